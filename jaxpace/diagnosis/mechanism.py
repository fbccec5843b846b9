"""What the hosts' columns show of why a process is late or pauses. What they don't show is left
open."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.codes import Evidence, Sentence
from jaxpace.diagnosis.counters import CROWDED, mean_gauge, per_step, switches
from jaxpace.diagnosis.modes.case import LEAST, Case
from jaxpace.diagnosis.wording import milliseconds, name_process, percent
from jaxpace.trace.step_causes import PAUSES

# Set looking at the fault lab's runs of seeds 0 to 3; measurements/fault_lab_seed4 is what they are
# worth on others.
PART = 0.3
"""A column explains lateness or pauses if it holds this part of them ..."""
_LEAST = 0.025
"""... or this share of the step."""
_LONG = 0.1
"""Share of the step that a pause takes at least; shorter than half of the median one it is none
like them."""
_SWITCHES = 0.2
SLICE = 10e-3
"""Seconds that a process which is preempted waits for its processor again, at most, as a rule:
Linux grants others a slice of 3 to 5 ms, longer on many cores. Switches explain no more lateness
than so each: a process that sleeps is switched now and then as well, on a machine with few
cores."""
_SLOWER_CLOCK = 0.05


class Mechanism(NamedTuple):
  """A cause, and the sentence that shows it."""

  kind: str
  sentence: str

  @property
  def said(self) -> Sentence:
    """The sentence with its code."""
    return Sentence(Evidence(self.kind) if self.kind else Evidence.ASLEEP, self.sentence)


def of_lateness(case: Case, process: int, begin: int, end: int, lateness: float,
                gap: float = 0.0) -> list[Mechanism]:
  """Compares a late process with the others, from block `begin` to before block `end`.

  Args:
    case: the run.
    process: the late one.
    begin: first block.
    end: one past the last.
    lateness: seconds a step to be explained.
    gap: of it, for a longer gap between steps, in which a process computes next to nothing.

  Returns:
    The causes; none of a lateness that is next to nothing.
  """
  if not lateness >= LEAST * case.step_time:
    return []
  return [*_columns(case, process, begin, end, lateness, gap),
          *_samples(case, process, begin, end, lateness)]


def _columns(case: Case, process: int, begin: int, end: int, lateness: float,
             gap: float) -> list[Mechanism]:
  causes = case.run.host_causes
  row = causes.row(process)
  if row is None:
    return []
  inside = case.selected.within(begin, end)
  means = {name: _known_means(values[:, inside]) for name, values in causes.columns.items()}
  who, found = name_process(case.run, process).capitalize(), []
  excess: dict[str, float] = {}
  for name, mean in means.items():
    others = np.delete(mean, row)
    others = others[np.isfinite(others)]
    if others.size:
      usual = float(np.median(others))
    else:  # one process: compared with itself before and after
      outside = causes.columns[name][row, ~inside & case.selected.mask]
      outside = outside[np.isfinite(outside)]
      usual = float(outside.mean()) if outside.size else 0.0 if name in PAUSES else float("nan")
    if np.isfinite(mean[row]) and np.isfinite(usual):
      excess[name] = float(mean[row]) - usual
  for name, cause in PAUSES.items():
    if excess.get(name, 0.0) >= PART * lateness:
      found.append(Mechanism(name, f"{who} {cause.pauses} for "
                                   f"{milliseconds(float(means[name][row]))} per step, "
                                   f"{milliseconds(excess[name])} more than the others."))
  if found:
    return found
  work = excess.get("cpu")
  switches = excess.get("nivcsw", 0.0)
  # It is where a process computes that it is preempted: a gap holds little of that.
  computing = max(lateness - gap, 0.0)
  explained = min(switches * SLICE, computing) >= PART * lateness
  if explained and switches >= _SWITCHES and float(means["nivcsw"][row]) >= 2 * (
      float(means["nivcsw"][row]) - switches) and (work is None or work < 0.5 * lateness):
    found.append(Mechanism("preempted", (
        f"{who} is preempted: {float(means['nivcsw'][row]):.1f} involuntary switches a step, "
        f"{switches:.1f} more than the others"
        + (", while its CPU time is not longer" if work is not None else "")
        + ": something else runs on its processors.")))
  elif work is not None and work >= 0.5 * lateness:
    found.append(Mechanism("work", f"{who} has more work: its CPU time is {milliseconds(work)} a "
                                   "step longer than the others'."))
  elif work is not None and len(causes.processes) > 1:
    found.append(Mechanism("", (
        f"{who} uses no more CPU time than the others, and is not preempted so often that it would "
        "explain this: it sleeps, stands still or waits for a device, and the host's columns don't "
        "say for what.")))
  return found


def _samples(case: Case, process: int, begin: int, end: int, lateness: float) -> list[Mechanism]:
  run, selected, found = case.run, case.selected, []
  who = name_process(run, process).capitalize()
  for column, kind, does in (("throttled_ns", "throttled",
                              "is throttled by a CPU limit of its control group"),
                             ("steal_ns", "steal",
                              "runs on a host whose hypervisor gives its processors to others")):
    rise = per_step(run, selected, column, begin, end)
    others = [value for other, value in rise.items() if other != process]
    own = 1e-9 * (rise.get(process, 0.0) - (float(np.median(others)) if others else 0.0))
    if own >= PART * lateness:
      found.append(Mechanism(kind,
                             f"{who} {does}: {milliseconds(own)} per step more than the others."))
  clocks = mean_gauge(run, selected, "gpu_clock_mhz", begin, end)
  others = [value for other, value in clocks.items() if other != process]
  if (process in clocks and others
      and clocks[process] < (1 - _SLOWER_CLOCK) * float(np.median(others))):
    found.append(Mechanism("gpu_clock", f"{who}'s GPU runs at {clocks[process]:.0f} MHz, the "
                                        f"others' at {float(np.median(others)):.0f}: heat, power, "
                                        "or a limit set on it."))
  return found


def crowded_processors(case: Case) -> bool:
  """Whether something else runs on the hosts' processors all the time: then gaps and transfers are
  ragged by that."""
  return switches(case.run, case.selected) >= CROWDED


def held_by_causes(case: Case) -> np.ndarray | None:
  """[R] seconds a step that each rank's process spends now and then on what its columns measure;
  None: next to none."""
  causes, held = case.run.host_causes, np.zeros(case.run.ranks)
  for name in PAUSES:
    if name in causes.columns:
      values = np.nan_to_num(causes.columns[name][:, case.selected.mask].astype(np.float64))
      own = np.maximum(values.mean(axis=1) - np.median(values, axis=1), 0.0)
      of_process = dict(zip(causes.processes.tolist(), own.tolist(), strict=True))
      held += np.array([of_process.get(int(p), 0.0) for p in case.run.process_of_rank])
  return held if held.max(initial=0.0) >= _LEAST / 2 * case.step_time else None


def strikes(case: Case) -> dict[int, int]:
  """By process, the steps in which it does much more than usual of what its columns measure."""
  causes, found = case.run.host_causes, dict.fromkeys(case.run.host_causes.processes.tolist(), 0)
  own = [np.nan_to_num(causes.columns[name][:, case.selected.mask].astype(np.float64))
         for name in PAUSES if name in causes.columns]
  if own:
    together = np.stack(own).sum(axis=0)
    beyond = together - np.median(together, axis=1, keepdims=True)
    long = beyond[beyond >= _LONG * case.step_time]
    number = (beyond >= (0.5 * np.median(long) if long.size else np.inf)).sum(axis=1)
    found.update(zip(causes.processes.tolist(), number.tolist(), strict=True))
  return found


def of_pauses(case: Case, processes: list[int], pause: float) -> list[tuple[Mechanism, float]]:
  """What processes do in their long gaps.

  Args:
    case: the run.
    processes: those that pause.
    pause: seconds a step by which their mean gap exceeds their median gap.

  Returns:
    The causes and the part of the pauses that each holds, the largest first.
  """
  causes = case.run.host_causes
  rows = [row for row in (causes.row(p) for p in processes) if row is not None]
  if not rows or not pause > 0:
    return []
  found = []
  for name, cause in PAUSES.items():
    if name not in causes.columns:
      continue
    values = causes.columns[name][rows][:, case.selected.mask].astype(np.float64)
    values = np.where(np.isfinite(values), values, 0.0)
    held = float((values.mean(axis=1) - np.median(values, axis=1)).mean())
    if held >= PART * pause or held >= _LEAST * case.step_time:
      struck = values > np.median(values, axis=1, keepdims=True) + 0.5 * held
      longest = float(values.max())
      part = min(held / pause, 1.0)
      found.append((Mechanism(name, (
          f"In its long gaps a process {cause.pauses}: {milliseconds(held)} per step, "
          f"{percent(part)} of the pauses, in {percent(float(struck.mean()))} of the steps, up to "
          f"{milliseconds(longest)} at a time.")), part))
  return sorted(found, key=lambda entry: -entry[1])


def _known_means(values: np.ndarray) -> np.ndarray:
  known = np.isfinite(values)
  number = known.sum(axis=1)
  return np.divide(np.where(known, values, 0.0).sum(axis=1, dtype=np.float64), number,
                   out=np.full(len(values), np.nan), where=number > 0)
