"""Small train steps, all (state, batch) -> (state, metrics) on one device of the axis "data"."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

FEATURES, CLASSES = 6, 5


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def batches(ranks: int, each: int = 4, count: int = 3,
            dtype: Any = jnp.float32) -> list[tuple[jax.Array, jax.Array]]:
  """Inputs [ranks * each, FEATURES] and targets [ranks * each, CLASSES]."""
  return [(normal(100 + k, ranks * each, FEATURES, dtype=dtype),
           normal(200 + k, ranks * each, CLASSES, dtype=dtype))
          for k in range(count)]


def mlp_params(width: int = 16, layers: int = 2, dtype: Any = jnp.float32) -> dict[str, Any]:
  sizes = [FEATURES, *[width] * layers, CLASSES]
  return {f"layer{i}": {"w": jnp.asarray(np.random.default_rng(i).normal(size=(a, b)) / np.sqrt(a),
                                         dtype),
                        "b": jnp.asarray(np.zeros(b), dtype)}
          for i, (a, b) in enumerate(zip(sizes[:-1], sizes[1:], strict=True))}


def mlp(params: Any, x: jax.Array) -> jax.Array:
  for i in range(len(params)):
    x = x @ params[f"layer{i}"]["w"] + params[f"layer{i}"]["b"]
    x = jnp.tanh(x) if i + 1 < len(params) else x
  return x


def square_loss(params: Any, batch: Any) -> jax.Array:
  x, y = batch
  return jnp.mean(jnp.square(mlp(params, x) - y).astype(jnp.float32))


def sgd(params: Any, grads: Any, rate: float = 0.05) -> Any:
  return jax.tree.map(lambda p, g: p - jnp.asarray(rate, p.dtype) * g.astype(p.dtype), params,
                      grads)


def plain_step(params: Any, batch: Any) -> tuple[Any, Any]:
  """The gradient's mean is the user's own call: check_vma=False, pmap."""
  loss, grads = jax.value_and_grad(square_loss)(params, batch)
  loss, grads = jax.lax.pmean((loss, grads), "data")
  return sgd(params, grads), loss


def vma_step(params: Any, batch: Any) -> tuple[Any, Any]:
  """JAX's autodiff inserts the gradient's sum: check_vma=True."""
  loss, grads = jax.value_and_grad(lambda p: jax.lax.pmean(square_loss(p, batch), "data"))(params)
  return sgd(params, grads), loss


def halves_step(params: Any, batch: Any) -> tuple[Any, Any]:
  """Nothing that is summed is float32, of parameters in half precision: not even the loss."""
  grads = jax.lax.psum(
      jax.grad(lambda p: jnp.mean(jnp.square(mlp(p, batch[0]) - batch[1])))(params), "data")
  return sgd(params, grads), jnp.int32(0)


def optax_step(tx: optax.GradientTransformation) -> Any:
  """A step with an optax transformation; its state is (params, opt_state)."""

  def step(state: Any, batch: Any) -> tuple[Any, Any]:
    params, opt = state
    loss, grads = jax.lax.pmean(jax.value_and_grad(square_loss)(params, batch), "data")
    # optax's own counters mix dtypes.
    with jax.numpy_dtype_promotion("standard"):
      updates, opt = tx.update(grads, opt, params)
      return (optax.apply_updates(params,
                                  updates), opt), {"loss": loss, "norm": optax.tree.norm(grads)}

  return step
