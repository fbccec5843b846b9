"""The ways people write train steps: each instrumented, unchanged in its bits, its collectives all accounted for."""

import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpace
from jaxpace.core.plan import Plan
from tests.instrument import models
from tests.instrument.running import (
  P,
  bits,
  bytes_of,
  extra_operands,
  host_callbacks,
  jaxpr_collectives,
  mesh_of,
  pair,
  restless,
)


class Case(NamedTuple):
  step: Any
  state: Any
  check_vma: bool = False
  hidden: int = 0


def _pmean_step(loss_fn):
  def step(params, batch):
    loss, grads = jax.lax.pmean(jax.value_and_grad(loss_fn)(params, batch), "data")
    return models.sgd(params, grads), loss

  return step


def _loss_with(apply):
  return lambda params, batch: jnp.mean(jnp.square(apply(params, batch[0]) - batch[1]))


def by_user():
  return Case(models.plain_step, models.mlp_params())


def by_autodiff():
  return Case(models.vma_step, models.mlp_params(), check_vma=True)


def nested_jit():
  return Case(jax.jit(lambda params, batch: jax.jit(models.plain_step)(params, batch)), models.mlp_params())


def linen_mlp():
  class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(models.CLASSES)(nn.gelu(nn.Dense(16)(x)))

  model = Mlp()
  return Case(_pmean_step(_loss_with(model.apply)), model.init(jax.random.key(0), jnp.ones((1, models.FEATURES))))


def linen_sync_batch_norm():
  class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Conv(4, (3,))(x[..., None])
      x = nn.relu(nn.BatchNorm(use_running_average=False, axis_name="data")(x))
      return nn.Dense(models.CLASSES)(x.reshape(x.shape[0], -1))

  model = Cnn()
  # On the host: it is made on a mesh of one device, and used on another.
  state = jax.tree.map(np.asarray, jax.jit(jax.shard_map(
      lambda x: model.init(jax.random.key(0), x), mesh=mesh_of(data=1), in_specs=P(), out_specs=P(),
      check_vma=False))(jnp.ones((1, models.FEATURES))))

  def step(state, batch):
    def loss(params):
      out, new = model.apply({"params": params, "batch_stats": state["batch_stats"]}, batch[0],
                             mutable=["batch_stats"])
      return jnp.mean(jnp.square(out - batch[1])), new

    (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
    grads = jax.lax.pmean(grads, "data")
    return {"params": models.sgd(state["params"], grads), **new}, jax.lax.pmean(value, "data")

  return Case(step, state)


def nnx_model():
  class Mlp(nnx.Module):
    def __init__(self, rngs):
      self.a = nnx.Linear(models.FEATURES, 16, rngs=rngs)
      self.b = nnx.Linear(16, models.CLASSES, rngs=rngs)

    def __call__(self, x):
      return self.b(nnx.relu(self.a(x)))

  graph, state = nnx.split(Mlp(nnx.Rngs(0)))

  @nnx.jit
  def loss_fn(model, batch):
    return jnp.mean(jnp.square(model(batch[0]) - batch[1]))

  def step(state, batch):
    model = nnx.merge(graph, state)
    loss, grads = jax.lax.pmean(nnx.value_and_grad(loss_fn)(model, batch), "data")
    return models.sgd(state, grads), loss

  return Case(step, state)


def remat():
  return Case(_pmean_step(_loss_with(jax.checkpoint(models.mlp))), models.mlp_params())


def remat_by_autodiff():
  """JAX puts the gradient's sum inside the remat."""
  apply = jax.checkpoint(models.mlp)

  def step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jax.lax.pmean(_loss_with(apply)(p, batch), "data"))(params)
    return models.sgd(params, grads), loss

  return Case(step, models.mlp_params(), check_vma=True, hidden=-1)


def scanned_layers():
  def apply(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return x @ params["out"]

  f = models.FEATURES
  return Case(_pmean_step(_loss_with(apply)),
              {"layers": models.normal(0, 3, f, f), "out": models.normal(1, f, models.CLASSES)})


def collective_in_a_scan():
  def apply(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) + jax.lax.pmean(jnp.mean(x), "data"), None), x,
                        params["layers"])
    return x @ params["out"]

  return scanned_layers()._replace(step=_pmean_step(_loss_with(apply)), hidden=2)


def collective_in_a_cond():
  def step(params, batch):
    params, loss = models.plain_step(params, batch)
    return params, jax.lax.cond(loss > 0, lambda x: jax.lax.pmax(x, "data"), lambda x: x, loss)

  return Case(step, models.mlp_params(), hidden=1)


