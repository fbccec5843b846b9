"""What a topology file of NCCL, which is XML, says of a machine."""

from __future__ import annotations

import os
import re
import stat
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from typing import NamedTuple

from jaxpace.files import UserError
from jaxpace.hosts.locality import pci
from jaxpace.hosts.locality.nvml import bus_id
from jaxpace.hosts.locality.tree import format_list
from jaxpace.hosts.locality.types import Gpu, Link, Nic, NumaNode

_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_LONGEST_NAME = 64
_MASK = re.compile(r"^(?:0x)?[0-9a-f]{1,8}(?:,(?:0x)?[0-9a-f]{0,8})*$", re.IGNORECASE)
_LONGEST_MASK = 1 << 12
"""Characters; 8,192 processors take 2,800."""


class TopologyError(UserError, ValueError):
  """The file is no topology that can be read: a sentence that says what is wrong."""


class DevicePlace(NamedTuple):
  """Where a device is, whatever it is."""

  pci: str
  path: tuple[str, ...] = ()
  numa_node: int | None = None
  switch: str | None = None
  link: Link = Link()


class Described(NamedTuple):
  """What of a topology file is of use here."""

  gpus: tuple[Gpu, ...] = ()
  nics: tuple[Nic, ...] = ()  # one of which only the bus id is known has that for its name
  unclassed: tuple[DevicePlace, ...] = ()  # devices of which the file doesn't say what they are
  numa: tuple[NumaNode, ...] = ()


def read_address(text: str | None) -> str | None:
  """A PCI bus id as sysfs writes it; None for what is none.

  >>> read_address("00000000:3B:00.0"), read_address("x")
  ('0000:3b:00.0', None)
  """
  address = bus_id(text or "")
  return address if _ADDRESS.match(address) else None


def read_name(text: str | None) -> str | None:
  """A name out of a file, without what could steer a terminal, and no longer than names are."""
  name = "".join(c for c in (text or "")[:_LONGEST_NAME] if c.isprintable()).strip()
  return name or None


def read_number(text: str | None) -> int | None:
  """A whole number, decimal or 0x…, as long as one of 64 bits at most."""
  try:
    return int(text, 0) if text and len(text) <= 20 else None
  except ValueError:
    return None


def read_mask(text: str | None) -> str | None:
  """The kernel list of a mask in words of 32 bits, the highest first; None for what is none, or is
  without an end.

  >>> read_mask("00000003,0000ffff"), read_mask("0xf...f")
  ('0-15,32-33', None)
  """
  if not text or len(text) > _LONGEST_MASK or not _MASK.match(text):
    return None
  value = 0
  for word in text.split(","):
    value = value << 32 | int(word or "0", 16)
  return format_list(tuple(i for i, bit in enumerate(f"{value:b}"[::-1]) if bit == "1"))


_LEAST_GUID = 1 << 32


def read_system(root: xml.Element) -> Described:
  """What the element `system` of NCCL's XML says, as NCCL_TOPO_DUMP_FILE writes and NCCL_TOPO_FILE
  reads it. Of several hosts (one file lists all that NVLink joins) the first one's cards are read.

  Elements: system > cpu (numaid) > pci (busid, class, link_speed, link_width) > gpu > nvlink
  (target, count), and pci > nic > net (name, speed in Mbit/s). The files that clouds ship have
  nothing but system, cpu and pci: what a device is then follows from its class. Source:
  src/graph/xml.cc of NCCL.
  """
  cpus = list(root.iter("cpu"))
  cpus = [cpu for cpu in cpus if cpu.get("host_hash") == cpus[0].get("host_hash")]
  numa: dict[int, str] = {}
  cards: list[Gpu | Nic | DevicePlace] = []
  for i, cpu in enumerate(cpus):
    number = read_number(cpu.get("numaid"))
    node = number if number is not None and number >= 0 else None
    mask = read_mask(cpu.get("affinity"))
    if node is not None and mask:
      numa.setdefault(node, mask)
    # NCCL puts NICs whose place it doesn't know below the first processor: that says nothing of
    # where they are.
    cards += _nets(cpu, DevicePlace(""))
    for element, place in _devices(cpu, (f"cpu{i if node is None else node}",), node):
      cards += _cards(element, place)
  return Described(tuple(card for card in cards if isinstance(card, Gpu)),
                   tuple(card for card in cards if isinstance(card, Nic)),
                   tuple(card for card in cards if isinstance(card, DevicePlace)),
                   numa=tuple(NumaNode(*item) for item in sorted(numa.items())))


def _devices(above: xml.Element, path: tuple[str, ...],
             node: int | None) -> Iterator[tuple[xml.Element, DevicePlace]]:
  """PCI devices below an element; `path` leads to it from the top."""
  for number, element in enumerate(above.findall("pci")):
    address = read_address(element.get("busid"))
    way = (*path, address or f"?{number}")
    link = Link(pci.parse_speed(element.get("link_speed")),
                read_number(element.get("link_width")) or None)
    if address:
      yield element, DevicePlace(address, way, node, pci.switch_of(way), link)
    yield from _devices(element, way, node)


