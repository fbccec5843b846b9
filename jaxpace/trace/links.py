"""What a link probe has measured, kept in the run directory: `links.json`. Imports no JAX."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
from typing import Any

import numpy as np

from jaxpace.files import atomic_write
from jaxpace.files.documents import read_document
from jaxpace.files.plain import to_plain
from jaxpace.files.schemas import LinksFile
from jaxpace.trace.link_inference import Culprit, infer

_LOG = logging.getLogger("jaxpace")
FILE = "links.json"
SCHEMA = 1
_LARGEST_FILE = 64 << 20
"""Bytes: two times a pair of 1,024 ends."""


@dataclasses.dataclass(frozen=True)
class ProbedLinks:
  """What a probe has measured, and what it says.

  n ends: the processes, each by its first device; of a process that is alone, its devices.

  Attributes:
    hosts: [n] host of each end.
    message_bytes: size of a message.
    seconds: [n, n] quickest time of a message from row to column; NaN where it was not measured.
    median_seconds: [n, n] the median.
    culprits: what is slow, the strongest first; empty where nothing is, or it can't be told.
    cannot_tell: why nothing more can be told; empty where it can.
    taken: seconds that the probe took.
    when_unix_ns: when it ended.
  """

  hosts: tuple[str, ...]
  message_bytes: int
  seconds: np.ndarray
  median_seconds: np.ndarray
  culprits: tuple[Culprit, ...]
  cannot_tell: str
  taken: float
  when_unix_ns: int

  def text(self) -> str:
    """Says it in words."""
    known = self.seconds[np.isfinite(self.seconds)]
    lines = []
    if known.size:
      rate = self.message_bytes / np.median(known)
      lines.append(f"{known.size} pairs, {_bytes(self.message_bytes)} each: median "
                   f"{np.median(known) * 1e3:.2f} ms ({_bytes(rate)}/s), quickest "
                   f"{known.min() * 1e3:.2f} ms, slowest {known.max() * 1e3:.2f} ms.")
    lines += [culprit.sentence() for culprit in self.culprits]
    if self.cannot_tell:
      lines.append(self.cannot_tell)
    elif not self.culprits:
      lines.append("No host or link is slower than the others.")
    return "\n".join(lines)

  def to_json(self) -> dict[str, Any]:
    """Returns plain values, null for what was not measured; the format of `links.json`."""
    return {"schema": SCHEMA, "when_unix_ns": self.when_unix_ns,
            "message_bytes": self.message_bytes, "taken_seconds": self.taken,
            "hosts": list(self.hosts), "seconds": to_plain(self.seconds),
            "median_seconds": to_plain(self.median_seconds),
            "culprits": [c.to_json() for c in self.culprits], "cannot_tell": self.cannot_tell}

  @staticmethod
  def from_json(data: dict[str, Any]) -> ProbedLinks:
    """Inverse of `to_json`; what the times say is found anew.

    Raises:
      ValueError: it is no such document.
    """
    try:
      hosts = tuple(str(host) for host in data["hosts"])
      seconds, median = (np.array([[np.nan if x is None else float(x) for x in row]
                                   for row in data[key]], np.float64)
                         for key in ("seconds", "median_seconds"))
      if (data["schema"] != SCHEMA or seconds.shape != (len(hosts),) * 2
          or median.shape != seconds.shape):
        raise ValueError("its shape does not fit")
      found = infer(seconds, hosts)
      return ProbedLinks(hosts, int(data["message_bytes"]), seconds, median, found.culprits,
                         found.cannot_tell, float(data["taken_seconds"]), int(data["when_unix_ns"]))
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(f"not a link probe's document: {type(error).__name__}: {error}") from error


def write_links(directory: str | os.PathLike[str], links: ProbedLinks) -> None:
  """Writes `links.json`, whole or not at all. Trouble is a warning, no error: the job goes on."""
  path = pathlib.Path(os.path.abspath(directory)) / FILE
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write.write_text(path, json.dumps(links.to_json(), indent=1, allow_nan=False) + "\n")
  except OSError as error:
    _LOG.warning("What the link probe found is not recorded: %s can't be written (%s).", path,
                 error.strerror or error)


def read_links(directory: str | os.PathLike[str]) -> ProbedLinks | None:
  """Returns what a probe left in a run directory; None if there is nothing that can be read.
  Imports no JAX."""
  try:
    document = read_document(pathlib.Path(directory) / FILE, LinksFile, most=_LARGEST_FILE)
    return ProbedLinks.from_json(document.value)
  except (OSError, ValueError):
    return None


def _bytes(size: float) -> str:
  """
  >>> _bytes(1 << 20), _bytes(12.5e6), _bytes(800)
  ('1.05 MB', '12.5 MB', '800 B')
  """
  for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
    if size >= scale:
      return f"{size / scale:.3g} {unit}"
  return f"{size:.0f} B"
