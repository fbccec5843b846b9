"""What the collectives of another number of ranks take."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxpace.costs.fabric_file import (
  ALGORITHMS,
  RING,
  TREE,
  Cost,
  Level,
  MeasuredFabric,
  coefficients,
)
from jaxpace.diagnosis.codes import Sentence, Silence
from jaxpace.diagnosis.forecast.sample import Sample
from jaxpace.trace.problems import plural

FITTED, ONE_SIZE, GIVEN = "fitted to the run", "one size: bounds", "fabric"


class Transfers(NamedTuple):
  """Transfers at a number of ranks."""

  point: np.ndarray  # [C] s
  draws: np.ndarray  # [D, C] s
  source: str


def new_tier(sample: Sample, ranks: int, per_host: int | None,
             fabric: MeasuredFabric | None) -> Sentence | None:
  """Says why transfers at `ranks` ranks can't be known, or None where they can."""
  if fabric is not None:
    here, there = fabric.level(sample.ranks), fabric.level(ranks)
    if here is None or there is None:
      top = fabric.levels[-1]
      return Sentence(Silence.BEYOND_FABRIC,
          f"{fabric.source} describes a fabric of {plural(top.ranks or 0, 'rank')} at most (level "
          f"'{top.name}'): what lies beyond was not measured.")
    kinds = {c.kind for c in sample.collectives}
    lacking = [level.name for level in (here, there) if not kinds <= set(level.costs)]
    if lacking:
      return Sentence(Silence.NO_COST,
          f"{fabric.source} has no cost of {', '.join(sorted(kinds))} at level '{lacking[0]}'.")
    return None
  own = math.ceil(sample.ranks / sample.hosts)
  hosts = math.ceil(ranks / (per_host or own))
  if sample.hosts == 1 and hosts > 1:
    return Sentence(Silence.NEW_TIER,
        f"With {plural(per_host or own, 'rank')} a host, {ranks:,} ranks need {hosts:,} hosts, and "
        "this run never left one: what lies between hosts was not measured. Give --fabric (from "
        "`jaxpace bench`), or --ranks-per-host if so many share a host.")
  return None


def transfers(sample: Sample, ranks: int, fabric: MeasuredFabric | None, algorithm: str | None,
              draws: int, random: np.random.Generator) -> Transfers:
  """Scales the recorded transfers to another number of ranks.

  What a transfer takes above its floor, contention, stays as it was recorded. The floor grows as α
  and β say: of a fabric that was measured or described; else fitted to the run's own collectives,
  if they differ in size; else, from one size alone, only bounds are known: from all of it bandwidth
  to all of it latency, in a tree or a ring.

  Args:
    sample: the run.
    ranks: ranks of the forecast job.
    fabric: from `jaxpace bench`, or described.
    algorithm: "ring", "tree" or "doubling"; None leaves it open where nothing says.
    draws: draws of what is not known for sure.
    random: where they come from.
  """
  recorded = sample.transfer.mean(axis=1)
  contention = np.maximum(recorded - sample.floor, 0.0)
  floor = np.minimum(sample.floor, recorded)
  if ranks < 2:
    return Transfers(np.zeros_like(recorded), np.zeros((draws, len(recorded))), "no other rank")
  if ranks == sample.ranks:
    return Transfers(recorded, np.broadcast_to(recorded, (draws, len(recorded))), "as recorded")
  if fabric is not None:
    here, there = fabric.level(sample.ranks), fabric.level(ranks)
    assert here is not None and there is not None
    return _given(sample, recorded, ranks, here, there, draws, random)
  fitted = _fit(sample, floor, algorithm or RING)
  if fitted is not None:
    ratio = np.array([_model(fitted, c.kind, algorithm or RING, ranks, c.size or 0)
                      / max(_model(fitted, c.kind, algorithm or RING, sample.ranks, c.size or 0),
                            1e-30)
                      for c in sample.collectives])
    return Transfers(contention + floor * ratio,
                     np.broadcast_to(contention + floor * ratio, (draws, len(recorded))), FITTED)
  latency = random.random((draws, 1))
  algorithms = [algorithm] if algorithm in ALGORITHMS else [TREE, RING]
  chosen = random.integers(0, len(algorithms), (draws, 1))
  growth = np.array(
      [[[coefficients(c.kind, name, ranks)[i] / coefficients(c.kind, name, sample.ranks)[i]
         # [algorithms, C, 2]
         for i in (0, 1)] for c in sample.collectives] for name in algorithms])
  drawn = growth[chosen[:, 0]]  # [D, C, 2]
  ratio = latency * drawn[..., 0] + (1 - latency) * drawn[..., 1]
  point = 0.5 * growth[0, :, 0] + 0.5 * growth[0, :, 1]
  return Transfers(contention + floor * point, contention + floor * ratio, ONE_SIZE)


