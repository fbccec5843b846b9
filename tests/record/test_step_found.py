"""Which program is taken for the step, where nobody names it."""

import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.words.notes import Note
from jaxpace.record import writer
from jaxpace.record.ring import found
from jaxpace.runs import rundir
from jaxpace.runs.reader import RunError, read_run
from tests.record.unnamed_step import STEPS, arrays, rows_written, train


def test_devices_that_the_step_does_not_run_on_are_no_ranks(tmp_path):
  mesh = jax.make_mesh((3,), ("data",), (AxisType.Auto,), devices=jax.devices()[1:4])
  x = jax.device_put(jnp.arange(36.0).reshape(6, 6), NamedSharding(mesh, P("data")))
  with jaxpace.observed(tmp_path / "run"):
    step = jax.jit(lambda x: (x @ x.T).sum())
    for _ in range(30):
      step(x)
  diagnosis = diagnose(read_run(tmp_path / "run"))
  assert diagnosis.run.ranks_in_all == 3 and not diagnosis.run.silent.size
  assert "Nothing is known" not in diagnosis.verdict


def test_devices_that_evaluate_alone_are_no_ranks(tmp_path):
  train_step = jax.jit(jax.grad(lambda x: (x @ x.T).sum()))
  eval_step = jax.jit(lambda x: (x @ x.T).sum())

  def on(devices):
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    return jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("data")))

  with jaxpace.observed(tmp_path / "run"):
    for step in range(24):
      train_step(on(2)).block_until_ready()
      if step % 8 == 0:
        eval_step(on(4)).block_until_ready()
  run = read_run(tmp_path / "run")
  assert len(run.steps) == 24 and run.ranks_in_all == 2 and not run.silent.size


def test_one_function_on_several_submeshes_is_one_step_of_all_their_ranks(tmp_path):
  @jax.jit
  def stage(x):
    return x / jnp.abs(x).max()

  with jaxpace.observed(tmp_path / "run"):
    for _ in range(20):
      for first in (0, 2):
        devices = jax.devices()[first:first + 2]
        mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=devices)
        stage(jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("data")))).block_until_ready()
  run = read_run(tmp_path / "run")
  assert len(run.steps) == 20 and run.ranks == 4 and not run.silent.size


def test_a_program_that_ran_once_is_no_step_and_that_is_said(tmp_path):
  with jaxpace.observed(tmp_path / "run"):
    train(1)
  with pytest.raises(RunError, match="has ended: was .* what ran three times"):
    read_run(tmp_path / "run")


def whole_training(name, layers, steps, loops=1):
  """One program by this name: loops of steps of so many layers, rank 2 late in each."""
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])

  def step(w, _):
    late = jnp.where(jax.lax.axis_index("data") == 2, 8e-3, 0.0)
    def layer(w, _):
      return jax.lax.pmean(jnp.tanh(w), "data"), None
    w, _ = jax.lax.scan(layer, w, length=layers)
    return jax.lax.psum(jaxpace.delay(w, late), "data"), None

  def whole(w):
    for _ in range(loops):
      w, _ = jax.lax.scan(step, w, length=steps)
    return w

  whole.__name__ = name
  return jax.jit(jax.shard_map(whole, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def test_iterations_are_the_steps_of_training_that_is_one_program(tmp_path):
  fit, w = whole_training("fit", 3, 40), jnp.ones((4, 4))
  with jaxpace.observed(tmp_path / "run") as inside:
    found = np.asarray(fit(fit(w)))
  assert inside.step.programs == ("an iteration of fit",)
  run = read_run(tmp_path / "run")
  assert len(run.steps) == 80 and len(run.collectives) == 3 + 1
  assert any(2 in each.ranks for each in diagnose(run).findings)
  np.testing.assert_array_equal(found, np.asarray(whole_training("fit", 3, 40)(fit(w))))


def test_iterations_are_the_steps_where_gradients_meet_in_loops_within_the_loop(tmp_path):
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])

  def minibatch(w, _):
    return w - 0.1 * jax.lax.pmean(jax.grad(lambda w: jnp.tanh(w).sum())(w), "data"), None

  def epoch(w, _):
    return jax.lax.scan(minibatch, w, length=3)

  def update(w, _):
    late = jnp.where(jax.lax.axis_index("data") == 2, 8e-3, 0.0)
    return jax.lax.scan(epoch, jaxpace.delay(w, late), length=2)

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
  def train(w):
    return jax.lax.scan(update, w, length=30)[0]

  with jaxpace.observed(tmp_path / "run") as inside:
    train(train(jnp.ones((4, 4)))).block_until_ready()
  assert inside.step.programs == ("an iteration of train",)
  run = read_run(tmp_path / "run")
  assert len(run.steps) == 60 and len(run.collectives) == 2 * 3
  assert any(2 in each.ranks for each in diagnose(run).findings)


