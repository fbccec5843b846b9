"""Writes a run of what NCCL's Inspector dumped: the collectives of a job as rows, step by step."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpace.core.plan import Collective
from jaxpace.core.words import plural
from jaxpace.files import UserError
from jaxpace.record.columns import picked, whose
from jaxpace.record.nccl_dumps import (
  MOST_RECORDS,
  Dumps,
  Key,
  Members,
  Process,
  Record,
  Stream,
  members,
  streams,
)
from jaxpace.record.parts import PartStore
from jaxpace.record.ring.plan import MOST, columns_of_slots
from jaxpace.runs import rundir, schema

_TIMED = 0.5
"""The part of the records that must have times."""
_ROWS = 1 << 20


def convert(dumps: Dumps, directory: str | pathlib.Path, each_step: int | None = None
            ) -> tuple[Table, tuple[str, ...]]:
  """Makes a run of dumps.

  Args:
    dumps: what was read.
    directory: run directory; made if it is missing. An earlier run in it is moved to `.previous`.
    each_step: collectives of a rank in one step; None finds what repeats.

  Returns:
    Its rows; and what was left out, and what the dumps don't tell, in sentences.

  Raises:
    UserError: the dumps don't make a run.
    OSError: it can't be written.
  """
  if not dumps.records:
    if dumps.orphans:
      raise UserError(f"{plural(dumps.orphans, 'record')} without the marker (dump_stats) that "
                      "says whose they are, and none with it: give the plugin's files as it wrote "
                      "them, not filtered, split or merged.")
    raise UserError("No record of NCCL's Inspector was found. Its files are in "
                    "NCCL_INSPECTOR_DUMP_DIR, in a directory for each job, and hold JSON with a "
                    "key coll_perf.")
  who = members(dumps.records)
  timed = sum(record.enter_us is not None for record in dumps.records)
  if timed < _TIMED * len(dumps.records):
    raise UserError("these dumps hold how long each kernel ran, not when: set "
                    "NCCL_INSPECTOR_DUMP_VERBOSE=1, with which they hold both.")
  found, doubts = streams(dumps.records, each_step)
  table = lay_out(dumps.records, who, found)
  said = (who.numbering, *_left_out(dumps, who), *doubts, *table.said)
  path = pathlib.Path(directory)
  content = repr((dumps.records[:1000], len(dumps.records), each_step))
  run = f"nccl-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
  _write(path, run, who, table, said)
  return table, said


def _left_out(dumps: Dumps, who: Members) -> list[str]:
  return [*(f"{name}: left out." for name in dumps.unreadable[:5]), *_counted(
      (dumps.damaged, f"{plural(dumps.damaged, 'object')} that can't be read are left out."),
      (dumps.others, f"{plural(dumps.others, 'object')} of sends, receives or proxies are left out:"
       " only collectives count."),
      (dumps.orphans, f"{plural(dumps.orphans, 'object')} without the marker (dump_stats) that says"
       " whose they are left out: files that were filtered, split or merged lose it."),
      (dumps.overwritten, f"NCCL lost {plural(dumps.overwritten, 'collective')} before it could "
       "dump them: dump more often, or with a larger NCCL_INSPECTOR_DUMP_COLL_RING_SIZE."),
      (dumps.cut, f"Only the first {MOST_RECORDS:,} collectives are read."),
      (who.dropped, f"{plural(len(who.dropped), 'communicator')} left out: a process with several "
       "GPUs does not tell which of them is which rank there. The largest communicator is read."))]


def _write(path: pathlib.Path, run: str, who: Members, table: Table, said: Sequence[str]) -> None:
  processes: list[Process] = sorted(set(who.process.values()))
  number = {process: i for i, process in enumerate(processes)}
  ranks = max(who.process) + 1
  process_of = np.zeros(ranks, np.int32)
  for rank, process in who.process.items():
    process_of[rank] = number[process]
  rundir.prepare(path)
  rundir.set_aside(path, run)
  for old in sorted((path / "collectives").glob(f"{run}-*.parquet")):
    old.unlink()
  rundir.write_json(path / rundir.RUN_FILE, {
      "schema_version": schema.SCHEMA_VERSION, "run": run, "attempt": 0, "ranks": ranks,
      "processes": len(processes), "devices": ranks, "axis": None, "clock": "nccl",
      "platform": "gpu", "kind": "nccl",
      "plan": {"axis": None, "ranks": ranks, "clock": "nccl", "marks": [],
               "collectives": list(table.slots), "notices": list(said)}})
  columns = columns_of_slots(table.slots)
  for i, (host, pid) in enumerate(processes):
    own = [rank for rank, process in who.process.items() if process == (host, pid)]
    rundir.write_json(path / "process" / f"{i}.json", {
        "schema_version": schema.SCHEMA_VERSION, "run": run, "attempt": 0, "process": i,
        "hostname": host, "pid": pid, "ranks": sorted(own), "closed_cleanly": True})
    store = PartStore(path, "collectives", run, i)
    chosen = np.flatnonzero(process_of[table.rank] == i)
    chosen = chosen[np.lexsort((table.slot[chosen], table.rank[chosen], table.step[chosen]))]
    for at in range(0, len(chosen), _ROWS):
      rows = chosen[at:at + _ROWS]
      store.append({**whose(table.step[rows], table.rank[rows], i, 0),
                    **picked(columns, table.slot[rows]),
                    "enter_ns": table.enter_ns[rows], "exit_ns": table.exit_ns[rows]})
    store.compact()


_KINDS = {"AllReduce": "all-reduce", "AllGather": "all-gather", "ReduceScatter": "reduce-scatter",
          "AllToAll": "all-to-all", "Broadcast": "collective-broadcast", "Reduce": "reduce",
          "Gather": "gather", "Scatter": "scatter"}


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows, n of them; times are ns of their host's clock."""

  slots: tuple[dict[str, Any], ...]
  """Collectives of the step, as `run.json` describes them, each in all groups of ranks that run it
  side by side."""
  step: np.ndarray  # [n] int64, from 0 on
  rank: np.ndarray  # [n] int64
  slot: np.ndarray  # [n] int64
  enter_ns: np.ndarray  # [n] int64
  exit_ns: np.ndarray  # [n] int64
  said: tuple[str, ...]
  """What was left out, and what the dumps don't tell, in sentences."""

  @property
  def size(self) -> tuple[int, int]:
    """Numbers of ranks and steps."""
    return len(np.unique(self.rank)), int(self.step.max()) + 1