def _given(sample: Sample, recorded: np.ndarray, ranks: int, here: Level, there: Level, draws: int,
           random: np.random.Generator) -> Transfers:
  """As recorded, and what the fabric takes more at the new size than at the old one."""
  points, drawn = [], []
  for c, collective in enumerate(sample.collectives):
    kind, size = collective.kind, float(collective.size or 0)
    costs = here.costs[kind], there.costs[kind]
    before, after = (cost.seconds(kind, p, size)
                     for cost, p in zip(costs, (sample.ranks, ranks), strict=True))
    points.append(max(recorded[c] + after - before, 0.0))
    # One error for both where they are of one level: α off by a tenth is off at both sizes.
    alpha, beta = random.standard_normal((2, draws))
    other = (alpha, beta) if here is there else random.standard_normal((2, draws))
    old = _drawn(costs[0], kind, sample.ranks, size, alpha, beta)
    new = _drawn(costs[1], kind, ranks, size, *other)
    drawn.append(np.maximum(recorded[c] + new - old, 0.0))
  return Transfers(np.array(points), np.stack(drawn, axis=1), GIVEN)


def _drawn(cost: Cost, kind: str, ranks: int, size: float, alpha: np.ndarray,
           beta: np.ndarray) -> np.ndarray:
  a, b = coefficients(kind, cost.algorithm, ranks)
  return (a * np.maximum(cost.alpha.estimate + cost.alpha.deviation * alpha, 0.0)
          + b * size * np.maximum(cost.beta.estimate + cost.beta.deviation * beta, 0.0))


def _fit(sample: Sample, floor: np.ndarray, algorithm: str) -> tuple[float, float] | None:
  """α and β of the run's own collectives; None unless there are sizes of which one is 4 times
  another."""
  known = [(c, floor[i]) for i, c in enumerate(sample.collectives) if c.size and floor[i] > 0]
  sizes = [c.size or 0 for c, _ in known]
  if len(known) < 2 or max(sizes) < 4 * min(sizes):
    return None
  rows = (np.array([coefficients(c.kind, algorithm, sample.ranks) for c, _ in known])
          * np.array([[1, s] for s in sizes]))
  seconds = np.array([s for _, s in known])
  solution, *_ = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(known)), rcond=None)
  if solution.min() < 0:  # one of the two alone, the better
    alone = [(float(((rows[:, i] / seconds).sum()) / ((rows[:, i] / seconds)**2).sum()), i)
             for i in (0, 1)]
    errors = [float(((x * rows[:, i] / seconds - 1)**2).sum()) for x, i in alone]
    value, i = alone[int(np.argmin(errors))]
    solution = np.array([value, 0.0] if i == 0 else [0.0, value])
  return float(solution[0]), float(solution[1])


def _model(fitted: tuple[float, float], kind: str, algorithm: str, ranks: int, size: int) -> float:
  a, b = coefficients(kind, algorithm, ranks)
  return a * fitted[0] + b * size * fitted[1]
