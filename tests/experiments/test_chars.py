"""The character example: its text, its windows, its model, its training."""

from __future__ import annotations

import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from configs import chars as chars_config
from experiments.examples.chars import data, train
from experiments.examples.chars.model import Transformer
from experiments.examples.start import UserError


def test_the_default_text_is_the_one_whose_origin_is_told() -> None:
  text = data.DEFAULT_TEXT.read_bytes()
  told = (data.DEFAULT_TEXT.parent / "README.md").read_text()
  assert data.DEFAULT_TEXT.name in told and "Shakespeare" in told and "public domain" in told
  assert text.isascii() and 20_000 < len(text) < 100_000
  assert hashlib.sha256(text).hexdigest() in told


def test_the_held_out_text_is_the_end() -> None:
  train_text, test_text = data.load(data.DEFAULT_TEXT, 32)
  assert train_text.tobytes() + test_text.tobytes() == data.DEFAULT_TEXT.read_bytes()
  assert len(test_text) == pytest.approx(0.1 * (len(train_text) + len(test_text)), abs=1)


@given(length=st.integers(2, 300), context=st.integers(1, 40))
def test_windows_predict_every_character_at_most_once_and_in_order(
    length: int, context: int) -> None:
  text = (np.arange(length) % 251).astype(np.uint8)
  rows = data.windows(text, context)
  targets = rows[:, 1:].ravel()
  np.testing.assert_array_equal(targets, text[1:1 + len(targets)])
  assert length - 1 - len(targets) < context
  np.testing.assert_array_equal(rows[:, 1:-1], rows[:, 1:][:, :-1])


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


def test_the_shortest_text_it_asks_for_is_enough(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "text"
  path.write_bytes(b"x" * int(34 / data.HELD_OUT))
  _, test_text = data.load(path, 32)
  assert len(data.windows(test_text, 32)) == 1


@pytest.mark.long
def test_the_model_does_not_see_the_future() -> None:
  model = Transformer(256, 8, 16, 2, 2, rngs=nnx.Rngs(0))
  text = jnp.arange(8, dtype=jnp.int32)[None] + 65
  changed = text.at[0, 5].set(90)
  run = nnx.jit(lambda model, text: model(text))
  before, after = run(model, text), run(model, changed)
  np.testing.assert_allclose(before[0, :5], after[0, :5], rtol=1e-5, atol=1e-6)
  assert np.abs(np.asarray(before[0, 5:] - after[0, 5:])).max() > 1e-3


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
