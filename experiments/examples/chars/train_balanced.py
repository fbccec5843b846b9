"""Trains the character transformer on documents of different length, evened out over the ranks.

    jaxpace run --nproc 2 -- python -m experiments.examples.chars.train_balanced --steps=200

Two forms of sharing work are in it. `jaxpace.balance` says which rank gets which documents, so that all have about as
many windows; `jaxpace.accumulate` lets every rank run as many as it has, weighs every character alike, and meets once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
from absl import app, flags
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.examples.chars import data, documents
from experiments.examples.chars.model import Transformer

CONTEXT, WIDTH, HEADS, BLOCKS, EACH = 32, 64, 4, 2, 8
_STEPS = flags.DEFINE_integer("steps", 200, "Steps to train.", lower_bound=1)


class Training:
  """The model, its step and where they are."""

  def __init__(self) -> None:
    self.mesh = jax.make_mesh((jax.device_count(),), ("data",))
    model = Transformer(data.VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    self.optimizer = optax.adam(3e-3)
    place = NamedSharding(self.mesh, P())
    self.params, self.moments = jax.device_put((params, self.optimizer.init(params)), place)
    split = P("data")
    self.step = jax.jit(jax.shard_map(
        functools.partial(self.train_step, graphdef), mesh=self.mesh, in_specs=(P(), P(), split, split, P()),
        out_specs=P()), donate_argnums=(0, 1))

  def train_step(self, graphdef: Any, params: Any, moments: Any, windows: Any, weights: Any, counts: Any) -> Any:
    """One step on one device: this rank's first `counts[rank]` windows, and one all-reduce."""
    loss, grads = jaxpace.accumulate(
        functools.partial(documents.loss_fn, graphdef), params, (windows, weights), counts, "data")
    updates, moments = self.optimizer.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, loss

  def run(self, batch: documents.Batch) -> jax.Array:
    """Takes a step; returns the loss."""
    split, ranks = NamedSharding(self.mesh, P("data")), len(batch.counts)
    mine = [r for r, device in enumerate(self.mesh.devices.flat) if device.process_index == jax.process_index()]

    def own(rows: np.ndarray) -> jax.Array:
      here = rows.reshape(ranks, -1, *rows.shape[1:])[mine]
      return jax.make_array_from_process_local_data(split, here.reshape(-1, *rows.shape[1:]))

    self.params, self.moments, loss = self.step(
        self.params, self.moments, own(batch.windows), own(batch.weights), batch.counts)
    return loss


def main(_: list[str]) -> None:
  jaxpace.distributed.initialize()
  texts = documents.split(data.load(data.DEFAULT_TEXT, CONTEXT)[0])
  training = Training()
  source = documents.batches(texts, CONTEXT, training.mesh.size, EACH, 0, balanced=True)
  for step in range(1, _STEPS.value + 1):
    loss = training.run(next(source))
    if step % 50 == 0 and jax.process_index() == 0:
      print(f"step {step} loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
  app.run(main)
