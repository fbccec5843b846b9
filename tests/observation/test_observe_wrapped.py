"""An observed step takes the place of the jitted one in classes, in wrappers of flax, in copies."""

import copy
import functools
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.runs.reader import read_run
from tests.observation import observed_steps as steps


def sgd(w, x):
  return w - jnp.float32(0.1) * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


def arrays():
  mesh = steps.mesh_of(data=4)
  x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
  return (jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P())),
          jax.device_put(x, NamedSharding(mesh, P("data"))))


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
  w, x = arrays()
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
  w, x = arrays()
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

  w, x = np.ones(4, np.float32), np.asarray(arrays()[1]).reshape(4, 2, 4)
  mapped = nnx.pmap(local, axis_name="i", in_axes=(None, 0), out_axes=0)
  observed = jaxpace.observe(mapped)
  assert steps.bits(observed(w, x)) == steps.bits(mapped(w, x))
  assert is_observed(observed)


@pytest.mark.parametrize("copied", [
    copy.copy, copy.deepcopy, lambda step: pickle.loads(cloudpickle.dumps(step))],
    ids=["copy", "deepcopy", "cloudpickle"])
def test_it_is_copied_where_the_jitted_one_is(copied):
  w, x = arrays()
  observed = jaxpace.observe(jax.jit(sgd), exact=True, different="marked")
  wanted = steps.bits(observed(w, x))
  other = copied(observed)
  assert other is not observed and not other.plan.programs
  assert other.settings_json() == observed.settings_json()
  assert steps.bits(other(w, x)) == wanted
  assert is_observed(other) and len(observed.plan.programs) == 1


def test_a_recorded_step_has_what_the_step_has(tmp_path):
  w, x = arrays()
  jitted = jax.jit(sgd)
  for directory in (tmp_path, None):
    with jaxpace.recorded(directory, jitted) as recorded_step:
      assert recorded_step.lower(w, x).compile() is not None
      assert recorded_step.eval_shape(w, x).shape == (4,)
      assert recorded_step.__name__ == "sgd"
      with pytest.raises(AttributeError):
        recorded_step.nothing_of_the_kind  # noqa: B018
