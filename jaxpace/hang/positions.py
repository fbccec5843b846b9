"""Where a rank is in its program, by the timestamps that its device has written; programs of
several processes that are one; and positions as short text for a heartbeat."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from jaxpace.core.observed import TAG_BITS, ObservedPlan, ObservedProgram
from jaxpace.core.plan import Collective
from jaxpace.core.ring_layout import END_TAG, NUMBER, START_TAG, VALUES

_MASK = (1 << TAG_BITS) - 1
_USUAL_OF = 64
"""Steps whose median is the usual one."""


class NewestExecution(NamedTuple):
  """The newest execution of one program on one device.

  Counts are by place of the collective in the program: how often the device has entered and left
  it.
  """

  program: str
  """Key in `ProgramsByKey`."""
  number: int | None
  """Executions that had started before; None where the ring no longer holds its start."""
  ended: bool
  entered: tuple[int, ...] = ()
  left: tuple[int, ...] = ()
  last: tuple[int, int, bool] | None = None
  """Newest timestamp of a collective: its place, its iteration, and whether it was the exit."""

  @property
  def pending(self) -> list[tuple[int, int]]:
    """(place, turn) of each collective that was entered and not left."""
    return [] if self.ended else [(place, number - 1) for place, number in enumerate(self.entered)
                                  if number > self.left[place]]


@dataclasses.dataclass(frozen=True)
class Position:
  """Where a rank was when its ring was read."""

  rank: int
  process: int
  executions: tuple[NewestExecution, ...] = ()
  """Newest execution of each program, the one with the newest timestamp last."""
  quiet: float | None = None
  """Seconds from its newest timestamp to when its process last wrote, by its own clock."""
  usual: float | None = None
  """Median seconds between two starts of the program with the newest timestamp; None before a
  few."""
  state: Literal["running", "silent", "closed"] = "running"
  """"silent": nothing more is heard of its process; "closed": its process has closed its
  recording. All timestamps up to then are known, and none after it."""
  ended_by: str = ""
  """Why its recording ends, as its process wrote down; empty where it wrote nothing."""
  moving: bool = False
  """Whether it wrote timestamps while its ring was watched: what it was in then is over."""
  host: str = ""
  waiting: float | None = None
  """Seconds since it entered the collective that it entered last, if it is in one."""

  def of(self, program: str) -> NewestExecution | None:
    """Its newest execution of a program; None where it has none in its ring."""
    return next((each for each in self.executions if each.program == program), None)

  @property
  def current(self) -> NewestExecution | None:
    """The execution with the newest timestamp."""
    return self.executions[-1] if self.executions else None


def position(rank: int, process: int, tag: np.ndarray, ns: np.ndarray, keys: Mapping[int, str],
             programs: ProgramsByKey, now_ns: int | None) -> Position:
  """Tells where a rank is by what its ring holds.

  Args:
    tag: [n] uint32, events in the order they were written, with the program's number.
    ns: [n] int64, their times.
    keys: keys of the process's programs by their number, see `Programs.add`.
    now_ns: when its process last lived, of the same clock; None where not known.
  """
  timed = ((tag & _MASK) < VALUES) | ((tag & _MASK) == NUMBER)
  tag, ns = tag[timed], ns[timed]
  number, own = tag >> TAG_BITS, (tag & _MASK).astype(np.int64)
  found: list[tuple[int, int, NewestExecution, float | None]] = []
  for each in np.unique(number).tolist():
    key = keys.get(each)
    if key is None:
      continue
    at = np.flatnonzero(number == each)
    execution, begun = _newest(own[at], ns[at], key, programs.by_key[key])
    starts = ns[at][own[at] == START_TAG][-_USUAL_OF - 1:]
    usual = float(np.median(np.diff(starts))) / 1e9 if len(starts) >= 4 else None
    found.append((int(at[-1]), int(at[begun]), execution, usual))
  found.sort(key=lambda entry: entry[0])
  # A device runs one program with collectives after the other: what ended later shows that one
  # which began earlier was given up, as when a step raises.
  kept = [entry for i, entry in enumerate(found)
          if entry[2].ended or not any(other[2].ended and other[1] > entry[0]
                                       for other in found[i + 1:])]
  executions = tuple(entry[2] for entry in kept)
  known = now_ns is not None and len(ns) > 0
  quiet = max(0.0, (now_ns - int(ns[-1])) / 1e9) if known and now_ns is not None else None
  waiting = None
  if kept and executions[-1].pending and now_ns is not None:
    inside = programs.by_key[executions[-1].program].collectives
    entries = [inside[place].enter_tag for place, _ in executions[-1].pending]
    upper = int(number[kept[-1][0]])
    marks = ns[(number == upper) & np.isin(own, entries)]
    waiting = max(0.0, (now_ns - int(marks[-1])) / 1e9)
  return Position(rank, process, executions, quiet, kept[-1][3] if kept else None, waiting=waiting)


def _newest(tag: np.ndarray, ns: np.ndarray, key: str,
            program: ObservedProgram) -> tuple[NewestExecution, int]:
  """The newest execution in a program's events, and the place of its first event among them."""
  first, number = _beginning(tag, ns)
  tags = tag[first:]
  counts = Counter(tags.tolist())
  entered = tuple(counts[each.enter_tag] for each in program.collectives)
  left = tuple(counts[each.exit_tag] for each in program.collectives)
  ended = bool((tags == END_TAG).any())
  last = _last(tags, program, entered, left)
  return NewestExecution(key, number, ended, entered, left, last), first


