"""What the hosts' columns show of why a process is late or pauses. What they don't show is left
open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxpace.core.words import Sentence
from jaxpace.diagnose.limits import COSTLY, FEWEST, LEAST, PART, SHOWS
from jaxpace.diagnose.modes.inputs import EvidenceInputs
from jaxpace.diagnose.phases import pauses_in
from jaxpace.diagnose.selected_steps import SelectedSteps, mean_known, medians_known, ratio
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.names import milliseconds, name_process, percent
from jaxpace.runs.run import MISSING, PAUSES, Run

# Set looking at the fault lab's runs of seeds 0 to 3; measurements/fault_lab_seed4 is what they are
# worth on others.
SLICE = 10e-3
"""Seconds that a process which is preempted waits for its processor again, at most, as a rule:
Linux grants others a slice of 3 to 5 ms, longer on many cores. Switches explain no more lateness
than so each: a process that sleeps is switched now and then as well, on a machine with few
cores."""


def kinds(causes: Iterable[Sentence]) -> tuple[str, ...]:
  """The codes of causes, each once; of one that doesn't show there is none."""
  return tuple(dict.fromkeys(str(cause.code) for cause in causes if cause.code != Evidence.ASLEEP))


def of_lateness(case: EvidenceInputs, process: int, begin: int, end: int, lateness: float,
                gap: float = 0.0) -> list[Sentence]:
  """Compares a late process with the others, from block `begin` to before block `end`.

  Args:
    process: the late one.
    lateness: seconds per step to be explained.
    gap: of it, for a longer gap between steps, in which a process computes next to nothing.

  Returns:
    A sentence for each cause, whose code is its kind; none of a lateness that is next to nothing.
  """
  if not lateness >= LEAST * case.mean_step:
    return []
  return [*_columns(case, process, begin, end, lateness, gap),
          *_samples(case, process, begin, end, lateness)]


def _columns(case: EvidenceInputs, process: int, begin: int, end: int, lateness: float,
             gap: float) -> list[Sentence]:
  causes = case.run.host_causes
  row = causes.row(process)
  if row is None:
    return []
  inside = case.selected.within(begin, end)
  means = {name: mean_known(values[:, inside]) for name, values in causes.columns.items()}
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
      found.append(Evidence(name).say("late", who=who, pauses=cause.pauses,
                       mean=milliseconds(float(means[name][row])),
                       more=milliseconds(excess[name])))
  if found:
    return found
  work = excess.get("cpu")
  switches = excess.get("nivcsw", 0.0)
  # It is where a process computes that it is preempted: a gap holds little of that.
  computing = max(lateness - gap, 0.0)
  own = float(means["nivcsw"][row]) if "nivcsw" in means else 0.0
  explained, crowded = (min(times * SLICE, computing) >= PART * lateness
                        for times in (switches, own))
  if explained and own >= 2 * (own - switches) and (work is None or work < 0.5 * lateness):
    found.append(Evidence.PREEMPTED.say(who=who, switches=own, more=switches,
        work="" if work is None else ", while its CPU time is not longer"))
  elif work is not None and work >= 0.5 * lateness:
    found.append(Evidence.WORK.say(who=who, work=milliseconds(work)))
  elif work is not None and len(causes.processes) > 1 and not crowded:
    found.append(Evidence.ASLEEP.say(who=who))
  return found


def _samples(case: EvidenceInputs, process: int, begin: int, end: int,
             lateness: float) -> list[Sentence]:
  run, selected = case.run, case.selected
  found: list[Sentence] = []
  who = name_process(run, process).capitalize()
  for column, code in (("throttled_ns", Evidence.THROTTLED), ("steal_ns", Evidence.STEAL)):
    rise = per_step(run, selected, column, begin, end)
    others = [value for other, value in rise.items() if other != process]
    own = 1e-9 * (rise.get(process, 0.0) - (float(np.median(others)) if others else 0.0))
    if own >= PART * lateness:
      found.append(code.say(who=who, more=milliseconds(own)))
  clocks = {other: float(own[0]) for other, own in
            medians(run, selected, "gpu_clock_mhz", np.array([begin, end])).items()
            if np.isfinite(own[0])}
  others = [value for other, value in clocks.items() if other != process]
  if (process in clocks and others
      and clocks[process] < (1 - COSTLY) * float(np.median(others))):
    found.append(Evidence.GPU_CLOCK.say(who=who, mhz=clocks[process],
        usual=float(np.median(others))))
  return found


