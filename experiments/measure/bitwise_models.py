"""Train steps for `experiments.measure.bitwise`: the models of the examples and two more, in three
precisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.examples.chars import data as chars_data
from experiments.examples.chars.model import Transformer
from experiments.examples.digits import data as digits_data
from experiments.examples.digits.model import CNN

DTYPES = {"float32": (jnp.float32, jnp.float32), "bf16-compute": (jnp.float32, jnp.bfloat16),
          "bf16-params": (jnp.bfloat16, jnp.bfloat16)}
"""Name -> dtypes that parameters are stored in and that losses are computed in."""

_EXAMPLES = 4  # of each rank
_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Job:
  """A model to be trained. Its state is (params, optimizer state, statistics)."""

  state: Any
  batches: list[Any]  # leaves [ranks * n, ...], to be split along their first axis
  # (params, statistics, batch) -> loss, new statistics
  loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]]
  tx: optax.GradientTransformation

  def step(self, by_autodiff: bool, more: bool = False) -> Callable[..., Any]:
    """Makes the per-device step (state, batch) -> (state, metrics).

    Args:
      by_autodiff: the loss is averaged over "data" and JAX sums the gradients, as under
        `check_vma=True`; else the step averages both itself.
      more: whether the metrics also hold the averaged gradients of the vectors.
    """

    def train_step(state: Any, batch: Any) -> Any:
      params, opt, statistics = state

      def mean_loss(params: Any) -> Any:
        loss, new = self.loss(params, statistics, batch)
        return (jax.lax.pmean(loss, "data") if by_autodiff else loss), new

      (loss, statistics), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
      if not by_autodiff:
        grads, loss = jax.lax.pmean((grads, loss), "data")
      updates, opt = self.tx.update(grads, opt, params)
      metrics = {"loss": loss, "norm": optax.tree.norm(grads)}
      if more:
        metrics["gradients"] = ([leaf for leaf in jax.tree.leaves(grads) if leaf.ndim == 1]
                                or jax.tree.leaves(grads)[:1])
      return (optax.apply_updates(params, updates), opt, statistics), metrics

    return train_step


def _cast(tree: Any, dtype: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating)
                      else leaf, tree)


def _job(params: Any, statistics: Any, batches: list[Any], forward: Callable[[Any, Any, Any], Any],
         stored: Any, compute: Any, tx: optax.GradientTransformation) -> Job:
  """`forward(params, statistics, batch)` -> loss of the outputs, new statistics; params and inputs
  in `compute`."""
  params = _cast(params, stored)

  def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
    value, new = forward(_cast(params, compute), statistics, _cast(batch, compute))
    return value.astype(jnp.float32), new

  return Job((params, tx.init(params), statistics), batches, loss, tx)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def _digits(ranks: int) -> list[Any]:
  train, _ = digits_data.load()
  rows = np.random.default_rng(0).choice(len(train["label"]), (_BATCHES, _EXAMPLES * ranks))
  return [{"image": train["image"][r], "label": train["label"][r]} for r in rows]


def digits(ranks: int, stored: Any, compute: Any) -> Job:
  """The digits CNN of the example (flax.linen), Adam."""
  model, batches = CNN(features=4), _digits(ranks)
  params = model.init(jax.random.key(0), batches[0]["image"][:1])["params"]

  def forward(params: Any, statistics: Any, batch: Any) -> Any:
    return _cross_entropy(model.apply({"params": params},
                                      batch["image"]), batch["label"]), statistics

  return _job(params, (), batches, forward, stored, compute, optax.adam(1e-2))


def chars(ranks: int, stored: Any, compute: Any) -> Job:
  """The character transformer of the example (flax.nnx), small, Adam."""
  context = 8
  text, _ = chars_data.load(chars_data.DEFAULT_TEXT, context)
  windows = chars_data.windows(text, context)
  rows = np.random.default_rng(0).choice(len(windows), (_BATCHES, _EXAMPLES * ranks))
  graph, params = nnx.split(Transformer(128, context, 16, 2, 1, rngs=nnx.Rngs(0)))

  def forward(params: Any, statistics: Any, batch: jax.Array) -> Any:
    return _cross_entropy(nnx.merge(graph, params)(batch[:, :-1]), batch[:, 1:]), statistics

  return _job(params, (), [np.minimum(windows[r], 127) for r in rows], forward, stored, compute,
              optax.adam(3e-3))


def mlp(ranks: int, stored: Any, compute: Any) -> Job:
  """A perceptron with a squared loss and weight penalty, AdamW behind clipping by the global
  norm."""
  rng = np.random.default_rng(0)
  sizes = (24, 40, 40, 6)
  params = [{"w": jnp.asarray(rng.standard_normal((a, b)) / a ** 0.5, jnp.float32),
             "b": jnp.zeros(b, jnp.float32)}
            for a, b in zip(sizes[:-1], sizes[1:], strict=True)]
  batches = [{"x": rng.standard_normal((_EXAMPLES * ranks, sizes[0]), np.float32),
              "y": rng.standard_normal((_EXAMPLES * ranks, sizes[-1]), np.float32)}
             for _ in range(_BATCHES)]

  def forward(params: Any, statistics: Any, batch: Any) -> Any:
    x = batch["x"]
    for layer in params[:-1]:
      x = jax.nn.silu(x @ layer["w"] + layer["b"])
    out = (x @ params[-1]["w"] + params[-1]["b"]).astype(jnp.float32)
    penalty = sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(params))
    return jnp.mean(jnp.square(out - batch["y"].astype(jnp.float32))) + 1e-4 * penalty, statistics

  return _job(params, (), batches, forward, stored, compute,
              optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(3e-3)))


def sync_bn(ranks: int, stored: Any, compute: Any) -> Job:
  """A CNN with batch norm over all ranks (flax.linen): collectives in the forward and the backward
  pass; SGD."""

  class Net(nn.Module):
    axis: str | None

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
      x = nn.Conv(4, (3, 3))(image)
      x = nn.relu(nn.BatchNorm(use_running_average=False, axis_name=self.axis)(x))
      return nn.Dense(10)(x.reshape(len(x), -1))

  batches, model = _digits(ranks), Net("data")
  variables = Net(None).init(jax.random.key(0), batches[0]["image"][:2])

  def forward(params: Any, statistics: Any, batch: Any) -> Any:
    logits, new = model.apply({"params": params, "batch_stats": statistics}, batch["image"],
                              mutable=["batch_stats"])
    return _cross_entropy(logits, batch["label"]), _cast(new["batch_stats"], jnp.float32)

  return _job(variables["params"], variables["batch_stats"], batches, forward, stored, compute,
              optax.sgd(1e-2, momentum=0.9, nesterov=True))


MODELS: dict[str, Callable[[int, Any, Any], Job]] = {"digits": digits, "chars": chars, "mlp": mlp,
                                                     "sync-bn": sync_bn}