def _beginning(tag: np.ndarray, ns: np.ndarray) -> tuple[int, int | None]:
  """Place of the first event of the newest execution, and its number, None where not known.

  It is what comes after the end timestamp of the one before, see
  `jaxpace.record.ring.executions.Splitter`.
  """
  starts = np.flatnonzero(tag == NUMBER)
  if not starts.size:
    return 0, None
  newest, number = int(starts[-1]), int(ns[starts[-1]])
  ends = np.flatnonzero(tag == END_TAG)
  if ends.size and newest < ends[-1] < len(tag) - 1:
    # Its first collectives are entered, its start timestamp is not written yet.
    return int(ends[-1]) + 1, number + 1
  before = ends[ends < newest]
  if before.size and not ((starts > before[-1]) & (starts < newest)).any():
    return int(before[-1]) + 1, number
  return newest, number


def _last(tags: np.ndarray, program: ObservedProgram, entered: tuple[int, ...],
          left: tuple[int, ...]) -> tuple[int, int, bool] | None:
  sides = {tag: (place, leaves) for place, each in enumerate(program.collectives)
           for leaves, tag in ((False, each.enter_tag), (True, each.exit_tag))}
  newest = next((tag for tag in reversed(tags.tolist()) if tag in sides), None)
  if newest is None:
    return None
  place, leaves = sides[newest]
  return place, (left if leaves else entered)[place] - 1, leaves


_OWN = ("number", "paced", "bare_compile_s", "stamped_compile_s", "notices", "unstamped")


class ProgramsByKey:
  """Programs by a key that is the same in every process that compiled the same."""

  def __init__(self) -> None:
    """Begins without any."""
    self.by_key: dict[str, ObservedProgram] = {}
    self._groups: dict[tuple[str, int], dict[int, tuple[int, ...]]] = {}

  def add(self, plan: ObservedPlan) -> dict[int, str]:
    """Takes in a process's programs, and returns the key of each by its number. Programs are the
    same if they have the same name, ranks and collectives; of several that are the same within a
    process, the k-th is the other process's k-th."""
    keys, met = {}, Counter[str]()
    described = plan.to_json()["programs"]
    for program, document in zip(plan.programs, described, strict=True):
      text = json.dumps({name: value for name, value in document.items() if name not in _OWN},
                        sort_keys=True)
      digest = hashlib.sha256(text.encode()).hexdigest()[:10]
      key = f"{digest}-{met[digest]}" if met[digest] else digest
      met[digest] += 1
      keys[program.number] = key
      self.by_key.setdefault(key, program)
    return keys

  def collective(self, key: str, place: int) -> Collective:
    """Returns a program's collective by its place in the list."""
    return self.by_key[key].collectives[place]

  def group(self, key: str, place: int, rank: int) -> tuple[int, ...]:
    """Returns the ranks that a rank meets in a collective, itself included, rising."""
    known = self._groups.get((key, place))
    if known is None:
      program = self.by_key[key]
      each = program.collectives[place]
      found = each.members or (program.ranks,)
      known = {r: tuple(sorted(set(members))) for members in found for r in members}
      self._groups[key, place] = known
    return known.get(rank, (rank,))


_NEWEST = 2
"""Executions of a rank that are described: that under way, and one of another program."""
_Entry = tuple[list[int], tuple[tuple[NewestExecution, ...], float | None, float | None,
                                float | None]]
"""Ranks, and what `to_text` says of each."""


def to_text(positions: Iterable[Position], most: int) -> str:
  """Writes positions in at most so many characters; ranks that are at the same place share their
  entry. What does not fit is left out."""
  entries: dict[str, list[int]] = {}
  for one in positions:
    times = [None if value is None else round(value, 2)
             for value in (one.quiet, one.usual, one.waiting)]
    text = json.dumps([one.executions[-_NEWEST:], *times], separators=(",", ":"))
    entries.setdefault(text, []).append(one.rank)
  pieces: list[str] = []
  left = most - 2
  for text, ranks in entries.items():
    piece = f"[{json.dumps(ranks, separators=(',', ':'))},{text}]"
    needed = len(piece) + (1 if pieces else 0)
    if needed > left:
      continue
    left -= needed
    pieces.append(piece)
  return f"[{','.join(pieces)}]" if pieces else ""


def from_text(text: str, process: int, host: str, programs: ProgramsByKey,
              silence: float = 0.0) -> list[Position]:
  """Reads `to_text`, written so many seconds ago; what can't be read, or is of programs that are
  not known here, is left out."""
  try:
    entries = msgspec.convert(json.loads(text or "[]"), list[_Entry])
  except ValueError:
    return []
  found: list[Position] = []
  for ranks, (executions, quiet, usual, waiting) in entries:
    if all(_fits(each, programs) for each in executions):
      one = Position(-1, process, executions, None if quiet is None else quiet + silence, usual,
                     host=host, waiting=None if waiting is None else waiting + silence)
      found += [dataclasses.replace(one, rank=rank) for rank in ranks]
  return found


def _fits(one: NewestExecution, programs: ProgramsByKey) -> bool:
  program = programs.by_key.get(one.program)
  return (program is not None and len(one.entered) == len(one.left) == len(program.collectives)
          and (one.last is None or 0 <= one.last[0] < len(program.collectives)))
