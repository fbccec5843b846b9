"""Every step is recorded, whatever of JAX's settings picks the program that it runs."""

import contextlib
import copy
import functools
import pickle
import threading

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.observation.clocks import host_ring
from jaxpace.runs.reader import read_run
from tests.observation import observed_steps as steps
from tests.quick import long
from tests.record.recording import table

STEPS = 12
auto = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
explicit = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,),
                         devices=jax.devices()[:4])
PICKED = {
    "a mesh": [contextlib.nullcontext, lambda: jax.set_mesh(auto)],
    "precision": [contextlib.nullcontext, lambda: jax.default_matmul_precision("highest")],
    "precisions": [lambda: jax.default_matmul_precision("float32"),
                   lambda: jax.default_matmul_precision("bfloat16"), contextlib.nullcontext],
    "debugging": [contextlib.nullcontext, lambda: jax.numpy_rank_promotion("raise")],
}


def sgd(w, x):
  return w - jnp.float32(0.1) * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


def arrays(mesh):
  x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
  return (jax.device_put(np.ones((4, 2), np.float32), NamedSharding(mesh, P())),
          jax.device_put(x, NamedSharding(mesh, P("data"))))


def recorded_steps(directory, observed, calls):
  """Runs and records the calls; checks that all are recorded and returns the executions of each
  program."""
  with jaxpace.recorded(directory, observed) as recorded_step:
    for setting, args in calls:
      with setting():
        jax.block_until_ready(recorded_step(*args))
  assert recorded_step.recorder.lost["lost_rows"] == 0
  assert sorted((row["rank"], row["step"]) for row in table(directory)) == [
      (rank, step) for rank in range(4) for step in range(len(calls))]
  return [host_ring.executions(0, one.number) for one in observed.plan.programs]


