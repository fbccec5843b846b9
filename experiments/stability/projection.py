"""What a synchronisation policy would cost, and the choice of one, without simulating the run.

Warm steps are drawn independently of each other, as many as it takes to know their mean; failures
and checkpoints by Daly's closed form. What is left out: memory from step to step, cold starts, and
work after a restart that is cooler.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.stability.job import Machine, Policy, ideal, pausing, transfer
from jaxpace.simulation.failures import Failures, best_interval, expected


class Trouble(NamedTuple):
  """Failures and what they cost. Seconds."""

  mtbf: float  # of one node
  node: int  # accelerators of a node
  checkpoint: float
  restart: float


class Projected(NamedTuple):
  """A policy, and what it is expected to cost."""

  policy: Policy
  step: float  # s, mean
  cost: float  # expected s a useful step over those of an undisturbed one


def failure_rate(machine: Machine, groups: int, trouble: Trouble) -> float:
  """Failures a second of the whole job."""
  return groups * machine.group / trouble.node / trouble.mtbf


@functools.lru_cache(maxsize=64)
def warm_step(machine: Machine, groups: int, policy: Policy, draws: int, seed: int = 0) -> float:
  """Mean seconds of a step once the job is warm."""
  random = np.random.default_rng(seed)
  every, shape = policy.local, (groups, machine.group)
  total = 0.0
  for _ in range(draws):
    level = (machine.drift * np.maximum(1 + machine.spread * random.standard_normal(shape), 0)
             + machine.wander * random.standard_normal(shape))
    jitter = (machine.jitter * machine.barriers**0.5
              * random.standard_normal((machine.barriers * every, *shape)))
    share = (jitter + level).max(axis=2).mean(axis=0)
    struck = (random.random((every, 1 if policy.aligned else groups))
              < pausing(machine, policy.aligned))
    busy = every * machine.compute * (1 + share) + machine.pause * struck.sum(axis=0)
    total += float(busy.max()) / every
  return total / draws + machine.gap + transfer(machine, groups) / every


def project(machine: Machine, groups: int, policy: Policy, trouble: Trouble,
            draws: int = 32) -> Projected:
  """Expected cost of a policy; an interval of 0 is replaced by Young's, for this size."""
  step = warm_step(machine, groups, policy._replace(interval=0.0), draws)
  rate = failure_rate(machine, groups, trouble)
  interval = policy.interval or best_interval(trouble.checkpoint, 1 / rate)
  # checkpoints fall between averages
  interval = max(1, round(interval / step / policy.local)) * step * policy.local
  took = expected(interval, Failures(rate, 1, trouble.checkpoint, trouble.restart))
  return Projected(policy._replace(interval=interval), step,
                   took / interval * step / ideal(machine))


def choose(machine: Machine, groups: int, candidates: Sequence[Policy], trouble: Trouble,
           draws: int = 32) -> Projected:
  """The candidate with the lowest projected cost."""
  return min((project(machine, groups, policy, trouble, draws) for policy in candidates),
             key=lambda p: p.cost)
