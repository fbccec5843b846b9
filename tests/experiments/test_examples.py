"""The examples: few lines differ with jaxpace, the documentation shows those very lines, results
stay what they were, and the demo's fault and judge do what they say."""

import itertools
import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpace
from configs import chars as chars_config
from configs import digits as digits_config
from experiments.examples import demo, late, start
from experiments.examples.chars import data as chars_data
from experiments.examples.chars import documents
from experiments.examples.chars import train as chars_train
from experiments.examples.digits import data as digits_data
from experiments.examples.digits import train as digits_train
from experiments.examples.start import UserError
from jaxpace.runs.reader import read_run
from tests.instrumentation.running import mesh_of
from tests.multiprocess import jobs

FOLDER = jobs.ROOT / "experiments" / "examples"
both_examples = pytest.mark.parametrize("example", ["digits", "chars"])


# What differs.


@both_examples
@pytest.mark.parametrize(("patch", "added", "removed", "pages"), [
    ("paced", range(1, 6), range(6), ["docs/how_to/existing_flax.md"]),
    ("observed", [3], [2], ["README.md", "docs/observe.md", "docs/how_to/existing_flax.md"])])
def test_few_lines_change_and_the_documentation_shows_them(example, patch, added, removed, pages):
  lines = (FOLDER / example / f"{patch}.patch").read_text().splitlines()[2:]
  changed = [line for line in lines if not line.startswith("@@")]
  assert sum(line.startswith("+") for line in changed) in added
  assert sum(line.startswith("-") for line in changed) in removed
  assert not any(";" in line for line in changed if line.startswith("+")), "two lines in one"
  for page in pages:
    assert "\n".join(changed) in (jobs.ROOT / page).read_text(), f"{page} is out of date"
  assert start.script(FOLDER / example, patch).jaxpace is jaxpace
  assert "jaxpace" not in (FOLDER / example / "train.py").read_text()


def launched(example, *flags):
  environment = jobs.clean_environment(XLA_FLAGS="--xla_force_host_platform_device_count=4")
  return subprocess.run([sys.executable, "-m", f"experiments.examples.{example}.main", *flags],
                        cwd=jobs.ROOT, env=environment, text=True, stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT, timeout=300)


@pytest.mark.long
@pytest.mark.parametrize(("example", "flags"), [
    ("digits", ["--config.batch_size=64"]),
    ("chars", ["--config.batch_size=8", "--config.width=16", "--config.blocks=1"])])
def test_results_with_jaxpace_are_those_without_it(tmp_path, example, flags):
  results = []
  for switch in ("jaxpace", "nojaxpace", "observe"):
    workdir = tmp_path / switch
    done = launched(example, f"--workdir={workdir}", f"--{switch}", "--config.log_every=1",
                    "--config.steps=3", *flags)
    assert done.returncode == 0, done.stdout
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    losses = [words[words.index("loss") + 1] for words in lines]
    assert len(losses) >= 3, done.stdout
    results.append((json.loads((workdir / "result.json").read_text()), losses))
    if switch == "nojaxpace":
      assert not (workdir / "run.json").exists()
    else:
      run = read_run(workdir)
      assert run.ranks == 4 and len(run.collectives) >= 1
  assert results[0] == results[1] == results[2]


# Their data, models and training.


def test_batches_do_not_depend_on_the_number_of_devices():
  split, _ = digits_data.load()
  for one, four in zip(*(digits_data.batches(split, 32, 3, 5, mesh_of(data=n)) for n in (1, 4)),
                       strict=True):
    assert len(four["image"].addressable_shards) == 4
    np.testing.assert_array_equal(one["image"], four["image"])
    np.testing.assert_array_equal(one["label"], four["label"])
  text, _ = chars_data.load(chars_data.DEFAULT_TEXT, 16)
  one, four = (np.asarray(next(chars_data.batches(text, 16, 8, 1, 7, mesh_of(data=n))))
               for n in (1, 4))
  np.testing.assert_array_equal(one, four)
  assert all(row.astype(np.uint8).tobytes() in text.tobytes() for row in one)
  with pytest.raises(UserError, match="does not divide among 4 devices.*batch_size=256"):
    next(digits_data.batches(split, 30, 1, 0, mesh_of(data=4)))


