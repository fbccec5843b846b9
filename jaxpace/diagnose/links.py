"""What a link probe has measured, kept in the run directory (`links.json`), and which host or link
is slow by it. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxpace.diagnose.limits import CONFIDENCE, KEPT, SCHEMA
from jaxpace.files.plain import to_plain
from jaxpace.files.reading import read_document
from jaxpace.files.schemas import LinksFile

FILE = "links.json"


@dataclasses.dataclass(frozen=True)
class ProbedLinks:
  """What a probe has measured, and what it says.

  n ends: the processes, each by its first device; of a process that is alone, its devices.

  Attributes:
    hosts: [n] host of each end.
    message_bytes: size of a message.
    seconds: [n, n] quickest time of a message from row to column; NaN where it was not measured.
    median_seconds: [n, n] the median.
    culprits: what is slow, the strongest first; empty where nothing is, or it is unknown.
    cannot_tell: why nothing more is known; empty where it is.
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


def read_links(directory: str | os.PathLike[str]) -> ProbedLinks | None:
  """Returns what a probe left in a run directory, what its times say found anew; None if there is
  nothing that can be read. Imports no JAX."""
  try:
    # Both times of each pair of 1,024 ends take no more.
    data, _ = read_document(pathlib.Path(directory) / FILE, LinksFile, most=KEPT)
    hosts = tuple(data["hosts"])
    # What was not measured is null there, NaN here.
    seconds, median = (np.array(data[key], np.float64) for key in ("seconds", "median_seconds"))
    if data["schema"] != SCHEMA or not seconds.shape == median.shape == (len(hosts),) * 2:
      return None
    return ProbedLinks(hosts, data["message_bytes"], seconds, median, *infer(seconds, hosts),
                       data["taken_seconds"], data["when_unix_ns"])
  except (OSError, KeyError, ValueError):
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


Kind = Literal["host", "sender", "receiver", "link", "direction", "process"]

SMALLEST_RATIO = 1.3
"""Slower than that, or it is not mentioned."""
_PROBABLE = 0.95
"""Probability that a hypothesis must have among all; a link or a direction `CONFIDENCE`: those are
many, and one or two odd times look like one."""
_FLOOR = 0.05  # scale below which noise is not believed: two runs of one probe differ by as much
_MOST = 4  # culprits looked for
_LINKS_TRIED = 64  # in large jobs: those pairs of hosts that stand out most


class Culprit(NamedTuple):
  """Something that is slow.

  Attributes:
    kind: "host" (sends and receives slowly), "sender" or "receiver" (one way only), "link" (between
      two hosts, each way), "direction" (from one host to another), "process" (one of several on its
      host).
    hosts: the host, or the two.
    processes: those on it; of a link those on both.
    ratio: how many times as long its pairs take as others.
    confidence: probability among all hypotheses tried, 0 to 1.
  """

  kind: Kind
  hosts: tuple[str, ...]
  processes: tuple[int, ...]
  ratio: float
  confidence: float

  def sentence(self) -> str:
    """Says it in words."""
    name = self.hosts[0]
    slow = f"{self.ratio:.1f} times as slow as elsewhere (confidence {100 * self.confidence:.0f} %)"
    return {
        "host":
        f"Host {name} sends and receives {slow}: its NIC, cable or port, or load on the host.",
        "sender": f"What host {name} sends is {slow}; it receives as the others do.",
        "receiver": f"What host {name} receives is {slow}; it sends as the others do.",
        "link":
        f"Between hosts {' and '.join(self.hosts)} messages are {slow}, each way; both are well "
        "elsewhere.",
        "direction":
        f"From host {name} to host {self.hosts[-1]} messages are {slow}; the way back is not.",
        "process":
        f"Process {self.processes[0]} on host {name} is {slow}, the host's other processes "
        "are not.",
    }[self.kind]

  def to_json(self) -> dict[str, Any]:
    """Returns plain values, the sentence with them."""
    return {**self._asdict(), "sentence": self.sentence()}


_Hypothesis = tuple[Kind, tuple[int, ...], tuple[int, ...], np.ndarray]
"""What may be slow: kind, numbers of hosts, processes, and which pairs would be slow then, [N]
bool."""


def infer(seconds: np.ndarray, hosts: Sequence[str]) -> tuple[tuple[Culprit, ...], str]:
  """Says which host or link is slow.

  Args:
    seconds: [n, n] time of a message from row to column; NaN where it was not measured, and on the
      diagonal.
    hosts: [n] name of each process's host.

  Returns:
    The culprits, the strongest first; and why nothing more is known, empty where it is.
  """
  seconds = np.asarray(seconds, np.float64)
  known = np.isfinite(seconds) & (seconds > 0)
  np.fill_diagonal(known, False)
  sender, receiver = np.nonzero(known)
  names = list(dict.fromkeys(hosts))
  of = np.array([names.index(host) for host in hosts])
  if len(seconds) < 3:
    return (), ("With two processes every message is between the same two: a slow one can't be "
                "separated from its peer or the link. Probe with three or more.")
  missing = len(seconds) * (len(seconds) - 1) - len(sender)
  if len(sender) < 2 * len(seconds):
    return (), (f"{missing} pairs of {len(seconds) * (len(seconds) - 1)} were not measured in "
                "time: give the probe more seconds, or smaller messages.")
  y = np.log(seconds[sender, receiver])
  tier = (of[sender] != of[receiver]).astype(int)
  tried = _hypotheses(sender, receiver, of, tier, y)
  if not tried:
    return (), ("All processes are on two hosts: a slow host can't be separated from its peer or "
                "the link. Probe with a third." if len(names) == 2
                else "Too few pairs were measured to compare them.")
  sets = [pairs for *_, pairs in tried]
  chosen: dict[int, float] = {}  # number of a hypothesis: its shift
  while len(chosen) < _MOST:
    probability, shift = _compare(y - _explained(chosen, sets), tier, sets)
    best = int(np.argmax(probability[1:]))
    if best in chosen or probability[0] > 1 - _PROBABLE or math.exp(shift[best]) < SMALLEST_RATIO:
      break
    chosen[best] = shift[best]
  culprits: list[Culprit] = []
  reason = ""
  # each anew, beside the others: two slow hosts don't contest each other's place
  for best in chosen:
    rest = {other: shift for other, shift in chosen.items() if other != best}
    probability, shift = _compare(y - _explained(rest, sets), tier, sets)
    (kind, own, processes, _), ratio = tried[best], math.exp(shift[best])
    needed = CONFIDENCE if kind in ("link", "direction") else _PROBABLE
    if probability[1 + best] >= needed and ratio >= SMALLEST_RATIO:
      culprits.append(Culprit(kind, tuple(names[h] for h in own), processes, ratio,
                              float(probability[1 + best])))
    else:
      reason = reason or _ambiguous(probability, tried, shift, names)
  return tuple(culprits), reason


