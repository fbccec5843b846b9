"""Runs a scenario: every job's steps, part by part, so that memory stays bounded and progress can
be shown.

Failures: a segment is the work from one checkpoint to the next, the checkpoint included. A failure
throws the job back to the last checkpoint; it restarts and tries the segment again. Failures come
at a constant rate and none strikes during a restart: Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps" (2006).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxpace.core.types import Pacer
from jaxpace.simulation.job import Shape, Steps, simulation
from jaxpace.simulation.jobs import LinkShares, several
from jaxpace.simulation.settings import Failures, JobSettings, Scenario
from jaxpace.simulation.sharing import Stretch


def survive(step_times: np.ndarray, failures: Failures, seed: int
            ) -> tuple[dict[str, float], np.ndarray]:
  """Plays a run's steps, [K] s, with failures. A segment that is tried again takes as long as the
  first time: the steps are the same.

  Returns seconds that the run takes, `elapsed`, and what of it are steps that lasted, checkpoints
  that were completed, what failures threw away of both, and restarts; and the number of failures.
  And [G] s that each segment took until it was done.
  """
  steps = np.asarray(step_times, np.float64)
  begins = np.arange(0, len(steps), failures.every)
  work = np.add.reduceat(steps, begins) if len(steps) else np.zeros(0)
  random = np.random.default_rng(seed)
  need = work + failures.checkpoint
  # Attempts that fail before the one that doesn't: geometric, since failures forget. How long each:
  # exponential, cut.
  chance = -np.expm1(-failures.rate * need)
  count = (random.geometric(np.clip(1 - chance, 1e-12, 1)) - 1 if failures.rate > 0
           else np.zeros(len(need), np.int64))
  which = np.repeat(np.arange(len(need)), count)
  until = (-np.log1p(-random.random(len(which)) * chance[which]) / failures.rate if len(which)
           else np.zeros(0))
  wasted = np.bincount(which, until, minlength=len(need))
  segments = need + wasted + count * failures.restart
  return {"elapsed": float(segments.sum()), "work": float(work.sum()),
          "checkpoints": len(need) * failures.checkpoint, "lost": float(wasted.sum()),
          "restarts": float(count.sum()) * failures.restart, "failures": int(count.sum())}, segments


_PART_CELLS = 1 << 21
"""Rank-steps times buckets that are kept at once; about 100 bytes each."""
_MOST_STRETCHES = 64
"""Stretches of a collective at most, each with its own use of shared links."""


def run(scenario: Scenario) -> Iterator[tuple[int, Steps]]:
  """Simulates all jobs; the same seed gives the same numbers, however the run is cut. Yields the
  number of a job and its next steps, kept by rank, in numpy.

  A job alone on its links is simulated by itself, in parts. Jobs that share links run together, in
  one piece.
  """
  for group in _together(scenario):
    if len(group) == 1:
      yield from _alone(scenario, group[0])
    else:
      yield from _shared(scenario, group)


def alone(settings: JobSettings) -> float:
  """Seconds per step takes where nothing varies, nothing is paced and no other job is there."""
  job, overlap = settings.job, settings.shape.overlap
  begin = float(job.update) + float(job.gap) + float(job.forward)
  leave = 0.0
  for bucket in range(settings.buckets):
    done = (bucket + 1) / settings.buckets if overlap else 1.0
    leave = max(leave, begin + done * float(job.backward)) + float(job.transfers[bucket])
  return leave


def _together(scenario: Scenario) -> list[list[int]]:
  """Jobs by whether they share a link, directly or through others."""
  groups: list[list[int]] = []
  for index, job in enumerate(scenario.jobs):
    touching = [g for g in groups if scenario.shared and any(
        ((job.load.usage > 0) & (scenario.jobs[o].load.usage > 0)).any() for o in g)]
    merged = [*itertools.chain.from_iterable(touching), index]
    groups = [*(g for g in groups if g not in touching), merged]
  return sorted(sorted(group) for group in groups)


def _alone(scenario: Scenario, index: int) -> Iterator[tuple[int, Steps]]:
  settings = scenario.jobs[index]
  total = min(scenario.steps, settings.leaves or scenario.steps)
  init, advance = _compiled(settings.shape, settings.pacer, settings.buckets, scenario.max_delay)
  key = jax.random.fold_in(jax.random.key(scenario.seed), index)
  state = init(key, settings.job)
  length = max(1, min(total, _PART_CELLS // (settings.shape.ranks * settings.buckets)))
  done = 0
  while done < total:
    count = min(length, total - done)
    state, steps = advance(key, settings.job, state, count)
    done += count
    yield index, jax.tree.map(np.asarray, steps)


@functools.lru_cache(maxsize=8)
def _compiled(shape: Shape, pacer: Pacer | None, buckets: int,
              max_delay: float) -> tuple[Any, Any]:
  """Jobs that differ in numbers only share a compiled program."""
  init, run = simulation(shape, pacer, buckets=buckets, max_delay=max_delay, by_rank=True)
  return init, jax.jit(run, static_argnums=3)


def _shared(scenario: Scenario, group: list[int]) -> Iterator[tuple[int, Steps]]:
  jobs = [scenario.jobs[index] for index in group]
  plan = several([j.shape for j in jobs], [j.pacer for j in jobs],
                 buckets=[j.buckets for j in jobs],
                 steps=scenario.steps, max_delay=scenario.max_delay, by_rank=True)
  last = [j.leaves or 2**30 for j in jobs]
  key = jax.random.fold_in(jax.random.key(scenario.seed), group[0])
  histories = jax.jit(plan)(
      key, [j.job for j in jobs], shares(jobs),
      np.asarray([j.start for j in jobs], np.float32), np.asarray(last, np.int32))
  for index, steps in zip(group, histories, strict=True):
    kept: Any = jax.tree.map(np.asarray, steps)
    count = int(np.isfinite(kept.step_time).sum())
    yield index, jax.tree.map(lambda values, n=count: values[:n], kept)


def shares(jobs: list[JobSettings]) -> LinkShares:
  """What jobs want of the links that two or more of them use, stretch by stretch of their
  collectives.

  Where jobs compete, each of their messages gets the same: a job's weight is its messages on its
  busiest shared link, over the share of that link it takes at full speed.
  """
  common = (np.stack([j.load.usage for j in jobs]) > 0).sum(axis=0) > 1
  if not common.any():
    one = np.ones((len(jobs), 1), np.float32)
    return LinkShares(np.zeros((len(jobs), 1, 1), np.float32), one, one)
  each = [_merged([Stretch(s.seconds, s.usage[common], s.flows[common]) for s in j.load.stretches])
          for j in jobs]
  length = max(map(len, each))
  usage = np.zeros((len(jobs), length, int(common.sum())))
  weights, parts = np.ones((len(jobs), length)), np.zeros((len(jobs), length))
  for j, own in enumerate(each):
    total = sum(piece.seconds for piece in own)
    parts[j, 0] = 1.0  # of a job that sends nothing
    for p, piece in enumerate(own):
      busiest = piece.usage.argmax()
      usage[j, p], parts[j, p] = piece.usage, piece.seconds / total
      if piece.usage[busiest] > 0:
        weights[j, p] = piece.flows[busiest] / piece.usage[busiest]
  # Many links look alike: one of each will do.
  columns = np.unique(usage.reshape(-1, usage.shape[2]), axis=1).reshape(len(jobs), length, -1)
  return LinkShares(*(values.astype(np.float32) for values in (columns, weights, parts)))


def _alike(one: Stretch, other: Stretch) -> bool:
  return (np.allclose(one.usage, other.usage, rtol=1e-6, atol=1e-9)
          and bool((one.flows == other.flows).all()))


def _joined(one: Stretch, other: Stretch) -> Stretch:
  seconds = one.seconds + other.seconds
  mean = (one.usage * one.seconds + other.usage * other.seconds) / seconds
  return Stretch(seconds, mean, np.maximum(one.flows, other.flows))


def _merged(pieces: list[Stretch]) -> list[Stretch]:
  """Stretches that take the same of the shared links as the one before are one with it.

  Where that leaves too many, the shortest are joined to the shorter of their neighbours.
  """
  kept: list[Stretch] = []
  for piece in pieces:
    if kept and _alike(kept[-1], piece):
      kept[-1] = _joined(kept[-1], piece)
    else:
      kept.append(piece)
  while len(kept) > _MOST_STRETCHES:
    at = min(range(len(kept) - 1), key=lambda i: kept[i].seconds + kept[i + 1].seconds)
    kept[at:at + 2] = [_joined(kept[at], kept[at + 1])]
  return kept


class Adding:
  """Adds up a job's parts as they come, without keeping them."""

  def __init__(self) -> None:
    self._step_times: list[np.ndarray] = []
    self._sums = dict.fromkeys(("transfer", "earliness", "delay", "cost"), 0.0)

  def add(self, steps: Steps) -> None:
    """Takes in the next part of the job."""
    self._step_times.append(np.asarray(steps.step_time, np.float64))
    self._sums["transfer"] += float(np.sum(steps.transfers, dtype=np.float64))
    self._sums["earliness"] += float(np.sum(steps.earliness, dtype=np.float64))
    self._sums["delay"] += float(np.sum(np.mean(steps.delay, axis=1, dtype=np.float64)))
    self._sums["cost"] += float(np.sum(steps.cost, dtype=np.float64))

  def summary(self, settings: JobSettings, seed: int) -> dict[str, Any]:
    """Returns the job in figures, of all parts so far, seconds: of a step its mean, median and 99th
    percentile, what it would take alone without noise and pacing, means of its transfers in all, of
    the ranks' earliness at the first bucket and of their delays, and by how much these held it
    back; with failures, what became of the run."""
    step_times = np.concatenate(self._step_times)
    mean, count = float(step_times.mean()), len(step_times)
    figures: dict[str, Any] = {
        "steps": count, "mean": mean, "median": float(np.median(step_times)),
        "p99": float(np.quantile(step_times, 0.99)),
        "cv": float(step_times.std() / mean) if mean else 0.0, "alone": alone(settings),
        **{name: total / count for name, total in self._sums.items()}}
    if settings.failures:
      figures["failures"], _ = survive(step_times, settings.failures, seed)
    return figures