def crowded_processors(case: EvidenceInputs) -> bool:
  """Whether something else runs on the hosts' processors all the time: then gaps and transfers are
  ragged by that."""
  return switches(case.run, case.selected) >= CROWDED


def throttled(case: EvidenceInputs) -> tuple[int, float] | None:
  """The process that the CPU limit of its control group holds back longest, and for how many
  seconds per step; None where nobody sampled that."""
  rise = per_step(case.run, case.selected, "throttled_ns", 0, case.selected.blocks)
  return max(((process, 1e-9 * own) for process, own in rise.items()), key=lambda entry: entry[1],
             default=None)


def held_by_causes(case: EvidenceInputs) -> np.ndarray | None:
  """[R] seconds per step that each rank's process spends now and then on what its columns measure;
  None: next to none."""
  causes, held = case.run.host_causes, np.zeros(case.run.ranks)
  for seconds in pauses_in(case.run).values():
    values = seconds[:, case.selected.mask]
    own = np.maximum(values.mean(axis=1) - np.median(values, axis=1), 0.0)
    held += causes.by_rank(own, case.run.process_of_rank)
  return held if held.max(initial=0.0) >= SHOWS / 2 * case.mean_step else None


def strikes(case: EvidenceInputs) -> dict[int, int]:
  """By process, the steps in which it does much more than usual of what its columns measure."""
  causes, found = case.run.host_causes, dict.fromkeys(case.run.host_causes.processes.tolist(), 0)
  own = list(pauses_in(case.run).values())
  if own:
    together = np.sum(own, axis=0)[:, case.selected.mask]
    beyond = together - np.median(together, axis=1, keepdims=True)
    long = beyond[beyond >= COSTLY * case.mean_step]
    number = (beyond >= (0.5 * np.median(long) if long.size else np.inf)).sum(axis=1)
    found.update(zip(causes.processes.tolist(), number.tolist(), strict=True))
  return found


def of_pauses(case: EvidenceInputs, processes: list[int],
              pause: float) -> list[Sentence]:
  """What processes do in their long gaps.

  Returns:
    A sentence for each cause, those that hold most of the pauses first.
  """
  rows = [row for row in map(case.run.host_causes.row, processes) if row is not None]
  if not rows or not pause > 0:
    return []
  found = []
  for name, seconds in pauses_in(case.run).items():
    values = seconds[rows][:, case.selected.mask]
    held = float((values.mean(axis=1) - np.median(values, axis=1)).mean())
    if held >= PART * pause or held >= SHOWS * case.mean_step:
      struck = values > np.median(values, axis=1, keepdims=True) + 0.5 * held
      longest = float(values.max())
      part = min(held / pause, 1.0)
      found.append((-part, Evidence(name).say(
          "pauses", pauses=PAUSES[name].pauses, held=milliseconds(held), part=percent(part),
          often=percent(float(struck.mean())), longest=milliseconds(longest))))
  return [said for _, said in sorted(found, key=lambda entry: entry[0])]


# The hosts' counters over a stretch of the run, per step, by process.

CROWDED = 5.0
"""Involuntary switches a step of a process that shares its processors with other programs."""


def switches(run: Run, selected: SelectedSteps) -> float:
  """Involuntary switches of the process that has most of them, mean a step; 0 where they were not
  recorded.

  Steps that a program runs by itself, iterations of its loop, have no columns of their own; the
  process was sampled meanwhile.
  """
  values = run.host_causes.columns.get("nivcsw")
  if values is not None and np.isfinite(values[:, selected.mask]).any():
    return float(np.nan_to_num(mean_known(values[:, selected.mask])).max(initial=0.0))
  return max(per_step(run, selected, "nivcsw", 0, selected.blocks).values(), default=0.0)