def custom_gradient():
  """A function whose gradient is summed over the ranks by its own rule."""

  @jax.custom_vjp
  def shared(params):
    return params

  shared.defvjp(lambda params: (params, None), lambda _, grads: (jax.lax.pmean(grads, "data"),))

  def step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: models.square_loss(shared(p), batch))(params)
    return models.sgd(params, grads), jax.lax.pmean(loss, "data")

  return Case(step, models.mlp_params())


def accumulated():
  def step(params, batch):
    parts = jax.tree.map(lambda leaf: leaf.reshape(2, -1, leaf.shape[-1]), batch)
    grads, losses = jax.lax.scan(
        lambda total, part: (lambda loss, grads: (jax.tree.map(jnp.add, total, grads), loss))(
            *jax.value_and_grad(models.square_loss)(params, part)),
        jax.tree.map(jnp.zeros_like, params), parts)
    grads, loss = jax.lax.pmean((grads, jnp.mean(losses)), "data")
    return models.sgd(params, grads), loss

  return Case(step, models.mlp_params())


def sharpness_aware():
  def step(params, batch):
    grads = jax.lax.pmean(jax.grad(models.square_loss)(params, batch), "data")
    scale = jnp.float32(0.05) / optax.tree.norm(grads)
    climbed = jax.tree.map(lambda p, g: p + scale * g, params, grads)
    loss, grads = jax.lax.pmean(jax.value_and_grad(models.square_loss)(climbed, batch), "data")
    return models.sgd(params, grads), loss

  return Case(step, models.mlp_params())


def dropout_and_odd_leaves():
  """Typed keys, integers, None and empty containers in the state."""

  def step(state, batch):
    key, now = jax.random.split(state["key"])
    now = jax.random.fold_in(now, jax.lax.axis_index("data"))

    def loss(params):
      kept = jax.random.bernoulli(now, 0.8, batch[0].shape)
      return models.square_loss(params, (jnp.where(kept, batch[0], jnp.float32(0)), batch[1]))

    grads = jax.lax.psum(jax.grad(loss)(state["params"]), "data")
    new = dict(state, key=key, params=models.sgd(state["params"], grads, 0.01), count=state["count"] + 1)
    return new, {"norm": optax.tree.norm(grads), "nothing": None}

  return Case(step, {"params": models.mlp_params(), "key": jax.random.key(3), "count": jnp.int32(0), "none": None,
                     "empty": {}, "flag": jnp.bool_(True), "void": jnp.zeros((0, 3))})


def matrices_clipped_and_cast():
  """No flat gradient: the entry waits for an element of matrices that are fused from others."""
  def step(params, batch):
    loss = jax.checkpoint(lambda params: jnp.mean(jnp.square(jnp.tanh(batch[0] @ params[0]) @ params[1] - batch[1])))
    value, grads = jax.value_and_grad(loss)(params)
    scale = jnp.minimum(jnp.float32(1), jnp.float32(0.1) / optax.tree.norm(grads))
    grads = jax.tree.map(lambda g, p: (g * scale + jnp.float32(0.01) * p).astype(jnp.bfloat16), grads, params)
    value, grads = jax.lax.pmean((value, grads), "data")
    return models.sgd(params, grads), value

  return Case(step, [models.normal(0, models.FEATURES, 32), models.normal(1, 32, models.CLASSES)])


def reduce_scatter_all_gather():
  def step(params, batch):
    grads = jax.grad(lambda w: jnp.mean(jnp.square(batch[0] @ w - batch[1])))(params)
    part = jax.lax.psum_scatter(grads.reshape(2, -1), "data", tiled=True)
    mine = jax.lax.dynamic_slice_in_dim(params.reshape(2, -1), jax.lax.axis_index("data"), 1)
    new = jax.lax.all_gather(mine - jnp.float32(0.05) * part, "data", tiled=True)
    return new.reshape(params.shape), jnp.sum(new)

  return Case(step, models.normal(0, models.FEATURES, models.CLASSES))


def max_and_permute():
  def step(params, batch):
    def loss(params):
      out = models.mlp(params, batch[0])
      top = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(out)), "data")
      next_door = jax.lax.ppermute(out, "data", [(0, 1), (1, 0)])
      return jnp.mean(jnp.square((out - next_door) / (1.0 + jnp.abs(top)) - batch[1]))

    loss, grads = jax.lax.pmean(jax.value_and_grad(loss)(params), "data")
    return models.sgd(params, grads), loss

  return Case(step, models.mlp_params())


