"""What coordination does in calibrated worlds: the live pacers, each coupling by itself, and the null."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpace
from experiments.paper import world as worlds
from jaxpace.core.types import Pacer


class Arm(NamedTuple):
  """One way to run the same worlds."""

  about: str
  couplings: worlds.Couplings  # while coordinated
  bare: worlds.Couplings  # of the run it is compared with
  paced: bool
  both: bool = False  # whether the neighbour is paced too


ON, OFF = worlds.Couplings(), worlds.Couplings(0.0, 0.0, 0.0)
ARMS = {
    "all": Arm("early ranks paced, phase shifted, pauses aligned", worlds.Couplings(aligned=1.0), ON, True),
    "both": Arm("the same, the neighbour coordinated too", worlds.Couplings(aligned=1.0), ON, True, True),
    "pacers": Arm("pacers alone, pauses left as they come", ON, ON, True),
    "aligned": Arm("pauses aligned, no pacer", worlds.Couplings(aligned=1.0), ON, False),
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
            arms: list[str], say: Callable[[str], None]) -> dict[str, Predicted]:
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
  simulators: dict[Any, worlds.Simulate] = {}

  def run(paced: bool, both: bool, couplings: worlds.Couplings) -> worlds.Outcome:
    if (paced, both) not in simulators:
      simulators[paced, both] = worlds.simulator(
          nodes, steps, seeds, pauses, coordination(1) if paced else None, coordination(2) if both else None)
    done = simulators[paced, both](key, made, jax.tree.map(jnp.float32, couplings))
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), done)

  bare: dict[worlds.Couplings, worlds.Outcome] = {}
  result = {}
  for name in arms:
    arm = ARMS[name]
    say(f"{nodes:,} nodes, {name}")
    if arm.bare not in bare:
      bare[arm.bare] = run(False, False, arm.bare)
    without, having = bare[arm.bare], run(arm.paced, arm.both, arm.couplings)
    result[name] = Predicted(without.mean / having.mean - 1, having.cv, without.cv, without.mean, having.cost,
                             having.delay)
  return result
