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
from jaxpace.hosts.locality.types import Gpu, Nic

_FORM = "output of nvidia-smi topo -m"

_ANSI = re.compile(r"\x1b?\[[0-9;]*m")
"""What underlines the header; in text that was copied its first character may be lost."""
_GPU = re.compile(r"^GPU\d{1,4}$")
_CELL = re.compile(r"\s*(NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|N/A|X)")
_TAIL = re.compile(r"\s+(?=(?:CPU|NUMA)\s+Affinity|GPU\s+NUMA)")
"""What parts the columns of affinity."""
_LEGEND = re.compile(r"^\s*(NIC\d{1,4}):\s*(\S+)", re.MULTILINE)
_MOST_LINKS = 18
"""NVLinks that one GPU has at most."""
_WIDEST = 1024

_Row = tuple[list[str], list[str]]


def read_matrix(text: str) -> Described | None:
  """What the matrix in the text says; None if there is none, or GPUs lack their rows."""
  lines = [_ANSI.sub("", line) for line in text.splitlines()]
  start = next((i for i, line in enumerate(lines) if line.lstrip().startswith("GPU0")), len(lines))
  if start == len(lines):
    return None
  head, *tail = _TAIL.split(lines[start].strip())
  labels = head.split()
  rows: dict[str, _Row] = {}
  for line in lines[start + 1:] if len(labels) < _WIDEST else []:
    label, _, rest = line.strip().partition("\t" if "\t" in line else " ")
    row = _row(rest, len(labels)) if label.strip() in labels else None
    if row:
      rows.setdefault(label.strip(), row)
  gpus = [label for label in labels if _GPU.match(label)]
  if not set(gpus) <= set(rows):
    return None
  names = {nic: read_name(name) for nic, name in _LEGEND.findall("\n".join(lines))}
  return _described(labels, gpus, rows, tail, names)


def _row(rest: str, width: int) -> _Row | None:
  """The cells of a row and the columns behind them."""
  cells: list[str] = []
  at = 0
  while len(cells) < width:
    cell = _CELL.match(rest, at)
    if not cell:
      return None
    cells.append("SYS" if cell[1] == "SOC" else cell[1])
    at = cell.end()
  # Columns may be blank, such as the CPUs of a node that this process may not use: tabs still tell
  # them apart.
  behind = rest[at:]
  return cells, ([column.strip() for column in behind.split("\t")[1:]] if "\t" in behind
                 else behind.split())


def _described(labels: list[str], gpus: list[str], rows: dict[str, _Row], tail: list[str],
               names: dict[str, str | None]) -> Described:
  cards = [_gpu(label, labels, gpus, *rows[label], tail) for label in gpus]
  nics = [(label, names.get(label) or read_name(label) or label) for label in labels
          if label not in gpus]
  distances = {(gpu.pci, name): word for gpu in cards for label, name in nics
               if (word := rows[gpu.pci][0][labels.index(label)]) in pci.DISTANCES}
  placed = []
  for _, name in nics:
    # of the GPUs that it reaches without crossing to another node
    near = {gpu.numa_node for gpu in cards if distances.get((gpu.pci, name), "SYS") != "SYS"}
    placed.append(Nic(name, "rdma", numa_node=near.pop() if len(near) == 1 else None))
  return Described(_FORM, tuple(cards), tuple(placed), numbered=True,
                   distances=tuple(distances.items()))


def _gpu(label: str, labels: list[str], gpus: list[str], cells: list[str], behind: list[str],
         tail: list[str]) -> Gpu:
  links = [int(cell[2:]) for cell, other in zip(cells, labels, strict=True)
           if cell.startswith("NV") and other != label]
  # Behind an NVSwitch all of a GPU's links lead to every other one, so that their sum is no number
  # of links.
  count = sum(links) if sum(links) <= _MOST_LINKS else max(links)
  column = next((i for i, name in enumerate(tail) if name.startswith("NUMA")), None)
  # With fewer values than columns it can't be told which is whose.
  node = behind[column] if column is not None and len(behind) >= len(tail) else ""
  return Gpu(label, numa_node=int(node) if node.isdecimal() and len(node) < 5 else None,
             nvlinks=count or None,
             interconnect="nvlink" if links else "pcie" if len(gpus) > 1 else None)
