"""Writes a run of what NCCL's Inspector dumped."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpace.record.columns import null, whose
from jaxpace.record.nccl.jobs import Members, NcclError, Process, members, streams
from jaxpace.record.nccl.records import MOST_RECORDS, Dumps
from jaxpace.record.nccl.tables import Table, lay_out
from jaxpace.record.parts import PartStore
from jaxpace.record.ring.plan import described
from jaxpace.runs import rundir, schema
from jaxpace.runs.problems import plural

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
    NcclError: the dumps don't make a run.
    OSError: it can't be written.
  """
  if not dumps.records:
    if dumps.orphans:
      raise NcclError(f"{plural(dumps.orphans, 'record')} without the marker (dump_stats) that "
                      "says whose they are, and none with it: give the plugin's files as it wrote "
                      "them, not filtered, split or merged.")
    raise NcclError("No record of NCCL's Inspector was found. Its files are in "
                    "NCCL_INSPECTOR_DUMP_DIR, in a directory for each job, and hold JSON with a "
                    "key coll_perf.")
  who = members(dumps.records)
  timed = sum(record.enter_us is not None for record in dumps.records)
  if timed < _TIMED * len(dumps.records):
    raise NcclError("these dumps hold how long each kernel ran, not when: set "
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
  counted = (
      (dumps.damaged, f"{plural(dumps.damaged, 'object')} that can't be read are left out."),
      (dumps.others, f"{plural(dumps.others, 'object')} of sends, receives or proxies are left out:"
       " only collectives count."),
      (dumps.orphans, f"{plural(dumps.orphans, 'object')} without the marker (dump_stats) that says"
       " whose they are left out: files that were filtered, split or merged lose it."),
      (dumps.overwritten, f"NCCL lost {plural(dumps.overwritten, 'collective')} before it could "
       "dump them: dump more often, or with a larger NCCL_INSPECTOR_DUMP_COLL_RING_SIZE."),
      (dumps.cut, f"Only the first {MOST_RECORDS:,} collectives are read."),
      (who.dropped, f"{plural(len(who.dropped), 'communicator')} left out: a process with several "
       "GPUs does not tell which of them is which rank there. The largest communicator is read."))
  return [*(f"{name}: left out." for name in dumps.unreadable[:5]),
          *(sentence for count, sentence in counted if count)]


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
  rundir.write_json(path / rundir.RUN_FILE, _info(run, ranks, len(processes), table, said))
  names, axes, sizes = described(table.slots)
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
      slot = table.slot[rows]
      store.append({
          **whose(table.step[rows], table.rank[rows], i, 0),
          "collective": slot.astype(np.int32), "name": names[slot], "axis": axes[slot],
          "bytes": null(sizes[slot], sizes[slot] < 0),
          "enter_ns": table.enter_ns[rows], "exit_ns": table.exit_ns[rows]})
    store.compact()


def _info(run: str, ranks: int, processes: int, table: Table,
          said: Sequence[str]) -> dict[str, Any]:
  return {"schema_version": schema.SCHEMA_VERSION, "run": run, "attempt": 0, "ranks": ranks,
          "processes": processes, "devices": ranks, "axis": None, "clock": "nccl",
          "platform": "gpu", "kind": "nccl",
          "plan": {"axis": None, "ranks": ranks, "clock": "nccl", "marks": [],
                   "collectives": list(table.slots), "notices": list(said)}}