def test_training_that_is_one_program_can_be_read_while_it_runs(tmp_path, monkeypatch):
  monkeypatch.setattr(writer, "_FIRST_SECONDS", 0.0)
  directory, fit = tmp_path / "run", whole_training("fit", 1, 100)
  with jaxpace.observed(directory) as inside:
    training = threading.Thread(target=lambda: fit(jnp.ones((4, 4))).block_until_ready())
    training.start()
    while rows_written(directory) < 4 * 20:
      time.sleep(0.01)
    assert inside.step is None and len(read_run(directory).steps) >= 20
    training.join()
  assert len(read_run(directory).steps) == 100


@pytest.mark.parametrize("name, steps, loops", [("train_step", 40, 1), ("fit", 12, 1),
                                                ("fit", 40, 2)])
def test_a_loop_in_a_step_a_short_one_and_several_are_no_training(tmp_path, name, steps, loops):
  with jaxpace.observed(tmp_path / "run") as inside:
    whole_training(name, 3, steps, loops)(jnp.ones((4, 4))).block_until_ready()
  assert inside.step is None


def test_what_computes_gradients_is_the_step_though_an_evaluation_takes_longer(tmp_path):
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
  x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("data")))

  @jax.jit
  def forward(w, x):
    return ((x @ w) ** 2).mean()

  @jax.jit
  def fit(w, x):
    return w - 0.1 * jax.grad(forward)(w, x)

  w = jnp.ones((4,))
  with jaxpace.observed(tmp_path / "run") as inside:
    for _ in range(5):
      w = fit(fit(w, x), x)
      for _ in range(9):
        forward(w, x).block_until_ready()
      jnp.sum(x).block_until_ready()
  assert inside.step.programs == ("fit",)
  run = read_run(tmp_path / "run")
  assert len(run.steps) == 10 and run.info["settings"]["step"]["beside"] == [
      "forward", "programs of JAX's own"]


def a_loss_and_its_gradient():
  """Programs of a loop that evaluates its loss at length before the first step, and their
  arguments."""
  @jax.jit
  def loss(w, x):
    return ((x @ w) ** 2).mean()

  @jax.jit
  def fit(w, x):
    return w - jnp.float32(1e-4) * jax.grad(loss)(w, x)

  return loss, fit, *arrays()


