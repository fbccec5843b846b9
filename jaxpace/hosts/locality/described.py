"""What a topology file says of a machine, whatever its format."""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxpace.files import UserError
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

  form: str  # its format, as a user knows it
  gpus: tuple[Gpu, ...] = ()
  nics: tuple[Nic, ...] = ()  # one of which only the bus id is known has that for its name
  unclassed: tuple[DevicePlace, ...] = ()  # devices of which the file doesn't say what they are
  numbered: bool = False  # whether GPUs have numbers ("GPU0") in place of bus ids
  # how far a GPU and a NIC are apart, where the file has words for it, one of `pci.DISTANCES`
  distances: tuple[tuple[tuple[str, str], str], ...] = ()
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
