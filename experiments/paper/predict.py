"""What coordination does in calibrated worlds: the live pacers, each coupling by itself, and the null."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpace
from experiments.paper import paced, quick
from experiments.paper import world as worlds
from jaxpace.core.types import Pacer


class Arm(NamedTuple):
  """One way to run the same worlds."""

  about: str
  couplings: worlds.Couplings  # while coordinated
  bare: worlds.Couplings  # of the run it is compared with
  paced: bool
  both: bool = False  # whether the neighbour is paced too


ON, OFF, ALIGNED = worlds.ON, worlds.OFF, worlds.Couplings(aligned=1.0)
ARMS = {
    "all": Arm("all: early ranks paced, phase shifted, pauses aligned", ALIGNED, ON, True),
    "both": Arm("the same, the neighbour coordinated too", ALIGNED, ON, True, True),
    "pacers": Arm("pacers alone, pauses left as they come", ON, ON, True),
    "aligned": Arm("pauses aligned, no pacer", ALIGNED, ON, False),
    "null": Arm("the null: every coupling off, pacers on", OFF, OFF, True),
}


def coordination(key: int) -> Pacer:
  """The pacers of the table, as they come but for a longest delay in units of compute."""
  return jaxpace.chain(jaxpace.pace_early_ranks(max_delay=0.5),
                       jaxpace.interleave_jobs(max_delay=3.0, key=key, slots=worlds.BUCKETS))


class Predicted(NamedTuple):
  """Of W worlds at one size."""

  gain: np.ndarray  # [W] throughput with over without, less 1
  cv: np.ndarray  # [W] with
  bare_cv: np.ndarray  # [W] without
  bare_mean: np.ndarray  # [W] mean step without, in units of compute
  cost: np.ndarray  # [W] what delays held the step back, as a share of it
  delay: np.ndarray  # [W] mean delay, as a share of the step


def predict(nodes: int, made: worlds.World, *, steps: int, seeds: int, pauses: tuple[float, float], key: jax.Array,
            arms: Sequence[str], say: Callable[[str], None]) -> dict[str, Predicted]:
  """Runs worlds at one size under every arm, on the same draws.

  Args:
    nodes: N.
    made: worlds, a leading axis.
    steps: of each run.
    seeds: runs of each.
    pauses: of one in a step on each rank, and its seconds.
    key: of the draws.
    arms: names of `ARMS`.
    say: told what is being run.
  """
  moments = quick.simulator(steps, seeds, pauses, [nodes])
  simulators: dict[bool, paced.Simulate] = {}

  @functools.cache
  def bare(couplings: worlds.Couplings) -> paced.Outcome:
    mean, cv = moments(key, made, couplings)
    return paced.Outcome(mean[:, 0], cv[:, 0], np.zeros(len(mean)), np.zeros(len(mean)))

  def run(arm: Arm) -> paced.Outcome:
    if not arm.paced:
      return bare(arm.couplings)
    if arm.both not in simulators:
      simulators[arm.both] = paced.simulator(
          nodes, steps, seeds, pauses, coordination(1), coordination(2) if arm.both else None)
    done = simulators[arm.both](key, made, jax.tree.map(jnp.float32, arm.couplings))
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), done)

  result = {}
  for name in arms:
    say(f"{nodes:,} nodes, {name}")
    without, having = bare(ARMS[name].bare), run(ARMS[name])
    result[name] = Predicted(without.mean / having.mean - 1, having.cv, without.cv, without.mean, having.cost,
                             having.delay)
  return result
