"""How long each phase takes, per rank."""

from __future__ import annotations

import numpy as np

from jaxpace.diagnose.accounting import account
from jaxpace.diagnose.limits import NEARLY_ALL, SAMPLED
from jaxpace.diagnose.selected_steps import SelectedSteps, medians_known
from jaxpace.diagnose.step_times import counted
from jaxpace.runs.run import OTHERS, PAUSES, Run

ORDER = ("forward", "backward", "compute", "held", "sync", "update", "gap")


def phase_medians(run: Run, mask: np.ndarray) -> dict[str, np.ndarray]:
  """Median of every phase on every rank, from at most 4,096 evenly spread steps.

  Returns:
    [R] seconds by phase, NaN where a rank never recorded it; phases nobody recorded are absent.
    Built-in phases first, then the user's by name.
  """
  steps = np.flatnonzero(mask)
  steps = steps[::max(1, -(-len(steps) // SAMPLED))]
  own = sorted(name for name in run.durations if name.startswith("phase_"))
  medians = {}
  for name in (*ORDER, *own):
    if name not in run.durations or not steps.size:
      continue
    values = run.durations[name][:, steps].astype(np.float64)
    if name == "sync" and "held" in run.durations:
      # As recorded it begins before what was held, which is recorded by itself.
      values -= np.nan_to_num(run.durations["held"][:, steps], nan=0.0)
    median = medians_known(values)
    if np.isfinite(median).any():
      medians[name.removeprefix("phase_")] = median
  return medians


# What a step waits for data, in every step alike or now and then, on all ranks.

def waiting_for_data(run: Run, selected: SelectedSteps) -> float | None:
  """Seconds per step, mean over ranks, that processes wait for data; None where that was not
  measured.

  No more than the rank's gap: what the devices' work hides costs nothing.
  """
  rows = run.host_causes.columns.get("data")
  gaps = run.durations.get("gap")
  if rows is None or gaps is None or not selected.size:
    return None
  total, number = 0.0, 0
  for rank in range(run.ranks):
    row = run.host_causes.row(int(run.process_of_rank[rank]))
    if row is not None:
      waits = np.minimum(rows[row].astype(np.float64), gaps[rank])
      known = selected.mask & np.isfinite(waits)
      total, number = total + float(waits[known].sum()), number + int(known.sum())
  return total / number if number else None


# What pauses that the processes measure themselves cost a step: themselves, and the waiting for
# them.

def paused(run: Run, selected: SelectedSteps) -> tuple[float, float]:
  """Adds up the pauses beyond each process's usual ones and the waiting for them, in whatever
  collectives follow.

  The earliness of a rank, max A - A, is split by the positive differences (last rank - this one)
  between pauses and all else, as docs/accounting.md has it. The columns are the process's: a rank
  of it pauses no longer than its own gap, where gaps were recorded.

  Returns:
    Seconds per step, mean over ranks, in the pauses, and of waiting for a rank that paused longer.
  """
  pause = pauses_by_rank(run, selected)
  total = np.zeros(2)
  for part, work in counted(run, selected.mask):
    arrival = work.undelayed
    most = work.runtime if "gap" in run.durations else arrival[0]
    now = np.where(work.valid, np.minimum(pause[:, part], most), np.nan)
    split = account(work._replace(arrival=arrival, runtime=now, compute=arrival[0] - now,
                                  pacing=np.zeros_like(work.pacing)))
    number = np.maximum(work.valid.sum(axis=0), 1)
    total += [(np.where(work.valid, values, 0.0).sum(axis=0) / number).sum()
              for values in (now, split.waiting_runtime)]
  own, waiting = (total / max(1, selected.size)).tolist()
  return own, waiting


def pauses_in(run: Run) -> dict[str, np.ndarray]:
  """[P, K] seconds that each process collects garbage, waits for data and writes checkpoints, by
  cause as far as recorded, without what the job does on purpose; 0 where a step's are missing."""
  columns = run.host_causes.columns
  found = {name: np.nan_to_num(columns[name].astype(np.float64)) for name in PAUSES
           if name in columns}
  if OTHERS in found:
    found[OTHERS] = found[OTHERS] - on_purpose(run)
  return found


def one_alone(paused: np.ndarray) -> int | None:
  """Row of the process that holds nearly all of these pauses, [P, K] s; None where none does, or
  there is no other."""
  held = paused.sum(axis=1)
  most = int(held.argmax())
  return most if len(held) > 1 and held[most] >= NEARLY_ALL * held.sum() > 0 else None


def on_purpose(run: Run) -> np.ndarray:
  """[K] seconds for which all processes run programs beside the step, such as an evaluation: these
  are the job's own and no pause."""
  seconds = run.host_causes.columns.get(OTHERS)
  if seconds is None or not len(seconds):
    return np.zeros(len(run.steps))
  return np.nan_to_num(seconds).min(axis=0).astype(np.float64)


def pauses_by_rank(run: Run, selected: SelectedSteps) -> np.ndarray:
  """[R, K] seconds that each rank's process pauses beyond its usual.

  A process has its pauses once: its ranks pause together, each for no longer than its own gap.
  """
  causes = run.host_causes
  whole = np.zeros((len(causes.processes), len(run.steps)))
  for seconds in pauses_in(run).values():
    whole += beyond_usual(seconds, selected)
  return causes.by_rank(whole, run.process_of_rank)


def beyond_usual(seconds: np.ndarray, selected: SelectedSteps) -> np.ndarray:
  """[P, K] seconds beyond each process's usual, the median step's."""
  if not selected.size:
    return np.zeros_like(seconds)
  return np.maximum(seconds - np.median(seconds[:, selected.mask], axis=1, keepdims=True), 0.0)
