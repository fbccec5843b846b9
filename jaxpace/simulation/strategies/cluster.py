"""What strategies run on: ranks' compute with noise, links, servers; and what a strategy's messages
cost there."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core.fields import SettingsError
from jaxpace.simulation import allreduce
from jaxpace.simulation import noise as noises
from jaxpace.simulation.strategies.settings import Compressed, LocalSteps, ParameterServer, Strategy

_ONE = np.float32(1)
_LEAST = np.float32(0.05)
"""Compute never falls below this share of its mean, as in `jaxpace.simulation.job`."""
_FLOAT32, _INDEX, _SCALE = 4, 4, 4
"""Bytes of a dense element, of an element's position, and of the scale that goes with int8."""
_PASSES = {"fp16": 2.0, "int8": 4.0, "top_k": 8.0}


class Cluster(NamedTuple):
  """The numbers of a cluster, a pytree: any may be traced, and given a leading axis for
  `jax.vmap`."""

  compute: Any  # [] s, forward and backward
  update: Any = 0.0  # [] s
  noise: tuple[Any, ...] = ()  # components of `jaxpace.simulation.noise`
  gradient_bytes: Any = 0.0  # [] of a float32 gradient
  latency: Any = 0.0  # [] s a message
  rate: Any = math.inf  # [] B/s of each rank's link, each way
  server_rate: Any = math.inf  # [] B/s that a parameter server takes gradients in and applies them
  codec_rate: Any = math.inf  # [] B/s of a pass over a gradient that is encoded or decoded


def check(cluster: Cluster) -> Cluster:
  """Returns a cluster of plain numbers as it is.

  Raises:
    SettingsError: one of them is out of range.
  """
  for name in ("compute", "update", "gradient_bytes", "latency"):
    value = getattr(cluster, name)
    if not 0 <= float(value) < math.inf:
      raise SettingsError(f"{name}={value!r} must be a number from 0 up, and finite.")
  for name in ("rate", "server_rate", "codec_rate"):
    value = getattr(cluster, name)
    if not float(value) > 0:
      raise SettingsError(f"{name}={value!r} must be above 0 B/s; inf for no limit.")
  return cluster


class DrawnSteps(NamedTuple):
  """What ranks do by themselves, step by step: float32 s. K steps, R ranks."""

  compute: jax.Array  # [K, R]
  pauses: jax.Array  # [K, R] between steps
  caused: dict[str, jax.Array]  # [K, R] of the pauses, those with a cause

  def work(self, update: Any) -> jax.Array:
    """[K, R] s, all of it, the update included."""
    return self.compute + self.pauses + jnp.asarray(update, jnp.float32)


def draw(cluster: Cluster, key: jax.Array, ranks: int, steps: int, causes: tuple[str, ...] = (),
         together: int = 1
         ) -> DrawnSteps:
  """How long each rank is busy with each of its steps.

  The same key gives the same numbers whatever the strategy, so that strategies can be compared step
  by step.

  Args:
    cluster: what draws them.
    key: of the run.
    ranks: R.
    steps: K.
    causes, together: as for `jaxpace.simulation.noise.sample_causes`.
  """
  first, own = jax.random.split(key)
  states = noises.init(cluster.noise, first, ranks, causes, together)
  compute = jnp.asarray(cluster.compute, jnp.float32)

  def step(states: Any, number: jax.Array) -> tuple[Any, DrawnSteps]:
    share, pauses, caused, states = noises.sample_causes(cluster.noise, own, number, states, ranks,
                                                         causes, together)
    return states, DrawnSteps(compute * jnp.maximum(_ONE + share, _LEAST), pauses, caused)

  return jax.lax.scan(step, states, jnp.arange(steps, dtype=jnp.int32))[1]


class ExchangeCost(NamedTuple):
  """What a strategy's exchange costs, each time there is one."""

  seconds: Any  # [] s on a quiet fabric, encoding and decoding included
  bytes: Any  # [] sent by each rank


def messages(strategy: Strategy, cluster: Cluster, ranks: int) -> ExchangeCost:
  """What one exchange of a strategy costs.

  Dense gradients, and those of fp16 and int8, go round a ring: 2 (P - 1) messages of m / P bytes.
  Each rank sums the piece it owns of int8 gradients in float32 and encodes the sum again, so that
  the pieces stay small both ways; each carries a scale. top_k's gradients have different elements
  on every rank: all get all (P - 1 messages of the kept values and positions). With a parameter
  server a rank sends its gradient, and fetches parameters once it has been served: its wait for the
  server comes on top (`service`).
  """
  size = cluster.gradient_bytes
  beta: Any = _ONE / jnp.asarray(cluster.rate, jnp.float32)
  around = 2 * (ranks - 1) / ranks
  if isinstance(strategy, ParameterServer):
    return ExchangeCost(2 * cluster.latency + size * beta, 1.0 * size)
  if not isinstance(strategy, Compressed):
    return ExchangeCost(allreduce.ring(ranks, size, cluster.latency, beta), around * size)
  coded, wire = coding(strategy, size, cluster.codec_rate, ranks), wire_bytes(strategy, size, ranks)
  if strategy.codec == "top_k":
    return ExchangeCost((ranks - 1) * (cluster.latency + wire * beta) + coded, (ranks - 1) * wire)
  return ExchangeCost(allreduce.ring(ranks, wire, cluster.latency, beta) + coded, around * wire)


def wire_bytes(strategy: Compressed, size: Any, ranks: int) -> Any:
  """Bytes that stand for a float32 gradient of `size` bytes."""
  if strategy.codec == "top_k":
    # A dense element is as long as its position is: kept elements take twice their share.
    return strategy.keep * size * (_FLOAT32 + _INDEX) / _FLOAT32
  return size / 2 if strategy.codec == "fp16" else size / 4 + ranks * _SCALE


def coding(strategy: Compressed, size: Any, rate: Any, ranks: int) -> Any:
  """Seconds for which a rank encodes its gradient and decodes what it gets, passing over them at
  `rate` B/s."""
  if ranks < 2:
    return 0.0
  passes = _PASSES[strategy.codec] if strategy.passes is None else strategy.passes
  # Decoding of top_k adds up what P ranks have kept.
  more = (ranks - 1) * wire_bytes(strategy, size, ranks) if strategy.codec == "top_k" else 0.0
  return (passes * size + more) / jnp.asarray(rate, jnp.float32)


def service(strategy: ParameterServer, cluster: Cluster) -> jax.Array:
  """[] s for which the servers are busy with one gradient: no more than 1 / this are applied a
  second."""
  rate = jnp.asarray(cluster.server_rate, jnp.float32) * np.float32(strategy.servers)
  return jnp.asarray(cluster.gradient_bytes, jnp.float32) / rate


def bytes_per_step(strategy: Strategy, cluster: Cluster, ranks: int) -> float:
  """Bytes that each rank sends in a step, on average."""
  every = strategy.every if isinstance(strategy, LocalSteps) else 1
  return float(messages(strategy, cluster, ranks).bytes) / every
