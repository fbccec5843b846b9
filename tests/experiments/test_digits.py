"""The digits example: its data, its model, its training."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from configs import digits as digits_config
from experiments.examples.digits import data, train
from experiments.examples.digits.model import CNN
from experiments.examples.start import UserError


def mesh_of(devices: int) -> jax.sharding.Mesh:
  return jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])


def test_a_batch_does_not_depend_on_the_number_of_devices() -> None:
  split, _ = data.load()
  on_one, on_four = (list(data.batches(split, 32, 3, 5, mesh_of(n))) for n in (1, 4))
  for one, four in zip(on_one, on_four, strict=True):
    assert four["image"].sharding.spec == P("data") and len(four["image"].addressable_shards) == 4
    np.testing.assert_array_equal(one["image"], four["image"])
    np.testing.assert_array_equal(one["label"], four["label"])


def test_a_batch_that_does_not_divide_is_a_sentence() -> None:
  split, _ = data.load()
  with pytest.raises(UserError, match="does not divide among 4 devices.*batch_size=256"):
    next(data.batches(split, 30, 1, 0, mesh_of(4)))


@pytest.mark.long
def test_training_reaches_95_percent_on_held_out_images(tmp_path: pathlib.Path,
                                                        capfd: pytest.CaptureFixture[str]
                                                        ) -> None:
  config = digits_config.get_config()
  config.steps = 120
  accuracy = train.train_and_evaluate(config, str(tmp_path))
  assert accuracy >= 0.95
  assert (json.loads((tmp_path / "result.json").read_text())
          == {"test_accuracy": pytest.approx(accuracy)})
  assert list((tmp_path / "tensorboard").iterdir())
  printed = capfd.readouterr().out
  assert "step    120" in printed and "step_time_ms" in printed


def test_training_gives_the_same_as_one_device_with_the_whole_batch(tmp_path: pathlib.Path) -> None:
  """The mean over ranks of the gradients of equal shares is the gradient of the whole."""
  split, _ = data.load()
  model = CNN(features=4)
  params = jax.jit(model.init)(jax.random.key(0), split["image"][:1])["params"]

  def loss(params):  # independent of train_step
    logits = model.apply({"params": params}, split["image"][:64])
    picked = jax.nn.log_softmax(logits)[np.arange(64), split["label"][:64]]
    return -picked.mean()

  whole, gradient = jax.jit(jax.value_and_grad(loss))(params)
  expected = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, params, gradient)
  state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
  mesh = mesh_of(4)
  step = jax.jit(jax.shard_map(train.train_step, mesh=mesh, in_specs=(P(), P("data")),
                               out_specs=P(), check_vma=False))
  sharding = jax.NamedSharding(mesh, P("data"))
  batch = {name: jax.device_put(split[name][:64], sharding) for name in ("image", "label")}
  state, scalars = step(jax.device_put(state, jax.NamedSharding(mesh, P())), batch)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.params,
               expected)
  np.testing.assert_allclose(scalars["loss"], whole, rtol=1e-5)
