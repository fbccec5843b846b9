"""Long runs with failures, restarts from the last checkpoint and cold starts; and the ratios that
say what they cost.

Failures come at a constant rate, none during a restart, as in `jaxpace.simulation.failures`. Unlike
there, every restart begins cold: the steps after it are those of another run's beginning.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from experiments.stability.job import Series


class Power(NamedTuple):
  """Watts of one accelerator."""

  busy: float  # computing
  waiting: float  # in a collective or a pause
  idle: float  # while checkpoints are written and jobs restarted


class Lived(NamedTuple):
  """A run of K useful steps with failures. Seconds, joules of one accelerator."""

  done: np.ndarray  # [K] when each useful step was done for good
  fresh: np.ndarray  # [K] steps since the last start, of each useful step
  useful: float  # s of the steps that lasted
  lost: float  # s of steps and checkpoints that were thrown away
  checkpoints: float  # s of those that lasted
  restarts: float  # s
  failures: int
  energy: float  # J


class Ratios(NamedTuple):
  """Without units. Each but `reruns` is 1, or 0 for `variance`, for a job that nothing disturbs."""

  reruns: float  # lost over lost and useful: the share of all steps' time that was run for nothing
  # squared coefficient of variation of the time that equal amounts of useful work took
  variance: float
  energy: float  # energy to output: J a useful step, over those of a step that nothing disturbs
  cost: float  # cost to performance: s a useful step, over those of a step that nothing disturbs


def live(runs: Series, local: int, steps: int, rate: float, every: int, checkpoint: float,
         restart: float, power: Power, seed: int) -> Lived:
  """Plays a long run out of simulated cold starts.

  Each start takes the next run of the series, from its beginning. Past its end its second half,
  which is warm, is repeated.

  Args:
    runs: from cold starts.
    local: steps behind each number of the series.
    steps: useful ones to be done.
    rate: failures a second, of the whole job; 0 for none.
    every: steps from one checkpoint to the next.
    checkpoint: s that one takes.
    restart: s from a failure to the first step after it.
    power: of one accelerator.
    seed: of the failures, and of which run comes first.
  """
  if every < 1 or steps < 1:
    raise ValueError(f"every={every} and steps={steps} must be 1 or more.")
  random = np.random.default_rng(seed)
  at = _warm(runs.times.shape[1], -(-steps // local))
  which = int(random.integers(len(runs.times)))
  starts: dict[int, tuple[np.ndarray, np.ndarray]] = {}
  done, fresh = np.empty(steps), np.empty(steps, np.int64)
  now, kept, failures = 0.0, 0, 0
  lost = useful = written = energy = 0.0
  while kept < steps:
    row = which % len(runs.times)
    if row not in starts:
      starts[row] = (np.repeat(runs.times[row][at], local), np.repeat(runs.busy[row][at], local))
    strikes = random.exponential(1 / rate) if rate > 0 else np.inf
    left = steps - kept
    # no more steps than these come before it
    ahead = min(left, int(min(strikes / runs.times[row].min(), left)) + 2)
    times, busy = starts[row][0][:ahead], starts[row][1][:ahead]
    saved = checkpoint * (np.arange(1, ahead + 1) // every)  # a checkpoint follows its step
    ends = np.cumsum(times) + saved
    spent = (np.cumsum(busy) * power.busy + np.cumsum(times - busy) * power.waiting
             + saved * power.idle)
    if strikes >= ends[-1]:
      held, until, joules = left, float(ends[-1]), float(spent[-1])
    else:
      steps_done = int(np.searchsorted(ends, strikes, side="right"))
      held, until = steps_done // every * every, float(strikes)
      before = float(ends[steps_done - 1]) if steps_done else 0.0
      # The stretch that was cut off took as much a second as the step it belongs to.
      share = (until - before) / (float(ends[steps_done]) - before)
      below = float(spent[steps_done - 1]) if steps_done else 0.0
      joules = below + share * (float(spent[steps_done]) - below) + restart * power.idle
    done[kept:kept + held] = now + ends[:held]
    fresh[kept:kept + held] = np.arange(held)
    worked = float(times[:held].sum())
    useful, written = useful + worked, written + (float(saved[held - 1]) if held else 0.0)
    energy += joules
    if held < left:
      lost += until - (float(ends[held - 1]) if held else 0.0)
      until, failures, which = until + restart, failures + 1, which + 1
    now, kept = now + until, kept + held
  return Lived(done, fresh, useful, lost, written, failures * restart, failures, energy)


def ratios(lived: Lived, step: float, power: Power, window: int) -> Ratios:
  """What a run cost, against one that nothing disturbs.

  Args:
    lived: the run.
    step: s of a step that nothing disturbs.
    power: of one accelerator.
    window: useful steps of an amount of work, for the variance.
  """
  steps = len(lived.done)
  took = np.diff(lived.done[window - 1::window], prepend=0.0)
  variance = float(took.var() / took.mean() ** 2) if len(took) else float("nan")
  return Ratios(lived.lost / (lived.lost + lived.useful), variance,
                lived.energy / (steps * step * power.busy), float(lived.done[-1]) / (steps * step))


def _warm(length: int, wanted: int) -> np.ndarray:
  """[wanted] places in a series: its own, and then those of its second half again and again."""
  half = length // 2
  at = np.arange(wanted)
  return np.where(at < length, at, half + (at - half) % (length - half))
