"""Reads the JSON that NCCL's Inspector plugin writes: one object a collective and rank, in files of
any damage.

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
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

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
