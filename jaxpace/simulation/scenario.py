"""Runs a scenario: every job's steps, part by part, so that memory stays bounded and progress can be shown."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpace.core.types import Pacer
from jaxpace.simulation.failures import Survived, survive
from jaxpace.simulation.job import Shape, Simulation, Steps, simulation
from jaxpace.simulation.jobs import Shares, several
from jaxpace.simulation.settings import JobSettings, Scenario
from jaxpace.simulation.strategies.cluster import messages, service
from jaxpace.simulation.strategies.own import OwnSteps, play_own
from jaxpace.simulation.strategies.settings import BoundedStaleness, ParameterServer

_PART_CELLS = 1 << 21
"""Rank-steps times buckets that are kept at once; about 100 bytes each."""


class Part(NamedTuple):
  """Some steps of one job."""

  job: int
  steps: Steps | OwnSteps  # kept by rank, numpy
  done: int  # steps of the job so far, these included


class Summary(NamedTuple):
  """One job in figures. Seconds."""

  steps: int
  mean: float
  median: float
  p99: float
  cv: float
  alone: float  # mean step without noise, pacing and other jobs
  transfer: float  # mean, all buckets
  earliness: float  # mean over ranks and steps, at the first bucket; of ranks that go their own ways, any waiting
  delay: float  # mean over ranks and steps
  cost: float  # mean L = max(A + d) - max(A)
  survived: Survived | None


def run(scenario: Scenario) -> Iterator[Part]:
  """Simulates all jobs; the same seed gives the same numbers, however the run is cut.

  A job alone on its links is simulated by itself, in parts. Jobs that share links run together, in one piece.
  """
  together = _together(scenario)
  for group in together:
    if scenario.jobs[group[0]].alone:
      yield _own(scenario, group[0])
    elif len(group) == 1:
      yield from _alone(scenario, group[0])
    else:
      yield from _shared(scenario, group)


def summarise(settings: JobSettings, step_times: np.ndarray, means: dict[str, float], seed: int) -> Summary:
  """Adds a job up.

  Args:
    settings: of the job.
    step_times: [K] s.
    means: `transfer`, `earliness`, `delay`, `cost`: mean seconds a step.
    seed: of failures.
  """
  mean = float(step_times.mean())
  return Summary(
      len(step_times), mean, float(np.median(step_times)), float(np.quantile(step_times, 0.99)),
      float(step_times.std() / mean) if mean else 0.0, alone(settings), means["transfer"], means["earliness"],
      means["delay"], means["cost"],
      survive(step_times, settings.failures, seed) if settings.failures else None)


def _own_summary(settings: JobSettings, own: OwnSteps) -> Summary:
  """Of ranks that go their own ways: a step's mean is that in which as many gradients are made as there are ranks."""
  known, lengths = own.known(), own.lengths()
  busy = (own.compute + own.gap)[known] + float(settings.job.update)
  exchange = exchange_seconds(settings)
  elapsed = float(own.end[known].max())
  mean = elapsed * settings.shape.ranks / int(own.taken.sum())
  return Summary(int(own.taken.max()), mean, float(np.median(lengths)), float(np.quantile(lengths, 0.99)),
                 float(lengths.std() / lengths.mean()), alone(settings), exchange,
                 float(np.mean(lengths - busy) - exchange), 0.0, 0.0, None)


def exchange_seconds(settings: JobSettings) -> float:
  """s in which a rank that goes its own way sends its gradient and gets parameters, were it the only one."""
  if settings.alone is not None and isinstance(settings.strategy, ParameterServer):
    sent = messages(settings.strategy, settings.alone, settings.shape.ranks).seconds
    return float(sent) + float(service(settings.strategy, settings.alone))
  return float(settings.job.transfers.sum())


def alone(settings: JobSettings) -> float:
  """Seconds a step takes where nothing varies, nothing is paced and no other job is there."""
  job, overlap = settings.job, settings.shape.overlap
  if settings.alone is not None:
    busy = float(job.update) + float(job.gap) + float(job.forward) + float(job.backward)
    return busy + exchange_seconds(settings)
  local = settings.shape.local
  begin = float(job.update) + float(job.gap) + local * float(job.forward)
  leave = 0.0
  for bucket in range(settings.buckets):
    done = (bucket + 1) / settings.buckets if overlap else 1.0
    leave = max(leave, begin + done * local * float(job.backward)) + float(job.transfers[bucket])
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


def _key(scenario: Scenario) -> jax.Array:
  return jax.random.key(scenario.seed)


