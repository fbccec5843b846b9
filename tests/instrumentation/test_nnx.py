"""The forms in which flax documents nnx training steps: instrumented, each trains bit for bit as it
does bare."""


import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpace
from tests.instrumentation import models
from tests.instrumentation.running import P, bits, instrumented, mesh_of, restless

pytestmark = pytest.mark.optimized

STEPS = 3


class Net(nnx.Module):
  """All that has state of its own: parameters, statistics, a stream of random numbers."""

  def __init__(self, rngs):
    self.inner = nnx.Linear(models.FEATURES, 16, rngs=rngs)
    self.norm = nnx.BatchNorm(16, rngs=rngs)
    self.drop = nnx.Dropout(0.3, rngs=rngs)
    self.outer = nnx.Linear(16, models.CLASSES, rngs=rngs)

  def __call__(self, x):
    return self.outer(self.drop(jnp.tanh(self.norm(self.inner(x)))))


def made():
  with jax.numpy_dtype_promotion("standard"):
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def loss_of(model, batch):
  return jnp.mean(jnp.square(model(batch[0]) - batch[1]))


def descended(model, optimizer, batch):
  """Changes the parameters and the optimizer, and returns the loss alone."""
  loss, grads = nnx.value_and_grad(loss_of)(model, batch)
  loss, grads = jax.lax.pmean((loss, grads), "data")
  with jax.numpy_dtype_promotion("standard"):
    optimizer.update(model, grads)
  return loss


def in_place(model, optimizer, batch):
  """Changes statistics, too."""
  model.train()
  loss = descended(model, optimizer, batch)
  statistics = nnx.state(model, nnx.BatchStat)
  nnx.update(model, jax.lax.pmean(statistics, "data"))
  return loss


def returned(model, optimizer, batch):
  """Changes them and returns them as well."""
  loss = in_place(model, optimizer, batch)
  return model, optimizer, loss


def by_rows(model, optimizer, batch):
  """A transform of nnx within the step, and gradients of some parameters alone."""
  def loss(model):
    one = nnx.vmap(lambda model, x, y: jnp.mean(
        jnp.square(model.outer(jnp.tanh(model.inner(x))) - y)),
                   in_axes=(None, 0, 0))
    return jnp.mean(one(model, *batch))

  value, grads = nnx.value_and_grad(nnx.remat(loss), argnums=nnx.DiffState(0, nnx.Param))(model)
  value, grads = jax.lax.pmean((value, grads), "data")
  with jax.numpy_dtype_promotion("standard"):
    optimizer.update(model, grads)
  return value


def trained(run, objects, batches):
  """The bits of all that training has changed, and of what the last step returned."""
  for k in range(STEPS):
    out = run(*objects, batches[k % len(batches)])
  return bits([nnx.state(list(objects)), *jax.tree.leaves(out)])


def both(step, wrap, specs=(P(), P(), P("data")), out=P(), make=made, mesh=None, devices=None,
         **settings):
  """Trains bare and instrumented; `wrap(step, in_specs, out_specs)` compiles: under pmap where
  `devices` are given. Asserts that the bits of both are the same."""
  mesh, objects, batches = mesh or mesh_of(data=2), make(), models.batches(2)
  if devices:
    batches = [jax.tree.map(lambda a: a.reshape(2, -1, a.shape[-1]), batch) for batch in batches]
  before = bits(nnx.state(list(objects)))
  bare = trained(wrap(step, specs, out), objects, batches)
  again = make()
  paced = jaxpace.instrument(step, "data", pacer=restless(), **settings)
  spec = 0 if devices else jaxpace.spec(mesh)
  pace = paced.init(devices=devices) if devices else paced.init(mesh)
  compiled = wrap(paced, (spec, *specs), (spec, out))

  def run(*arguments):
    nonlocal pace
    pace, result = compiled(pace, *arguments)
    return result

  found = trained(run, again, batches)
  assert (np.asarray(pace.step) == STEPS).all() and paced.plan.collectives
  assert bare[:len(before)] != before, "it trains"
  assert found == bare
  if hasattr(again[0], "drop"):
    assert (again[0].drop.deterministic == objects[
        0].drop.deterministic), "what is no array is carried out, too"


def mapped(mesh=None, **options):
  """How nnx maps a step, within `nnx.jit`: without it every operation is compiled by itself, and
  takes minutes."""
  mesh = mesh or mesh_of(data=2)
  return lambda step, specs, out: nnx.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out,
                                                **options)


