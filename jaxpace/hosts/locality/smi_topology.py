"""The matrix that `nvidia-smi topo -m` prints.

A row for each GPU and, behind them, each RDMA device, in cells how far apart two are, then columns
of the GPU's CPUs and NUMA node. Newer drivers call the devices NIC0, NIC1, … and name them in a
legend below. There are no bus ids: GPUs are numbered in the order of them. Source: the manual page
of nvidia-smi.
"""

from __future__ import annotations

import re

from jaxpace.hosts.locality import pci
from jaxpace.hosts.locality.described import Described, read_name
from jaxpace.hosts.locality.tree import format_list, parse_list
from jaxpace.hosts.locality.types import Gpu, Nic, NumaNode

FORM = "output of nvidia-smi topo -m"

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\[[0-9]{1,2}m")
"""What underlines the header; in text that was copied its first character may be lost."""
_GPU = re.compile(r"^GPU\d{1,4}$")
_CELL = re.compile(r"\s*(NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|N/A|X)")
_TAIL = re.compile(r"\s*(CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA(?:\s+ID)?|NUMA)")
_LEGEND = re.compile(r"^\s*(NIC\d{1,4}):\s*(\S+)")
_MOST_LINKS = 18
"""NVLinks that one GPU has at most."""
_WIDEST = 1024


def read_topology(text: str) -> Described | None:
  """What the first matrix in the text says; None if there is none, or GPUs lack their rows."""
  lines = [_ANSI.sub("", line) for line in text.splitlines()]
  for number, line in enumerate(lines):
    labels, tail = _header(line)
    if labels:
      found = _read(labels, tail, lines[number + 1:])
      if found is not None:
        return found
  return None


def _header(line: str) -> tuple[list[str], list[str]]:
  """Labels of the columns of cells, and the names of the columns behind them."""
  words = line.split()
  # Copied out of a shell, the prompt's line may be indented, commented or quoted.
  while words and words[0] in ("#", "|", ">", "//"):
    words = words[1:]
  if not words or not _GPU.match(words[0]):
    return [], []
  labels: list[str] = []
  for i, word in enumerate(words):
    if word in ("CPU", "NUMA") or (word == "GPU" and words[i + 1:i + 2] == ["NUMA"]):
      return labels, ["cpus" if "CPU" in name else "id" if "GPU" in name else "node"
                      for name in _TAIL.findall(" ".join(words[i:]))]
    labels.append(word)
  # Without columns of affinity it may be a row of something else.
  row = _CELL.match(" ".join(labels[1:])) is not None
  return (([], []) if row or len(set(labels)) < len(labels)
          or len(labels) > _WIDEST else (labels, []))


def _read(labels: list[str], tail: list[str], lines: list[str]) -> Described | None:
  rows: dict[str, tuple[list[str], list[str]]] = {}
  names: dict[str, str] = {}
  for line in lines:
    legend = _LEGEND.match(line)
    name = read_name(legend[2]) if legend else None
    if legend and name:
      names[legend[1]] = name
    row = _row(line, labels)
    if row is not None:
      label, cells, rest = row
      if label in rows and _GPU.match(label):
        break  # another matrix begins
      rows.setdefault(label, (cells, rest))
  gpus = [label for label in labels if _GPU.match(label)]
  if any(label not in rows for label in gpus):
    return None
  nics = [label for label in labels if label not in gpus]
  described = tuple(_gpu(label, labels, *rows[label], tail) for label in gpus)
  known = [(label, read_name(names.get(label, label)) or label) for label in nics]
  distances = []
  column = {label: i for i, label in enumerate(labels)}
  near: dict[str, set[int | None]] = {}
  for gpu in described:
    for label, name in known:
      word = rows[gpu.pci][0][column[label]]
      word = "SYS" if word == "SOC" else word
      if word in pci.DISTANCES:
        distances.append(((gpu.pci, name), word))
      if word in pci.DISTANCES and word != "SYS":
        near.setdefault(name, set()).add(gpu.numa_node)
  # A NIC without a name of its own has none here that another source would know.
  placed = tuple(Nic(name, "rdma", numa_node=_node_of(near.get(name))) for _, name in known)
  unnamed = sum(label == name and label.startswith("NIC") for label, name in known)
  note = (f"{unnamed} of its NICs are numbers without a legend: keep the lines below the "
          "matrix, too.")
  return Described(FORM, described, placed, numbered=True, distances=tuple(distances),
                   notes=(note,) if unnamed else (), numa=_numa(gpus, rows, tail))


def _row(line: str, labels: list[str]) -> tuple[str, list[str], list[str]] | None:
  """Label, cells and what stands behind them. Cells may have no blank between them where a terminal
  broke the line."""
  match = re.match(r"^[\s#|>/]*(\S+)", line)
  if not match or match[1] not in labels:
    return None
  cells: list[str] = []
  at = match.end()
  while len(cells) < len(labels):
    cell = _CELL.match(line, at)
    if not cell:
      return None
    cells.append(cell[1])
    at = cell.end()
  rest = line[at:]
  # Columns may be blank, such as the CPUs of a node that this process may not use: tabs still tell
  # them apart.
  columns = [column.strip() for column in rest.split("\t")[1:]] if "\t" in rest else rest.split()
  return match[1], cells, columns


def _gpu(label: str, labels: list[str], cells: list[str], rest: list[str], tail: list[str]) -> Gpu:
  links = [int(cell[2:]) for cell, other in zip(cells, labels, strict=True) if cell.startswith("NV")
           and other != label]
  # Behind an NVSwitch all of a GPU's links lead to every other one, so that their sum is no number
  # of links.
  count = sum(links) if sum(links) <= _MOST_LINKS else max(links)
  alone = len([label for label in labels if _GPU.match(label)]) < 2
  interconnect = "nvlink" if links else None if alone else "pcie"
  return Gpu(label, numa_node=_single(_column("node", rest, tail)), nvlinks=count or None,
             interconnect=interconnect)


def _column(name: str, rest: list[str], tail: list[str]) -> str | None:
  """A value behind the cells; None where there are fewer than columns, so that it can't be told
  which is whose."""
  return rest[tail.index(name)] if name in tail and len(rest) >= len(tail) else None


def _single(text: str | None) -> int | None:
  return int(text) if text and text.isdecimal() and len(text) < 5 else None


def _node_of(near: set[int | None] | None) -> int | None:
  """The NUMA node of a NIC, given those of the GPUs it reaches without crossing to another."""
  return next(iter(near)) if near and len(near) == 1 else None


def _numa(gpus: list[str], rows: dict[str, tuple[list[str], list[str]]],
          tail: list[str]) -> tuple[NumaNode, ...]:
  nodes: dict[int, set[int]] = {}
  for gpu in gpus:
    rest = rows[gpu][1]
    node, cpus = _single(_column("node", rest, tail)), parse_list(_column("cpus", rest, tail))
    if node is not None and cpus:
      nodes.setdefault(node, set()).update(cpus)
  return tuple(NumaNode(node, format_list(tuple(cpus))) for node, cpus in sorted(nodes.items()))
