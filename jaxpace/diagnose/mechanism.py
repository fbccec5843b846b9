"""What the hosts' columns show of why a process is late or pauses. What they don't show is left
open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from jaxpace.diagnose.limits import COSTLY, FEWEST, LEAST, PART, SHOWS
from jaxpace.diagnose.modes.inputs import EvidenceInputs
from jaxpace.diagnose.phases import pauses_in
from jaxpace.diagnose.selected_steps import SelectedSteps, mean_known
from jaxpace.diagnose.words.codes import Sentence
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.names import milliseconds, name_process, percent
from jaxpace.runs.run import MISSING, HostSamples, Run
from jaxpace.runs.step_causes import PAUSES

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
    case: the run.
    process: the late one.
    begin: first block.
    end: one past the last.
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
  explained = min(switches * SLICE, computing) >= PART * lateness
  if explained and float(means["nivcsw"][row]) >= 2 * (
      float(means["nivcsw"][row]) - switches) and (work is None or work < 0.5 * lateness):
    found.append(Evidence.PREEMPTED.say("switches" if work is None else "cpu_time", who=who,
                     switches=float(means["nivcsw"][row]), more=switches))
  elif work is not None and work >= 0.5 * lateness:
    found.append(Evidence.WORK.say(who=who, work=milliseconds(work)))
  elif work is not None and len(causes.processes) > 1:
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
  clocks = mean_gauge(run, selected, "gpu_clock_mhz", begin, end)
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

  Args:
    case: the run.
    processes: those that pause.
    pause: seconds per step by which their mean gap exceeds their median gap.

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
  recorded."""
  values = run.host_causes.columns.get("nivcsw")
  if values is None:
    return 0.0
  return float(np.nan_to_num(mean_known(values[:, selected.mask])).max(initial=0.0))


def per_step(run: Run, selected: SelectedSteps, name: str, begin: int,
             end: int) -> dict[int, float]:
  """By how much a counter of the table `hosts` rose, per step, from block `begin` to before block
  `end`.

  Samples and exits of a process are on the same clock; between samples a counter is taken to rise
  evenly.

  Returns:
    The rise by process, in the counter's unit; processes without enough samples are left out.
  """
  found: dict[int, float] = {}
  for process, times, values, first, last, steps in _stretch(run, selected, name, begin, end):
    if steps < 1:
      continue
    # Counters never fall, as far as the kernel goes; what is read torn must not count backwards.
    rise = np.maximum.accumulate(values)
    origin = times[0]
    at = np.interp([first - origin, last - origin], (times - origin).astype(np.float64), rise)
    found[process] = float(at[1] - at[0]) / steps
  return found