def per_step(run: Run, selected: SelectedSteps, name: str, begin: int,
             end: int) -> dict[int, float]:
  """By how much a counter of the table `hosts` rose, per step, from block `begin` to before block
  `end`.

  Returns:
    The rise by process, in the counter's unit; processes with few samples there are left out.
  """
  edges = np.array([begin, end])
  return {one.process: float(one.rises()[0]) for one in _sampled(run, selected, name, edges)
          if one.within >= FEWEST and one.steps[0]}


def per_window(run: Run, selected: SelectedSteps, name: str,
               most: int) -> tuple[np.ndarray, dict[int, np.ndarray]]:
  """By how much a counter rose per step, in windows of the counted steps that begin and end with
  blocks.

  Args:
    name: column of the table `hosts`.
    most: windows, at most; fewer where a window would hold fewer than two samples.

  Returns:
    [W + 1] blocks at which the windows begin, and the end of the last one; the rise [W] by process,
    in the counter's unit. No windows where nothing was sampled often enough.
  """
  whole = list(_sampled(run, selected, name, np.array([0, selected.blocks])))
  size = min([most, selected.blocks, *(one.within // 2 for one in whole)], default=0)
  if size < 1 or not whole:
    return np.zeros(1, np.int64), {}
  edges = np.arange(size + 1) * selected.blocks // size
  return edges, {one.process: one.rises() for one in _sampled(run, selected, name, edges)}


def medians(run: Run, selected: SelectedSteps, name: str, edges: np.ndarray
            ) -> dict[int, np.ndarray]:
  """Medians of a gauge over its samples in windows of the counted steps.

  Args:
    name: column of the table `hosts`.
    edges: [W + 1] blocks at which windows begin, and the end of the last one, as `per_window` gives
      them.

  Returns:
    [W] by process, in the gauge's unit, NaN where a window holds no sample; without processes that
    never sampled it.
  """
  return {one.process: one.medians() for one in _sampled(run, selected, name, edges)
          if one.times.size}


class _Samples(NamedTuple):
  """What a process sampled of a column in its newest attempt, and when windows begin on its clock.

  W windows.
  """

  process: int
  times: np.ndarray  # int64 ns
  values: np.ndarray
  exits: np.ndarray  # [W + 1] int64 ns, of the first known steps of the windows, and the last one
  steps: np.ndarray  # [W] from one to the next

  @property
  def within(self) -> int:
    """Samples from the first to the last exit."""
    return int(((self.times >= self.exits[0]) & (self.times <= self.exits[-1])).sum())

  def rises(self) -> np.ndarray:
    """[W] by how much a counter rose per step; between samples it is taken to rise evenly.

    Counters never fall, as far as the kernel goes; what is read torn must not count backwards.
    """
    origin = self.times[0]
    level = np.interp((self.exits - origin).astype(np.float64),
                      (self.times - origin).astype(np.float64), np.maximum.accumulate(self.values))
    return ratio(np.diff(level), self.steps)

  def medians(self) -> np.ndarray:
    """[W] median sample; NaN where there is none."""
    at = np.searchsorted(self.exits, self.times) - 1
    return medians_known(self.values[at == window] for window in range(len(self.steps)))


def _sampled(run: Run, selected: SelectedSteps, name: str, edges: np.ndarray
             ) -> Iterator[_Samples]:
  """What each process sampled of a column, in windows between blocks [W + 1]."""
  counted = np.flatnonzero(selected.block >= 0)
  if run.host_samples is None or not run.collectives or name not in run.host_samples.columns:
    return
  collective, seen = run.collectives[-1], {-1}
  for rank, process in enumerate(run.process_of_rank.tolist()):
    exits, attempts = collective.exit_ns[rank, counted], collective.attempt[rank, counted]
    known = (exits != MISSING) & (attempts == attempts.max(initial=-1))
    if process in seen or known.sum() < 2:
      continue
    seen.add(process)
    own = run.host_samples.of(process)
    values, use = own.columns[name], own.attempt == attempts.max()
    use &= np.isfinite(values)
    if (own.attempt == attempts.max()).any():
      block = selected.block[counted[known]]
      at = np.minimum(np.searchsorted(block, edges), len(block) - 1)
      yield _Samples(process, own.time_ns[use], values[use], exits[known][at],
                     np.diff(counted[known][at]))
