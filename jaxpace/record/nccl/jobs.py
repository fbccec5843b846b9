"""Ranks and steps of a job, from its collectives alone."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from jaxpace.files import UserError
from jaxpace.record.nccl.records import Record
from jaxpace.runs.problems import plural

LONGEST_PATTERN = 4096
"""Collectives of one kind and communicator in a step, at most."""
_REPEATS = 3
_WINDOW = 5 * LONGEST_PATTERN

Process = tuple[str, int]
Key = tuple[str, str]
"""A communicator, and a kind of collective in it: numbers are counted for each."""


@dataclasses.dataclass(frozen=True)
class Members:
  """Who is who. A rank of the job is a GPU."""

  ranks: dict[tuple[str, int], int]
  """Rank of the job by communicator and rank in it."""
  process: dict[int, Process]
  dropped: tuple[str, ...]
  """Communicators that are left out since their ranks are unknown."""
  numbering: str = ""
  """How ranks are numbered, in a sentence."""


def members(records: Iterable[Record]) -> Members:
  """Numbers the ranks of a job as its largest communicator does.

  A process with several GPUs has several ranks in a communicator, and nothing says which of them
  is which in another one: then only the largest communicator, and those of other processes, are
  kept.
  """
  inside: dict[str, dict[int, Process]] = defaultdict(dict)
  sizes: dict[str, int] = {}
  for record in records:
    inside[record.communicator][record.rank] = record.host, record.pid
    sizes[record.communicator] = record.ranks
  order = sorted(inside, key=lambda name: (-sizes[name], -len(inside[name]), name))
  several = {process for of in inside.values() for process, count in Counter(of.values()).items()
             if count > 1}
  ranks: dict[tuple[str, int], int] = {}
  process_of: dict[int, Process] = {}
  known: dict[Process, int] = {}
  dropped, following = [], 0
  numbering: list[tuple[str, range]] = []
  for name in order:
    processes = set(inside[name].values())
    if processes & several and any(process in known for process in processes):
      dropped.append(name)
      continue
    base = following
    for rank, process in sorted(inside[name].items()):
      if process in known and process not in several:
        ranks[name, rank] = known[process]
        continue
      number = base + rank
      ranks[name, rank], process_of[number] = number, process
      known[process] = number
      following = max(following, base + sizes[name])
    if following > base:
      numbering.append((name, range(base, following)))
  return Members(ranks, process_of, tuple(dropped), _sentence(numbering))


def _sentence(numbering: Sequence[tuple[str, range]]) -> str:
  """How ranks are numbered, by communicators and the numbers of each."""
  if len(numbering) == 1:
    return (f"Ranks are numbered as in communicator {numbering[0][0]}, which all belong to: in "
            "other communicators they have other numbers.")
  pieces = [f"{name}: {ranks.start} to {ranks.stop - 1}" for name, ranks in numbering[:4]]
  others = f", and {len(numbering) - 4:,} more" if len(numbering) > 4 else ""
  return ("No communicator holds all ranks, so they are numbered anew, one communicator after the "
          f"other ({'; '.join(pieces)}{others}).")


@dataclasses.dataclass(frozen=True)
class Stream:
  """Collectives of one kind and communicator: from `begin` on, `period` of them are a step's."""

  key: Key
  begin: int
  period: int
  steps: int
  pattern: tuple[int | None, ...]
  """Bytes of a step's collectives."""


def streams(records: Sequence[Record],
            each_step: int | None = None) -> tuple[list[Stream], list[str]]:
  """Finds the collectives that repeat, and how many of them are a step.

  What repeats in all communicators alike is taken for a step: the smallest pattern of sizes of
  each, as often as makes the numbers of repetitions equal.

  Args:
    records: all of them.
    each_step: collectives of a rank in one step, where the user knows; None finds it.

  Returns:
    The streams that repeat, and sentences on what was left out or is not sure.

  Raises:
    UserError: nothing repeats, or `each_step` does not fit what does.
  """
  sizes: dict[Key, dict[int, int | None]] = defaultdict(dict)
  processes: dict[Key, set[Process]] = defaultdict(set)
  for record in records:
    key = record.communicator, record.kind
    sizes[key][record.number] = record.bytes
    processes[key].add((record.host, record.pid))
  each = [_stream(key, by_number) for key, by_number in sorted(sizes.items())]
  found, said = [stream for stream in each if stream is not None], []
  if alone := len(each) - len(found):
    said.append(f"Collectives that don't repeat at least {_REPEATS} times, as those of the start, "
                f"are left out: {plural(alone, 'kind')}.")
  if not found:
    raise UserError("No collective repeats at least three times, so there are no steps: are these "
                    "the dumps of a whole training job?")
  repeats = min(stream.steps for stream in found)
  folded = []
  for stream in found:
    factor = round(stream.steps / repeats)
    if abs(stream.steps - factor * repeats) > factor:
      said.append(f"{stream.key[1]} of communicator {stream.key[0]} repeats {stream.steps} times "
                  f"where others repeat {repeats} times: it does not belong to every step, and is "
                  "left out.")
      continue
    folded.append(_times(stream, factor))
  of_process: Counter[Process] = Counter()
  for stream in folded:
    of_process.update(dict.fromkeys(processes[stream.key], stream.period))
  most = max(of_process.values())
  if each_step is not None:
    if each_step % most:
      raise UserError(f"{each_step} collectives per step don't fit: those of a rank repeat after "
                      f"{most}, so a step has a multiple of that.")
    folded = [_times(stream, each_step // most) for stream in folded]
  elif most == 1:
    said.append("All collectives look the same, so each is taken for a step: say with "
                "--collectives-per-step how many a step has.")
  return folded, said


def _stream(key: Key, by_number: dict[int, int | None]) -> Stream | None:
  first, last = min(by_number), max(by_number)
  count = last - first + 1
  if count < _REPEATS or count > 50_000_000:
    return None
  # -1 where no rank's record is there.
  sizes = np.full(count, -1, np.int64)
  for number, size in by_number.items():
    sizes[number - first] = 0 if size is None else min(size, 1 << 60)
  tail = sizes[-min(count, _WINDOW):]
  for period in range(1, min(LONGEST_PATTERN, len(tail) // _REPEATS) + 1):
    same = tail[-_REPEATS * period:]
    if not _equal(same, period).all():
      continue
    whole = _equal(sizes, period)
    broken = np.flatnonzero(~whole)
    begin = int(broken[-1]) + 1 if broken.size else 0
    # A shorter one at the end alone is part of a longer pattern.
    if count - begin >= max(_REPEATS * period, count / 2):
      known = [sizes[begin + place::period] for place in range(period)]
      pattern = [next(iter(own[own >= 0].tolist()), None) for own in known]
      return Stream(key, first + begin, period, (count - begin) // period, tuple(pattern))
  return None


def _equal(sizes: np.ndarray, period: int) -> np.ndarray:
  """Whether each size is that of one period later, or one of both is not known."""
  a, b = sizes[:-period], sizes[period:]
  return (a == b) | (a < 0) | (b < 0)


def _times(stream: Stream, factor: int) -> Stream:
  return dataclasses.replace(stream, period=stream.period * factor, steps=stream.steps // factor,
                             pattern=stream.pattern * factor)
