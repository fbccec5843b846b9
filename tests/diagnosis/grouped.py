"""Made-up runs in whose collectives not all ranks meet, recorded as files."""

import json
import pathlib

import numpy as np

from jaxpace.trace import schema
from jaxpace.trace.parts import PartStore


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
          run="made-up", processes=None, plan=None, left_out=()):
  """Writes [C, R, K] stamps as a run of a process for each rank, whose clocks have nothing in
  common.

  Args:
    directory: run directory.
    enter: entries, ns.
    leave: exits, ns.
    settings: of `run.json`.
    collectives: what the plan says of each.
    ranks: declared; as many as there are by default.
    gap: [R, K] s, or None.
    run: id.
    processes: process of each rank.
    plan: more of the plan.
    left_out: ranks that left no rows.
  """
  path = pathlib.Path(directory)
  slots, number, size = enter.shape
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
    keys = {"step": np.arange(size), "rank": np.full(size, rank, np.int32),
            "process": np.full(size, process, np.int32), "attempt": np.zeros(size, np.int32)}
    own_gap = np.full(size, 0.0) if gap is None else gap[rank]
    PartStore(path, "steps", run, process).append(
        {**keys, "start_ns": enter[0, rank] + origin, "end_ns": leave[-1, rank] + origin,
         "gap_ns": np.rint(own_gap * 1e9).astype(np.int64)})
    inside = [c for c in range(slots) if not (collectives and "groups" in collectives[c]
                                              and not any(rank in g
                                                          for g in collectives[c]["groups"]))]
    rows = {name: np.tile(values, len(inside)) for name, values in keys.items()}
    rows["collective"] = np.repeat(np.array(inside, np.int32), size)
    rows["name"] = np.repeat(np.array([entries[c]["name"] for c in inside]), size)
    rows["axis"] = np.full(len(rows["step"]), "data")
    rows["bytes"] = np.full(len(rows["step"]), 4096, np.int64)
    for name, values in (("enter_ns", enter), ("exit_ns", leave)):
      rows[name] = np.concatenate([values[c, rank] for c in inside]) + origin
    PartStore(path, "collectives", run, process).append(rows)