def _cards(element: xml.Element, place: DevicePlace) -> list[Gpu | Nic | DevicePlace]:
  """What a PCI device is: by the elements in it, else by its class."""
  gpu = element.find("gpu")
  cls, vendor = read_number(element.get("class")), read_number(element.get("vendor"))
  if gpu is not None:
    nvlinks = sum(read_number(link.get("count")) or 0 for link in gpu.iter("nvlink")) or None
    return [_gpu_at(place).replace(nvlinks=nvlinks, interconnect="nvlink" if nvlinks else "pcie")]
  if element.find("nic") is not None:
    return [*_nets(element, place, cls)]
  if element.find("pci") is not None or pci.is_bridge_class(cls):
    return []
  if cls is None:
    return [place]
  if pci.is_accelerator(cls, vendor):
    return [_gpu_at(place)]
  if pci.is_network_class(cls):
    return [_nic_at(place.pci, "infiniband" if pci.is_infiniband_class(cls) else "ethernet", place)]
  return []


def _nets(above: xml.Element, place: DevicePlace, cls: int | None = None) -> Iterator[Nic]:
  """Network devices of the elements `nic` of a device or a processor."""
  for nic in above.findall("nic"):
    for net in list(nic.iter("net")) or [nic]:
      speed = read_number(net.get("speed"))
      name = read_name(net.get("name")) or place.pci or f"net{read_name(net.get('dev'))}"
      # An RDMA device's guid has its vendor in the upper bits; a socket's is its number.
      rdma = (read_number(net.get("guid")) or 0) >= _LEAST_GUID
      yield _nic_at(name, pci.rdma_kind(cls) if rdma else "ethernet", place).replace(
          rate_gbps=speed / 1e3 if speed and speed > 0 else None)


def _gpu_at(place: DevicePlace) -> Gpu:
  return Gpu(place.pci, numa_node=place.numa_node, path=place.path, switch=place.switch,
             link=place.link)


def _nic_at(name: str, kind: str, place: DevicePlace) -> Nic:
  return Nic(name, kind, pci=place.pci or None, numa_node=place.numa_node, path=place.path,
             switch=place.switch, link=place.link)


_LARGEST = 4 << 20
"""Bytes. Files of large machines have some hundred thousand."""
_MOST_GPUS, _MOST_NICS = 512, 4096
"""Of one host, virtual functions included; each GPU is compared with each NIC."""
_WANTED = "what NCCL_TOPO_DUMP_FILE names or NCCL_TOPO_FILE is given"


def read_topology(path: str) -> Described:
  """Reads a topology file.

  Raises:
    TopologyError: the file can't be read, or is of no format that is known.
  """
  # A name may hold what steers a terminal.
  shown = "".join(c if c.isprintable() else "?" for c in path)
  try:
    return parse_topology(_read(path))
  except OSError as error:
    raise TopologyError(
        f"The topology file {shown} can't be read: {error.strerror or error}.") from error
  except TopologyError as error:
    raise TopologyError(f"{shown}: {error}") from error


def parse_topology(content: bytes) -> Described:
  """What the content of a topology file says.

  Raises:
    TopologyError: it is of no format that is known, or beyond all limits.
  """
  if not content[:4096].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<"):
    raise TopologyError(f"this is not XML. Give {_WANTED}.")
  if b"<!ENTITY" in content:
    # Entities of entities make gigabytes of a kilobyte; no writer of topologies uses any.
    raise TopologyError("this XML declares entities, which no topology needs: it isn't read.")
  try:
    root = xml.fromstring(content)
    found = read_system(root) if root.tag == "system" else None
  except RecursionError:
    raise TopologyError("this XML is nested deeper than any machine is.") from None
  except (xml.ParseError, ValueError, LookupError) as error:
    raise TopologyError(f"this is not XML ({error}).") from error
  if found is None:
    raise TopologyError("this is XML, but no topology of NCCL: its outermost element is "
                        f"<{read_name(root.tag)}>, not <system>. Give {_WANTED}.")
  if len(found.gpus) > _MOST_GPUS or len(found.nics) > _MOST_NICS:
    raise TopologyError(
        f"this file has {len(found.gpus):,} GPUs and {len(found.nics):,} NICs: no host has.")
  return found


def _read(path: str) -> bytes:
  # Opening a pipe without a writer would wait for ever.
  descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  with os.fdopen(descriptor, "rb") as file:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
      raise TopologyError(
          "this is a pipe or a device, not a file: write what it says into a file first.")
    content = file.read(_LARGEST + 1)
  if len(content) > _LARGEST:
    raise TopologyError(f"this file is larger than {_LARGEST >> 20} MiB: no topology is.")
  return content
