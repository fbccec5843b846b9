"""Cards as sysfs shows them on the PCI tree: the way down from the host bridge, the link, the NUMA
node; network interfaces with hardware behind them, and which is nearest to a GPU.

Source: Documentation/ABI/testing/sysfs-bus-pci of the Linux kernel.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from jaxpace.hosts.locality.host import Tree
from jaxpace.hosts.locality.types import Gpu, Link, Nic

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
  """How far apart two devices are, one of `DISTANCES`, by their paths and their NUMA nodes, None
  where that is not known."""
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
  return sum(itertools.takewhile(bool, map(operator.eq, a, b)))


def _speed(tree: Tree, path: str) -> float | None:
  """GT/s a lane of "16.0 GT/s PCIe"; None for "Unknown"."""
  speed = tree.match(path, r"^(\d+(?:\.\d+)?) GT/s")
  return float(speed) if speed else None


def _width(tree: Tree, path: str) -> int | None:
  width = tree.number(path)
  return width if width and 0 < width <= 32 else None  # 0 and 255 stand for "no link"


_INFINIBAND = "/sys/class/infiniband"
_NET = "/sys/class/net"
_FAR = 1 << 16
"""More hops than any tree has: for places that are not known."""


def read_nics(tree: Tree) -> tuple[Nic, ...]:
  """RDMA devices, one a device, then plain interfaces; virtual ones (loopback, bridges,
  containers') are left out."""
  found: list[Nic] = []
  interfaces: dict[str, str] = {}  # interface -> folder of its device
  for name in tree.names(_NET):
    if tree.exists(f"{_NET}/{name}/device"):
      interfaces[name] = tree.resolve(f"{_NET}/{name}/device")
  taken: set[str] = set()
  for name in tree.names(_INFINIBAND):
    directory = tree.resolve(f"{_INFINIBAND}/{name}/device")
    own = tuple(i for i, d in interfaces.items() if d == directory)
    taken.update(own)
    found.append(_rdma(tree, _nic(tree, name, directory, own)))
  for name, directory in interfaces.items():
    if name not in taken:
      speed = tree.number(f"{_NET}/{name}/speed")  # Mbit/s; -1 where the driver does not know
      state = tree.text(f"{_NET}/{name}/operstate")
      found.append(_nic(tree, name, directory, (name,)).replace(
          rate_gbps=speed / 1e3 if speed and speed > 0 else None,
          up=None if state in (None, "unknown") else state == "up"))
  return tuple(found)


def nearest(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> tuple[Gpu, ...]:
  """Gives every GPU its nearest NIC: of those on its NUMA node the one that is the fewest hops away
  on the PCI tree.

  Only the fabric's NICs count, see `fabric_of`. Of NICs as near as each other the least taken is
  chosen, so that two GPUs and two NICs on one switch pair up.
  """
  fabric = fabric_of(nics)
  taken: Counter[str] = Counter()
  placed = []
  for gpu in gpus:
    if not fabric:
      placed.append(gpu.replace(nic=None, nic_distance=None))
      continue
    ranked = [(*_nearness(gpu, nic), taken[nic.name], i) for i, nic in enumerate(fabric)]
    *_, word, _, chosen = min(ranked)
    taken[fabric[chosen].name] += 1
    placed.append(gpu.replace(nic=fabric[chosen].name, nic_distance=DISTANCES[word]))
  return tuple(placed)


def _nearness(gpu: Gpu, nic: Nic) -> tuple[int, int, int]:
  """What is smaller the nearer they are: what lies between their nodes, hops, index of the
  distance's name."""
  word = distance(gpu.path, nic.path, gpu.numa_node, nic.numa_node)
  links = hops(gpu.path, nic.path)
  # Ways through another socket, or not known at all, are the last however short they look on the
  # tree.
  between = {"SYS": 1, "?": 2}.get(word, 0)
  return between, _FAR if links is None else links, DISTANCES.index(word)


def fabric_of(nics: Sequence[Nic]) -> list[Nic]:
  """The NICs that are not down and have at least half the rate of the fastest; all of them where no
  rate is known."""
  able = [nic for nic in nics if nic.up is not False]
  fastest = max((nic.rate_gbps or 0 for nic in able), default=0)
  return [nic for nic in able if (nic.rate_gbps or 0) >= fastest / 2]


def _nic(tree: Tree, name: str, directory: str, interfaces: tuple[str, ...]) -> Nic:
  address = address_of(directory)
  path = path_of(directory)
  # A virtio interface's device lies below its PCI device.
  place = directory[:directory.index(address) + len(address)] if address else directory
  return Nic(name, interfaces=interfaces, pci=address, numa_node=numa_node(tree, place),
             path=path, switch=switch_of(path), link=link(tree, place))


def _rdma(tree: Tree, nic: Nic) -> Nic:
  """Adds rate, state and kind: those of the fastest port that is active, else of the first one."""
  folder = f"{_INFINIBAND}/{nic.name}/ports"
  found = [("ACTIVE" in (tree.text(f"{folder}/{port}/state") or "").upper().split(),
            float(tree.match(f"{folder}/{port}/rate", r"\A([\d.]+) Gb/sec") or 0.0),
            (tree.text(f"{folder}/{port}/link_layer") or "").lower())
           for port in tree.names(folder)]
  up, rate, layer = max(found, key=lambda port: port[:2], default=(None, None, ""))
  return nic.replace(up=up, rate_gbps=rate or None,
                     kind="roce" if layer == "ethernet" else "infiniband")
