"""Reads a topology file of either format: NCCL's XML, or the text of `nvidia-smi topo -m`."""

from __future__ import annotations

import os
import stat
import xml.etree.ElementTree as xml

from jaxpace.hosts.locality import nccl_topology, smi_topology
from jaxpace.hosts.locality.described import Described, TopologyError, read_name

_LARGEST = 4 << 20
"""Bytes. Files of large machines have some hundred thousand."""
_MOST_GPUS, _MOST_NICS = 512, 4096
"""Of one host, virtual functions included; each GPU is compared with each NIC."""
_WANTED = ("what NCCL_TOPO_DUMP_FILE names or NCCL_TOPO_FILE is given, or the output of "
           "`nvidia-smi topo -m`")


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
  if content[:4096].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<"):
    found = _parse_xml(content)
  else:
    matrix = smi_topology.read_matrix(content.decode(errors="replace"))
    if matrix is None:
      raise TopologyError(
          f"this is no XML, and holds no whole matrix of `nvidia-smi topo -m`. Give {_WANTED}.")
    found = matrix
  if len(found.gpus) > _MOST_GPUS or len(found.nics) > _MOST_NICS:
    raise TopologyError(
        f"this file has {len(found.gpus):,} GPUs and {len(found.nics):,} NICs: no host has.")
  return found


def _parse_xml(content: bytes) -> Described:
  if b"<!ENTITY" in content:
    # Entities of entities make gigabytes of a kilobyte; no writer of topologies uses any.
    raise TopologyError("this XML declares entities, which no topology needs: it isn't read.")
  try:
    root = xml.fromstring(content)
    if root.tag == "system":
      return nccl_topology.read_system(root)
  except RecursionError:
    raise TopologyError("this XML is nested deeper than any machine is.") from None
  except (xml.ParseError, ValueError, LookupError) as error:
    raise TopologyError(f"this is no XML ({error}).") from error
  raise TopologyError("this is XML, but no topology of NCCL: its outermost element is "
                      f"<{read_name(root.tag)}>, not <system>. Give {_WANTED}.")


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
