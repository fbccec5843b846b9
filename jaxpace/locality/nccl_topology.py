"""Topology files in NCCL's XML, as NCCL_TOPO_DUMP_FILE writes and NCCL_TOPO_FILE reads them.

Elements: system > cpu (numaid) > pci (busid, link_speed, link_width) > gpu > nvlink (target, count), and
pci > nic > net (name, speed in Mbit/s). Source: src/graph/xml.cc of NCCL.
"""

from __future__ import annotations

import xml.etree.ElementTree as xml
from typing import NamedTuple

from jaxpace.locality import pci
from jaxpace.locality.types import Gpu, Link, Nic


class TopologyError(ValueError):
  """The file is no topology of NCCL: a sentence that says what is wrong."""


class Topology(NamedTuple):
  """What of a topology file is of use here."""

  gpus: tuple[Gpu, ...]
  nics: tuple[Nic, ...]


def read_topology(path: str) -> Topology:
  """Reads a topology file.

  Raises:
    TopologyError: the file can't be read, is no XML, or is another document.
  """
  try:
    with open(path, encoding="utf-8", errors="replace") as file:
      return parse_topology(file.read())
  except OSError as error:
    raise TopologyError(f"The topology file {path} can't be read: {error.strerror or error}.") from error
  except TopologyError as error:
    raise TopologyError(f"{path}: {error}") from error


def parse_topology(text: str) -> Topology:
  """GPUs and NICs of a topology file's text.

  Raises:
    TopologyError: it is no XML, or another document.
  """
  try:
    root = xml.fromstring(text)
  except xml.ParseError as error:
    raise TopologyError(f"this is no XML ({error}). NCCL writes a topology where NCCL_TOPO_DUMP_FILE names a file."
                        ) from error
  if root.tag != "system":
    raise TopologyError(f"this is XML, but no topology of NCCL: its outermost element is <{root.tag}>, not <system>.")
  gpus: list[Gpu] = []
  nics: list[Nic] = []
  for i, cpu in enumerate(root.iter("cpu")):
    node = _number(cpu.get("numaid"))
    node = node if node is not None and node >= 0 else None
    for child in cpu:
      _walk(child, (f"cpu{i if node is None else node}",), node, gpus, nics)
  return Topology(tuple(gpus), tuple(nics))


def _walk(element: xml.Element, path: tuple[str, ...], node: int | None, gpus: list[Gpu], nics: list[Nic]) -> None:
  if element.tag == "nic":  # directly below the CPU: a NIC whose place is not known
    _nets(element, None, path, node, Link(), nics)
  if element.tag != "pci":
    return
  address = (element.get("busid") or "").lower()
  path = (*path, address)
  link = Link(pci.parse_speed(element.get("link_speed")), _number(element.get("link_width")) or None)
  for child in element:
    if child.tag == "gpu":
      links = [_number(link.get("count")) or 0 for link in child.iter("nvlink")]
      gpus.append(Gpu(address, numa_node=node, path=path, switch=pci.switch_of(path), link=link,
                      nvlinks=sum(links) if links else None, interconnect="nvlink" if sum(links) else "pcie"))
    elif child.tag == "nic":
      _nets(child, address, path, node, link, nics)
    else:
      _walk(child, path, node, gpus, nics)


def _nets(element: xml.Element, address: str | None, path: tuple[str, ...], node: int | None, link: Link,
          nics: list[Nic]) -> None:
  for net in element.iter("net"):
    speed = _number(net.get("speed"))
    name = net.get("name") or f"net{net.get('dev', len(nics))}"
    # NCCL names sockets by their interface, and an RDMA device by its own name and a guid other than 0.
    rdma = _number(net.get("guid")) not in (None, 0)
    nics.append(Nic(name, "infiniband" if rdma else "ethernet", pci=address, rate_gbps=speed / 1e3 if speed else None,
                    numa_node=node, path=path, switch=pci.switch_of(path), link=link))


def _number(text: str | None) -> int | None:
  try:
    return int(text, 0) if text else None
  except ValueError:
    return None
