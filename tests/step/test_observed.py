"""What a pacer observes is what the stamps of the ring say, computed here from those alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.core import ring
from jaxpace.core.types import Decision, Pacer
from tests.step import models
from tests.step.running import PAUSE, P, arrivals, at, column, mesh_of, times

STEPS, SLOTS = 6, 4
COLUMNS = ["step", "rank", "own", "other", "delays", "wait0", "wait1", "step_time", "job_step",
           "job0", "job1", "now0"]


def noting() -> Pacer:
  """Writes down what it observes, and delays every rank but the first."""

  def update(o, state):
    index = o.rank
    seen = [o.step, o.rank, o.arrivals[index], o.arrivals[1 - index], o.delays[1 - index],
            o.waits[0], o.waits[1], o.step_time, o.job_step_time, *o.job_transfers[:2],
            o.job_transfers_now[0]]
    assert o.waits.shape == o.job_transfers.shape == o.job_transfers_now.shape == (SLOTS,)
    assert o.arrivals.shape == o.delays.shape == (2,)
    info = {name: value.astype(jnp.float32) for name, value in zip(COLUMNS, seen, strict=True)}
    empty = jnp.isnan(o.waits[2:]).all() & jnp.isnan(o.job_transfers[2:]).all()
    empty &= jnp.isnan(o.job_transfers_now[1:]).all()
    info["wait1"] = jnp.where(empty, info["wait1"], jnp.float32(-1))
    return Decision(jnp.where(index > 0, jnp.float32(PAUSE), jnp.float32(0)), info), state

  return Pacer(lambda ranks: (), update)


def two_sums(params, batch):
  """One collective in the forward pass, and one of its gradient; then the gradients'."""

  def loss(params):
    h = jnp.tanh(batch[0] @ params["layer0"]["w"] + params["layer0"]["b"])
    h = h - jax.lax.stop_gradient(jax.lax.pmean(jnp.mean(h, axis=0), "data"))
    return jnp.mean(jnp.square(h @ params["layer1"]["w"] + params["layer1"]["b"] - batch[1]))

  value, grads = jax.lax.pmean(jax.value_and_grad(loss)(params), "data")
  return models.sgd(params, grads), value


@pytest.fixture(scope="module", params=[True, None], ids=["shared", "alone"])
def observed(request):
  paced = jaxpace.instrument(two_sums, "data", noting(), share=request.param, slots=SLOTS, rows=16)
  # so that a rank's index along the data axis is not its device's number
  mesh = mesh_of(model=2, data=2)
  state, batch = models.mlp_params(layers=1), models.batches(2)[0]
  pace, spec = paced.init(mesh), jaxpace.spec(mesh)
  step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                               out_specs=(spec, P()), check_vma=False))
  for _ in range(STEPS):
    pace, (state, _) = step(pace, state, batch)
    jax.block_until_ready(pace)
  plan = paced.plan
  assert plan.decisions == tuple(sorted(COLUMNS)) and len(plan.collectives) == 2
  noted = {name: column(pace, ring.DECISIONS + i)[:, 1:] for i, name in enumerate(plan.decisions)}
  return pace, plan, noted, request.param


def test_the_step_and_the_rank_s_index_along_the_axis(observed):
  pace, _, noted, _ = observed
  np.testing.assert_array_equal(noted["step"],
                                np.broadcast_to(np.arange(STEPS - 1), (4, STEPS - 1)))
  np.testing.assert_array_equal(noted["rank"][:, 0], [0, 1, 0, 1])
  np.testing.assert_array_equal(np.asarray(pace.rank), range(4))


def test_waits_by_slot(observed):
  pace, plan, noted, _ = observed
  stamps = times(pace, plan)
  for slot in range(2):
    waits = ((stamps[:, :-1, at(plan, "exit", slot)] - stamps[:, :-1, at(plan, "enter", slot)])
             * 1e-9)
    np.testing.assert_allclose(noted[f"wait{slot}"], waits, rtol=1e-6)