def _alone(scenario: Scenario, index: int) -> Iterator[Part]:
  settings = scenario.jobs[index]
  total = min(scenario.steps, settings.leaves or scenario.steps) // settings.shape.local
  plan, advance = _compiled(settings.shape, settings.pacer, settings.buckets, scenario.max_delay)
  key = jax.random.fold_in(_key(scenario), index)
  state = plan.init(key, settings.job)
  length = max(1, min(total, _PART_CELLS // (settings.shape.ranks * settings.buckets)))
  done = 0
  while done < total:
    count = min(length, total - done)
    state, steps = advance(key, settings.job, state, count)
    done += count
    yield Part(index, jax.tree.map(np.asarray, steps), done)


@functools.lru_cache(maxsize=8)
def _compiled(shape: Shape, pacer: Pacer | None, buckets: int, max_delay: float) -> tuple[Simulation, Any]:
  """Jobs that differ in numbers only share a compiled program."""
  plan = simulation(shape, pacer, buckets=buckets, max_delay=max_delay, by_rank=True)
  return plan, jax.jit(plan.run, static_argnums=3)


def _own(scenario: Scenario, index: int) -> Part:
  settings = scenario.jobs[index]
  assert settings.alone is not None
  assert isinstance(settings.strategy, (BoundedStaleness, ParameterServer))
  total = min(scenario.steps, settings.leaves or scenario.steps)
  shape, key = settings.shape, jax.random.fold_in(_key(scenario), index)
  return Part(index, play_own(settings.strategy, settings.alone, float(settings.job.transfers.sum()),
                              float(settings.job.gap), key, shape.ranks, total, shape.causes, shape.per_process), total)


def _shared(scenario: Scenario, group: list[int]) -> Iterator[Part]:
  jobs = [scenario.jobs[index] for index in group]
  plan = several([j.shape for j in jobs], [j.pacer for j in jobs], buckets=[j.buckets for j in jobs],
                 steps=[scenario.steps // j.shape.local for j in jobs], max_delay=scenario.max_delay, by_rank=True)
  last = [max(j.leaves // j.shape.local, 1) if j.leaves else 2**30 for j in jobs]
  histories = jax.jit(plan.run)(
      jax.random.fold_in(_key(scenario), group[0]), [j.job for j in jobs], shares(jobs),
      np.asarray([j.start for j in jobs], np.float32), np.asarray(last, np.int32))
  for index, steps in zip(group, histories, strict=True):
    kept: Any = jax.tree.map(np.asarray, steps)
    count = int(np.isfinite(kept.step_time).sum())
    yield Part(index, jax.tree.map(lambda values, n=count: values[:n], kept), count)


def shares(jobs: list[JobSettings]) -> Shares:
  """What jobs want of the links that two or more of them use.

  Where jobs compete, each of their messages gets the same: a job's weight is its messages on its busiest shared link,
  over the share of that link it takes at full speed.
  """
  usage = np.stack([j.load.usage for j in jobs])
  common = (usage > 0).sum(axis=0) > 1
  if not common.any():
    return Shares(np.zeros((len(jobs), 1), np.float32), np.ones(len(jobs), np.float32))
  usage = usage[:, common]
  flows = np.stack([j.load.flows for j in jobs])[:, common]
  busiest = usage.argmax(axis=1)
  each = np.arange(len(jobs))
  top = usage[each, busiest]
  weights = np.where(top > 0, flows[each, busiest] / np.where(top > 0, top, 1), 1.0)
  columns = np.unique(usage, axis=1)  # many links look alike: one of each will do
  return Shares(columns.astype(np.float32), weights.astype(np.float32))


class Adding:
  """Adds up a job's parts as they come, without keeping them."""

  def __init__(self) -> None:
    self._step_times: list[np.ndarray] = []
    self._sums = dict.fromkeys(("transfer", "earliness", "delay", "cost"), 0.0)
    self._own: OwnSteps | None = None

  def add(self, steps: Steps | OwnSteps) -> None:
    """Takes in the next part of the job."""
    if isinstance(steps, OwnSteps):
      self._own = steps
      return
    self._step_times.append(np.asarray(steps.step_time, np.float64))
    self._sums["transfer"] += float(np.sum(steps.transfers, dtype=np.float64))
    self._sums["earliness"] += float(np.sum(steps.earliness, dtype=np.float64))
    self._sums["delay"] += float(np.sum(np.mean(steps.delay, axis=1, dtype=np.float64)))
    self._sums["cost"] += float(np.sum(steps.cost, dtype=np.float64))

  def summary(self, settings: JobSettings, seed: int) -> Summary:
    """Returns the job in figures, of all parts so far."""
    if self._own is not None:
      return _own_summary(settings, self._own)
    step_times = np.concatenate(self._step_times)
    return summarise(settings, step_times, {name: total / len(step_times) for name, total in self._sums.items()}, seed)
