"""The cluster of the paper's Table 1, as far as a model can stand for it, at any number of nodes.

One job of N nodes, two ranks each, and a neighbour on the trunk they share. In units of one node's
undisturbed compute:

    transfer(N) = growth ((N - 1) / 63) ** power        what the job sends, which grows with the nodes it spans
    neighbour:    period ratio, sends `mass` of what the job sends, takes `claim` of the trunk while it does

Speed of each while both send: (1 - lost) min(1, 0.5 / claim). Fluids lose nothing where they share,
switches may: packets dropped and sent again, links held back for others' sake. In the fabric lab of
this repository nothing is lost (docs/interleaving.md); `lost` is assumed, and left out of one
search.

Compute varies by rank (normal, heavy-tailed), by host (one in sixteen is slower, throughout) and
for the whole job; other traffic comes and goes; pauses strike as measured. The couplings that
coordination can use are three, each with a switch: the neighbour (phase collisions), pauses that
could be aligned, early ranks that poll beside a late one of their node.
"""  # noqa: E501

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpace.simulation import noise
from jaxpace.simulation.job import Job

NODES = (4, 8, 16, 32, 64)
THROUGHPUT = {"baseline": (1024.0, 1980.0, 3600.0, 5800.0, 8200.0),
              "coordination": (1018.0, 1995.0, 3720.0, 6250.0, 9100.0)}
CV = {"baseline": (0.02, 0.04, 0.09, 0.15, 0.22), "coordination": (0.02, 0.03, 0.05, 0.07, 0.09)}
"""Table 1 of the paper: samples a second, and coefficient of variation of iteration time."""
PER_NODE = 2
BUCKETS = 2
WARMUP = 50
_BACKWARD = 2 / 3


class World(NamedTuple):
  """What is calibrated: float32 numbers, each with a leading axis where many worlds run at once."""

  jitter: Any  # deviation of a rank's compute
  heavy: Any  # scale of its Pareto extra, tail 3
  common: Any  # deviation of the whole job's compute
  slow: Any  # extra of one rank in every 32
  growth: Any  # transfer at 64 nodes, in units of compute
  power: Any  # of its growth with N - 1
  ratio: Any  # neighbour's period over the job's own at this N
  mass: Any  # neighbour's transfer over the job's
  claim: Any  # share of the trunk each takes at full speed
  lost: Any  # share of the trunk that nobody gets while both send
  begins: Any  # other traffic: probability to begin in a step
  length: Any  # mean steps
  load: Any  # share of the trunk
  polling: Any  # s lost a second that a neighbour rank polls
  step: Any  # s, one node's undisturbed compute; sets the size of measured pauses


class Couplings(NamedTuple):
  """Switches: 1 for on."""

  collisions: Any = 1.0  # jobs share the trunk
  polling: Any = 1.0
  aligned: Any = 0.0  # pauses of all ranks in one step: what aligned housekeeping does


ON, OFF = Couplings(), Couplings(0.0, 0.0, 0.0)
BOUNDS = {
    "jitter": (0.001, 0.05), "heavy": (0.0, 0.03), "common": (0.0, 0.05), "slow": (0.0, 0.1),
    "growth": (0.05, 1.6), "power": (0.6, 1.8), "ratio": (0.9, 1.25), "mass": (0.05, 1.5),
    "claim": (0.5, 1.0), "lost": (0.0, 0.6), "begins": (0.001, 0.5), "length": (1.0, 30.0),
    "load": (0.0, 0.7), "polling": (0.0, 0.6), "step": (0.1, 5.0)}
"""Ranges in which worlds are looked for."""


def transfer(world: World, nodes: int) -> Any:
  """[] in units of compute, all buckets together, on a quiet trunk."""
  return world.growth * ((nodes - 1) / 63.0) ** world.power


def alone(world: World, nodes: int) -> Any:
  """The job's step where nothing varies and nobody else is there, in units of compute."""
  exposed = jnp.maximum(transfer(world, nodes) / BUCKETS,
                        transfer(world, nodes) - _BACKWARD / BUCKETS)
  return 1.0 + exposed


def together(world: World, couplings: Couplings) -> Any:
  """[] speed of each job while both send, as a share of its own."""
  shared = jnp.minimum(np.float32(0.5) / world.claim, np.float32(1)) * (1 - world.lost)
  return jnp.where(jnp.asarray(couplings.collisions) > 0, shared, np.float32(1))


def job(world: World, nodes: int, pauses: tuple[float, float], couplings: Couplings) -> Job:
  """The paper's job at this size. `pauses`: of one in a step on each rank, and its seconds."""
  ranks = nodes * PER_NODE
  late = (jnp.arange(ranks) % 32 == 3).astype(jnp.float32) * world.slow
  chance, seconds = pauses
  return Job(
      forward=jnp.float32(1 - _BACKWARD), backward=jnp.float32(_BACKWARD), update=jnp.float32(0),
      gap=jnp.float32(0),
      transfers=jnp.full((BUCKETS,), 1 / BUCKETS, jnp.float32) * transfer(world, nodes),
      noise=(noise.Normal(world.jitter), noise.Heavy(world.heavy, np.float32(3)),
             noise.Common(world.common), noise.Slow(late),
             noise.Pauses(np.float32(chance), np.float32(seconds) / world.step,
                          jnp.asarray(couplings.aligned) > 0)),
      traffic=noise.Traffic(world.begins, world.length, world.load),
      polling=world.polling * couplings.polling)


def neighbour(world: World, nodes: int) -> Job:
  """A job on the same trunk: its period is `ratio` of this job's alone; it sends `mass` of what
  this one sends."""
  sends = world.mass * transfer(world, nodes)
  period = world.ratio * alone(world, nodes)
  zero = jnp.float32(0)
  return Job(forward=jnp.maximum(period - sends, 0.05 * period), backward=zero, update=zero,
             gap=zero, transfers=jnp.full((BUCKETS,), 1 / BUCKETS, jnp.float32) * sends,
             noise=(noise.Normal(world.jitter), noise.Common(world.common)))
