"""What workers share that join without jaxpace, as a program does that knows nothing of it."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def join() -> None:
  """Joins the two processes that `jobs.pair` starts, over gloo."""
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], 2,
                             int(os.environ["JAX_PROCESS_ID"]))


def laid_out(value: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
  """An array over all processes, each of which has all of its values."""
  return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec),
                                      lambda place: value[place])


def train_step(w: jax.Array, x: jax.Array) -> jax.Array:
  """What is observed where only what is around it matters."""
  return w - np.float32(0.1) * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


def scaled_down(w: jax.Array, x: jax.Array) -> jax.Array:
  """What is instrumented there."""
  return w - np.float32(0.1) * jax.lax.pmean(x.mean() * w, "data")


def local(tree: Any) -> list[bytes]:
  """The bytes that this process has of an array or a tree of them."""
  return [np.asarray(shard.data).tobytes() for leaf in jax.tree.leaves(tree)
          for shard in leaf.addressable_shards]
