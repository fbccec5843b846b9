"""The host itself: CPUs, sockets, NUMA nodes, clock source, memory."""

from __future__ import annotations

import re

from jaxpace.hosts.locality.tree import Tree, format_list, parse_list
from jaxpace.hosts.locality.types import Cpu, NumaNode

_CPUS = "/sys/devices/system/cpu"
_NODES = "/sys/devices/system/node"
_CLOCK = "/sys/devices/system/clocksource/clocksource0"
_ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")


def read_cpu(tree: Tree) -> Cpu:
  """CPUs, which of them this process may run on, and their sockets."""
  text = tree.text("/proc/cpuinfo") or ""
  model = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
  allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", tree.text("/proc/self/status") or "",
                      re.MULTILINE)
  online = parse_list(tree.text(f"{_CPUS}/online"))
  sockets: dict[int, list[int]] = {}
  for cpu in online:
    socket = tree.number(f"{_CPUS}/cpu{cpu}/topology/physical_package_id")
    if socket is not None and socket >= 0:
      sockets.setdefault(socket, []).append(cpu)
  return Cpu(" ".join(model[1].split()) if model else None, format_list(online),
             format_list(parse_list(allowed[1])) if allowed else "",
             tuple(format_list(tuple(cpus)) for _, cpus in sorted(sockets.items())))


def read_numa(tree: Tree) -> tuple[NumaNode, ...]:
  """NUMA nodes that have CPUs or memory; none where the kernel does not tell."""
  nodes = []
  for name in tree.names(_NODES):
    if not re.match(r"^node\d+$", name):
      continue
    total = re.search(r"MemTotal:\s*(\d+) kB", tree.text(f"{_NODES}/{name}/meminfo") or "")
    cpus = format_list(parse_list(tree.text(f"{_NODES}/{name}/cpulist")))
    nodes.append(NumaNode(int(name[4:]), cpus, int(total[1]) * 1024 if total else None))
  return tuple(sorted(node for node in nodes if node.cpus or node.memory_bytes))


def read_clock(tree: Tree) -> tuple[str | None, tuple[str, ...]]:
  """The clock source in use, and those there are."""
  return (tree.text(f"{_CLOCK}/current_clocksource") or None,
          tuple((tree.text(f"{_CLOCK}/available_clocksource") or "").split()))


def read_memory(tree: Tree) -> int | None:
  """Memory of the host in bytes."""
  total = re.search(r"^MemTotal:\s*(\d+) kB", tree.text("/proc/meminfo") or "", re.MULTILINE)
  return int(total[1]) * 1024 if total else None


def read_huge_pages(tree: Tree) -> str | None:
  """How transparent huge pages are given: "always", "madvise" or "never"."""
  chosen = re.search(r"\[(\w+)\]", tree.text("/sys/kernel/mm/transparent_hugepage/enabled") or "")
  return chosen[1] if chosen else None


def read_allocator(tree: Tree) -> str | None:
  """The malloc mapped into this process in place of the C library's, if it is a known one."""
  maps = tree.text("/proc/self/maps") or ""
  return next((name for name in _ALLOCATORS if f"lib{name}" in maps), None)
