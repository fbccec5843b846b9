"""The measurements: what they make of their numbers, and each of them once in small."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lib import measured
from experiments.measure import (
  null_live,
  published_examples,
  published_trainers,
)
from experiments.measure import recording_overhead as overhead
from experiments.measure.null_live import BLOCK, ON

CIRCUMSTANCES = {"command": "c", "date": "d", "load_average_at_start": 1.0,
                 "machine": {"cores": 2, "platform": "p", "jax": "j", "python": "3"}}


# The live null.

WARM_UP = 20


def synthetic(harm, noise, rounds=400):
  """Seconds of `rounds` rounds, as `null_live.run` returns them."""
  rng = np.random.default_rng(0)
  each = (rounds, 3, BLOCK)
  steps = jnp.arange(WARM_UP, WARM_UP + rounds * 3 * BLOCK, dtype=jnp.int32)
  arms = np.asarray(jax.vmap(lambda k: null_live.arm(k, WARM_UP))(steps)).reshape(each)[..., 0]
  seconds = (20e-3 * (1 + noise * rng.normal(size=each))
             * np.where(arms == ON, 1 + harm, 1.0)[..., None])
  seconds *= 1 + 0.02 * rng.normal(size=(rounds, 1, BLOCK))  # the same steps of all arms alike
  seconds[rng.random(each) < 0.02] += 0.5  # somebody else's pauses
  delays = np.where(arms == ON, 2e-3, 0.0).reshape(-1, 1) * [1, 0]
  return {"seconds": seconds.reshape(-1, BLOCK).tolist(), "arms": arms.reshape(-1).tolist(),
          "delays": delays.tolist()}


@pytest.mark.parametrize(("harm", "noise", "expected"), [
    (0.0, 2e-3, "met"), (0.02, 2e-3, "MISSED"), (0.005, 2e-3, "not shown"),
    (0.0, 0.1, "inconclusive: A/A fails")])
def test_the_judgement_of_the_live_null(harm, noise, expected):
  result = null_live.judge(synthetic(harm, noise))
  assert result["verdict_percent"] == result["verdict_mean_percent"] == expected
  if noise < 0.01:
    assert result["on_percent"][0] == pytest.approx(100 * harm, abs=0.2)
    assert result["on_mean_percent"][0] == pytest.approx(100 * harm, abs=0.5)
    assert result["again_cut"] == pytest.approx(0.04, abs=0.015)
  assert result["largest_mean_delay_ms"] == pytest.approx(2) and result["blocks_delayed"] == 1
  assert result["delay_while_off"] == 0


@pytest.mark.long
def test_the_live_null_in_small():
  """Two devices of this process. Loose: on a busy machine nothing may be delayed."""
  with jax.numpy_dtype_promotion("strict"):
    found = null_live.run(2, "straggler", rounds=2, warm_up=WARM_UP)
  assert len(found["seconds"]) == len(found["arms"]) == len(found["delays"]) == 6
  assert np.shape(found["seconds"]) == (6, BLOCK) and np.min(found["seconds"]) > null_live.BUSY
  result = null_live.judge(found)
  assert result["delay_while_off"] == 0
  text = "\n".join(null_live.lines({**measured.circumstances("x"), "rounds": 2,
                                    "jobs": {"one": {"straggler": result}}}))
  assert "## Mean of the differences, cut" in text and "| one | straggler |" in text


# Observed and recorded steps.


def test_each_arm_of_recording_stands_beside_the_null():
  drift = np.array([[1.0], [1.2], [0.9]])  # of a round, in all arms alike
  bare = 20e-3 * drift * np.ones((3, 5))
  bare[1, 0] += 5e-3  # a pause
  found = {overhead.BARE: bare, overhead.AGAIN: bare, overhead.OBSERVED: 1.02 * bare,
           overhead.INSTRUMENTED: 1.05 * bare}
  row = {"case": "shard_map", "marks": 20, "writer_percent": 2.5, **overhead.compared(found)}
  assert overhead.writer_percent(0.01, found) == pytest.approx(
      100 * 0.01 / 2 / sum(times.sum() for times in found.values()))
  assert row["percent"]["recorded"] == pytest.approx([2, 2, 2])
  assert row["percent_of_medians"]["instrumented"] == pytest.approx([5, 5, 5])
  page = overhead.lines({**CIRCUMSTANCES, "devices": 2, "rounds": 3, "rows": [row]})
  assert [line.split("|")[4:6] for line in page if line.startswith("| shard_map")] == [
      [" recorded ", " +2.0 % [2.0, 2.0] "], [" instrumented ", " +5.0 % [5.0, 5.0] "]]


@pytest.mark.long
@pytest.mark.parametrize("case", overhead.CASES)
def test_recording_in_small(case, monkeypatch):
  monkeypatch.setattr(overhead, "sized", lambda *_: (16, 32))
  row = overhead.measure(case, 5e-3, rounds=2, seconds=0.01)
  assert row["marks"] > 0 and row["bare_ms"][0] > 0
  assert ("instrumented" in row["percent"]) == (case == "shard_map")


# Published trainers; here one that is written as flax's is.

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
def published(tmp_path):
  """Runs the trainer above as flax's, with a change to its text, and makes the page of its row."""
  file = tmp_path / published_examples.EXAMPLES["nnx_data_parallel"].file
  file.parent.mkdir(parents=True)

  def run(*arguments, old="", new=""):
    file.write_text(TRAINER.replace(old, new, 1))
    row = published_trainers.run("nnx_data_parallel", tmp_path, arguments[0], arguments[1],
                                 tmp_path / "arms", *arguments[2:])
    if "failed" in row:
      return row, ""
    return row, published_trainers.to_markdown(
        {**CIRCUMSTANCES, "trainers": [{"load": 1.0} | row], "commits": {"flax": "abc"}})

  return run


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_published_file_is_run_as_it_is_bare_and_observed(published, processes):
  row, page = published(3, processes)
  assert not row.get("failed")
  assert (row["steps"], row["different"], row["reported_steps"], row["untimed"]) == (3, {}, 3, 0)
  assert row["collectives"] == {"all-reduce": 1} and row["arrays"] == 4 and not row["bare_reasons"]
  assert row["lines_changed"] == 1
  assert f"| nnx_data_parallel | {processes} |" in page and "| nnx.jit | 1 all-reduce | 0 |" in page


@pytest.mark.long
def test_a_published_file_is_run_as_it_is_by_jaxpace_run(published):
  row, page = published(12, 1, "run")
  assert (row["steps"], row["different"], row["reported_steps"]) == (12, {}, 12)
  assert row["step"]["programs"] == ["train_step"] and row["lines_changed"] == 0
  assert "| nnx_data_parallel | 1 | 1 | train_step | 12 of 12 | 4 | 0 | " in page
  row, _ = published(3, 1, old="w = jnp.ones(4)", new="raise ValueError('no such data')")
  assert row["failed"].startswith("bare: ") and "no such data" in row["failed"]


@pytest.mark.parametrize(("said", "different", "answer"), [
    ([[3, "may differ"]], {"a": 2}, "no"), ([[3, "may differ"]], {"a": 3}, "yes"),
    ([], {}, "no"), ([[0, "runs unmodified"]], {}, "yes"),
    ([[9, "recorded with losses"]], {}, "no")])
def test_what_is_said_after_the_first_difference_or_the_end_is_no_warning(said, different, answer):
  row = {"said": said, "different": different, "steps": 9}
  assert published_trainers.warned(row) == answer