def lay_out(records: Sequence[Record], who: Members, found: Sequence[Stream]) -> Table:
  """Gives each record its step and its slot.

  Raises:
    UserError: there are more slots than a run can have, or no rows.
  """
  by_key = {stream.key: stream for stream in found}
  slots, first_slot = _slots(found, who)
  if len(slots) > MOST:
    raise UserError(
        f"A step would have {len(slots):,} collectives, more than the {MOST:,} that a run "
        "can have.")
  before = untimed = 0
  rows: dict[tuple[int, Key, int], tuple[int, int]] = {}
  total = 0
  for record in records:
    stream, rank = (by_key.get((record.communicator, record.kind)),
                    who.ranks.get((record.communicator, record.rank)))
    if stream is None or rank is None:
      before += 1
      continue
    at = record.number - stream.begin
    if not 0 <= at < stream.steps * stream.period:
      before += 1
    elif record.enter_us is None or record.exit_us is None:
      untimed += 1
    else:
      total += 1
      rows[rank, stream.key, at] = record.enter_us * 1000, record.exit_us * 1000
  doubled = total - len(rows)
  said = [*_counted(
      (before, f"{plural(before, 'record')} of before the first step, or that belong to none, left "
       "out."),
      (untimed, f"{plural(untimed, 'record')} without times of their kernel left out."),
      (doubled, f"{plural(doubled, 'record')} there twice: the last counts.")),
      "A step begins where the pattern of collectives does, which may be within a step of the "
      "training loop; phases, gaps and pauses of the host are not in the dumps.",
      "Entry and exit are when the host saw the kernel's first channel start and its last one "
      "stop; a kernel that waits for its stream counts as not yet arrived."]
  if not rows:
    raise UserError(f"No collective has a rank, a step and the times of its kernel. {said[0]}")
  keys = list(by_key)
  place = {key: i for i, key in enumerate(keys)}
  which = np.array([(rank, place[key], at) for rank, key, at in rows], np.int64)
  times = np.array(list(rows.values()), np.int64)
  period = np.array([by_key[key].period for key in keys], np.int64)
  step = which[:, 2] // period[which[:, 1]]
  inside = which[:, 2] % period[which[:, 1]]
  step += _offsets(which[:, 0], which[:, 1], step, inside, times[:, 0], len(keys))[which[:, 1]]
  step -= step.min()
  slot = np.array([first_slot[key] for key in keys], np.int64)[which[:, 1]] + inside
  return Table(tuple(slots), step, which[:, 0], slot, times[:, 0], times[:, 1], tuple(said))


