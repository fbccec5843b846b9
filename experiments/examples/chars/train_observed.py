"""Trains the character transformer (flax.nnx), data parallel over every device of every process."""

from __future__ import annotations

import functools
from typing import Any

import jax
import ml_collections
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.examples import metrics
from experiments.examples.chars import data
from experiments.examples.chars.model import Transformer


def loss_fn(model: Transformer, rows: jax.Array) -> jax.Array:
  """Returns the mean cross-entropy of the next character, in nats; rows are [B, T + 1] int32."""
  return optax.softmax_cross_entropy_with_integer_labels(model(rows[:, :-1]), rows[:, 1:]).mean()


def train_step(
    graphdef: nnx.GraphDef[Any], state: nnx.State, rows: jax.Array) -> tuple[nnx.State, dict[str, jax.Array]]:
  """Takes one step on one device. The loss is averaged over "data"; JAX's autodiff sums the gradients itself."""
  model, optimizer = nnx.merge(graphdef, state)
  loss, grads = nnx.value_and_grad(lambda model: jax.lax.pmean(loss_fn(model, rows), "data"))(model)
  optimizer.update(model, grads)
  return nnx.state((model, optimizer)), {"loss": loss}


def train_and_evaluate(config: ml_collections.ConfigDict, workdir: str, text: str = str(data.DEFAULT_TEXT)) -> float:
  """Trains and returns the mean cross-entropy of a held-out character, in nats."""
  train, test = data.load(text, config.context)
  mesh = jax.make_mesh((jax.device_count(),), ("data",))

  def create() -> tuple[Transformer, nnx.Optimizer[Transformer]]:
    model = Transformer(data.VOCABULARY, config.context, config.width, config.heads, config.blocks,
                        rngs=nnx.Rngs(config.seed))
    return model, nnx.Optimizer(model, optax.adam(config.learning_rate), wrt=nnx.Param)

  graphdef = nnx.graphdef(nnx.eval_shape(create))
  state = jax.jit(lambda: nnx.state(create()), out_shardings=NamedSharding(mesh, P()))()
  local_step = functools.partial(train_step, graphdef)
  step = jax.shard_map(local_step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
  step = jax.jit(step, donate_argnums=0)
  batches = data.batches(train, config.context, config.batch_size, config.steps, config.seed, mesh)
  with metrics.Writer(workdir, config.log_every) as writer, jaxpace.recorded(workdir, step) as recorded_step:
    for i, batch in enumerate(batches, start=1):
      state, scalars = recorded_step(state, batch)
      writer.write_scalars(i, scalars)

    # The held-out text is short: every process evaluates all of it with its own copy of the parameters.
    model, _ = nnx.merge(graphdef, jax.tree.map(lambda x: x.addressable_data(0), state))
    loss = float(loss_fn(model, data.windows(test, config.context)))
    writer.summary({"test_loss": loss})
  return loss
