"""Trains the digits CNN (flax.linen), data parallel over every device of every process."""

from __future__ import annotations

from typing import Any

import jax
import ml_collections
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.examples import metrics
from experiments.examples.digits import data
from experiments.examples.digits.model import CNN


def train_step(state: TrainState, batch: data.Batch) -> tuple[TrainState, dict[str, jax.Array]]:
  """Takes one step on one device; gradients and metrics are averaged over the axis "data"."""

  def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
    logits = state.apply_fn({"params": params}, batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, (logits.argmax(-1) == batch["label"]).mean()

  (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
  grads, loss, accuracy = jax.lax.pmean((grads, loss, accuracy), "data")
  return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}


def train_and_evaluate(config: ml_collections.ConfigDict, workdir: str, train_step: Any = train_step) -> float:
  """Trains and returns the accuracy on the held-out images."""
  train, test = data.load(config.seed)
  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  model = CNN(features=config.features)

  def create_state(key: jax.Array) -> TrainState:
    params = model.init(key, test["image"][:1])["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(config.learning_rate))

  state = jax.jit(create_state, out_shardings=NamedSharding(mesh, P()))(jax.random.key(config.seed))
  step = jax.shard_map(train_step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
  step = jax.jit(step, donate_argnums=0)
  batches = data.batches(train, config.batch_size, config.steps, config.seed, mesh)
  with metrics.Writer(workdir, config.log_every) as writer, jaxpace.recorded(workdir, step) as recorded_step:
    for i, batch in enumerate(batches, start=1):
      state, scalars = recorded_step(state, batch)
      writer.write_scalars(i, scalars)

    # The test split is small: every process evaluates all of it with its own copy of the parameters.
    params = jax.tree.map(lambda x: x.addressable_data(0), state.params)
    correct = model.apply({"params": params}, test["image"]).argmax(-1) == test["label"]
    accuracy = float(correct.mean())
    writer.summary({"test_accuracy": accuracy})
  return accuracy
