"""Network interfaces with hardware behind them, and which is nearest to a GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from jaxpace.hosts.locality import pci
from jaxpace.hosts.locality.tree import Tree
from jaxpace.hosts.locality.types import Gpu, Nic

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

  Args:
    gpus: GPUs of a host.
    nics: its NICs.
  """
  fabric = fabric_of(nics)
  taken: Counter[str] = Counter()
  placed = []
  for gpu in gpus:
    if not fabric:
      placed.append(gpu.replace(nic=None, nic_distance=None))
      continue
    ranked = [(*_nearness(gpu, nic), taken[nic.name], i) for i, nic in enumerate(fabric)]
    *_, distance, _, chosen = min(ranked)
    taken[fabric[chosen].name] += 1
    placed.append(gpu.replace(nic=fabric[chosen].name, nic_distance=pci.DISTANCES[distance]))
  return tuple(placed)


def _nearness(gpu: Gpu, nic: Nic) -> tuple[int, int, int]:
  """What is smaller the nearer they are: what lies between their nodes, hops, index of the
  distance's name."""
  word = pci.distance(gpu.path, nic.path, gpu.numa_node, nic.numa_node)
  hops = pci.hops(gpu.path, nic.path)
  # Ways through another socket, or not known at all, are the last however short they look on the
  # tree.
  between = {"SYS": 1, "?": 2}.get(word, 0)
  return between, _FAR if hops is None else hops, pci.DISTANCES.index(word)


def fabric_of(nics: Sequence[Nic]) -> list[Nic]:
  """The NICs that are not down and have at least half the rate of the fastest; all of them where no
  rate is known."""
  able = [nic for nic in nics if nic.up is not False]
  fastest = max((nic.rate_gbps or 0 for nic in able), default=0)
  return [nic for nic in able if (nic.rate_gbps or 0) >= fastest / 2]


def _nic(tree: Tree, name: str, directory: str, interfaces: tuple[str, ...]) -> Nic:
  address = pci.address_of(directory)
  path = pci.path_of(directory)
  # A virtio interface's device lies below its PCI device.
  place = directory[:directory.index(address) + len(address)] if address else directory
  return Nic(name, interfaces=interfaces, pci=address, numa_node=pci.numa_node(tree, place),
             path=path, switch=pci.switch_of(path), link=pci.link(tree, place))


def _rdma(tree: Tree, nic: Nic) -> Nic:
  """Adds rate, state and kind: those of the fastest port that is active, else of the first one."""
  best: tuple[bool, float, str] | None = None
  for port in tree.names(f"{_INFINIBAND}/{nic.name}/ports"):
    directory = f"{_INFINIBAND}/{nic.name}/ports/{port}"
    rate = re.match(r"([\d.]+) Gb/sec", tree.text(f"{directory}/rate") or "")
    active = "ACTIVE" in (tree.text(f"{directory}/state") or "").upper().split()
    layer = (tree.text(f"{directory}/link_layer") or "").lower()
    entry = (active, float(rate[1]) if rate else 0.0, layer)
    if best is None or entry[:2] > best[:2]:
      best = entry
  if best is None:
    return nic.replace(kind="infiniband")
  return nic.replace(up=best[0], rate_gbps=best[1] or None,
                      kind="roce" if best[2] == "ethernet" else "infiniband")
