"""Topology files in NCCL's XML, as NCCL_TOPO_DUMP_FILE writes and NCCL_TOPO_FILE reads them; RCCL's
are alike.

Elements: system > cpu (numaid) > pci (busid, class, link_speed, link_width) > gpu > nvlink or xgmi
(target, count), and pci > nic > net (name, speed in Mbit/s). The files that clouds ship have
nothing but system, cpu and pci: what a device is then follows from its class. Source:
src/graph/xml.cc of NCCL.
"""

from __future__ import annotations

import xml.etree.ElementTree as xml

from jaxpace.hosts.locality import pci
from jaxpace.hosts.locality.described import (
    MOST_NODES,
    Described,
    DevicePlace,
    TopologyError,
    read_address,
    read_mask,
    read_name,
    read_number,
)
from jaxpace.hosts.locality.types import Gpu, Link, Nic, NumaNode
from jaxpace.hosts.locality.xml_document import parse_xml

__all__ = ["TopologyError", "parse_topology", "read_system"]

FORM = "NCCL topology"
_LEAST_GUID = 1 << 32


def parse_topology(text: str) -> Described:
  """GPUs and NICs of a topology file's text.

  Raises:
    TopologyError: it is no XML, or another document.
  """
  root = parse_xml(text.encode(errors="replace"))
  if root.tag != "system":
    raise TopologyError("this is XML, but no topology of NCCL: its outermost element is "
                        f"<{read_name(root.tag)}>, not <system>.")
  return read_system(root)


def read_system(root: xml.Element) -> Described:
  """What the element `system` says."""
  cpus = list(root.iter("cpu"))
  hosts = list(dict.fromkeys(cpu.get("host_hash") for cpu in cpus))
  notes: tuple[str, ...] = ()
  if len(hosts) > 1:
    # Where GPUs of several hosts are joined by NVLink, one file lists them all; their bus ids are
    # the same.
    cpus = [cpu for cpu in cpus if cpu.get("host_hash") == hosts[0]]
    notes = (f"It describes {len(hosts)} hosts: the first one's cards are read.",)
  reader = _Reader()
  for i, cpu in enumerate(cpus):
    node = read_number(cpu.get("numaid"))
    node = node if node is not None and node >= 0 else None
    mask = read_mask(cpu.get("affinity")) if node is not None and node not in reader.numa else None
    if node is not None and mask and len(reader.numa) < MOST_NODES:
      reader.numa[node] = mask
    for child in cpu:
      reader.walk(child, (f"cpu{i if node is None else node}",), node)
  return Described(
      FORM, tuple(reader.gpus), tuple(reader.nics), tuple(reader.unclassed), reader.others,
      reader.unreadable,
      numa=tuple(NumaNode(node, mask) for node, mask in sorted(reader.numa.items())), notes=notes)


class _Reader:
  """Collects devices on the way down."""

  def __init__(self) -> None:
    self.gpus: list[Gpu] = []
    self.nics: list[Nic] = []
    self.unclassed: list[DevicePlace] = []
    self.numa: dict[int, str] = {}
    self.others = 0
    self.unreadable = 0
    self.elements = 0

  def walk(self, element: xml.Element, path: tuple[str, ...], node: int | None) -> None:
    """Takes in an element below `cpu`; `path` leads to it from the top."""
    if element.tag == "nic":
      # NCCL puts NICs whose place it doesn't know below the first processor: that says nothing of
      # where they are.
      self._nets(element, DevicePlace(""))
    if element.tag != "pci":
      return
    address = read_address(element.get("busid"))
    self.elements += 1
    path = (*path, address or f"?{self.elements}")
    link = Link(pci.parse_speed(element.get("link_speed")),
                read_number(element.get("link_width")) or None)
    place = DevicePlace(address or "", path, node, pci.switch_of(path), link)
    self._device(element, place)
    for child in element:
      if child.tag == "pci":
        self.walk(child, path, node)

  def _device(self, element: xml.Element, place: DevicePlace) -> None:
    gpu, nics = element.find("gpu"), element.findall("nic")
    cls, vendor = read_number(element.get("class")), read_number(element.get("vendor"))
    if gpu is None and not nics and (element.find("pci") is not None or pci.is_bridge_class(cls)):
      return
    if not place.pci:
      self.unreadable += 1
    elif gpu is not None:
      nvlinks, xgmi = _links(gpu, "nvlink"), _links(gpu, "xgmi")
      self.gpus.append(_gpu(place)._replace(
          nvlinks=nvlinks, xgmi_links=xgmi,
          interconnect="nvlink" if nvlinks else "xgmi" if xgmi else "pcie"))
    elif nics:
      for nic in nics:
        self._nets(nic, place, cls)
    elif cls is None:
      self.unclassed.append(place)
    elif pci.is_accelerator_class(cls, vendor):
      self.gpus.append(_gpu(place))
    elif pci.is_network_class(cls):
      kind = "infiniband" if pci.is_infiniband_class(cls) else "ethernet"
      self.nics.append(_nic(place.pci, kind, place))
    else:
      self.others += 1

  def _nets(self, nic: xml.Element, place: DevicePlace, cls: int | None = None) -> None:
    nets = list(nic.iter("net")) or [nic]
    for net in nets:
      speed = read_number(net.get("speed")) if net is not nic else None
      name = (read_name(net.get("name")) or place.pci
              or f"net{read_name(net.get('dev')) or len(self.nics)}")
      # An RDMA device's guid has its vendor in the upper bits; a socket's is its number.
      rdma = (read_number(net.get("guid")) or 0) >= _LEAST_GUID
      found = _nic(name, pci.rdma_kind(cls) if rdma else "ethernet", place)
      self.nics.append(found._replace(rate_gbps=speed / 1e3 if speed and speed > 0 else None))


def _gpu(place: DevicePlace) -> Gpu:
  return Gpu(place.pci, numa_node=place.numa_node, path=place.path, switch=place.switch,
             link=place.link)


def _nic(name: str, kind: str, place: DevicePlace) -> Nic:
  return Nic(name, kind, pci=place.pci or None, numa_node=place.numa_node, path=place.path,
             switch=place.switch, link=place.link)


def _links(gpu: xml.Element, tag: str) -> int | None:
  counts = [read_number(link.get("count")) or 0 for link in gpu.iter(tag)]
  return sum(counts) if counts else None
