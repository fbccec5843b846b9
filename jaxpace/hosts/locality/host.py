"""The host itself: CPUs, sockets, NUMA nodes, clock source, memory; and the limits of the control
groups a process is in, version 1, 2 or both at once. Read from files below a root, which stands for
"/": the real one, a copy of another machine's, or one made by a test. What is missing, unreadable
or not what it should be is None. Nothing here raises.

Source: Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst of the Linux kernel.
"""

from __future__ import annotations

import os
import re

from jaxpace.core.words import successive
from jaxpace.hosts.locality.types import Cgroup, Cpu, NumaNode


class Tree:
  """Files of sysfs and procfs below `root`. Paths are given as on the machine, with or without the
  leading slash."""

  def __init__(self, root: str | os.PathLike[str] = "/"):
    self.root = os.path.realpath(root)

  @property
  def live(self) -> bool:
    """Whether this is the running machine, so that other sources than files speak of the same
    one."""
    return self.root == "/"

  def path(self, path: str) -> str:
    """Where `path` lies."""
    return os.path.join(self.root, path.lstrip("/"))

  def text(self, path: str) -> str | None:
    """The file's text without surrounding blanks."""
    try:
      # A few attributes of sysfs fail with EINVAL while their device is down.
      with open(self.path(path), encoding="utf-8", errors="replace") as file:
        return file.read(1 << 20).strip()
    except (OSError, ValueError):
      return None

  def match(self, path: str, pattern: str) -> str | None:
    """The first group of a pattern in the file's text, of which `^` and `$` match at line ends."""
    found = re.search(pattern, self.text(path) or "", re.MULTILINE)
    return found[1] if found else None

  def number(self, path: str) -> int | None:
    """The file's first word as a whole number, decimal or 0x…"""
    words = (self.text(path) or "").split()
    try:
      return int(words[0], 0) if words else None
    except ValueError:
      return None

  def names(self, path: str) -> list[str]:
    """Names in a folder, sorted; none if there is no such folder."""
    try:
      return sorted(os.listdir(self.path(path)))
    except OSError:
      return []

  def exists(self, path: str) -> bool:
    """Whether there is such a file or folder."""
    return os.path.exists(self.path(path))

  def resolve(self, path: str) -> str:
    """The path on the machine that `path` leads to through its links, with a leading slash."""
    real = os.path.realpath(self.path(path))
    below = os.path.relpath(real, self.root)
    return real if below.startswith("..") else "/" + below


def parse_list(text: str | None) -> tuple[int, ...]:
  """Numbers of a kernel list; those that can't be read are left out.

  >>> parse_list("0-3,8")
  (0, 1, 2, 3, 8)
  >>> parse_list(None), parse_list("x")
  ((), ())
  """
  found: set[int] = set()
  for piece in (text or "").split(","):
    first, dash, last = piece.strip().partition("-")
    if first.isdecimal() and (not dash or last.isdecimal()):
      begin, end = int(first), int(last or first)
      if end - begin < 1 << 16:
        found.update(range(begin, end + 1))
  return tuple(sorted(found))


def format_list(numbers: tuple[int, ...]) -> str:
  """Inverse of `parse_list`.

  >>> format_list((0, 1, 2, 3, 8))
  '0-3,8'
  """
  return ",".join(str(piece[0]) if len(piece) == 1 else f"{piece[0]}-{piece[-1]}"
                  for piece in successive(set(numbers)))


_CPUS = "/sys/devices/system/cpu"
_NODES = "/sys/devices/system/node"
_ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")


def read_cpu(tree: Tree) -> Cpu:
  """CPUs, which of them this process may run on, and their sockets."""
  model = tree.match("/proc/cpuinfo", r"^(?:model name|Model|cpu model)\s*:\s*(.+)$")
  allowed = tree.match("/proc/self/status", r"^Cpus_allowed_list:\s*(\S+)")
  online = parse_list(tree.text(f"{_CPUS}/online"))
  sockets: dict[int, list[int]] = {}
  for cpu in online:
    socket = tree.number(f"{_CPUS}/cpu{cpu}/topology/physical_package_id")
    if socket is not None and socket >= 0:
      sockets.setdefault(socket, []).append(cpu)
  return Cpu(" ".join(model.split()) if model else None, format_list(online),
             format_list(parse_list(allowed)),
             tuple(format_list(tuple(cpus)) for _, cpus in sorted(sockets.items())))


