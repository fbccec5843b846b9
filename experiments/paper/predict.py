"""What coordination does in calibrated worlds: the live pacers, each coupling by itself, and the
null."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpace
from experiments.paper import paced, quick
from experiments.paper import world as worlds
from jaxpace.core.types import Pacer

BATCH = 12


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


def predict(nodes: int, made: worlds.World, *, steps: int, seeds: int, pauses: tuple[float, float],
            key: jax.Array, arms: Sequence[str],
            say: Callable[[str], None]) -> dict[str, Predicted]:
  """Runs worlds at one size under every arm, on the same draws.

  Args:
    nodes: N.
    made: worlds, a leading axis.
    steps: of each run.
    seeds: runs of each.
    pauses: of one in a step on each rank, and its seconds.
    key: of the draws, the same for every world.
    arms: names of `ARMS`.
    say: told what is being run.
  """
  moments = quick.simulator(steps, seeds, pauses, [nodes])

  @functools.cache
  def simulator(both: bool) -> paced.Simulate:
    return paced.simulator(nodes, steps, seeds, pauses, coordination(1),
                           coordination(2) if both else None)

  def bare(couplings: worlds.Couplings, part: worlds.World) -> paced.Outcome:
    mean, cv = moments(key, part, couplings)
    return paced.Outcome(mean[:, 0], cv[:, 0], np.zeros(len(mean)), np.zeros(len(mean)))

  def run(arm: Arm, part: worlds.World) -> Predicted:
    without = bare(arm.bare, part)
    having = (bare(arm.couplings, part) if not arm.paced
              else simulator(arm.both)(key, part, jax.tree.map(jnp.float32, arm.couplings)))
    mean, cv, cost, delay = (np.asarray(leaf, np.float64) for leaf in having)
    return Predicted(without.mean / mean - 1, cv, without.cv, without.mean, cost, delay)

  result = {}
  for name in arms:
    say(f"{nodes:,} nodes, {name}")
    done = [run(ARMS[name], part) for part in _batches(made)]
    result[name] = Predicted(*(np.concatenate(columns)[:len(made.jitter)]
                               for columns in zip(*done, strict=True)))
  return result


def _batches(made: worlds.World) -> Iterator[worlds.World]:
  """`BATCH` worlds at a time, the last one repeated: one shape, compiled once, however many worlds
  there are."""
  count = len(made.jitter)
  for begin in range(0, count, BATCH):
    place = np.minimum(np.arange(begin, begin + BATCH), count - 1)
    yield jax.tree.map(lambda leaf, place=place: leaf[place], made)
