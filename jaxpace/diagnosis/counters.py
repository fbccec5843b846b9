"""The hosts' counters over a stretch of the run, per step, by process."""

from __future__ import annotations

import numpy as np

from jaxpace.diagnosis.selected_steps import SelectedSteps
from jaxpace.trace.run import MISSING, HostSamples, Run

# Set looking at the fault lab's runs of seeds 0 to 3; measurements/fault_lab_seed4 is what they are
# worth on others.
CROWDED = 5.0
"""Involuntary switches a step of a process that shares its processors with other programs."""
_FEWEST = 3


def switches(run: Run, selected: SelectedSteps) -> float:
  """Involuntary switches of the process that has most of them, mean a step; 0 where they were not
  recorded."""
  values = run.host_causes.columns.get("nivcsw")
  if values is None:
    return 0.0
  inside = values[:, selected.mask]
  known = np.isfinite(inside)
  number = known.sum(axis=1)
  return float((np.where(known, inside, 0.0).sum(axis=1, dtype=np.float64)
                / np.maximum(number, 1)).max(initial=0.0))


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
  for process, (samples, first, last, steps) in _windows(run, selected, begin, end).items():
    values = samples.columns.get(name)
    if values is None or steps < 1:
      continue
    known = np.isfinite(values)
    times, values = samples.time_ns[known], values[known]
    if np.count_nonzero((times >= first) & (times <= last)) < _FEWEST:
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
  sampled = {process: (samples, first, last)
             for process, (samples, first, last,
                           _) in _windows(run, selected, 0, selected.blocks).items()
             if name in samples.columns}
  number = [int(np.count_nonzero(np.isfinite(samples.columns[name]) & (samples.time_ns >= first)
                                 & (samples.time_ns <= last)))
            for samples, first, last in sampled.values()]
  size = min([most, selected.blocks, *(n // 2 for n in number)], default=0)
  if size < 1 or not number:
    return np.zeros(1, np.int64), {}
  edges = np.arange(size + 1) * selected.blocks // size
  at = _first_steps(selected, edges)
  found: dict[int, np.ndarray] = {}
  for process, (samples, _, _) in sampled.items():
    exits, attempts = _exits(run, process, at)
    values = samples.columns[name]
    known = np.isfinite(values)
    times, rise = samples.time_ns[known], np.maximum.accumulate(values[known])
    level = np.interp((exits - times[0]).astype(np.float64),
                      (times - times[0]).astype(np.float64), rise)
    there = (exits != MISSING) & (attempts == attempts.max())
    found[process] = np.where(there[1:] & there[:-1], np.diff(level) / np.maximum(np.diff(at), 1),
                              np.nan)
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
  at = _first_steps(selected, edges)
  found: dict[int, np.ndarray] = {}
  for process, (samples, _, _, _) in _windows(run, selected, 0, selected.blocks).items():
    values = samples.columns.get(name)
    if values is None or not np.isfinite(values).any():
      continue
    exits, attempts = _exits(run, process, at)
    there = (exits != MISSING) & (attempts == attempts.max())
    own = np.full(len(edges) - 1, np.nan)
    for window in np.flatnonzero(there[1:] & there[:-1]):
      inside = ((samples.time_ns > exits[window]) & (samples.time_ns <= exits[window + 1])
                & np.isfinite(values))
      if inside.any():
        own[window] = np.median(values[inside])
    found[process] = own
  return found


def _first_steps(selected: SelectedSteps, edges: np.ndarray) -> np.ndarray:
  """[W + 1] places of the steps at which windows begin; of the last edge, that of the last step."""
  steps = np.flatnonzero(selected.block >= 0)
  return steps[np.minimum(np.searchsorted(selected.block[steps], edges), len(steps) - 1)]


def _exits(run: Run, process: int, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Last exits of a process's first rank in some steps, on its clock, and the attempts they are
  from."""
  rank = int(np.flatnonzero(run.process_of_rank == process)[0])
  return run.collectives[-1].exit_ns[rank, at], run.collectives[-1].attempt[rank, at]


def mean_gauge(run: Run, selected: SelectedSteps, name: str, begin: int,
               end: int) -> dict[int, float]:
  """Mean of a gauge (GPU clock or power) over the samples of the stretch, by process."""
  found: dict[int, float] = {}
  for process, (samples, first, last, _) in _windows(run, selected, begin, end).items():
    values = samples.columns.get(name)
    if values is None:
      continue
    inside = np.isfinite(values) & (samples.time_ns >= first) & (samples.time_ns <= last)
    if np.count_nonzero(inside) >= _FEWEST:
      found[process] = float(values[inside].mean())
  return found


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