def read_numa(tree: Tree) -> tuple[NumaNode, ...]:
  """NUMA nodes that have CPUs or memory; none where the kernel lists none."""
  nodes = []
  for name in tree.names(_NODES):
    if not re.match(r"^node\d+$", name):
      continue
    memory = read_memory(tree, f"{_NODES}/{name}/meminfo")
    cpus = format_list(parse_list(tree.text(f"{_NODES}/{name}/cpulist")))
    nodes.append(NumaNode(int(name[4:]), cpus, memory))
  return tuple(sorted(node for node in nodes if node.cpus or node.memory_bytes))


def read_memory(tree: Tree, path: str = "/proc/meminfo") -> int | None:
  """Memory of the host, or of a node, in bytes."""
  total = tree.match(path, r"MemTotal:\s*(\d+) kB")
  return int(total) * 1024 if total else None


def read_allocator(tree: Tree) -> str | None:
  """The malloc mapped into this process in place of the C library's, if it is a known one."""
  maps = tree.text("/proc/self/maps") or ""
  return next((name for name in _ALLOCATORS if f"lib{name}" in maps), None)


_UNLIMITED = 1 << 60  # version 1 writes a number near 2**63 for "no limit"


def read_cgroup(tree: Tree) -> Cgroup:
  """Reads the tightest limits on this process's way up to the outermost group that can be seen."""
  version, folders = chain(tree, "cpu")
  cpu = [limit for folder in folders if (limit := _cpu_limit(tree, folder, version)) is not None]
  memory_version, memory_folders = chain(tree, "memory")
  name = "memory.max" if memory_version == 2 else "memory.limit_in_bytes"
  memory = [limit for folder in memory_folders
            if (limit := tree.number(f"{folder}/{name}")) is not None]
  return Cgroup(version, folders[0] if folders else None, min(cpu, default=None),
                min((limit for limit in memory if 0 < limit < _UNLIMITED), default=None))


def chain(tree: Tree, controller: str) -> tuple[int | None, list[str]]:
  """Folders of this process's groups for a controller, its own first, the outermost visible one
  last.

  Returns:
    The version of cgroups that has the controller, None if there is neither; and the folders.
  """
  own: dict[str, str] = {}
  for line in (tree.text("/proc/self/cgroup") or "").splitlines():
    pieces = line.split(":", 2)
    if len(pieces) == 3:
      own.update(dict.fromkeys(pieces[1].split(","), pieces[2]))
  version = 1 if controller in own else 2 if "" in own else None
  if version is None:
    return None, []
  inside, mount = _mount(tree, controller, version)
  path = own[controller if version == 1 else ""]
  if path != inside and not path.startswith(inside.rstrip("/") + "/"):
    path = inside  # seen from a container, the group's path lies outside of what is mounted
  below = path[len(inside):].strip("/")
  folders = [mount]
  for piece in below.split("/") if below else []:
    folders.append(f"{folders[-1]}/{piece}")
  return version, [folder for folder in reversed(folders) if tree.exists(folder)]


def throttled_ns(tree: Tree, version: int | None, folders: list[str]) -> int | None:
  """Time for which the CPU limits of these groups held their processes back, ns; None where nothing
  counts it."""
  name, scale = ("throttled_usec", 1000) if version == 2 else ("throttled_time", 1)
  times = [int(value) * scale for folder in folders
           if (value := tree.match(f"{folder}/cpu.stat", rf"^{name} (\d+)$"))]
  return sum(times) if times else None


def _mount(tree: Tree, controller: str, version: int) -> tuple[str, str]:
  """The group that is mounted, and where."""
  for line in (tree.text("/proc/self/mountinfo") or "").splitlines():
    left, _, right = line.partition(" - ")
    fields, kind = left.split(), right.split()
    if len(fields) < 5 or len(kind) < 3:
      continue
    if version == 2 and kind[0] == "cgroup2":
      return fields[3], fields[4]
    if version == 1 and kind[0] == "cgroup" and controller in kind[-1].split(","):
      return fields[3], fields[4]
  return "/", "/sys/fs/cgroup" if version == 2 else f"/sys/fs/cgroup/{controller}"


def _cpu_limit(tree: Tree, folder: str, version: int | None) -> float | None:
  if version == 2:
    quota, _, period = (tree.text(f"{folder}/cpu.max") or "").partition(" ")
    values = (int(quota), int(period)) if quota.isdecimal() and period.isdecimal() else (0, 0)
  else:
    values = (tree.number(f"{folder}/cpu.cfs_quota_us") or 0,
              tree.number(f"{folder}/cpu.cfs_period_us") or 0)
  return values[0] / values[1] if values[0] > 0 and values[1] > 0 else None