def _counted(*sentences: tuple[Any, str]) -> list[str]:
  """The sentences whose number is not 0."""
  return [sentence for count, sentence in sentences if count]


def _slots(found: Sequence[Stream], who: Members) -> tuple[list[dict[str, Any]], dict[Key, int]]:
  """Slots, and the first of each stream's. Streams of groups that do the same side by side, as
  those along one axis of a mesh do, have the same ones."""
  members: dict[str, list[int]] = defaultdict(list)
  for (communicator, _), rank in sorted(who.ranks.items(), key=lambda item: item[1]):
    members[communicator].append(rank)
  group_of = {communicator: tuple(ranks) for communicator, ranks in members.items()}
  alike: dict[Any, list[list[Stream]]] = defaultdict(list)
  for stream in sorted((one for one in found if one.key[0] in group_of),
                       key=lambda one: group_of[one.key[0]]):
    group = group_of[stream.key[0]]
    classes = alike[stream.key[1], stream.pattern, tuple(np.diff(group).tolist())]
    apart = (own for own in classes
             if not any(set(group) & set(group_of[other.key[0]]) for other in own))
    if (together := next(apart, None)) is None:
      classes.append(together := [])
    together.append(stream)
  slots: list[dict[str, Any]] = []
  first: dict[Key, int] = {}
  counts: Counter[str] = Counter()
  for together in (own for classes in alike.values() for own in classes):
    first.update(dict.fromkeys((stream.key for stream in together), len(slots)))
    kind = _KINDS.get(together[0].key[1], together[0].key[1])
    groups = tuple(sorted(group_of[stream.key[0]] for stream in together))
    for size in together[0].pattern:
      name = together[0].key[1]
      one = Collective(len(slots), f"{name}.{counts[name]}", kind, size, 1, (), (), "", -1,
                       groups)
      slots.append({"slot": one.index, **one.to_json()})
      counts[name] += 1
  return slots, first


def _offsets(rank: np.ndarray, stream: np.ndarray, step: np.ndarray, inside: np.ndarray,
             enter: np.ndarray, count: int) -> np.ndarray:
  """[streams] what to add to the steps of each, so that what ran at the same time is the same
  step."""
  begins: dict[int, dict[int, tuple[np.ndarray, np.ndarray]]] = defaultdict(dict)
  for one in range(count):
    own = np.flatnonzero((stream == one) & (inside == 0))
    for each in np.unique(rank[own]).tolist():
      at = own[rank[own] == each]
      at = at[np.argsort(step[at])]
      begins[one][each] = step[at], enter[at]
  offsets = np.zeros(count, np.int64)
  done = [max(begins, key=lambda one: len(begins[one]), default=0)]
  todo = set(begins) - set(done)
  while todo:
    pair = next(((one, other, each) for one in sorted(todo) for other in done
                 for each in begins[one] if each in begins[other]), None)
    if pair is None:
      # Ranks that share none with the others: their steps are counted from their own first one.
      done.append(todo.pop())
      continue
    one, other, each = pair
    steps, times = begins[one][each]
    known, starts = begins[other][each]
    # A step of one may be counted with the other's that begins before it or after it. As a rule
    # both are dumped from the same step on.
    after = np.searchsorted(starts, times, side="right")
    with_earlier = int(np.median(known[np.maximum(after - 1, 0)] - steps))
    offsets[one] = offsets[other] + min(max(0, with_earlier), with_earlier + 1)
    done.append(one)
    todo.discard(one)
  return offsets
