"""A published file, bare and observed; here one that is written as flax's is."""

import json
import pathlib

import pytest

from experiments.measure import published_examples, published_trainers

TRAINER = """
import os
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import tensorflow_datasets as tfds

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
mesh = jax.make_mesh((jax.local_device_count(),), ("data",), axis_types=(AxisType.Auto,))

@jax.jit
def train_step(w, x):
  return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w), x.mean()

def dataset(steps, batch_size):
  for _ in range(steps):
    x, y = np.random.normal(size=(batch_size, 4)), np.zeros(batch_size)
    yield x, y

w = jnp.ones(4)
for x, _ in dataset(1000, 16):
  w, _ = train_step(w, jax.device_put(x, NamedSharding(mesh, P("data"))))
raise AssertionError("the training was not ended after the steps asked for")
"""


@pytest.fixture
def sources(tmp_path):
  file = tmp_path / published_examples.EXAMPLES["nnx_data_parallel"].file
  file.parent.mkdir(parents=True)
  file.write_text(TRAINER)
  return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_file_is_run_as_it_is_bare_and_observed(sources, processes):
  row = published_trainers.run("nnx_data_parallel", sources, 3, processes, sources / "arms")
  assert not row.get("failed")
  assert (row["steps"], row["different"], row["reported_steps"], row["untimed"]) == (3, {}, 3, 0)
  assert row["collectives"] == {"all-reduce": 1} and row["arrays"] == 4 and not row["bare_reasons"]
  assert row["lines_changed"] == 1
  page = published_trainers.to_markdown(
      {"trainers": [row], "commits": {"flax": "abc"}, "command": "c", "date": "d",
       "load_average_at_start": 1.0,
       "machine": {"cores": 2, "platform": "p", "jax": "j", "python": "3"}})
  assert f"| nnx_data_parallel | {processes} | not kept | nnx.jit | 1 all-reduce | 0 |" in page


@pytest.mark.long
def test_a_file_is_run_as_it_is_by_jaxpace_run(sources):
  row = published_trainers.run("nnx_data_parallel", sources, 12, 1, sources / "arms", "run")
  assert not row.get("failed")
  assert (row["steps"], row["different"], row["reported_steps"]) == (12, {}, 12)
  assert row["step"]["programs"] == ["train_step"] and row["lines_changed"] == 0
  page = published_trainers.to_markdown(
      {"trainers": [row | {"load": 1.0}], "commits": {"flax": "abc"}, "command": "c", "date": "d",
       "load_average_at_start": 1.0,
       "machine": {"cores": 2, "platform": "p", "jax": "j", "python": "3"}})
  assert "| nnx_data_parallel | 1 | 1 | train_step | 12 of 12 | 4 | 0 | " in page


@pytest.mark.long
def test_a_trainer_that_fails_is_a_row_with_its_last_line(sources):
  file = sources / published_examples.EXAMPLES["nnx_data_parallel"].file
  file.write_text(TRAINER.replace("w = jnp.ones(4)", "raise ValueError('no such data')"))
  row = published_trainers.run("nnx_data_parallel", sources, 3, 1, sources / "arms")
  assert row["failed"].startswith("bare: ") and "no such data" in row["failed"]


def test_a_file_that_was_rewritten_since_says_so():
  example = published_examples.EXAMPLES["lm1b"]
  with pytest.raises(SystemExit, match="has no '  # Main Train Loop"):
    published_examples.edited(TRAINER, example)


def test_a_notebook_is_the_program_of_its_cells(tmp_path):
  cells = [{"cell_type": "markdown", "source": ["# Title"]},
           {"cell_type": "code", "source": ["x = 1\n", "y = 2"]},
           {"cell_type": "code", "source": ["z = x"]}]
  (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
  assert published_examples.text_of(tmp_path / "a.ipynb") == "x = 1\ny = 2\nz = x"


def test_clones_that_are_not_there_are_named(tmp_path, monkeypatch):
  monkeypatch.setattr(published_trainers.flags, "FLAGS", type("Its", (), {
      "sources": str(tmp_path), "trainers": ["lm1b", "equinox"], "steps": 1, "out": "x.json"}))
  with pytest.raises(SystemExit, match="clones of equinox, flax"):
    published_trainers.main([])
  assert not pathlib.Path("x.json").exists()


@pytest.mark.parametrize(("said", "different", "answer"), [
    ([[3, "may differ"]], {"a": 2}, "no"), ([[3, "may differ"]], {"a": 3}, "yes"),
    ([], {}, "no"), ([[0, "runs unmodified"]], {}, "yes"),
    ([[9, "recorded with losses"]], {}, "no")])
def test_what_is_said_after_the_first_difference_or_the_end_is_no_warning(said, different, answer):
  row = {"said": said, "different": different, "steps": 9}
  assert published_trainers.warned(row) == answer