@pytest.mark.long
def test_training_learns(tmp_path, capfd):
  config = digits_config.get_config()
  config.steps = 120
  accuracy = digits_train.train_and_evaluate(config, str(tmp_path / "digits"))
  assert accuracy >= 0.95
  assert (json.loads((tmp_path / "digits" / "result.json").read_text())
          == {"test_accuracy": pytest.approx(accuracy)})
  assert list((tmp_path / "digits" / "tensorboard").iterdir())
  printed = capfd.readouterr().out
  assert "step    120" in printed and "step_time_ms" in printed
  config = chars_config.get_config()
  config.update(steps=60, width=32, heads=2, blocks=1)
  loss = chars_train.train_and_evaluate(config, str(tmp_path / "chars"))
  counts = np.bincount(chars_data.load(chars_data.DEFAULT_TEXT, 32)[0], minlength=256)
  shares = counts[counts > 0] / counts.sum()
  assert loss < -(shares * np.log(shares)).sum(), "no better than the frequencies of the characters"


def characters(batch, ranks):
  """Pairs of a character and the next one that are trained on, of all ranks, sorted."""
  pairs, each = [], len(batch.windows) // ranks
  for rank, count in enumerate(batch.counts):
    part = slice(rank * each, rank * each + count)
    rows, weights = batch.windows[part], batch.weights[part] > 0
    pairs += zip(rows[:, :-1][weights].tolist(), rows[:, 1:][weights].tolist(), strict=True)
  return sorted(pairs)


def test_every_character_is_trained_on_once_whoever_has_its_document():
  speeches = documents.split(chars_data.load(chars_data.DEFAULT_TEXT, 16)[0])
  drawn, balanced = (documents.batches(speeches, 16, 4, 3, 5, even) for even in (False, True))
  better = 0
  for one, other in itertools.islice(zip(drawn, balanced, strict=True), 20):
    assert characters(one, 4) == characters(other, 4)
    assert one.counts.sum() == other.counts.sum() and other.counts.max() <= one.counts.max()
    better += int(other.counts.max() < one.counts.max())
  assert better >= 15


# The demo: the rank that is made late, and what is made of the report.


def late_step(check_vma, seconds, rank=1, dtype=jnp.float32):
  """A compiled step on two devices: mean of the batch, and each device's time through it."""
  mesh = mesh_of(data=2)

  def train_step(state, batch):
    return state + jax.lax.pmean(batch["x"].astype(jnp.float32).sum(), "data"), batch["x"]

  step = jax.jit(jax.shard_map(late.make_late(train_step, "data", rank, seconds), mesh=mesh,
                               in_specs=(P(), P("data")), out_specs=(P(), P("data")),
                               check_vma=check_vma))
  batch = {"x": jax.device_put(np.arange(8).astype(dtype), jax.NamedSharding(mesh, P("data")))}
  return step, jax.device_put(jnp.zeros(()), jax.NamedSharding(mesh, P())), batch


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.uint8, jnp.bfloat16])
def test_a_late_rank_changes_no_value(check_vma, dtype):
  (plain, state, batch), (slow, _, _) = (late_step(check_vma, seconds, dtype=dtype)
                                         for seconds in (0, 1e-3))
  for expected, got in zip(plain(state, batch), slow(state, batch), strict=True):
    np.testing.assert_array_equal(np.asarray(expected), np.asarray(got))


def test_only_the_chosen_rank_sleeps(monkeypatch):
  slept = []
  monkeypatch.setattr(late, "time", types.SimpleNamespace(sleep=slept.append))
  step, state, batch = late_step(True, 12e-3, rank=0)
  for _ in range(3):
    jax.block_until_ready(step(state, batch))
  assert slept == [12e-3] * 3
  step, state, batch = late_step(True, 1e-3, rank=2)
  with pytest.raises(UserError, match="Rank 2 cannot be made late: there are 2"):
    step(state, batch)


@pytest.mark.parametrize(("injected", "lateness", "line", "wrong"), [
    (2, {2: 0.0147}, "injected: rank 2, 15.0 ms; found: rank 2, 14.7 ms", None),
    (2, {1: 0.0147}, "", "rank 2 was made late"), (2, {}, "", "rank 2 was made late"),
    (2, {1: 0.02, 2: 0.015}, "", "rank 2 was made late"),
    (None, {}, "injected: nobody; found: nobody", None),
    (None, {3: 0.01}, "", "finds rank 3 late by 33%"),
    # Reported, but no alarm: processes take turns at the cores.
    (None, {3: 0.002}, "found: rank 3, 2.0 ms", None)])
def test_the_demo_judges_whom_the_report_names(injected, lateness, line, wrong):
  report = {"findings": [{"mode": demo.STRAGGLER, "ranks": sorted(lateness)}] if lateness else [],
            "per_rank": [{"rank": rank, "lateness": lateness.get(rank, 1e-4 * rank)}
                         for rank in range(4)], "step_time": {"mean": 0.030}}
  said, mistakes = demo.judge(report, 0.97, injected, 0.015 if injected else 0.0, 0.95)
  assert line in said
  assert len(mistakes) == (wrong is not None) and (wrong is None or wrong in mistakes[0])
