"""PCI devices as sysfs shows them: the way down from the host bridge, the link, the NUMA node.

Source: Documentation/ABI/testing/sysfs-bus-pci of the Linux kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxpace.hosts.locality.tree import Tree
from jaxpace.hosts.locality.types import Link

_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_BRIDGE = re.compile(r"^pci[0-9a-f]{4,8}:[0-9a-f]{2}$")
NVIDIA = 0x10DE
GPU_VENDORS = {NVIDIA: "NVIDIA", 0x1002: "AMD"}
"""Makers of displays that compute; not those on a server's main board."""

DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS", "?")
"""Nearest first: one PCIe switch, several, one host bridge, one NUMA node, across sockets, not
known."""


def devices(tree: Tree) -> Iterator[tuple[str, str, int, int]]:
  """All PCI devices, in the order of their addresses: address, folder in sysfs, class (0xCCSSPP:
  class, subclass, programming interface), maker."""
  for address in tree.names("/sys/bus/pci/devices"):
    directory = f"/sys/bus/pci/devices/{address}"
    cls = tree.number(f"{directory}/class")
    if _ADDRESS.match(address) and cls is not None:
      yield address, tree.resolve(directory), cls, tree.number(f"{directory}/vendor") or 0


def is_accelerator(cls: int, vendor: int) -> bool:
  """Whether a device of this class and maker computes: a GPU, or a processing accelerator (class
  0x12)."""
  kind = cls >> 16
  return kind == 0x12 or (kind == 0x03 and vendor in GPU_VENDORS)


def is_nvswitch(cls: int, vendor: int) -> bool:
  """A switch between GPUs: NVIDIA's, of class bridge, other."""
  return vendor == NVIDIA and cls >> 8 == 0x0680


def address_of(directory: str) -> str | None:
  """The innermost PCI device of a path in sysfs, such as the one a network interface belongs to."""
  found = [part for part in directory.split("/") if _ADDRESS.match(part)]
  return found[-1] if found else None


def path_of(directory: str) -> tuple[str, ...]:
  """The way from the host bridge down to a device, both included.

  >>> path_of("/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/net/eth0")
  ('pci0000:15', '0000:15:01.0', '0000:16:00.0')
  """
  return tuple(part for part in directory.split("/") if _ADDRESS.match(part) or _BRIDGE.match(part))


def switch_of(path: tuple[str, ...]) -> str | None:
  """Upstream port of the PCIe switch a device hangs on; None where it hangs on a root port.

  A path reads host bridge, root port, then for each switch its upstream and downstream port, then
  the device.
  """
  return path[-3] if len(path) >= 5 else None


def numa_node(tree: Tree, directory: str) -> int | None:
  """The NUMA node of a device or the nearest bridge above that says one; firmware that says none
  writes -1."""
  while "/pci" in directory:
    node = tree.number(f"{directory}/numa_node")
    if node is not None and node >= 0:
      return node
    directory = directory.rpartition("/")[0]
  return None


def link(tree: Tree, directory: str) -> Link:
  """The PCIe link of a device; fields are None where there is none, as for virtual functions."""
  parent = directory.rpartition("/")[0]
  return Link(_speed(tree, f"{directory}/current_link_speed"),
              _width(tree, f"{directory}/current_link_width"),
              _speed(tree, f"{directory}/max_link_speed"),
              _width(tree, f"{directory}/max_link_width"), _speed(tree, f"{parent}/max_link_speed"),
              _width(tree, f"{parent}/max_link_width"))


def distance(a: tuple[str, ...], b: tuple[str, ...], node_a: int | None, node_b: int | None) -> str:
  """How far apart two devices are, one of `DISTANCES`.

  Args:
    a: path of one.
    b: path of the other.
    node_a: NUMA node of one; None where it is not known.
    node_b: NUMA node of the other.
  """
  common = _common(a, b)
  if common >= 2:
    # Below the switch that they share: its port, and the device.
    return "PIX" if max(len(a), len(b)) - common <= 2 else "PXB"
  if common == 1:
    return "PHB"
  if node_a is None or node_b is None:
    return "?"
  return "NODE" if node_a == node_b else "SYS"


def hops(a: tuple[str, ...], b: tuple[str, ...]) -> int | None:
  """Links between two devices on the tree of bridges, with the host bridges of a node joined at its
  processor.

  None where the place of one of them is not known.

  >>> hops(("pci0000:15", "0000:15:01.0", "0000:16:00.0"),
  ...      ("pci0000:15", "0000:15:02.0", "0000:17:00.0"))
  4
  """
  return len(a) + len(b) - 2 * _common(a, b) if a and b else None


def _common(a: tuple[str, ...], b: tuple[str, ...]) -> int:
  """How far two ways from the top are the same."""
  common = 0
  while common < min(len(a), len(b)) and a[common] == b[common]:
    common += 1
  return common


def _speed(tree: Tree, path: str) -> float | None:
  """GT/s a lane of "16.0 GT/s PCIe"; None for "Unknown"."""
  speed = tree.match(path, r"^(\d+(?:\.\d+)?) GT/s")
  return float(speed) if speed else None


def _width(tree: Tree, path: str) -> int | None:
  width = tree.number(path)
  return width if width and 0 < width <= 32 else None  # 0 and 255 stand for "no link"