@pytest.mark.parametrize("picked", PICKED)
def test_a_setting_that_picks_the_program(tmp_path, picked):
  observed, args = jaxpace.observe(jax.jit(sgd)), arrays(auto)
  settings = PICKED[picked]
  executions = recorded_steps(tmp_path, observed, [
      (settings[k % len(settings)], args) for k in range(STEPS)])
  assert executions == [STEPS // len(settings)] * len(settings)


def test_an_automatic_and_an_explicit_mesh_in_turn(tmp_path):
  observed = jaxpace.observe(jax.jit(sgd))
  kinds = [(contextlib.nullcontext, arrays(auto)),
           (lambda: jax.set_mesh(explicit), arrays(explicit))]
  # One of them is rare, as in a warm-up.
  executions = recorded_steps(tmp_path, observed, [kinds[k % 5 == 3] for k in range(STEPS)])
  assert sorted(executions) == [2, 10]


@pytest.mark.parametrize("every", [*long(4), 2])
def test_steps_without_timestamps_are_counted_and_not_judged_as_if_they_were_there(
    tmp_path, every):
  step, (params, x, y) = steps.data_parallel()

  def scaled(params, x, y, scale):
    return step(params, x, y)[1] * scale

  observed = jaxpace.observe(jax.jit(scaled, static_argnums=3))
  one = jax.device_put((params, np.asarray(x), np.asarray(y)), jax.devices()[0])
  bare = [k for k in range(40) if k % every == every - 1]
  with jaxpace.recorded(tmp_path, observed) as recorded_step:
    for k in range(40):
      # On one device there is nobody to wait for.
      args = one if k in bare else (params, x, y)
      jax.block_until_ready(recorded_step(*args, 1.0 + k % 3))
  run = read_run(tmp_path)
  assert list(run.steps) == list(range(40 - len(bare)))
  assert recorded_step.recorder.lost["lost_rows"] == 4 * len(bare)
  diagnosis = diagnose(run)
  refused = "recorded 20 and lost 20 of 40 steps" in diagnosis.verdict
  assert refused == (every == 2) and not (refused and diagnosis.findings)


# An observed step takes the place of the jitted one in classes, in wrappers of flax, in copies.

def is_observed(observed):
  return [one.bare for one in observed.plan.programs] == [""]


def trainer_class():
  class Trainer:

    def __init__(self, rate):
      self.rate = rate

    @jaxpace.observe
    @functools.partial(jax.jit, static_argnums=0)
    def decorated(self, w, x):
      return w - self.rate * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

    @functools.partial(jax.jit, static_argnums=0)
    def put_in_later(self, w, x):
      return sgd(w, x)

  return Trainer


def test_it_is_a_method_where_it_is_in_a_class(tmp_path):
  w, x = arrays(auto)
  Trainer = trainer_class()
  trainer = Trainer(jnp.float32(0.1))
  wanted = steps.bits(jax.jit(sgd)(w, x))
  assert steps.bits(trainer.decorated(w, x)) == wanted
  assert is_observed(trainer.decorated) and trainer.decorated.plan is Trainer.decorated.plan
  bare, Trainer.put_in_later = Trainer.put_in_later, jaxpace.observe(Trainer.put_in_later)
  try:
    assert steps.bits(trainer.put_in_later(w, x)) == wanted
    with jaxpace.recorded(tmp_path, trainer.put_in_later) as recorded_step:
      for _ in range(3):
        assert steps.bits(recorded_step(w, x)) == wanted
    assert is_observed(trainer.put_in_later)
  finally:
    Trainer.put_in_later = bare
  assert list(read_run(tmp_path).steps) == [0, 1, 2]


class Model(nnx.Module):

  def __init__(self, w):
    self.w = nnx.Param(w)


def in_place(model, x):
  grads = nnx.grad(lambda model: ((x @ model.w[...]) ** 2).mean())(model)
  model.w[...] -= jnp.float32(0.1) * grads.w[...]
  return (x @ model.w[...]).mean()


@pytest.mark.parametrize("recorded", [False, True])
def test_nnx_caches_its_arguments_with_all_that_libraries_look_for(tmp_path, recorded):
  w, x = arrays(auto)
  one, two = Model(w), Model(w)
  bare, observed = nnx.cached_partial(nnx.jit(in_place), one), jaxpace.observe(nnx.jit(in_place))
  with jaxpace.recorded(tmp_path if recorded else None, observed) as recorded_step:
    step = nnx.cached_partial(recorded_step, two)
    for _ in range(3):
      wanted, found = bare(x), step(x)
      assert steps.bits((wanted, nnx.state(one))) == steps.bits((found, nnx.state(two)))
  assert is_observed(observed)
  # As libraries ask for it, of the partial function as of the step.
  assert step.jitted_fn is recorded_step.jitted_fn is observed.jitted_fn is not None
  assert step.jitted_fn._cache_size() == 1


def test_what_nnx_pmap_returns_is_observed():
  def local(w, x):
    return w - jnp.float32(0.1) * jax.lax.pmean(sgd(w, x), "i")

  w, x = np.ones(4, np.float32), np.asarray(arrays(auto)[1]).reshape(4, 2, 4)
  mapped = nnx.pmap(local, axis_name="i", in_axes=(None, 0), out_axes=0)
  observed = jaxpace.observe(mapped)
  assert steps.bits(observed(w, x)) == steps.bits(mapped(w, x))
  assert is_observed(observed)


@pytest.mark.parametrize("copied", [
    copy.copy, copy.deepcopy, lambda step: pickle.loads(cloudpickle.dumps(step))],
    ids=["copy", "deepcopy", "cloudpickle"])
def test_it_is_copied_where_the_jitted_one_is(copied):
  w, x = arrays(auto)
  observed = jaxpace.observe(jax.jit(sgd), exact=True)
  wanted = steps.bits(observed(w, x))
  other = copied(observed)
  assert other is not observed and not other.plan.programs
  assert other.settings_json() == observed.settings_json()
  assert steps.bits(other(w, x)) == wanted
  assert is_observed(other) and len(observed.plan.programs) == 1


def test_a_recorded_step_has_what_the_step_has(tmp_path):
  w, x = arrays(auto)
  jitted = jax.jit(sgd)
  for directory in (tmp_path, None):
    with jaxpace.recorded(directory, jitted) as recorded_step:
      assert recorded_step.lower(w, x).compile() is not None
      assert recorded_step.eval_shape(w, x).shape == (4, 2)
      assert recorded_step.__name__ == "sgd"
      with pytest.raises(AttributeError):
        recorded_step.nothing_of_the_kind  # noqa: B018


# Threads that call one observed step at the same time, without a lock of their own.

SECONDS = 120


def test_a_step_that_raises_while_it_is_compiled_leaves_nothing_behind():
  step, args = steps.data_parallel()
  observed = jaxpace.observe(jax.jit(step))
  jitted = observed.jitted

  def interrupted(*args):
    jitted(*args)
    raise KeyboardInterrupt

  with jax.numpy_dtype_promotion("standard"):
    observed.jitted = interrupted
    with pytest.raises(KeyboardInterrupt):
      observed(*args)
    observed.jitted = jitted
    # Of the call that raised JAX knows no result, and the next one compiles nothing.
    observed(*args)
    few = steps.put(steps.mesh_of(data=4), steps.batch(8), (P("data"), P("data")))
    observed(args[0], *few)
  assert len(observed.runs) == 2


def test_steps_of_several_threads_are_each_recorded_once(tmp_path):
  step, args = steps.data_parallel()
  observed = jaxpace.observe(jax.jit(step))
  times, threads = 15, 3
  turn = threading.Lock()

  def loop():
    with jax.numpy_dtype_promotion("standard"):
      for _ in range(times):
        # Two programs on few cores may each wait for a device that the other has.
        with turn:
          jax.block_until_ready(observed(*args))
        recorder.record()

  with jaxpace.Recorder(tmp_path, observed) as recorder:
    running = [threading.Thread(target=loop) for _ in range(threads)]
    for thread in running:
      thread.start()
    for thread in running:
      thread.join(SECONDS)
      assert not thread.is_alive()
  [number] = observed.runs
  assert host_ring.executions(0, number) == times * threads
  assert recorder.lost["lost_rows"] == 0
  found = [(row["step"], row["rank"]) for row in table(tmp_path)]
  assert found and len(set(found)) == len(found)
