"""A published file, bare and observed; here one that is written as flax's is."""

import pathlib

import pytest

from experiments.measure import published_examples, published_trainers

TRAINER = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import tensorflow_datasets as tfds

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

@jax.jit
def train_step(w, x):
  return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w), x.mean()

def dataset(steps, batch_size):
  for _ in range(steps):
    yield np.random.normal(size=(batch_size, 4)).astype(np.float32)

w = jnp.ones(4)
for x in dataset(1000, 16):
  w, _ = train_step(w, jax.device_put(x, NamedSharding(mesh, P("data"))))
raise AssertionError("the training was not ended after the steps asked for")
"""


@pytest.fixture
def clone(tmp_path):
  file = tmp_path / "examples" / published_examples.EXAMPLES["nnx_data_parallel"].file
  file.parent.mkdir(parents=True)
  file.write_text(TRAINER)
  return tmp_path


@pytest.mark.long
def test_a_file_is_run_as_it_is_bare_and_observed(clone):
  row = published_trainers.run("nnx_data_parallel", clone, 3)
  assert (row["steps"], row["different"], row["reported_steps"], row["untimed"]) == (3, {}, 3, 0)
  assert row["collectives"] == {"all-reduce": 1} and row["arrays"] == 4 and not row["bare_reasons"]
  assert "| nnx_data_parallel | nnx.jit | 1 all-reduce | 0 |" in published_trainers.to_markdown(
      {"trainers": [row], "commit": "abc", "command": "c", "date": "d",
       "load_average_at_start": 1.0,
       "machine": {"cores": 2, "platform": "p", "jax": "j", "python": "3"}})


def test_a_file_that_was_rewritten_since_says_so(clone):
  example = published_examples.EXAMPLES["lm1b"]
  with pytest.raises(SystemExit, match="has no line '  # Main Train Loop'"):
    published_examples._edited(TRAINER, example, True)


def test_a_folder_that_is_no_clone_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(published_trainers.flags, "FLAGS", type("Its", (), {
      "flax": str(tmp_path), "trainers": [], "steps": 1, "out": "x.json"}))
  with pytest.raises(SystemExit, match="give a clone"):
    published_trainers.main([])
  assert not pathlib.Path("x.json").exists()