@pytest.mark.parametrize("step", [in_place, pytest.param(by_rows, marks=pytest.mark.long)])
def test_a_step_that_changes_its_modules_in_place(step):
  both(step, lambda *a: nnx.jit(mapped(check_vma=False)(*a)))


def plain_made():
  with jax.numpy_dtype_promotion("standard"):
    model = nnx.Sequential(nnx.Linear(models.FEATURES, 8, rngs=nnx.Rngs(1)), jnp.tanh,
                           nnx.Linear(8, models.CLASSES, rngs=nnx.Rngs(2)))
    model.drop = nnx.Dropout(0.0, deterministic=True)
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


@pytest.mark.long
def test_returned_modules_are_the_ones_that_were_given():
  wrap = mapped(check_vma=False)
  same = []

  def checked(*a):
    compiled = nnx.jit(wrap(*a))

    def run(*arguments):
      result = compiled(*arguments)
      outer = result[-1] if isinstance(result[0], jaxpace.PaceState) else result
      same.append(outer[0] is arguments[-3] and outer[1] is arguments[-2])
      return (result[0], outer[2]) if isinstance(result[0], jaxpace.PaceState) else outer[2]

    return run

  both(returned, checked, out=(P(), P(), P()))
  assert all(same) and len(same) == 2 * STEPS


@pytest.mark.long
def test_parameters_that_are_sharded_over_a_model_axis():
  mesh = mesh_of(data=2, model=2)
  width = nnx.StateSharding({nnx.PathContains("kernel"): P(None, "model"), ...: P()})

  def step(model, batch):
    def loss(model):
      return jnp.mean(jnp.square(model(batch[0])
                                 - jax.lax.stop_gradient(batch[1]).sum(-1, keepdims=True)))

    value, grads = jax.lax.pmean(nnx.value_and_grad(loss)(model), "data")
    nnx.update(model, jax.tree.map(lambda p, g: p - jnp.float32(0.1) * g,
                                   nnx.state(model, nnx.Param), grads))
    return jax.lax.pmean(value, "model")

  both(step, lambda *a: nnx.jit(mapped(mesh, check_vma=False)(*a)), (width, P("data")), mesh=mesh,
       make=lambda: (nnx.Linear(models.FEATURES, 4, use_bias=False, rngs=nnx.Rngs(0)),), share=True)


@pytest.mark.long
@pytest.mark.parametrize("step", [in_place, by_rows])
def test_pmap(step):
  devices, shared = jax.local_devices()[:2], nnx.StateAxes({...: None})
  both(step, lambda inner, axes, out: nnx.pmap(inner, axis_name="data", in_axes=axes, out_axes=out,
                                               devices=devices),
       (shared, shared, 0), 0, devices=devices)


@pytest.mark.long
@pytest.mark.parametrize("mode", [nnx.set_graph_mode, nnx.set_graph_updates])
def test_other_modes_of_nnx(mode):
  with mode(False):
    both(descended, lambda *a: nnx.jit(mapped(check_vma=False)(*a)), make=plain_made)


def test_a_flax_that_can_not_carry_changes_out_is_named(monkeypatch):
  mesh = mesh_of(data=2)
  paced = jaxpace.instrument(in_place, "data")
  spec = jaxpace.spec(mesh)
  run = nnx.jit(nnx.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P(), P("data")),
                              out_specs=(spec, P()), check_vma=False))
  monkeypatch.delattr(nnx, "split_context")
  with pytest.raises(ValueError, match=r"no nnx\.split_context.*nnx\.split\(model\).*nnx\.merge"):
    run(paced.init(mesh), *made(), models.batches(2)[0])


def test_a_mutable_array_given_to_the_step_is_changed():
  def step(total, x):
    value = jax.lax.psum(jnp.sum(x), "data")
    total[...] = total[...] + value
    return value

  mesh = mesh_of(data=2)
  _, run, pace = instrumented(step, mesh, P("data"), P("data"))
  total = jax.new_ref(jax.device_put(jnp.zeros(2), jax.sharding.NamedSharding(mesh, P("data"))))
  for _ in range(2):
    pace, _ = run(pace, total, jnp.ones(4))
  assert np.asarray(total[...]).tolist() == [8.0, 8.0]
