"""The forecast: step time, efficiency and variation at other numbers of ranks, with intervals.

    S(N) = rest + sum over collectives of (mean arrival + E[max of N own noises and offsets] + transfer(N))

The own noise of n ranks over K steps is n·K draws: the largest of N is resampled from them while N
is small against n·K, and beyond that taken from a tail fitted to the uppermost of them. Intervals
come from drawing blocks of neighbouring steps anew, since noise is autocorrelated.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from jaxpace.core.words import Sentence
from jaxpace.costs.fabric_file import Estimate, MeasuredFabric
from jaxpace.diagnose.forecast_sample import MIN_STEPS, ONE_SIZE, Sample, new_tier, transfers
from jaxpace.diagnose.forecast_tails import (
  Noise,
  Pooled,
  calibration,
  largest,
  largest_apart,
  predict_offsets,
  separate,
  with_tail,
)
from jaxpace.diagnose.limits import SCHEMA
from jaxpace.diagnose.words.codes import Silence, codes
from jaxpace.diagnose.words.notes import Note
from jaxpace.runs.run import Run

DRAWS = 200
LEVEL = 0.9
_CALIBRATED = 1.1
"""Intervals are widened by this: on simulated jobs, those of resampled blocks alone came out that
much too narrow."""
RESAMPLED, TAIL = "resampled", "tail fitted"
_LEAST = 10
"""Recorded noises for each rank of the forecast job: from so many on resampling will do, with fewer
it is silent."""


class Point(NamedTuple):
  """The job at one number of ranks."""

  ranks: int
  silent: Sentence | None  # why there is no forecast; then all below is None
  step_time: Estimate | None = None  # s, mean over a run as long as the recorded one
  cv: Estimate | None = None  # standard deviation of a step over its mean
  efficiency: Estimate | None = None  # share of the step that a rank works on average
  change: Estimate | None = None  # step time over that recorded, less 1
  waiting: float | None = None  # s per step waits for its last ranks, on average
  transfer: float | None = None  # s
  method: str | None = None
  transfer_source: str | None = None


class Forecast(NamedTuple):
  """Forecasts from one run."""

  sample: Sample
  noises: tuple[Noise, ...]
  recorded: float  # s, mean step of the sample
  recorded_cv: float
  efficiency: float
  points: tuple[Point, ...]
  fabric: str | None
  notes: tuple[Sentence, ...]


class _Draws(NamedTuple):
  """What doesn't depend on the number of ranks. D draws, the first of which is the run as it
  was."""

  weights: np.ndarray  # [D, B] how often each block is drawn
  pooled: list[Pooled]  # [D, J] of each collective
  mean: np.ndarray  # [D] rest and mean arrivals, s
  busy: np.ndarray  # [D] mean arrival of all ranks, s
  shared: np.ndarray  # [D] variance of what all ranks share in a step
  error: np.ndarray  # [D] s, by which the mean of another run as long as this one is off


def forecast(sample: Sample, ranks: Sequence[int], *, per_host: int | None = None,
             fabric: MeasuredFabric | None = None, algorithm: str | None = None, draws: int = DRAWS,
             seed: int = 0, progress: Callable[[int, int], None] | None = None) -> Forecast:
  """Forecasts a job at other numbers of ranks, each with the same work as now (weak scaling).

  Args:
    ranks: numbers of ranks, 1 or more.
    per_host: ranks of a host in the forecast jobs; as in the run by default.
    fabric: what collectives cost, from `jaxpace bench` or described.
    algorithm: how the collectives go, "ring", "tree" or "doubling"; None where it is not known.
    progress: called with the numbers of ranks done and their number.
  """
  random = np.random.default_rng(seed)
  noises = tuple(separate(arrival, sample.block) for arrival in sample.arrival)
  drawn = _draw(sample, noises, draws, random)
  points = []
  for done, number in enumerate(ranks):
    why = _too_far(sample, number) or new_tier(sample, number, per_host, fabric)
    if why:
      points.append(Point(number, why))
    else:
      transfer, source = transfers(sample, number, fabric, algorithm, draws, random)
      points.append(_at(sample, noises, drawn, number, transfer, random)._replace(
          transfer_source=source))
    if progress:
      progress(done + 1, len(ranks))
  recorded = float(sample.step.mean())
  notes = [*sample.notes, *_notes(sample, noises, drawn, points)]
  return Forecast(
      sample=sample, noises=noises, recorded=recorded,
      recorded_cv=float(sample.step.std()) / recorded,
      efficiency=float(sample.busy.mean()) / recorded, points=tuple(points),
      fabric=fabric.source if fabric else None, notes=tuple(notes))


def _too_far(sample: Sample, ranks: int) -> Sentence | None:
  """Why the run is too short for so many ranks, or None."""
  held = sample.units * sample.steps
  units = math.ceil(ranks / sample.unit)
  if units * _LEAST <= held:
    return None
  steps = math.ceil(units * _LEAST / sample.units)
  return Silence.TOO_SHORT.say(ranks=ranks, units=units, recorded=sample.units, by=sample.steps,
      reach=held // _LEAST * sample.unit, needed=steps)


def _draw(sample: Sample, noises: Sequence[Noise], draws: int,
          random: np.random.Generator) -> _Draws:
  blocks = sample.blocks
  weights = np.concatenate([np.ones((1, blocks)),
                            random.multinomial(blocks, np.full(blocks, 1 / blocks),
                                               draws).astype(np.float64)])
  steps = noises[0].block_steps
  number = weights @ steps

  def mean(values: np.ndarray) -> np.ndarray:
    return (weights @ np.bincount(sample.block, values, blocks)) / number

  arrived = sample.arrival.mean(axis=1)  # [C, K]
  rest = sample.step - (sample.arrival.max(axis=1) + sample.transfer).sum(axis=0)
  level = arrived.sum(axis=0) + rest
  whole = level + sample.transfer.sum(axis=0)
  own = sum(n.own_deviation**2 for n in noises) / sample.units
  shared = np.maximum(mean(whole**2) - mean(whole)**2 - own, 0.0)
  step = mean(sample.step)
  error = step[1:] - step[0]
  return _Draws(weights, [n.pooled.drawn(weights) for n in noises], mean(level), mean(sample.busy),
                shared, np.concatenate([[0.0], random.permutation(error)]))


def _at(sample: Sample, noises: Sequence[Noise], drawn: _Draws, ranks: int,
        transfer: np.ndarray, random: np.random.Generator) -> Point:
  units = max(1, math.ceil(ranks / sample.unit))
  fitted = units * MIN_STEPS > sample.units * sample.steps
  draws = len(drawn.weights)
  excess, variance = np.zeros(draws), np.zeros(draws)
  for noise, pooled in zip(noises, drawn.pooled, strict=True):
    scale = calibration(noise, pooled, drawn.weights, sample.units)
    centre = (pooled.counts * pooled.values).sum(axis=1) / pooled.counts.sum(axis=1)
    used = with_tail(pooled, _exceedances(sample, units)) if fitted else pooled
    if noise.offsets_spread:
      offsets = predict_offsets(noise, units, draws, random)
      most, spread = largest_apart(used, offsets, scale)
      excess += most - scale * centre
      variance += spread
    else:
      most, spread = largest(used, units)
      excess += scale * (most - centre)
      variance += scale**2 * spread
  step = drawn.mean + excess + transfer
  # Each draw of offsets is another job: none is "the" job, so the middle one stands for it.
  point = float(np.median(step) if any(n.offsets_spread for n in noises) else step[0])
  # What is not known of this run, and what another one would differ by anyway.
  around = _spread(step, point, sample.blocks, drawn.error)
  cv = np.sqrt(drawn.shared + variance) / np.maximum(step, 1e-12)
  recorded = float(sample.step.mean())
  busy = float(drawn.busy[0])
  efficiency = [min(busy / x, 1.0) if x > 0 else 1.0
                for x in (around.estimate, around.high, around.low)]
  waited = (point - float(drawn.mean[0]) - float(transfer[0])
            + float(sample.arrival.mean(axis=1).sum(axis=0).mean()))
  return Point(
      ranks=ranks, silent=None, step_time=around, cv=_spread(cv, float(cv[0]), sample.blocks, 0.0),
      efficiency=Estimate(*efficiency), change=Estimate(*(x / recorded - 1 for x in around)),
      waiting=max(waited - busy, 0.0), transfer=float(transfer[0]),
      method=TAIL if fitted else RESAMPLED)


def _exceedances(sample: Sample, units: int) -> int:
  """Values that make the fitted tail: several for each that lies beyond the 1 - 1/N quantile, 30 at
  least."""
  held = sample.units * sample.steps
  return int(np.clip(5 * held / units, 3 * math.sqrt(held), max(30, held // 10)))


def _spread(draws: np.ndarray, point: float, blocks: int, error: np.ndarray | float) -> Estimate:
  """Interval of the draws around the point; their median is moved there: drawing anew makes the
  largest smaller.

  Wider by Student's t over the normal quantile and the bias of a variance: of few blocks one knows
  less.
  """
  tail = (1 - LEVEL) / 2
  student = float(special.stdtrit(blocks - 1, 1 - tail) / special.ndtri(1 - tail))
  wider = _CALIBRATED * student * math.sqrt(blocks / (blocks - 1))
  off = (wider * (draws[1:] - np.median(draws[1:]))
         + (wider * error[1:] if isinstance(error, np.ndarray) else 0.0))
  low, high = np.quantile(off, [tail, 1 - tail])
  point = max(point, 0.0)
  return Estimate(point, max(point + min(float(low), 0.0), 0.0), point + max(float(high), 0.0))


def _notes(sample: Sample, noises: Sequence[Noise], drawn: _Draws, points: Sequence[Point]
           ) -> list[Sentence]:
  notes: list[Sentence] = []
  lasting = [n for n in noises if n.offsets_spread]
  if lasting:
    worst = max(lasting, key=lambda n: n.offsets_spread)
    latest = float(worst.offsets.max())
    notes.append(Note.RANKS_DIFFER_FOR_GOOD.say(spread=1000.0 * worst.offsets_spread,
        latest=1000.0 * latest, known=len(worst.offsets)))
  for collective, noise, pooled in zip(sample.collectives, noises, drawn.pooled, strict=True):
    whole = Pooled(pooled.values, pooled.counts[:1])
    if float(calibration(noise, whole, drawn.weights[:1], sample.units)[0]) <= 0.9:
      notes.append(Note.NOT_INDEPENDENT.say(collective=collective.name))
  if any(p.transfer_source == ONE_SIZE for p in points):
    notes.append(Note.ONE_SIZE.say())
  if sample.hosts > 1 and any(p.silent is None and p.ranks > sample.ranks for p in points):
    notes.append(Note.SAME_TIER.say())
  if any(p.method == TAIL for p in points):
    far = ", ".join(f"{p.ranks:,}" for p in points if p.method == TAIL)
    notes.append(Note.TAIL.say(ranks=far))
  return notes


# The forecast as a JSON document.

def to_json(found: Forecast, run: Run) -> dict[str, Any]:
  """Returns plain lists, dicts and scalars; seconds, and shares of one. Where it is silent, the
  values are null."""
  sample = found.sample
  return {
      "schema": SCHEMA, "run": run.id, "path": str(run.path), "ranks": sample.ranks,
      "hosts": sample.hosts, "steps": sample.steps, "level": LEVEL, "fabric": found.fabric,
      "recorded": {"step_time": found.recorded, "cv": found.recorded_cv,
                   "efficiency": found.efficiency},
      "model": {
          "units": sample.units, "ranks_of_unit": sample.unit, "blocks": sample.blocks,
          "collectives": [
              {"name": collective.name, "kind": collective.kind, "bytes": collective.size,
               "arrival": float(sample.arrival[i].mean()), "own_noise": noise.own_deviation,
               "common_noise": noise.shared_deviation, "lasting_differences": noise.offsets_spread,
               "transfer": float(sample.transfer[i].mean()), "floor": float(sample.floor[i])}
              for i, (collective, noise) in enumerate(
                  zip(sample.collectives, found.noises, strict=True))]},
      "forecasts": [_point(point) for point in found.points],
      "notes": [str(note) for note in found.notes], "note_codes": codes(found.notes)}


def _point(point: Point) -> dict[str, Any]:
  values = {name: value.to_json() if isinstance(value, Estimate) else value
            for name, value in point._asdict().items()}
  why = point.silent
  return {**values, "silent": None if why is None else str(why),
          "silent_code": None if why is None else str(why.code)}