def _explained(chosen: Mapping[int, float], sets: Sequence[np.ndarray]) -> np.ndarray:
  """[N] what the hypotheses chosen add to the times' logarithms."""
  return sum((shift * sets[number] for number, shift in chosen.items()), np.zeros(len(sets[0])))


def _hypotheses(sender: np.ndarray, receiver: np.ndarray, of: np.ndarray, tier: np.ndarray,
                y: np.ndarray) -> list[_Hypothesis]:
  """All hypotheses that leave enough other pairs of the same kind to compare with."""
  found: list[_Hypothesis] = []

  def add(kind: Kind, hosts: tuple[int, ...], processes: np.ndarray, pairs: np.ndarray) -> None:
    if not pairs.any() or any(((tier == t) & ~pairs).sum() < 2 for t in set(tier[pairs])):
      return
    found.append((kind, hosts, tuple(int(p) for p in processes), pairs))

  between = tier == 1
  for h in range(int(of.max()) + 1):
    own = np.flatnonzero(of == h)
    sends, receives = (of[sender] == h) & between, (of[receiver] == h) & between
    add("host", (h,), own, sends | receives)
    add("sender", (h,), own, sends)
    add("receiver", (h,), own, receives)
    if len(own) > 1:
      for p in own:
        add("process", (h,), np.array([p]), (sender == p) | (receiver == p))
  pairs = {(int(a), int(b)) for a, b in zip(of[sender[between]], of[receiver[between]],
                                            strict=True)}
  links = sorted({(min(pair), max(pair)) for pair in pairs})
  if len(links) > _LINKS_TRIED:
    def strength(link: tuple[int, int]) -> float:
      both = np.isin(of[sender], link) & np.isin(of[receiver], link) & between
      return -float(y[both].max())
    links = sorted(links, key=strength)[:_LINKS_TRIED]
  for a, b in links:
    there = (of[sender] == a) & (of[receiver] == b)
    back = (of[sender] == b) & (of[receiver] == a)
    both = np.flatnonzero((of == a) | (of == b))
    add("link", (a, b), both, there | back)
    add("direction", (a, b), both, there)
    add("direction", (b, a), both, back)
  return found


def _compare(y: np.ndarray, tier: np.ndarray,
             sets: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  """Probability of "nothing" and of each set, and each set's shift."""
  size = len(y)
  scale = _scale(y - _bases(y, tier, np.ones(size, bool)))
  scores, shifts = [0.0], []
  price = 0.5 * math.log(size) + math.log(max(1, len(sets)))
  for pairs in sets:
    base = _bases(y, tier, ~pairs)
    shift = float(np.median((y - base)[pairs]))
    shifts.append(shift)
    if shift <= 0:
      scores.append(-np.inf)
      continue
    own = _scale(y - base - shift * pairs)
    scores.append(size * math.log(scale / own) - price)
  weight = np.exp(np.array(scores) - max(scores))
  return weight / weight.sum(), np.array(shifts)


def _bases(y: np.ndarray, tier: np.ndarray, of: np.ndarray) -> np.ndarray:
  """[N] base of each pair: the median of its tier among the pairs `of`."""
  base = np.zeros(len(y))
  for t in set(tier):
    chosen = (tier == t) & of
    base[tier == t] = np.median(y[chosen if chosen.any() else tier == t])
  return base


def _scale(residuals: np.ndarray) -> float:
  return float(np.abs(residuals).mean()) + _FLOOR


def _ambiguous(probability: np.ndarray, tried: Sequence[_Hypothesis], shift: np.ndarray,
               names: Sequence[str]) -> str:
  """Why nothing is named though "nothing is slow" is improbable; empty where nothing seems slow."""
  if not tried or probability[0] > 1 - _PROBABLE:
    return ""
  order = [i for i in np.argsort(probability[1:])[::-1] if probability[1 + i] > 0.05 and
           math.exp(shift[i]) >= SMALLEST_RATIO][:3]
  if not order:
    return ""
  words = [
      f"{tried[i][0]} {' to '.join(names[h] for h in tried[i][1])} "
      f"({100 * probability[1 + i]:.0f} %)"
      for i in order]
  return (f"Something may be slow, but not surely: {', '.join(words)}. Probe again, with "
          "more repeats.")
