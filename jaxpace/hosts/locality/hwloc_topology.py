"""Topologies in hwloc's XML, as `lstopo --of xml` writes them, versions 1, 2 and 3.

Objects are nested: Machine > Package and so on, with bridges and PCI devices below the object they
are near to, and operating system devices ("mlx5_0", "eth0", "cuda0") below their PCI device.
Version 1 has NUMA nodes around what is in them, later ones beside it. Source: hwloc/topology-xml.c
and include/hwloc.h of hwloc.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as xml
from collections.abc import Iterator

from jaxpace.hosts.locality import pci
from jaxpace.hosts.locality.described import (
    MOST_NODES,
    Described,
    mask_value,
    read_address,
    read_mask,
    read_name,
    read_number,
)
from jaxpace.hosts.locality.types import Cpu, Gpu, Nic, NumaNode

FORM = "hwloc topology"

_NET, _RDMA, _GPU = "net", "rdma", "gpu"
_KINDS = {"1": _GPU, "2": _NET, "3": _RDMA, "5": _GPU}
"""Types of operating system devices, before version 3."""
_BITS = ((32, _RDMA), (16, _NET), (4 | 8, _GPU))
"""Theirs since, of which a device may have several."""
_COMPUTES = re.compile(r"^(?:cuda|nvml|rsmi|ze)\d")
"""Names of devices that a library for computing lists."""
_TYPE = re.compile(r"^([0-9a-fA-F]{4})(?: \[([0-9a-fA-F]{4}):)?")
_FIRST_BUS = re.compile(r"^([0-9a-fA-F]{4,8}):\[([0-9a-fA-F]{2})-")


def read_topology(root: xml.Element) -> Described:
  """What the element `topology` says."""
  numa = _numa(root)
  reader = _HwlocReader((root.get("version") or "1").split(".")[0],
                   sum(1 << node.node for node in numa if not node.cpus))
  for child in root.findall("object"):
    reader.walk(child, (), None)
  interconnects = _interconnects(root)
  if reader.nvswitch:
    interconnects.setdefault("NVIDIA", "nvlink")
  gpus = tuple(gpu._replace(interconnect=interconnects.get(maker)) for maker, gpu in reader.gpus)
  infos = {info.get("name"): info.get("value") for info in reversed(list(root.iter("info")))}
  machine = root.find("object")
  packages = [*root.iterfind(".//object[@type='Package']"),
              *root.iterfind(".//object[@type='Socket']")][:MOST_NODES]
  cpu = Cpu(read_name(infos.get("CPUModel")),
            read_mask(machine.get("cpuset")) or "" if machine is not None else "",
            sockets=tuple(filter(None, (read_mask(package.get("cpuset")) for package in packages))))
  return Described(FORM, gpus, tuple(reader.nics), others=reader.others,
                   unreadable=reader.unreadable, numa=numa, cpu=cpu,
                   hostname=read_name(infos.get("HostName")))


class _HwlocReader:
  """Collects devices on the way down."""

  def __init__(self, version: str, memory_only: int) -> None:
    self.gpus: list[tuple[str | None, Gpu]] = []  # with their makers
    self.nics: list[Nic] = []
    self.nvswitch = False
    self.others = 0
    self.unreadable = 0
    self._version = version
    self._memory_only = memory_only  # a mask of nodes

  def walk(self, element: xml.Element, path: tuple[str, ...], node: int | None) -> None:
    """Takes in an object; `path` leads to it from its host bridge, `node` is the NUMA node around
    it."""
    kind = element.get("type")
    if kind == "Bridge":
      path = _below(element, path)
    elif kind == "PCIDev":
      self._device(element, path, node)
      return
    elif element.get("nodeset") is not None:
      node = self._only_node(element.get("nodeset"))
    elif kind == "NUMANode":
      node = read_number(element.get("os_index"))
    for child in element.findall("object"):
      self.walk(child, path, node)

  def _device(self, element: xml.Element, path: tuple[str, ...], node: int | None) -> None:
    address, match = (read_address(element.get("pci_busid")),
                      _TYPE.match(element.get("pci_type") or ""))
    if not address or not match:
      self.unreadable += 1
      return
    cls, vendor = int(match[1], 16) << 8, int(match[2] or "0", 16)
    device = pci.PciDevice(address, "", cls, vendor)
    # Without bridges above, which hwloc can be told to leave out, nothing is known of the way.
    path = (*path, address) if path else ()
    own = [(self._kind(child), child) for child in element.iter("object")
           if child.get("type") == "OSDev"]
    computes = any(_COMPUTES.match(child.get("name") or "") for _, child in own)
    self.nvswitch |= pci.is_nvswitch(device)
    if computes or pci.is_accelerator(device):
      name = _info(element, "GPUModel") or _info(element, "PCIDevice") or _made_by(device)
      self.gpus.append((pci.vendor_name(device), Gpu(
          address, name, numa_node=node, path=path, switch=pci.switch_of(path))))
    elif pci.is_network_class(cls) or any(kind in (_NET, _RDMA) for kind, _ in own):
      self.nics.append(_nic(device, path, node, own))
    elif not pci.is_bridge_class(cls):
      self.others += 1

  def _only_node(self, nodeset: str | None) -> int | None:
    """The node that something is on, apart from nodes of memory alone; None of several: it is on
    none of them."""
    nodes = (mask_value(nodeset) or 0) & ~self._memory_only
    return nodes.bit_length() - 1 if nodes and not nodes & (nodes - 1) else None

  def _kind(self, device: xml.Element) -> str | None:
    kind = device.get("osdev_type") or ""
    if self._version in ("1", "2"):
      return _KINDS.get(kind)
    bits = read_number(kind) or 0
    return next((name for bit, name in _BITS if bits & bit), None)


def _below(bridge: xml.Element, path: tuple[str, ...]) -> tuple[str, ...]:
  """The way through a bridge; a host bridge is named by its domain and first bus, as in sysfs."""
  address = read_address(bridge.get("pci_busid"))
  if address:
    return (*path, address) if path else ()
  first = _FIRST_BUS.match(bridge.get("bridge_pci") or "")
  return (f"pci{first[1]}:{first[2]}".lower(),) if first else ()


def _nic(device: pci.PciDevice, path: tuple[str, ...], node: int | None,
         own: list[tuple[str | None, xml.Element]]) -> Nic:
  interfaces = tuple(filter(None,
                            (read_name(child.get("name")) for kind, child in own if kind == _NET)))
  rdma = [child for kind, child in own if kind == _RDMA]
  kind = "ethernet"
  if rdma or pci.is_infiniband_class(device.cls):
    kind = pci.rdma_kind(device.cls)
  name = next(filter(None, (read_name(child.get("name")) for child in rdma)), None)
  states = [info.get("value") for child in rdma for info in child.findall("info")
            if re.match(r"^Port\d+State$", info.get("name") or "")]
  # A port's state 4 is "active".
  return Nic(name or next(iter(interfaces), device.address), kind, interfaces, device.address,
             up="4" in states if states else None, numa_node=node, path=path,
             switch=pci.switch_of(path))


def _numa(root: xml.Element) -> tuple[NumaNode, ...]:
  nodes: dict[int, NumaNode] = {}
  memory_only: set[str] = set()
  for element in root.iterfind(".//object[@type='NUMANode']"):
    number = read_number(element.get("os_index"))
    if number is None or not 0 <= number < 1 << 16 or number in nodes or len(nodes) >= MOST_NODES:
      continue
    cpus = read_mask(element.get("cpuset")) or ""
    # Nodes of memory alone have the CPUs that are near to them; the kernel counts those to one
    # node.
    cpus = "" if cpus in memory_only else cpus
    memory_only.add(cpus)
    memory = read_number(element.get("local_memory"))
    nodes[number] = NumaNode(number, cpus, memory if memory and memory > 0 else None)
  return tuple(sorted(nodes.values()))


def _info(element: xml.Element, name: str) -> str | None:
  return next((read_name(info.get("value")) for info in element.iter("info")
               if info.get("name") == name), None)


def _made_by(device: pci.PciDevice) -> str | None:
  vendor = pci.vendor_name(device)
  return f"{vendor} GPU" if vendor else None


def _interconnects(root: xml.Element) -> dict[str | None, str]:
  """Links among GPUs by their maker, as far as there is a matrix of their bandwidths."""
  names = [name for name in _matrices(root) if name]
  found: dict[str | None, str] = {}
  if any(name.startswith("NVLink") for name in names):
    found["NVIDIA"] = "nvlink"
  if any(name.startswith("XGMI") for name in names):
    found["AMD"] = "xgmi"
  return found


def _matrices(root: xml.Element) -> Iterator[str | None]:
  return (element.get("name") for element in root if element.tag.startswith("distances"))