def per_window(run: Run, selected: SelectedSteps, name: str,
               most: int) -> tuple[np.ndarray, dict[int, np.ndarray]]:
  """By how much a counter rose per step, in windows of the counted steps that begin and end with
  blocks.

  Args:
    run: the run.
    selected: its steps that count.
    name: column of the table `hosts`.
    most: windows, at most; fewer where a window would hold fewer than two samples.

  Returns:
    [W + 1] blocks at which the windows begin, and the end of the last one; the rise [W] by process,
    in the counter's unit. No windows where nothing was sampled often enough.
  """
  number = [int(np.count_nonzero(np.isfinite(samples.columns[name]) & (samples.time_ns >= first)
                                 & (samples.time_ns <= last)))
            for samples, first, last, _ in _windows(run, selected, 0, selected.blocks).values()
            if name in samples.columns]
  size = min([most, selected.blocks, *(n // 2 for n in number)], default=0)
  if size < 1 or not number:
    return np.zeros(1, np.int64), {}
  edges = np.arange(size + 1) * selected.blocks // size
  steps = np.maximum(np.diff(_first_steps(selected, edges)), 1)
  found: dict[int, np.ndarray] = {}
  for process, times, values, exits, there in _sampled(run, selected, name, edges):
    level = np.interp((exits - times[0]).astype(np.float64),
                      (times - times[0]).astype(np.float64), np.maximum.accumulate(values))
    found[process] = np.where(there, np.diff(level) / steps, np.nan)
  return edges, found


def median_per_window(run: Run, selected: SelectedSteps, name: str,
                      edges: np.ndarray) -> dict[int, np.ndarray]:
  """Medians of a gauge over its samples in windows of the counted steps.

  Args:
    run: the run.
    selected: its steps that count.
    name: column of the table `hosts`.
    edges: [W + 1] blocks at which windows begin, and the end of the last one, as `per_window` gives
      them.

  Returns:
    [W] by process, in the gauge's unit, NaN where a window holds no sample; without processes that
    never sampled it.
  """
  found: dict[int, np.ndarray] = {}
  for process, times, values, exits, there in _sampled(run, selected, name, edges):
    own = found[process] = np.full(len(edges) - 1, np.nan)
    for window in np.flatnonzero(there):
      inside = (times > exits[window]) & (times <= exits[window + 1])
      if inside.any():
        own[window] = np.median(values[inside])
  return found


def _sampled(run: Run, selected: SelectedSteps, name: str, edges: np.ndarray
             ) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
  """The processes that sampled a column, with the times and values of their samples, the exits,
  [W + 1], at which windows begin and end, of their first rank, and which windows, [W] bool, lie
  between two."""
  at = _first_steps(selected, edges)
  for process, (samples, _, _, _) in _windows(run, selected, 0, selected.blocks).items():
    values = samples.columns.get(name)
    if values is None or not np.isfinite(values).any():
      continue
    rank, known = int(np.flatnonzero(run.process_of_rank == process)[0]), np.isfinite(values)
    last = run.collectives[-1]
    exits, attempts = last.exit_ns[rank, at], last.attempt[rank, at]
    there = (exits != MISSING) & (attempts == attempts.max())
    yield process, samples.time_ns[known], values[known], exits, there[1:] & there[:-1]


def _first_steps(selected: SelectedSteps, edges: np.ndarray) -> np.ndarray:
  """[W + 1] places of the steps at which windows begin; of the last edge, that of the last step."""
  steps = np.flatnonzero(selected.block >= 0)
  return steps[np.minimum(np.searchsorted(selected.block[steps], edges), len(steps) - 1)]


def mean_gauge(run: Run, selected: SelectedSteps, name: str, begin: int,
               end: int) -> dict[int, float]:
  """Mean of a gauge (GPU clock or power) over the samples of the stretch, by process."""
  return {process: float(values[(times >= first) & (times <= last)].mean())
          for process, times, values, first, last, _ in _stretch(run, selected, name, begin, end)}


def _stretch(run: Run, selected: SelectedSteps, name: str, begin: int, end: int
             ) -> Iterator[tuple[int, np.ndarray, np.ndarray, int, int, int]]:
  """The processes that sampled a column `FEWEST` times or more in a stretch, with the times and
  values of all their samples, first and last exit of the stretch, and the steps between these."""
  for process, (samples, first, last, steps) in _windows(run, selected, begin, end).items():
    values = samples.columns.get(name)
    if values is not None:
      known = np.isfinite(values)
      times = samples.time_ns[known]
      if np.count_nonzero((times >= first) & (times <= last)) >= FEWEST:
        yield process, times, values[known], first, last, steps


def _windows(run: Run, selected: SelectedSteps, begin: int,
             end: int) -> dict[int, tuple[HostSamples, int, int, int]]:
  """By process: samples of its newest attempt, first and last exit of the stretch on its clock,
  steps between them."""
  found: dict[int, tuple[HostSamples, int, int, int]] = {}
  steps = np.flatnonzero(selected.within(begin, end))
  if run.host_samples is None or not run.collectives or not steps.size:
    return found
  collective = run.collectives[-1]
  seen: set[int] = set()
  for rank in range(run.ranks):
    process = int(run.process_of_rank[rank])
    if process < 0 or process in seen:
      continue
    exits, attempts = collective.exit_ns[rank, steps], collective.attempt[rank, steps]
    use = np.flatnonzero((exits != MISSING) & (attempts == attempts.max()))
    if use.size < 2:
      continue
    seen.add(process)
    own = run.host_samples.of(process)
    keep = own.attempt == attempts.max()
    own = HostSamples(own.process[keep], own.attempt[keep], own.time_ns[keep],
                      {name: values[keep] for name, values in own.columns.items()})
    if own.time_ns.size:
      found[process] = own, int(exits[use[0]]), int(exits[use[-1]]), int(use[-1] - use[0])
  return found
