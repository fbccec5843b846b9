"""What changes over the run, as numbers to draw: the section `series` of the JSON report."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpace.core.words import list_ranks, some_ranks
from jaxpace.costs.fabric_file import MeasuredFabric
from jaxpace.diagnose.diagnosis import Diagnosis
from jaxpace.diagnose.floor import SHARES, shares_in, shares_of
from jaxpace.diagnose.forecast import forecast, to_json
from jaxpace.diagnose.forecast_sample import take_sample
from jaxpace.diagnose.groups import run_groups
from jaxpace.diagnose.lateness import attributed_wait
from jaxpace.diagnose.limits import CELLS, MOST, NEARLY_ALL, SAME, TWICE
from jaxpace.diagnose.modes.inputs import Finding
from jaxpace.diagnose.pacing import measured
from jaxpace.diagnose.selected_steps import (
  SelectedSteps,
  into_blocks,
  mean_known,
  ratio,
  step_times,
)
from jaxpace.diagnose.step_times import busy, chunks
from jaxpace.diagnose.totals import PARTS, typical
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.names import ranks_by_host
from jaxpace.files.plain import to_plain
from jaxpace.hosts.locality.job import job_concerns
from jaxpace.hosts.locality.outline import outlines
from jaxpace.runs.run import Run, RunError, cut

_DIGITS = 7
MOST_ROWS = 1024
MOST_COLUMNS = 512
"""Columns of the charts over time, at most: a wide screen has twice as many pixels to spare."""
_UNITS = 500.0
"""The cells that are late by most, but for a thousandth of them, are so many units late."""


def series(diagnosis: Diagnosis, progress: Callable[[int, int], None] | None = None,
           fabric: MeasuredFabric | None = None) -> dict[str, Any]:
  """What changes over the run: plain values, durations in seconds, null where a value is not known.

  Its size is bounded, whatever the run's: about 3 MB for 1,024 ranks and 100,000 steps.

  Args:
    fabric: what collectives cost, for the forecast.

  Returns:
    `over_time`, `skew`, `distribution` and `where` (null where no step counts), `pacing`, `places`,
    `forecast`.
  """
  some = diagnosis.step_time is not None
  return to_plain({
      "over_time": over_time(diagnosis) if some else None,
      "skew": skew_map(diagnosis, progress) if some else None,
      "distribution": distribution(diagnosis) if some else None,
      "where": where(diagnosis) if some else None,
      "pacing": blocks(diagnosis.run),
      "places": places(diagnosis),
      "forecast": outlook(diagnosis.run, fabric)}, _DIGITS)


# Step time and its shares, column by column.

def over_time(diagnosis: Diagnosis) -> dict[str, Any]:
  """Returns `columns`, `step_time` (mean, lowest and highest, seconds) and `shares` (of each
  column's steps)."""
  columns = diagnosis.selected.divided(MOST_COLUMNS)
  totals, floor = diagnosis.totals, diagnosis.floor
  means = {name: columns.means(totals.per_step[name]) for name in PARTS}
  quiet, contention = (np.nan_to_num(columns.means(values.sum(axis=0))).tolist()
                       for values in (floor.quiet, floor.contention))
  shares = [shares_of({name: float(means[name][i]) for name in PARTS}, quiet[i], contention[i])
            for i in range(columns.blocks)]
  steps, begin = totals.per_step["step"][columns.mask], np.cumsum(columns.number) - columns.number
  low, high = (of.reduceat(steps, begin).tolist() for of in (np.minimum, np.maximum))
  return {"columns": _spans(columns, diagnosis.run),
          "step_time": {"mean": means["step"].tolist(), "low": low, "high": high},
          "shares": {name: [own[name] for own in shares] for name in SHARES}}


def _spans(columns: SelectedSteps, run: Run) -> dict[str, Any]:
  """The blocks of neighbouring steps that the columns of a chart stand for."""
  first, last = columns.spans(run)
  return {"first": first.tolist(), "last": last.tolist(), "number": columns.number.tolist()}


# How late each rank was over time: a map of ranks by columns of steps.

def skew_map(diagnosis: Diagnosis,
             progress: Callable[[int, int], None] | None = None) -> dict[str, Any] | None:
  """Maps each rank's undelayed arrival, all collectives of a step together, less that step's median
  rank's.

  Of an even number of ranks the lower one of the two in the middle counts as the median, so that
  half of the ranks may be late. Where there are more than 1,024 ranks, neighbours share a row,
  which shows the latest of them.

  Returns:
    `rows` (first and last rank of each), `columns`, `unit` in seconds, and by row and column whole
    numbers of units, null where nothing is known: `mean` over the steps of a column, and `most`,
    the rank's latest step in it, null as a whole where each column is one step. None where ranks
    can't be compared.
  """
  run, selected = diagnosis.run, diagnosis.selected
  if not run.collectives or run.ranks < 2 or not selected.size:
    return None
  together = -(-run.ranks // MOST_ROWS)
  rows = np.arange(0, run.ranks, together)
  columns = selected.divided(min(MOST_COLUMNS, max(MOST_COLUMNS**2 // len(rows), 1)))
  total = np.zeros((run.ranks, columns.blocks))
  number = np.zeros((run.ranks, columns.blocks), np.int64)
  most = np.full((run.ranks, columns.blocks), -np.inf)
  joined = run_groups(run).joined
  for part in chunks(run):
    column = columns.block[part]
    if (column >= 0).any():
      arrival = busy(run, part).undelayed.sum(axis=0)
      late = arrival - typical(arrival, joined)
      known, into = np.isfinite(late) & (column >= 0), into_blocks(column)
      into(total, np.where(known, late, 0.0))
      into(number, known)
      into(most, np.where(known, late, -np.inf), np.maximum)
    if progress:
      progress(part.stop, len(run.steps))
  mean = ratio(total, number, -np.inf)
  mean, most = (np.maximum.reduceat(values, rows, axis=0) for values in (mean, most))
  unit = _unit(most)
  single = int(columns.number.max()) == 1
  return {"rows": {"first": rows.tolist(),
                   "last": (np.minimum(rows + together, run.ranks) - 1).tolist()},
          "columns": _spans(columns, run), "unit": unit, "mean": _whole(mean, unit),
          "most": None if single else _whole(most, unit)}


def _unit(values: np.ndarray) -> float:
  """1, 2 or 5 times a power of ten, seconds: fine enough to show, coarse enough for short
  numbers."""
  size = np.abs(values[np.isfinite(values)])
  large = float(np.quantile(size, 0.999)) if size.size else 0.0
  least = max(large / _UNITS, 1e-7)
  power = 10.0 ** math.floor(math.log10(least))
  step = next(m for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))
  return float(f"{step * power:.0e}")


def _whole(values: np.ndarray, unit: float) -> list[list[int | None]]:
  known = np.isfinite(values)
  whole = np.rint(np.where(known, values, 0.0) / unit).astype(np.int64)
  if known.all():
    return whole.tolist()
  return [[value if there else None for value, there in zip(row, own, strict=True)]
          for row, own in zip(whole.tolist(), known.tolist(), strict=True)]


# How step times are distributed, the tail by itself, and the longest steps.

LONGEST = 20
_FEWEST, _MOST = 12, 80


def distribution(diagnosis: Diagnosis) -> dict[str, Any]:
  """Returns `edges` and `steps` of the histogram, `beyond` its last edge, the `tail`, and the
  `longest` steps.

  The tail is pairs of a share of the steps and the seconds that this share takes longer than, from
  half of the steps to the very longest. Of each of the longest steps it has the shares, and the
  rank the job waited for most.
  """
  run, totals = diagnosis.run, diagnosis.totals
  at = np.flatnonzero(diagnosis.selected.mask)
  steps = totals.per_step["step"][at]
  low, usual, high = (float(x) for x in np.quantile(steps, [0, 0.995, 1]))
  end = high if high - low <= TWICE * (usual - low) else usual
  # between steps that differ by rounding alone there is no room for edges
  if end - low <= SAME:
    end = low + max(low * 1e-3, 1e-6)
  bins = int(np.clip(2 * np.cbrt(len(steps)), _FEWEST, _MOST))
  counts, edges = np.histogram(steps, bins, (low, end))
  inside = int(counts.sum())
  shares = np.unique(np.concatenate([np.geomspace(0.5, 1 / len(steps), 60), [0.5, 0.1, 0.01]]))[
      ::-1]
  shares = shares[shares >= 1 / len(steps)]
  longest = at[np.argsort(-steps, kind="stable")[:LONGEST]]
  return {
      "edges": edges.tolist(), "steps": counts.tolist(), "beyond": len(steps) - inside,
      "longest_step": high,
      "tail": {"share": shares.tolist(),
               "step_time": np.quantile(steps, 1 - shares, method="inverted_cdf").tolist()},
      "longest": [{"step": int(run.steps[k]), "step_time": float(totals.per_step["step"][k]),
                   "last_rank": int(totals.last_rank[k]) if totals.last_rank[k] >= 0 else None,
                   "shares": shares_in(totals, diagnosis.floor, np.array([k]))} for k in longest]}


# In which steps each finding happened, and where it cost most.

def where(diagnosis: Diagnosis) -> dict[str, Any]:
  """Returns `blocks` of steps (first and last), and of each finding what it cost in each, and the
  costliest stretch."""
  run, selected = diagnosis.run, diagnosis.selected
  number, (first, last) = selected.number, selected.spans(run)
  rows = []
  for finding in diagnosis.findings:
    cost = np.maximum(np.nan_to_num(_cost(diagnosis, finding)), 0.0)
    begin, stop = _stretch(cost)
    since = int(first[0]) if finding.first_step is None else finding.first_step
    until = int(last[-1]) if finding.last_step is None else finding.last_step
    own = (last >= since) & (first <= until)
    usual, most = (float(np.average(cost[part], weights=number[part]))
                   for part in (own, slice(begin, stop)))
    stands_out = (most >= TWICE * usual
                  and last[stop - 1] - first[begin] < NEARLY_ALL * (until - since))
    costliest = {"first_step": int(first[begin]), "last_step": int(last[stop - 1]), "cost": most}
    rows.append({"first_step": since, "last_step": until, "cost": cost.tolist(),
                 "costliest": costliest if stands_out else None})
  return {"blocks": _spans(selected, run), "findings": rows}


def _cost(diagnosis: Diagnosis, finding: Finding) -> np.ndarray:
  """[B] seconds per step by block: waiting for the late ranks or intermittently, gaps and waiting
  for them, contention."""
  lateness, selected, totals = diagnosis.lateness, diagnosis.selected, diagnosis.totals
  own = [e for e in lateness.episodes if e.rank in finding.ranks]
  if finding.mode == Verdict.PERSISTENT or (finding.mode == Verdict.LOCALITY and own):
    # Block by block, not the mean of an episode: a rank that is late by more for a while shows.
    return attributed_wait(totals, selected,
                [e._replace(begin=b, end=b + 1) for e in own
                 for b in range(e.begin, e.end)]).by_block
  if finding.mode == Verdict.AMPLIFICATION:
    return lateness.intermittent.by_block
  if finding.mode == Verdict.JITTER:
    return selected.means(totals.per_step["runtime"] + totals.per_step["waiting_runtime"])
  return selected.means(diagnosis.floor.contention.sum(axis=0))


def _stretch(cost: np.ndarray) -> tuple[int, int]:
  """First block, and one past the last, of the neighbouring blocks around the costliest one that
  cost half as much."""
  peak = int(cost.argmax())
  low = np.flatnonzero(cost < MOST * cost[peak])
  before, after = low[low < peak], low[low > peak]
  return int(before[-1]) + 1 if before.size else 0, int(after[0]) if after.size else len(cost)


# Where the job ran: hosts with their ranks, and the tree of each kind of host.

def places(diagnosis: Diagnosis) -> dict[str, Any]:
  """Returns `hosts`, each with processes, ranks and how late these are; the `trees`; and all
  `concerns`, notes too.

  A host's lateness is the mean of its ranks', its latest rank the one that is latest on average.
  Ranks whose host is not known are under the name null.
  """
  run, lateness = diagnosis.run, diagnosis.lateness.mean
  hosts = []
  for name, own in ranks_by_host(run).items():
    known = [r for r in own if np.isfinite(lateness[r])]
    hosts.append({"host": name or None, "ranks": own,
                  "processes": sorted({int(p) for p in run.process_of_rank[own] if p >= 0}),
                  "lateness": float(lateness[known].mean()) if known else None,
                  "latest_rank": max(known, key=lambda r: float(lateness[r])) if known else None})
  late = set(diagnosis.lateness.late.tolist())

  def of_process(process: int) -> str:
    own = np.flatnonzero(run.process_of_rank == process).tolist()
    named = [rank for rank in own if rank in late]
    return ", ".join(filter(None,
                            [some_ranks(own) if own else "",
                             f"late: {list_ranks(named)}" if named else ""]))

  return {"hosts": hosts,
          "trees": outlines(run.locality, of_process),
          "concerns": job_concerns(run.locality)}


# The step time at larger numbers of ranks, or why the run doesn't tell.

DOUBLINGS = 6


def outlook(run: Run, fabric: MeasuredFabric | None = None) -> dict[str, Any]:
  """Returns what `jaxpace report --forecast` gives for 2 to 64 times the ranks, or `silent`: why
  there is none.

  A forecast for some of the numbers of ranks may still be silent. `newest` is whether only the
  newest steps count.
  """
  steps = max(CELLS // (run.ranks * max(len(run.collectives), 1)), 1)
  newest = int(run.inside.sum()) > steps
  if newest:
    run = cut(run, len(run.steps) - steps)
  try:
    sample = take_sample(run)
    found = forecast(sample, [sample.ranks << n for n in range(1, DOUBLINGS + 1)], fabric=fabric)
  except RunError as error:
    return {"silent": str(error), "newest": newest}
  return {"silent": None, "newest": newest, **to_json(found, run)}


# What a guard's blocks of steps with pacing and without showed, pair by pair.

_EFFECTS = 128


def blocks(run: Run) -> dict[str, Any] | None:
  """Returns the `pairs`, the `effect` as it became known, and the `blocks`; None where no guard
  ran.

  `pairs` holds means of the step time with pacing (`on`) and without (`off`); neighbouring pairs
  are taken together where there are more than 256. `effect` is after so many pairs, the last one
  being the report's. `blocks` are the stretches in which the guard let pacing act or held it back,
  compared or not; null where there are more than 512.
  """
  compared = measured(run)
  if compared is None:
    return None
  number, means = compared.pairs, compared.means
  group = np.arange(number) * min(number, MOST_COLUMNS) // max(number, 1)
  together = [np.flatnonzero(group == each) for each in np.unique(group)]
  effects: dict[str, list[Any]] = {"pairs": [], "last_step": [], "effect": [], "low": [],
                                   "high": []}
  for n in sorted({int(x) for x in np.geomspace(1, number, _EFFECTS)}) if number else ():
    effect, interval = compared.after(n)
    low, high = interval if interval else (None, None)
    row = {"pairs": n, "last_step": int(compared.last_step[:n].max()), "effect": effect, "low": low,
           "high": high}
    for name, value in row.items():
      effects[name].append(value)
  return {
      "pairs": {"first_step": [int(compared.first_step[own].min()) for own in together],
                "last_step": [int(compared.last_step[own].max()) for own in together],
                "number": [own.size for own in together],
                "on": [float(means[own, 0].mean()) for own in together],
                "off": [float(means[own, 1].mean()) for own in together]},
      "effect": effects, "blocks": _stretches(run)}


def _stretches(run: Run) -> list[dict[str, Any]] | None:
  """Stretches of steps in which the guard's state stayed."""
  on, times = run.guard["guard_on"], step_times(run)
  at = np.flatnonzero(np.isfinite(on) & run.inside)
  if not at.size:
    return []
  state = on[at] > 0.5
  begin = np.flatnonzero(np.diff(state, prepend=~state[:1]))
  if len(begin) > MOST_COLUMNS:
    return None
  end = np.append(begin[1:], len(at))
  return [{"first_step": int(run.steps[at[b]]), "last_step": int(run.steps[at[e - 1]]),
           "on": bool(state[b]), "step_time": mean_known(times[at[b:e]])}
          for b, e in zip(begin, end, strict=True)]
