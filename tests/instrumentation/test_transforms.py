"""The ways people write train steps: each instrumented, unchanged in its bits, its collectives all
accounted for."""

import json

import jax
import numpy as np
import pytest

from tests.instrumentation import cases, models
from tests.instrumentation.running import (
  P,
  bits,
  bytes_of,
  extra_operands,
  host_callbacks,
  instrumented,
  jaxpr_collectives,
  mesh_of,
  pair,
  restless,
)

pytestmark = pytest.mark.optimized
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