CASES = [by_user, by_autodiff, nested_jit, linen_mlp, linen_sync_batch_norm, nnx_model, remat, remat_by_autodiff,
         scanned_layers, collective_in_a_scan, collective_in_a_cond, custom_gradient, accumulated, sharpness_aware,
         dropout_and_odd_leaves, matrices_clipped_and_cast, reduce_scatter_all_gather, max_and_permute]


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_bits_and_collectives(make):
  case = make()
  mesh, data = mesh_of(data=2), models.batches(2)
  both = pair(case.step, mesh, case.state, data[0], check_vma=case.check_vma, share=True, pacer=restless())
  both.check_bits(case.state, data, 6)
  plan = both.paced.plan

  # Number, kind, groups of ranks and operands of all collectives are the bare step's, but for the shared vector.
  # Arrivals and delays of 2 ranks, the step time, and each collective's transfer; in bfloat16 three numbers for each.
  parts = 3 if make is matrices_clipped_and_cast else 1
  shared = [f"f32[{parts * (5 + len(plan.collectives))}]"] if plan.share else []
  assert extra_operands(both.bare_hlo, both.hlo) == shared
  assert plan.share == (make is not reduce_scatter_all_gather)  # there, no sum that an operand could join
  if plan.clock == "native":
    assert host_callbacks(both.hlo) == host_callbacks(both.bare_hlo)

  traced = jax.make_jaxpr(jax.shard_map(case.step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
                                        check_vma=case.check_vma))(case.state, data[0])
  found = list(jaxpr_collectives(traced.jaxpr, "data"))
  assert sum(map(bytes_of, found)) == sum(c.bytes for c in plan.collectives) + sum(u.bytes for u in plan.unstamped)
  assert plan.overflow == 0
  if case.hidden < 0:
    assert plan.unstamped
  else:
    assert len(plan.unstamped) == case.hidden
  assert all(u.reason and u.name for u in plan.unstamped)
  assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("share", [True, None])
@pytest.mark.parametrize("make", [by_user, by_autodiff, sharpness_aware])
def test_every_all_reduce_is_held_back_by_its_entry_stamp(make, share):
  """Without that it may start before the stamp; seldom enough to be missed by a test of times."""
  case = make()
  data = models.batches(2)
  both = pair(case.step, mesh_of(data=2), case.state, data[0], check_vma=case.check_vma, share=share)
  if both.paced.plan.clock != "native":
    pytest.skip("callbacks hold by loops, which compiled programs don't name")
  reduced = re.findall(r" all-reduce\((.*?)\)", both.hlo)
  assert len(reduced) == len(both.paced.plan.collectives)
  held = set(re.findall(r'(%[\w.-]+) = .* custom_call_target="jaxpace_hold"', both.hlo))
  for operands in reduced:
    assert held.intersection(re.findall(r"%[\w.-]+", operands)), f"none of {operands} is held"


@pytest.mark.parametrize("make", [by_user, by_autodiff])
def test_every_gradient_comes_after_the_delay(make):
  """By dataflow in the compiled program: a small one runs in order anyway, so that times would show nothing."""
  case = make()
  both = pair(case.step, mesh_of(data=2), case.state, models.batches(2)[0], check_vma=case.check_vma, pacer=restless())
  if both.paced.plan.clock != "native":
    pytest.skip("callbacks hold by loops, which compiled programs don't name")
  reads = {name: re.findall(r"%[\w.-]+", rest) for name, rest in re.findall(r"(%[\w.-]+) = (.*)", both.hlo)}
  delays = {name for name, _ in re.findall(r'(%[\w.-]+) = (.*"jaxpace_delay")', both.hlo)}
  assert delays

  def behind(name):
    found, waiting = set(), [name]
    while waiting:
      value = waiting.pop()
      if value not in found:
        found.add(value)
        waiting += reads.get(value, [])
    return found

  (operands,) = re.findall(r" all-reduce\((.*?)\)", both.hlo)
  early = [operand for operand in re.findall(r"%[\w.-]+", operands) if not delays & behind(operand)]
  assert not early


