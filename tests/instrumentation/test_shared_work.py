"""Counts through the pace state: the live step runs by them, and they follow injected slowness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jaxpace
from jaxpace.coordination.apportion import even
from jaxpace.coordination.share_work import found
from tests.instrumentation.running import P, instrumented, mesh_of
from tests.patience import patiently
from tests.quick import long

RANKS, TOTAL, CAPACITY = 4, 12, 6
SECONDS = 1.5e-3


def loss_fn(w, micro_batch):
  x, seconds = micro_batch
  x = jaxpace.delay(x, seconds)
  return jnp.sum(jnp.square(x - w)), jnp.float32(x.size)


def step(w, batch):
  loss, grads = jaxpace.accumulate(loss_fn, w, (batch["x"], batch["seconds"]), batch["counts"])
  return w - jnp.float32(0.01) * grads, loss


def loaded(counts, speeds):
  """The same 12 micro-batches of 5 numbers each, in the ranks' parts; NaN where there is room to
  spare."""
  x, seconds = np.full((RANKS, CAPACITY,
                        5), np.nan, np.float32), np.zeros((RANKS, CAPACITY), np.float32)
  every, at = np.arange(TOTAL * 5, dtype=np.float32).reshape(TOTAL, 5), 0
  for rank, count in enumerate(counts):
    x[rank, :count], seconds[rank, :count] = every[at:at + count], SECONDS * speeds[rank]
    at += count
  return {"x": x.reshape(-1, 5), "seconds": seconds.reshape(-1), "counts": counts}


@patiently(SECONDS=1.5e-3)
def test_a_rank_that_is_slow_gets_fewer_and_the_parameters_are_those_of_even_counts():
  mesh = mesh_of(data=RANKS)
  specs = {"x": P("data"), "seconds": P("data"), "counts": P()}
  paced, run, pace = instrumented(
      step, mesh, P(), specs, check_vma=True, share=True,
      pacer=jaxpace.share_work(jaxpace.share_by_speed(TOTAL, CAPACITY, window=8)))
  bare = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), specs), out_specs=P()))
  w = other = jax.device_put(jnp.float32(0), NamedSharding(mesh, P()))
  queue = [even(TOTAL, RANKS)] * 2
  used = []
  for _ in range(40):
    counts = queue.pop(0)
    used.append(counts.tolist())
    pace, (w, loss) = run(pace, w, loaded(counts, [1, 1, 4, 1]))
    other, other_loss = bare(other, loaded(even(TOTAL, RANKS), [0, 0, 0, 0]))
    state = found(paced.pacer_state(pace))
    decided = np.asarray(state.counts)  # [R, 2, R]
    assert (decided == decided[:1]).all(), "all ranks decide alike"
    assert decided[0, 0].tolist() == (queue[0] if queue else counts).tolist()
    queue.append(decided[0, 1])
    np.testing.assert_allclose([w, loss], [other, other_loss], rtol=1e-5)
  assert used[:9] == [[3, 3, 3, 3]] * 9
  assert used[-1][2] < 3 and sum(used[-1]) == TOTAL
  assert np.asarray(state.ran)[0].tolist() == np.sum(used, axis=0).tolist()
  assert run._cache_size() == 1
  columns = dict(zip(paced.plan.decisions, np.asarray(pace.info)[2], strict=False))
  # They tell of the step that follows, whose counts may have changed once more.
  assert columns["micro_batches"] == decided[0, 0, 2]
  assert columns["work_uneven"] == (decided[0, 0] != even(TOTAL, RANKS)).any()


def traced(pacer, share, step=step):
  mesh = mesh_of(data=RANKS)
  paced = jaxpace.instrument(step, "data", pacer, share=share)
  spec = jaxpace.spec(mesh)
  specs = {"x": P("data"), "seconds": P("data"), "counts": P()}
  run = jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), specs), out_specs=(spec, P()))
  jax.eval_shape(run, paced.init(mesh), jnp.float32(0), loaded(even(TOTAL, RANKS), [0, 0, 0, 0]))
  return paced.plan


@pytest.mark.parametrize("wrap", [
    lambda pacer: jaxpace.steerable(jaxpace.chain(jaxpace.pace_early_ranks(), pacer)),
    *long(lambda pacer: pacer, jaxpace.steerable)])
def test_arrivals_are_shared_wherever_work_is(monkeypatch, wrap):
  monkeypatch.setattr(jax, "process_count", lambda: 4)
  by_speed = jaxpace.share_work(jaxpace.share_by_speed(TOTAL, CAPACITY))
  assert traced(wrap(by_speed), "auto").share
  assert not traced(jaxpace.pace_early_ranks(), "auto").share, "gloo with four processes"


@pytest.mark.parametrize(("answer", "said"), [
    (lambda counts, state: (counts[:2], state), r"counts of all ranks, \[4\] int32; it .* \[2\]"),
    (lambda counts, state: (jnp.int32(3), state), r"counts of all ranks, \[4\] int32; it .* \[\]"),
    (lambda counts, state: None, "must return .counts, state.; it returned a NoneType"),
    (lambda counts, state: counts, "must return .counts, state.; it returned a "),
    (lambda counts, state: (counts, jnp.float32(0)), "must return a state of the same structure")])
def test_answers_that_no_balancer_gives_are_refused_in_words(answer, said):
  balancer = jaxpace.Balancer(lambda ranks: jnp.int32(0),
                              lambda seen, state: answer(seen.counts, state), TOTAL)
  with pytest.raises(ValueError, match=said):
    traced(jaxpace.share_work(balancer), "auto")


@pytest.mark.parametrize("counts", [[9, 9, -3, -3], [1, 2, 3, 4], [np.nan] * 4, [9.0, 1, 1, 1]])
def test_counts_that_cannot_be_are_left_out(counts):
  balancer = jaxpace.Balancer(lambda ranks: jnp.int32(0),
                              lambda seen, state: (jnp.asarray(counts), state), TOTAL)
  pacer, ran = jaxpace.share_work(balancer), jnp.full(RANKS, 3, jnp.int32)
  state, nothing = pacer.init(RANKS), jnp.zeros(1)
  seen = jaxpace.Observation(jnp.int32(0), jnp.int32(0), jnp.ones(RANKS), jnp.zeros(RANKS),
                             *[nothing] * 4, counts=ran)
  _, after = jax.jit(pacer.update)(seen, state)
  possible = sum(counts) == TOTAL and min(counts) >= 0
  assert after.counts[1].tolist() == (counts if possible else ran.tolist())


def test_a_state_is_made_whatever_guards_transfers():
  with jax.transfer_guard("disallow"):
    jaxpace.instrument(step, "data", jaxpace.share_work(
        jaxpace.share_by_speed(TOTAL, CAPACITY))).init(mesh_of(data=RANKS))


def test_work_is_not_shared_without_arrivals():
  by_speed = jaxpace.share_work(jaxpace.share_by_speed(TOTAL, CAPACITY))
  with pytest.raises(ValueError, match="share=None keeps that from it: leave share out"):
    traced(by_speed, None)

  def in_whole_numbers(w, batch):
    return w + jax.lax.psum(jnp.int32(batch["x"].size), "data").astype(jnp.float32), w

  with pytest.raises(ValueError, match="that can't be shared: .*int32"):
    traced(by_speed, "auto", in_whole_numbers)
