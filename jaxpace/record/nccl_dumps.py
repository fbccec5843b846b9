"""Reads the JSON that NCCL's Inspector plugin writes: one object a collective and rank, in files of
any damage; and finds the ranks and steps of the job, from its collectives alone.

Formats v4.0 to v4.3, as the plugin's documentation shows them (NCCL,
plugins/profiler/inspector/README.md, before ext-profiler/inspector): `header` has the
communicator's id, the rank in it and how many there are; `metadata` the host, process and the time
of the dump; `coll_perf` the collective, its sequence number (counted for each kind and
communicator), bytes and execution time and, if NCCL_INSPECTOR_DUMP_VERBOSE=1, `event_trace_ts` with
the times at which its kernel started and stopped. Up to v4.2 every object has all three. From v4.3
on a marker with `dump_stats` has the header and metadata of as many objects as it counts, which
follow it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from jaxpace.core.words import plural
from jaxpace.files import UserError
from jaxpace.files.reading import UnreadableError, check_regular

SUFFIXES = (".log", ".json", ".jsonl", ".txt")
MOST_RECORDS = 5_000_000
_LONGEST = 1 << 20
_TIME = 1 << 62
_PAYLOAD = re.compile(r'\{\s*"(coll_perf|p2p_perf|proxy_trace)"')


class Record(NamedTuple):
  """A collective as one rank saw it. Times are microseconds of its host's clock."""

  communicator: str
  rank: int
  """In the communicator."""
  ranks: int
  host: str
  pid: int
  kind: str
  number: int
  """Sequence number."""
  bytes: int | None
  enter_us: int | None
  """When its kernel started; None where the dump does not tell."""
  exit_us: int | None


@dataclasses.dataclass
class Dumps:
  """All that was read, and what was not."""

  records: list[Record] = dataclasses.field(default_factory=list)
  files: int = 0
  damaged: int = 0
  """Objects that can't be read."""
  others: int = 0
  """Objects of other kinds: sends and receives, proxies."""
  orphans: int = 0
  """Objects without a header, whose marker is missing: nobody knows whose they are."""
  overwritten: int = 0
  """Collectives that the plugin says it lost before it could write them."""
  unreadable: list[str] = dataclasses.field(default_factory=list)
  """Files that can't be read, and why."""
  cut: bool = False
  """Whether there were more than `MOST_RECORDS`."""


def read_dumps(places: Sequence[str | pathlib.Path]) -> Dumps:
  """Reads files, and all files in directories whose names end in one of `SUFFIXES`."""
  found = Dumps()
  for place in places:
    path = pathlib.Path(place)
    files = [path] if not path.is_dir() else sorted(
        each for each in path.rglob("*") if each.suffix in SUFFIXES and each.is_file())
    for file in files:
      try:
        check_regular(file)
        with open(file, encoding="utf-8", errors="replace") as lines:
          _read(lines, found)
        found.files += 1
      except (OSError, UnreadableError) as error:
        found.unreadable.append(
            f"{file} {error if isinstance(error, UnreadableError) else error.strerror or error}")
  return found


def _read(lines: Any, found: Dumps) -> None:
  context: dict[str, Any] = {}  # of the last marker
  left = 0  # objects that follow it still
  for text in _objects(lines):
    if len(found.records) >= MOST_RECORDS:
      found.cut = True
      return
    try:
      value = json.loads(text)
    except (ValueError, RecursionError):
      value = None
    if not isinstance(value, dict):
      found.damaged += 1
      # It may have been a marker: what follows is then not of the batch before.
      left = left - 1 if _PAYLOAD.match(text) else 0
      continue
    if "dump_stats" in value:
      stats = value["dump_stats"] if isinstance(value["dump_stats"], dict) else {}
      context = {name: value.get(name) for name in ("header", "metadata")}
      left = sum(_count(stats, f"{kind}_records") for kind in ("coll", "p2p", "proxy"))
      found.overwritten += _count(stats, "coll_dropped_since_last_dump")
      continue
    if "header" not in value:
      if left <= 0:
        found.orphans += 1
        continue
      value, left = context | value, left - 1
    if "coll_perf" not in value:
      found.others += 1
    elif (record := _record(value)) is None:
      found.damaged += 1
    else:
      found.records.append(record)


def _count(stats: dict[str, Any], name: str) -> int:
  count = stats.get(name, 0)
  return count if _whole(count) else 0


def _objects(lines: Any) -> Iterator[str]:
  """The texts of objects: a line each, or over several lines from one that is "{" to one that is
  "}"."""
  held: list[str] | None = None
  size = 0
  while line := lines.readline(_LONGEST):
    text = line.rstrip()
    if held is not None:
      held.append(text)
      size += len(text)
      if text.rstrip(",") == "}" or size > _LONGEST:
        yield "".join(held).rstrip(",")
        held = None
    elif text == "{":
      held, size = [text], 1
    elif (bare := text.strip().rstrip(",")) not in ("", "[", "]", "{}"):
      yield bare.lstrip("[")
  if held:
    yield "".join(held)


def _record(value: dict[str, Any]) -> Record | None:
  header, metadata, coll = (value.get(name) for name in ("header", "metadata", "coll_perf"))
  if not (isinstance(header, dict) and isinstance(coll, dict)):
    return None
  about = metadata if isinstance(metadata, dict) else {}
  rank, ranks, number = header.get("rank"), header.get("n_ranks"), coll.get("coll_sn")
  kind = coll.get("coll")
  if not (_whole(rank) and _whole(ranks) and rank < ranks <= 1 << 20 and _whole(number)
          and isinstance(kind, str)):
    return None
  size = coll.get("coll_msg_size_bytes")
  enter, leave = _kernel(coll.get("event_trace_ts"))
  pid = about.get("pid")
  return Record(str(header.get("id"))[:64], rank, ranks, str(about.get("hostname") or "")[:255],
                pid if _whole(pid) else 0, kind[:64], number, size if _whole(size) else None,
                enter, leave)


def _kernel(trace: Any) -> tuple[int | None, int | None]:
  """When the first channel's kernel started and the last one's stopped; None where that is not
  told."""
  events = trace.get("kernel_events") if isinstance(trace, dict) else None
  if not isinstance(events, list) or not events:
    return None, None
  starts = [event.get("kernel_start_ts") for event in events if isinstance(event, dict)]
  stops = [event.get("kernel_stop_ts") for event in events if isinstance(event, dict)]
  known = [at for at in (*starts, *stops) if _whole(at) and at > 0]
  if not starts or len(known) < 2 * len(starts):
    return None, None
  first, last = min(known[:len(starts)]), max(known[len(starts):])
  return (first, last) if first <= last else (None, None)


def _whole(value: Any) -> TypeGuard[int]:
  return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _TIME // 1000


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
