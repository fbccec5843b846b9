"""The character example: its text, its windows, its model, its training."""

from __future__ import annotations

import functools
import itertools
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpace
from configs import chars as chars_config
from experiments.examples.chars import data, documents, train
from experiments.examples.chars.model import Transformer
from experiments.examples.start import UserError


def test_a_batch_is_text_and_does_not_depend_on_the_number_of_devices() -> None:
  text, _ = data.load(data.DEFAULT_TEXT, 16)
  meshes = [jax.make_mesh((n,), ("data",), devices=jax.devices()[:n]) for n in (1, 4)]
  one, four = (np.asarray(next(data.batches(text, 16, 8, 1, 7, mesh))) for mesh in meshes)
  np.testing.assert_array_equal(one, four)
  for row in one:
    assert row.astype(np.uint8).tobytes() in text.tobytes()


@pytest.mark.parametrize(("make", "match"), [
    (lambda path: None, "cannot be read: No such file"),
    (lambda path: path.mkdir(), "cannot be read"),
    (lambda path: path.write_text("short"), "has 5 characters.*at least"),
])
def test_a_text_that_will_not_do_is_a_sentence(tmp_path: pathlib.Path, make, match: str) -> None:
  path = tmp_path / "text"
  make(path)
  with pytest.raises(UserError, match=match):
    data.load(path, 32)


@pytest.mark.long
def test_every_device_steps_as_one_device_would() -> None:
  """Autodiff sums the gradients over four devices here; one device with the whole batch is the
  oracle."""
  model = Transformer(256, 8, 16, 2, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
  graphdef, state = nnx.split((model, optimizer))
  rows = np.random.default_rng(0).integers(65, 91, (16, 9)).astype(np.int32)
  loss, gradient = nnx.jit(nnx.value_and_grad(train.loss_fn))(model, jnp.asarray(rows))
  expected = jax.tree.map(lambda p, g: p - np.float32(0.5) * g, nnx.state(model, nnx.Param),
                          gradient)
  mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
  step = jax.jit(jax.shard_map(
      lambda state, rows: train.train_step(graphdef, state, rows), mesh=mesh,
      in_specs=(jax.P(), jax.P("data")), out_specs=jax.P()))
  state, scalars = step(jax.device_put(state, jax.NamedSharding(mesh, jax.P())),
                        jax.device_put(rows, jax.NamedSharding(mesh, jax.P("data"))))
  stepped, _ = nnx.merge(graphdef, state)
  np.testing.assert_allclose(scalars["loss"], loss, rtol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6),
               nnx.state(stepped, nnx.Param), expected)


@pytest.mark.long
def test_training_learns_the_text(tmp_path: pathlib.Path) -> None:
  config = chars_config.get_config()
  config.update(steps=60, width=32, heads=2, blocks=1)
  loss = train.train_and_evaluate(config, str(tmp_path))
  counts = np.bincount(data.load(data.DEFAULT_TEXT, 32)[0], minlength=256)
  shares = counts[counts > 0] / counts.sum()
  assert loss < -(shares * np.log(shares)).sum(), "no better than the frequencies of the characters"


CONTEXT, RANKS, EACH = 16, 4, 3


def speeches():
  return documents.split(data.load(data.DEFAULT_TEXT, CONTEXT)[0])


def characters(batch):
  """Pairs of a character and the next one that are trained on, of all ranks, sorted."""
  pairs = []
  for rank, count in enumerate(batch.counts):
    part = slice(rank * len(batch.windows) // RANKS, rank * len(batch.windows) // RANKS + count)
    rows, weights = batch.windows[part], batch.weights[part] > 0
    pairs += zip(rows[:, :-1][weights].tolist(), rows[:, 1:][weights].tolist(), strict=True)
  return sorted(pairs)


def test_every_character_is_trained_on_once_whoever_has_its_document():
  drawn, balanced = (documents.batches(speeches(), CONTEXT, RANKS, EACH, 5, even)
                     for even in (False, True))
  better = 0
  for one, other in itertools.islice(zip(drawn, balanced, strict=True), 20):
    assert characters(one) == characters(other)
    assert one.counts.sum() == other.counts.sum() and other.counts.max() <= one.counts.max()
    better += int(other.counts.max() < one.counts.max())
  assert better >= 15


@pytest.mark.long
def test_the_loss_is_that_of_the_same_documents_however_they_are_shared_out():
  mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(AxisType.Auto,),
                       devices=jax.devices()[:RANKS])
  graphdef, params = nnx.split(Transformer(data.VOCABULARY, CONTEXT, 16, 2, 1, rngs=nnx.Rngs(0)),
                               nnx.Param)
  loss_fn = functools.partial(documents.loss_fn, graphdef)

  def step(params, windows, weights, counts):
    return jaxpace.accumulate(loss_fn, params, (windows, weights), counts, "data")

  run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P("data"), P()),
                              out_specs=P()))
  drawn, balanced = (next(documents.batches(speeches(), CONTEXT, RANKS, EACH, 1, even))
                     for even in (False, True))
  (loss, grads), (other, others) = (run(params, *batch) for batch in (drawn, balanced))
  assert float(loss) == pytest.approx(float(other), rel=1e-5)
  chex.assert_trees_all_close(grads, others, rtol=1e-3, atol=1e-6)
