"""Other meshes than one data axis, and more collectives than slots."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jaxpace
from jaxpace.observation.clocks import resolve_clock
from tests.instrumentation import cases, models
from tests.instrumentation.running import (
  P,
  bits,
  bytes_of,
  extra_operands,
  hlo_collectives,
  host_callbacks,
  instrumented,
  jaxpr_collectives,
  mesh_of,
  pair,
  restless,
  times,
)
from tests.quick import long

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize("check_vma", [True, *long(False)])
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
  both = pair(step, mesh_of(data=2, model=2), params, data[0], check_vma=check_vma,
              state_spec=split, pacer=restless(), share=True)
  both.check_bits(params, data, 6)
  assert both.paced.plan.ranks == 2
  assert np.asarray(both.pace.rank).tolist() == [0, 1, 2, 3]
  assert np.asarray(both.pace.step).tolist() == [6] * 4
  assert extra_operands(both.bare_hlo, both.hlo) == ["f32[6]"] * both.paced.plan.share


def test_two_axes_that_together_are_the_data_axis():
  def step(params, batch):
    loss, grads = jax.lax.pmean(jax.value_and_grad(models.square_loss)(params, batch),
                                ("host", "device"))
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


# `shard_map(axis_names=...)`: only the data axis is manual, the compiler partitions over the model
# axis.

def compiled(check_vma, **settings):
  """A tensor-parallel step on 2 x 2 devices, bare and instrumented; its state, batch and pace."""
  mesh = mesh_of(data=2, model=2)

  def loss(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["up"]) @ params["down"]))

  def step(params, x):
    if check_vma:
      value, grads = jax.value_and_grad(lambda params: jax.lax.pmean(loss(params, x), "data"))(
          params)
    else:
      value, grads = jax.lax.pmean(jax.value_and_grad(loss)(params, x), "data")
    return models.sgd(params, grads), value

  params = {"up": jax.device_put(models.normal(0, 8, 16), NamedSharding(mesh, P(None, "model"))),
            "down": jax.device_put(models.normal(1, 16, 4), NamedSharding(mesh, P("model")))}
  batch = jax.device_put(models.normal(2, 8, 8), NamedSharding(mesh, P("data")))
  paced = jaxpace.instrument(step, "data", **settings)
  spec, pace = jaxpace.spec(mesh, axes=["data"]), paced.init(mesh, axes=["data"])
  options = {"mesh": mesh, "axis_names": {"data"}, "check_vma": check_vma}
  bare = jax.jit(jax.shard_map(step, in_specs=(P(), P("data")), out_specs=P(), **options))
  run = jax.jit(jax.shard_map(paced, in_specs=(spec, P(), P("data")), out_specs=(spec, P()),
                              **options))
  return paced, bare, run, pace, params, batch


@pytest.mark.parametrize("check_vma", [True, *long(False)])
def test_bits_stamps_and_no_gathered_parameters(check_vma):
  paced, bare, run, pace, params, batch = compiled(check_vma, pacer=restless(), share=True)
  if resolve_clock().notice:
    pytest.skip("callbacks are not allowed there")
  expected = found = params
  for _ in range(6):
    expected, _ = bare(expected, batch)
    pace, (found, _) = run(pace, found, batch)
    jax.block_until_ready((expected, found))
  assert bits(found) == bits(expected) != bits(params)
  plan = paced.plan
  assert plan.ranks == 2 and np.asarray(pace.rank).tolist() == [0, 1] and plan.share
  assert (np.diff(times(pace, plan), axis=-1) >= 0).all()
  assert any("'model' is left to the compiler" in notice for notice in plan.notices)
  collectives = [hlo_collectives(compiled.compile().as_text())
                 for compiled in (bare.lower(params, batch), run.lower(pace, params, batch))]
  # with the loss
  across = [[dict(operands) for _, operands in found if "f32[]" in operands]
            for found in collectives]
  assert len(across[0]) == len(across[1]) == 1, "the gradients' sum stays one, and holds ours"
  assert across[1][0] == across[0][0] | {"f32[6]": 1}
  added = [operands for groups, operands in collectives[1]
           if (groups, operands) not in collectives[0]]
  assert (sum(name.endswith("[1,1]") for operands in added for name in operands) == len(added)
          - 1), "but single elements"


def test_callbacks_are_refused_in_a_sentence():
  _, _, run, pace, params, batch = compiled(True, clock="callback")
  with pytest.raises(ValueError,
                     match="'model' is left to the compiler by axis_names.*native clock"):
    run(pace, params, batch)


# The ways people write train steps: each instrumented, unchanged in its bits, its collectives all
# accounted for.

SIMPLER = (cases.scanned_layers, cases.by_user, cases.by_autodiff, cases.nnx_model,
           cases.sharpness_aware, cases.max_and_permute)
"""What others of the cases contain, or another file instruments."""


@pytest.mark.parametrize("make", [
    pytest.param(make, marks=pytest.mark.long) if make in SIMPLER else make
    for make in cases.CASES], ids=lambda make: make.__name__)
def test_bits_and_collectives(make):
  case = make()
  mesh, data = mesh_of(data=2), models.batches(2)
  both = pair(case.step, mesh, case.state, data[0], check_vma=case.check_vma, share=True,
              pacer=restless())
  both.check_bits(case.state, data, 6)
  plan = both.paced.plan

  # Number, kind, groups of ranks and operands of all collectives are the bare step's, but for the
  # shared vector. Arrivals and delays of 2 ranks, the step time, each collective's transfer, the
  # wait of each that is over when the message leaves; in bfloat16 three numbers for each.
  parts = 3 if make is cases.matrices_clipped_and_cast else 1
  shared = [f"f32[{parts * (5 + len(plan.collectives) + plan.carrier)}]"] if plan.share else []
  assert extra_operands(both.bare_hlo, both.hlo) == shared
  # there, no sum that an operand could join
  assert plan.share == (make is not cases.reduce_scatter_all_gather)
  if plan.clock == "native":
    assert host_callbacks(both.hlo) == host_callbacks(both.bare_hlo)

  traced = jax.make_jaxpr(jax.shard_map(case.step, mesh=mesh, in_specs=(P(), P("data")),
                                        out_specs=P(), check_vma=case.check_vma))(
                                            case.state, data[0])
  found = list(jaxpr_collectives(traced.jaxpr, "data"))
  told = (*plan.collectives, *plan.inside, *plan.unstamped)
  moved, recorded = sum(map(bytes_of, found)), sum(one.bytes for one in told)
  # XLA combines sums of jax.checkpoint with the loss's and the shared vector, which counts twice.
  assert moved == recorded if case.hidden >= 0 else moved < recorded < 1.1 * moved
  assert plan.overflow == 0 and not plan.unstamped
  assert len(plan.inside) == abs(case.hidden) and all(one.name for one in plan.inside)
  assert json.loads(json.dumps(plan.to_json()))["ranks"] == plan.ranks


@pytest.mark.parametrize("check_vma", [False, True])
def test_without_phases_only_collectives_are_stamped_and_bits_are_the_same(check_vma):
  def step(params, batch):
    # Rematerialized: the boundary between the passes can be held, and with phases it is.
    loss, grads = jax.value_and_grad(jax.checkpoint(models.square_loss))(params, batch)
    return models.sgd(params, jax.lax.pmean(grads, "data")), jax.lax.pmean(loss, "data")

  batches, params, mesh = models.batches(2), models.mlp_params(layers=2), mesh_of(data=2)
  both = pair(step, mesh, params, batches[0], check_vma=check_vma, phases=False)
  both.check_bits(params, batches, 6)
  plan = both.paced.plan
  assert {mark.kind for mark in plan.marks} == {"start", "enter", "exit", "end"}
  assert {mark.segment for mark in plan.marks} == {"gap", "compute", "sync", "update"}
  assert (len(plan.collectives) >= 1 and not plan.overflow
          and both.paced.settings_json()["phases"] is False)
  paced, run, pace = instrumented(step, mesh, P(), P("data"), check_vma=check_vma)
  jax.eval_shape(run, pace, params, batches[0])
  assert {"forward", "backward"} <= {mark.segment for mark in paced.plan.marks}


def test_one_trace_donation_and_a_checkpoint():
  """The loop of a user: state donated, saved and restored half way, compiled once."""
  traces = []

  def step(params, batch):
    traces.append(1)
    return models.plain_step(params, batch)

  mesh, data = mesh_of(data=2), models.batches(2)
  _, run, pace = instrumented(step, mesh, P(), P("data"), pacer=restless(), donate=(0, 1))
  bare = jax.jit(jax.shard_map(models.plain_step, mesh=mesh, in_specs=(P(), P("data")),
                               out_specs=P(), check_vma=False))
  expected, state = models.mlp_params(), models.mlp_params()
  for k in range(20):
    expected, _ = bare(expected, data[k % 3])
    pace, (state, _) = run(pace, state, data[k % 3])
    if k == 10:
      shardings = jax.tree.map(lambda leaf: leaf.sharding, pace)
      pace = jax.tree.map(jax.device_put, jax.tree.map(np.asarray, pace), shardings)
  assert bits(state) == bits(expected)
  assert np.asarray(pace.step).tolist() == [20] * 2
  assert np.asarray(pace.rank).tolist() == [0, 1]
  assert len(traces) <= 2, "retraced"
