"""Synthetic runs in whose collectives not all ranks meet, recorded as files."""

import json
import pathlib

import numpy as np

from jaxpace.__main__ import main
from jaxpace.record.parts import PartStore
from jaxpace.runs import schema


def play(arrivals, transfers, groups=None, sources=None):
  """Entries and exits, ns on a clock common to all, of ranks that wait for those of their group, or
  for their source.

  Args:
    arrivals: [C, R, K] s busy before each collective.
    transfers: [C] s.
    groups: for each collective a list of lists of ranks; None: all meet.
    sources: for each collective None, or for each rank the one it receives from, -1 for none.
  """
  slots, ranks, size = np.shape(arrivals)
  enter, leave = np.zeros((2, slots, ranks, size))
  time = np.zeros(ranks)
  for k in range(size):
    for c in range(slots):
      ready = time + arrivals[c][:, k]
      enter[c, :, k] = ready
      if sources is not None and sources[c] is not None:
        time = np.array([max(ready[r], ready[s]) + transfers[c] if s >= 0 else ready[r]
                         for r, s in enumerate(sources[c])])
      else:
        time = ready.copy()
        for group in groups[c] if groups is not None else [range(ranks)]:
          time[list(group)] = ready[list(group)].max() + transfers[c]
      leave[c, :, k] = time
  return np.rint(enter * 1e9).astype(np.int64), np.rint(leave * 1e9).astype(np.int64)


def write(directory, enter, leave, *, settings=None, collectives=None, ranks=None, gap=None,
          run="made-up", processes=None, plan=None, left_out=(), start=None, end=None,
          present=None, columns=None):
  """Writes [C, R, K] timestamps, ns, as a run of a process for each rank, whose clocks have nothing
  in common.

  `collectives` say what the plan does of each, `ranks` is the number declared, `gap` is [R, K] s,
  `processes` are those of each rank, and ranks `left_out` left no rows. Steps [R, K] ns `start` at
  their first entry and `end` at their last exit by default. `present` [C, R, K] are the rows of
  `collectives` that there are, by default those of ranks that take part; a step without any has
  none in `steps`. `columns` are more of the table `steps`, [R, K] each.
  """
  path = pathlib.Path(directory)
  slots, number, size = enter.shape
  if present is None:
    present = np.ones(enter.shape, bool)
    for c, told in enumerate(collectives or ()):
      if "groups" in told:
        present[c] = np.isin(np.arange(number), np.concatenate(told["groups"]))[:, None]
  (path / "process").mkdir(parents=True)
  entries = [{"slot": c, "name": "psum", "primitives": ["psum"], "axis": "data", "bytes": 4096,
              "phase": "backward", **(collectives[c] if collectives else {})} for c in range(slots)]
  (path / "run.json").write_text(json.dumps({
      "schema_version": schema.SCHEMA_VERSION, "run": run, "attempt": 0, "ranks": ranks or number,
      "processes": number, "settings": settings or {},
      "plan": {"clock": "synthetic", "collectives": entries, "marks": [], **(plan or {})}}))
  for rank in range(number):
    process = rank if processes is None else processes[rank]
    if rank in left_out:
      continue
    (path / "process" / f"{process}.json").write_text(json.dumps(
        {"schema_version": schema.SCHEMA_VERSION, "run": run, "attempt": 0, "process": process,
         "hostname": f"host{process}", "ranks": [rank], "closed_cleanly": True}))
    origin = 10**15 + 7 * 10**14 * rank
    own = present[:, rank]  # [C, K]
    slot, step = np.nonzero(own)
    steps = np.flatnonzero(own.any(axis=0))
    of_step = {"start_ns": (enter[0] if start is None else start)[rank] + origin,
               "end_ns": (leave[-1] if end is None else end)[rank] + origin,
               "gap_ns": np.rint((0.0 if gap is None else gap[rank]) * np.full(size, 1e9)
                                 ).astype(np.int64),
               **{name: values[rank] for name, values in (columns or {}).items()}}
    PartStore(path, "steps", run, process).append(
        {**_keys(steps, rank, process),
         **{name: values[steps] for name, values in of_step.items()}})
    PartStore(path, "collectives", run, process).append({
        **_keys(step, rank, process), "collective": slot.astype(np.int32),
        "name": np.array([entry["name"] for entry in entries])[slot],
        "axis": np.array([entry["axis"] for entry in entries])[slot],
        "bytes": np.full(len(slot), 4096, np.int64),
        "enter_ns": enter[slot, rank, step] + origin, "exit_ns": leave[slot, rank, step] + origin})


def report(path, *arguments):
  """The JSON report of a run directory, by the command."""
  document = path.parent / f"{path.name}.json"
  assert main(["report", str(path), "--json", str(document), *arguments]) == 0
  return json.loads(document.read_text())


def _keys(steps, rank, process):
  return {"step": steps, "rank": np.full(len(steps), rank, np.int32),
          "process": np.full(len(steps), process, np.int32),
          "attempt": np.zeros(len(steps), np.int32)}
