"""Steps traced to flat programs, for tests of the order of evaluation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.instrumentation import program
from tests.instrumentation.running import P, mesh_of


def flat(step: Any, *arguments: Any) -> program.Program:
  """The flat program of a per-device step."""
  found = []

  def trace(*arguments):
    found.append(program.flatten(jax.make_jaxpr(step)(*arguments), ("data",)))
    return jnp.float32(0)

  jax.eval_shape(jax.shard_map(trace, mesh=mesh_of(data=2), in_specs=P(), out_specs=P(),
                               check_vma=False), *arguments)
  return found[0]


def layered(seed: int) -> tuple[Any, tuple[Any, ...]]:
  """A step of a few layers with sums over the ranks between them (as in SyncBN), in an order drawn
  from `seed`."""
  rng = np.random.default_rng(seed)
  layers = [("dense", "norm", "jit", "accumulate")[i] for i in rng.integers(0, 4, size=4)]

  def forward(w, x):
    aside = jnp.float32(0)
    for layer in layers:
      if layer == "dense":
        x = jnp.tanh(x @ w)
      elif layer == "norm":
        x = x - jax.lax.pmean(jnp.mean(x, axis=0), "data")
      elif layer == "jit":
        x = jax.jit(lambda x: x / jax.lax.psum(jnp.sum(jnp.abs(x)), "data"))(x)
      else:
        aside = aside + jax.lax.pmax(jax.lax.stop_gradient(jnp.max(x)), "data")
    return jnp.sum(x * x) + aside

  def step(w, x):
    loss, grads = jax.lax.pmean(jax.value_and_grad(forward)(w, x), "data")
    return w - grads * jnp.float32(0.1), loss

  return step, (jnp.ones((8, 8)) * jnp.float32(0.1), jnp.ones((4, 8)))
