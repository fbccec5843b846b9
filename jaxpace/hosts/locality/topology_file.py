"""Reads a topology file of whatever format: NCCL's or RCCL's XML, hwloc's XML, the text of
`nvidia-smi topo -m`."""

from __future__ import annotations

import os
import stat

from jaxpace.hosts.locality import hwloc_topology, nccl_topology, smi_topology
from jaxpace.hosts.locality.described import Described, TopologyError, check_size, read_name
from jaxpace.hosts.locality.xml_document import parse_xml

_LARGEST = 32 << 20
"""Bytes. Files of large machines have one or two million."""
_WANTED = ("what NCCL_TOPO_DUMP_FILE names or NCCL_TOPO_FILE is given, the XML of `lstopo --of "
           "xml`, or the output of `nvidia-smi topo -m`")


def read_topology(path: str) -> Described:
  """Reads a topology file.

  Raises:
    TopologyError: the file can't be read, or is of no format that is known.
  """
  # A name may hold what steers a terminal.
  shown = "".join(c if c.isprintable() else "?" for c in path)
  try:
    return check_size(parse_topology(_read(path)))
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
  start = content[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
  if not start:
    raise TopologyError(f"the file is empty, it is no XML and no matrix. Give {_WANTED}.")
  if not start.startswith(b"<"):
    found = smi_topology.read_topology(content.decode(errors="replace"))
    if found is None:
      raise TopologyError(
          f"this is no XML, and holds no whole matrix of `nvidia-smi topo -m`. Give {_WANTED}.")
    return found
  root = parse_xml(content)
  if root.tag == "system":
    return nccl_topology.read_system(root)
  if root.tag == "topology":
    return hwloc_topology.read_topology(root)
  raise TopologyError("this is XML, but no topology: its outermost element is "
                      f"<{read_name(root.tag)}>, neither NCCL's <system> nor hwloc's <topology>. "
                      f"Give {_WANTED}.")


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