def test_a_loss_that_was_evaluated_is_none_while_the_first_step_compiles(tmp_path, monkeypatch):
  now, polls, cut = [1.0], [], found.StepFinder.cut

  def counted(self, fresh, last):
    polls.append(last)
    return cut(self, fresh, last)

  monkeypatch.setattr(found, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
  monkeypatch.setattr(found.StepFinder, "cut", counted)
  loss, fit, w, x = a_loss_and_its_gradient()
  with jaxpace.observed(tmp_path / "run") as inside:
    for _ in range(20):
      loss(w, x).block_until_ready()
    while not rows_written(tmp_path / "run"):
      time.sleep(0.01)
    now[0] += 2 * found._SURE_SECONDS
    seen = len(polls)
    while len(polls) < seen + 20:
      time.sleep(0.01)
    assert inside.step is None
    for _ in range(10):
      w = jax.block_until_ready(fit(w, x))
  assert inside.step.programs == ("fit",) and len(read_run(tmp_path / "run").steps) == 10


def test_what_is_guessed_of_the_step_is_not_logged_each_time(tmp_path, caplog):
  caplog.set_level("INFO", "jaxpace")
  fit, w = whole_training("fit_step", 50, 1), jnp.ones((4, 4))
  with jaxpace.observed(tmp_path / "run"):
    for _ in range(2):
      written = rows_written(tmp_path / "run")
      for _ in range(4):
        w = fit(w).block_until_ready()
      while rows_written(tmp_path / "run") == written:
        time.sleep(0.01)
  said = [record.getMessage() for record in caplog.records]
  assert said and len(set(said)) == len(said)
  assert read_run(tmp_path / "run").info["plan"]["detail"]["every"] > 1


def test_a_pattern_names_another_program(tmp_path):
  with jaxpace.observed(tmp_path / "run", match="evaluate"):
    train()
  assert len(read_run(tmp_path / "run").steps) == len(range(0, STEPS, 5))


def test_pretraining_and_training_are_loops_and_the_report_is_on_the_longer_one(
    tmp_path, monkeypatch):
  monkeypatch.setattr(found, "_SURE_SECONDS", 0.0)
  steps, (w, x) = {"pretrain": 20, "fit": 30}, arrays()
  with jaxpace.observed(tmp_path) as inside:
    for name, sign in (("pretrain", 1e-6), ("fit", -1e-6)):
      def each(w, x, sign=sign):
        return w + sign * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
      each.__name__ = name
      step = jax.jit(each)
      for _ in range(steps[name]):
        w = jax.block_until_ready(step(w, x))
      while inside.step is None or inside.step.programs != (name,):
        time.sleep(0.01)
  said = rundir.read_json(tmp_path / "run.json")["settings"]["step"]
  written = rundir.read_json(tmp_path / "process" / "0.json")
  assert (written["rows_written"], written["lost_rows"]) == (50 * 4, 0)
  assert said["first_step"] == 21 and said["trains"]
  assert [one["programs"] for one in said["before"]] == [["pretrain"]]
  for window, first, last in (((0, 20), 0, 19), ((21, None), 21, 50)):
    run = read_run(tmp_path, window=window)
    assert (run.steps[0], run.steps[-1], len(run.loops), run.problems) == (first, last, 1, ())
    # No step begins where another loop ends.
    assert np.isnan(run.durations["gap"][:, 0]).all()
  run = read_run(tmp_path)
  own, other = run.loops
  assert own.seconds > other.seconds > 0 and own.holds(run.steps).all()
  assert not run.problems and len(run.steps) == steps[own.programs[0]]
  [note] = [note for note in diagnose(run).notes if note.code == Note.OTHER_LOOPS]
  assert f"that of {own.programs[0]}" in note and f"{other.programs[0]}, " in note


def test_another_loop_is_on_the_disk_before_it_is_sure_what_its_step_is(tmp_path, monkeypatch):
  monkeypatch.setattr(found, "_SURE_SECONDS", 0.0)
  monkeypatch.setattr(writer, "_GUESS_SECONDS", 0.0)
  first, second, w = whole_training("one", 2, 1), whole_training("two", 3, 1), jnp.ones((4, 4))
  with jaxpace.observed(tmp_path) as inside:
    for _ in range(10):
      w = jax.block_until_ready(first(w))
    while inside.step is None:
      time.sleep(0.01)
    monkeypatch.setattr(found, "_SURE_SECONDS", 1e9)
    for _ in range(10):
      w = jax.block_until_ready(second(w))
    while rows_written(tmp_path) < 4 * 20:
      time.sleep(0.01)
    assert inside.step is None
    for window, collectives in (((0, 10), 3), ((11, None), 4)):
      run = read_run(tmp_path, window=window)
      assert (len(run.steps), len(run.collectives)) == (10, collectives)
    assert len({entry["program"] for entry in run.plan["collectives"]}) == 2


def test_programs_of_an_earlier_recording_are_no_part_of_the_next(tmp_path):
  mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
  x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))
  wide = jax.jit(lambda x: x + x.sum())
  with jaxpace.observed(tmp_path / "earlier"):
    for _ in range(4):
      x = jax.block_until_ready(wide(x))
  with jaxpace.observed(tmp_path / "run"):
    train()
  assert read_run(tmp_path / "earlier").ranks == 8
  run = read_run(tmp_path / "run")
  assert run.ranks == 4 and len(run.steps) == STEPS and not run.problems