def test_step_time_is_from_last_exit_to_last_exit(observed):
  pace, plan, noted, _ = observed
  exits = times(pace, plan)[:, :, at(plan, "exit", 1)]
  np.testing.assert_allclose(noted["step_time"][:, 1:], np.diff(exits, axis=1)[:, :-1] * 1e-9,
                             rtol=1e-6)
  assert np.isnan(noted["step_time"][:, 0]).all(), "the first step has none before it"


def test_arrivals_and_delays_of_the_ranks(observed):
  pace, plan, noted, share = observed
  own = arrivals(pace, plan)[:, :-1]
  applied = column(pace, ring.DELAY_APPLIED)[:, :-1]
  other = [1, 0, 3, 2]
  np.testing.assert_allclose(noted["own"][:, 1:], own, rtol=1e-5, atol=1e-7)
  assert np.isnan(noted["own"][:, 0]).all()
  if share:
    np.testing.assert_allclose(noted["other"][:, 1:], own[other], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(noted["delays"], applied[other])
  else:
    assert np.isnan(noted["other"]).all() and np.isnan(noted["delays"]).all()
  assert np.isnan(noted["other"][:, 0]).all()


def test_what_is_asked_is_applied_in_the_next_step(observed):
  pace, _, _, _ = observed
  late = np.array([False, True, False, True])
  asked, applied = column(pace, ring.DELAY_ASKED), column(pace, ring.DELAY_APPLIED)
  np.testing.assert_array_equal(asked[:, 0], 0)
  np.testing.assert_array_equal(asked[:, 1:],
                                np.broadcast_to(late[:, None] * np.float32(PAUSE), (4, STEPS - 1)))
  assert (applied[late, 1:] >= 0.999 * np.float32(PAUSE)).all() and (applied[~late] == 0).all()
  # The time really slept, not what was asked: never the same to the bit.
  assert (applied[late, 1:] != np.float32(PAUSE)).all()


def test_what_the_job_knows_of_the_step_before_is_the_same_on_all_ranks(observed):
  pace, _, noted, share = observed
  # the ranks along the data axis, on each of the model axis's halves
  first, second = [0, 0, 2, 2], [1, 1, 3, 3]
  if not share:
    assert all(np.isnan(noted[name]).all() for name in ("job_step", "job0", "job1"))
    return
  np.testing.assert_array_equal(noted["job_step"][:, 1:], noted["step_time"][first, :-1])
  assert np.isnan(noted["job_step"][:, 0]).all()

  def averaged(values):
    return (values[first] + values[second])[:, :-1] / 2

  np.testing.assert_allclose(noted["job1"][:, 1:], averaged(noted["wait1"]), rtol=1e-6)
  entered = noted["own"] + column(pace, ring.DELAY_APPLIED)[:, :-1]
  early = np.maximum(entered[first], entered[second]) - entered
  transfers = averaged(np.maximum(noted["wait0"] - early, 0))
  np.testing.assert_allclose(noted["job0"][:, 1:], transfers, rtol=1e-4, atol=1e-6)
  np.testing.assert_array_equal(noted["job0"], noted["job0"][first])


def test_what_was_over_when_it_was_shared_is_of_the_step_just_done(observed):
  pace, plan, noted, share = observed
  first, second = [0, 0, 2, 2], [1, 1, 3, 3]
  assert plan.carrier == (1 if share else None), "the last collective carries it"
  if not share:
    assert np.isnan(noted["now0"]).all()
    return
  entered = noted["own"] + column(pace, ring.DELAY_APPLIED)[:, :-1]
  early = np.abs(entered[first] - entered[second]) / 2  # mean over the two ranks
  transfers = (noted["wait0"][first] + noted["wait0"][second]) / 2 - early
  np.testing.assert_allclose(noted["now0"][:, 1:], np.maximum(transfers, 0)[:, 1:], rtol=1e-3,
                             atol=1e-6)
  assert np.isnan(noted["now0"][:, 0]).all(), "arrivals aren't known in the first step"
  np.testing.assert_array_equal(noted["now0"], noted["now0"][first])