@pytest.mark.parametrize("check_vma", [True, False])
def test_data_and_model_axes(check_vma):
  """Tensor parallel: a weight split over the model axis, gradients summed over the data axis."""

  def step(params, batch):
    def loss(params):
      h = jnp.tanh(batch[0] @ params["up"])  # [batch, own part of width]
      out = jax.lax.psum(h @ params["down"], "model")
      value = jnp.mean(jnp.square(out - batch[1]))
      return jax.lax.pmean(value, "data") if check_vma else value

    value, grads = jax.value_and_grad(loss)(params)
    if not check_vma:
      value, grads = jax.lax.pmean((value, grads), "data")
    return models.sgd(params, grads), value

  params = {"up": models.normal(0, models.FEATURES, 8), "down": models.normal(1, 8, models.CLASSES)}
  split = {"up": P(None, "model"), "down": P("model", None)}
  data = models.batches(2)
  both = pair(step, mesh_of(data=2, model=2), params, data[0], check_vma=check_vma, state_spec=split,
              pacer=restless(), share=True)
  both.check_bits(params, data, 6)
  assert both.paced.plan.ranks == 2
  assert np.asarray(both.pace.rank).tolist() == [0, 1, 2, 3]
  assert np.asarray(both.pace.step).tolist() == [6] * 4
  assert extra_operands(both.bare_hlo, both.hlo) == ["f32[6]"] * both.paced.plan.share


def test_two_axes_that_together_are_the_data_axis():
  def step(params, batch):
    loss, grads = jax.lax.pmean(jax.value_and_grad(models.square_loss)(params, batch), ("host", "device"))
    return models.sgd(params, grads), loss

  params, data = models.mlp_params(), models.batches(4)
  both = pair(step, mesh_of(host=2, device=2), params, data[0], axis=("host", "device"),
              batch_spec=P(("host", "device")), share=True)
  both.check_bits(params, data, 6)
  assert both.paced.plan.ranks == 4 and both.paced.plan.share
  assert extra_operands(both.bare_hlo, both.hlo) == ["f32[8]"]
  shared = np.asarray(both.pace.arrivals)
  assert np.isfinite(shared).all() and (shared == shared[0]).all()


def test_more_collectives_than_slots():
  def step(params, batch):
    def loss(params):
      h = batch[0]
      for _ in range(3):
        h = jnp.tanh(models.mlp(params, h) @ jnp.ones((models.CLASSES, models.FEATURES)))
        h = h - jax.lax.pmean(jnp.mean(h, axis=0), "data")
      return jnp.mean(jnp.square(h))

    value, grads = jax.lax.pmean(jax.value_and_grad(loss)(params), "data")
    return models.sgd(params, grads), value

  params, data = models.mlp_params(), models.batches(2)
  both = pair(step, mesh_of(data=2), params, data[0], slots=1, pacer=restless())
  both.check_bits(params, data, 6)
  plan = both.paced.plan
  assert len(plan.collectives) == 1 and plan.overflow >= 3
  assert plan.collectives[0].operands == 1 + len(jax.tree.leaves(params)), "the largest is kept"
  assert len(plan.unstamped) >= plan.overflow
  assert all("slots" in u.reason for u in plan.unstamped)


@pytest.mark.parametrize("pmap", [False, True])
def test_one_trace_donation_and_a_checkpoint(pmap):
  """The loop of a user: state donated, saved and restored half way, compiled once."""
  traces = []

  def step(params, batch):
    traces.append(1)
    return models.plain_step(params, batch)

  ranks, data = 2, models.batches(2)
  paced = jaxpace.instrument(step, "data", restless(), rows=8)
  if pmap:
    devices = jax.local_devices()[:ranks]
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * ranks), models.mlp_params())
    data = [jax.tree.map(lambda leaf: leaf.reshape(ranks, -1, leaf.shape[-1]), batch) for batch in data]
    pace = paced.init(devices=devices)
    run = jax.pmap(paced, "data", devices=devices, donate_argnums=(0, 1))
    bare = jax.pmap(models.plain_step, "data", devices=devices)
  else:
    mesh = mesh_of(data=ranks)
    state, pace, spec = models.mlp_params(), paced.init(mesh), jaxpace.spec(mesh)
    run = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")), out_specs=(spec, P()),
                                check_vma=False), donate_argnums=(0, 1))
    bare = jax.jit(jax.shard_map(models.plain_step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
                                 check_vma=False))
  expected = state
  for k in range(20):
    expected, _ = bare(expected, data[k % 3])
    pace, (state, _) = run(pace, jax.tree.map(jnp.copy, state) if k == 0 else state, data[k % 3])
    if k == 10:
      shardings = jax.tree.map(lambda leaf: leaf.sharding, pace)
      pace = jax.tree.map(jax.device_put, jax.tree.map(np.asarray, pace), shardings)
  assert bits(state) == bits(expected)
  assert np.asarray(pace.step).tolist() == [20] * ranks
  assert np.asarray(pace.rank).tolist() == list(range(ranks))
  assert len(traces) <= 2, "retraced"
