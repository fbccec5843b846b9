"""Simulated jobs: against closed forms, against a plain loop, and the null: without a coupling no
pacer gains."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.core.types import Decision, Observation, Pacer
from jaxpace.simulation import noise
from jaxpace.simulation.job import Job, Shape, simulation, vmap_ranks
from jaxpace.simulation.scenario import survive
from jaxpace.simulation.settings import Failures
from tests.quick import long

KEY = jax.random.key(7)
PLAIN = Job(forward=10e-3, backward=20e-3, update=1e-3, gap=0.5e-3,
            transfers=np.array([2e-3], np.float32))


@functools.lru_cache
def compiled(ranks, pacer=None, buckets=1, by_rank=False, per_node=1, overlap=True):
  init, run = simulation(Shape(ranks, per_node, overlap), pacer, buckets=buckets, by_rank=by_rank)
  return jax.jit(lambda key, job, steps: run(key, job, init(key, job), steps)[1],
                 static_argnums=2)


def play(job, ranks, steps, **more):
  return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64),
                      compiled(ranks, **more)(KEY, job, steps))


def half_of_earliness():
  """A small pacer of one's own: half of own earliness, averaged over some steps. Its state differs
  between ranks."""
  def update(seen, state):
    early = jnp.nan_to_num(jnp.max(seen.arrivals) - seen.arrivals[seen.rank])
    state = state + np.float32(0.1) * (early - state)
    return Decision(np.float32(0.5) * state, {"early": early}), state

  return Pacer(lambda ranks: jnp.float32(0), update)


def within_4_sigma(values, mean):
  assert (abs(values.mean() - mean) < 4 * values.std() / math.sqrt(len(values))), (
      values.mean(), mean)


@pytest.mark.parametrize(("overlap", "expected_ms"), [
    # Ready at 16.5, 21.5, 26.5, 31.5: only the last transfer is exposed, unless they take longer
    # than 5 ms each.
    (True, 33.5), (False, 31.5 + 4 * 2)])
def test_buckets_hide_behind_the_backward_pass(overlap, expected_ms):
  job = PLAIN._replace(transfers=np.full(4, 2e-3, np.float32))
  steps = play(job, 2, 3, buckets=4, overlap=overlap)
  np.testing.assert_allclose(steps.step_time, expected_ms * 1e-3, rtol=1e-6)


@pytest.mark.parametrize(("component", "extra_share"), [
    (noise.Exponential(np.float32(0.1)), lambda n: 0.1 * sum(1 / k for k in range(1, n + 1))),
    (noise.Normal(np.float32(0.05)), lambda n: 0.05 * {64: 2.344, 1024: 3.248}[n])])
@pytest.mark.parametrize("ranks", [64, *long(1024)])
def test_the_slowest_of_n_is_late_by_the_expected_maximum(component, extra_share, ranks):
  steps = play(PLAIN._replace(noise=(component,)), ranks, 1500)
  within_4_sigma(steps.step_time, 33.5e-3 + 30e-3 * extra_share(ranks))


@pytest.mark.parametrize("aligned", [False, True])
def test_pauses_cost_what_the_oracle_says(aligned):
  ranks, chance, length = 16, 0.01, 40e-3
  job = PLAIN._replace(noise=(noise.Pauses(np.float32(chance), np.float32(length),
                                           np.bool_(aligned)),))
  steps = play(job, ranks, 8000)
  share = chance if aligned else 1 - (1 - chance) ** ranks
  within_4_sigma(steps.step_time, 33.5e-3 + length * share)


@pytest.mark.parametrize("aligned", [False, True])
def test_scheduled_pauses_come_so_often(aligned):
  job = PLAIN._replace(noise=(noise.Schedule(np.int32(50), np.float32(0.1), np.bool_(aligned)),))
  gap = play(job, 8, 200, by_rank=True).gap
  assert ((gap > 50e-3).sum(axis=0) == 4).all()
  together = (gap > 50e-3).all(axis=1).sum()
  assert together == (4 if aligned else 0)


@pytest.mark.parametrize(("component", "mean", "deviation", "beyond", "chance", "together"), [
    (noise.Heavy(np.float32(0.1), np.float32(4.0)), 0.1 / 3, 0.1 * math.sqrt(4 / (9 * 2)), 0.1,
     1 / 16, 1),
    # An AR(1) of correlation r holds (1 - r) / (1 + r) as much as independent steps do; a common
    # one one rank's worth.
    (noise.Wandering(np.float32(0.1), np.float32(5.0)), 0.0, 0.1, 0.1, 0.158655,
     1 / math.tanh(0.1)),
    (noise.Common(np.float32(0.1)), 0.0, 0.1, 0.1, 0.158655, 50)])
def test_noise_is_of_the_distribution_it_claims(component, mean, deviation, beyond, chance,
                                                together):
  """Its mean, and how often it is larger than so much: within 4 standard errors."""
  compute = play(PLAIN._replace(noise=(component,)), 50, 4000, by_rank=True).compute / 30e-3 - 1
  number = compute.size / together
  assert abs(compute.mean() - mean) < 4 * deviation / math.sqrt(number)
  assert abs((compute > beyond).mean() - chance) < 4 * math.sqrt(chance * (1 - chance) / number)


def test_wandering_remembers_and_common_noise_is_common():
  wandering, common = (noise.Wandering(np.float32(0.05), np.float32(10)),
                       noise.Common(np.float32(0.05), np.float32(10)))
  compute = play(PLAIN._replace(noise=(wandering,)), 40, 2000, by_rank=True).compute
  ahead = np.mean([np.corrcoef(c[:-10], c[10:])[0, 1] for c in compute.T])
  # 20 steps hold one's worth
  assert ahead == pytest.approx(math.exp(-1), abs=4 / math.sqrt(40 * 2000 / 20))
  compute = play(PLAIN._replace(noise=(common,)), 40, 50, by_rank=True).compute
  assert np.ptp(compute, axis=1).max() == 0 and np.ptp(compute[:, 0]) > 0


def test_bursts_come_in_bursts():
  """A chain of two states, left with a and b: 4 standard errors, by its autocovariance pi (1 - pi)
  (1 - a - b)^k."""
  a, b, q = 0.01, 1 / 20, 0.5
  job = PLAIN._replace(noise=(noise.Bursts(np.float32(a), np.float32(1 / b), np.float32(q),
                                           np.float32(0.1)),))
  paused = play(job, 50, 3000, by_rank=True).gap > 50e-3
  bad, stay = a / (a + b), 1 - a - b
  variance = q * bad * (1 - q * bad) + 2 * q**2 * bad * (1 - bad) * stay / (1 - stay)
  assert paused.mean() == pytest.approx(q * bad, abs=4 * math.sqrt(variance / paused.size))
  # After a pause the state was bad, whatever came before: the next one's chance is q (1 - b).
  again, number = paused[1:][paused[:-1]], paused[:-1].sum()
  assert (again.mean() == pytest.approx(q * (1 - b),
                                        abs=4
                                        * math.sqrt(q * (1 - b) * (1 - q * (1 - b)) / number)))


def test_traffic_lengthens_transfers_while_it_lasts():
  a, b, steps = 0.02, 1 / 30, 60_000
  job = PLAIN._replace(traffic=noise.Traffic(np.float32(a), np.float32(1 / b), np.float32(0.5)))
  transfers = play(job, 2, steps).transfers[:, 0]
  assert set(np.round(transfers * 1e3, 3)) == {2.0, 4.0}
  on, stay = a / (a + b), 1 - a - b
  error = math.sqrt(on * (1 - on) * (1 + stay) / (1 - stay) / steps)
  assert (transfers > 3e-3).mean() == pytest.approx(on, abs=4 * error)


def test_a_run_cut_into_parts_is_the_same_run():
  parts = (noise.Wandering(np.float32(0.1), np.float32(20)),
           noise.Pauses(np.float32(.05), np.float32(.01)))
  job = PLAIN._replace(noise=parts, transfers=np.array([1e-3, 2e-3], np.float32))
  init, run = simulation(Shape(4), half_of_earliness(), buckets=2, by_rank=True)
  whole = run(KEY, job, init(KEY, job), 40)[1]
  state, first = run(KEY, job, init(KEY, job), 13)
  rest = run(KEY, job, state, 27)[1]
  assert whole.delay.max() > 0
  chex.assert_trees_all_equal(whole,
                              jax.tree.map(lambda *parts: np.concatenate(parts), first, rest))


def loop(pacer, arrivals_of, ranks, steps, transfer):
  """The barrier model as a plain loop, each rank's pacer by itself. Returns delays [steps,
  ranks]."""
  update = jax.jit(pacer.update)
  states = [pacer.init(ranks) for _ in range(ranks)]
  delays, applied, before, found = ([], np.zeros(ranks, np.float32), np.float32(np.nan),
                                    np.float32(np.nan))
  for k in range(steps):
    busy = arrivals_of(k).astype(np.float32)
    entered = busy + applied
    leave = np.float32(entered.max() + np.float32(transfer))
    delays.append(applied)
    seen, took = (np.full(ranks, np.nan,
                          np.float32), np.float32(np.nan)) if k == 0 else (entered - applied, leave)
    asked = []
    for r in range(ranks):
      observation = Observation(
          step=jnp.int32(k), rank=jnp.int32(r), arrivals=jnp.asarray(seen),
          delays=jnp.asarray(applied), waits=jnp.asarray([leave - entered[r]]),
          step_time=jnp.asarray(took), job_step_time=jnp.asarray(before),
          job_transfers=jnp.asarray([found]))
      decision, states[r] = update(observation, states[r])
      asked.append(decision.delay)
    before, found = took, np.float32(np.nan) if k == 0 else np.float32(leave - entered.max())
    applied = np.asarray(asked, np.float32)
  return np.stack(delays)


def test_all_ranks_at_once_decide_as_each_by_itself():
  """With one rank late by a third, pacing acts; the delays are those of a plain loop over ranks and
  steps."""
  ranks, steps = 4, 40
  slow = np.array([0, 0, 0, 0.3], np.float32)
  job = PLAIN._replace(noise=(noise.Slow(slow),))
  pacer = jaxpace.chain(jaxpace.pace_early_ranks(window=8, max_delay=5e-3, cost=0.05),
                        half_of_earliness())
  simulated = play(job, ranks, steps, pacer=pacer, by_rank=True)
  busy = 1e-3 + 0.5e-3 + 30e-3 * (1 + slow)
  reference = loop(pacer, lambda k: busy, ranks, steps, 2e-3)
  assert reference.max() > 1e-3
  np.testing.assert_allclose(simulated.delay, reference, atol=2e-6)


def test_a_state_that_depends_on_the_rank_is_carried_by_rank():
  """A pacer that counts its own late steps, and knows its last wait: neither must be shared by
  mistake."""
  def update(seen, state):
    late = seen.arrivals[seen.rank] >= jnp.max(seen.arrivals)
    return Decision(jnp.float32(0),
                    {"late": state["own"].astype(jnp.float32), "waited": state["waited"]}), {
                        "own": state["own"] + late.astype(jnp.int32), "of_own": state["own"],
                        "same": state["same"] + 1, "waited": jnp.sum(seen.waits)}

  none = jnp.int32(0)
  pacer = Pacer(lambda ranks: {"own": none, "of_own": none, "same": none, "waited": jnp.float32(0)},
                update)
  of_ranks = {name: leaf.shape for name, leaf in vmap_ranks(pacer, 3, 1).init(3).items()}
  assert of_ranks == {"own": (3,), "of_own": (3,), "same": (), "waited": (3,)}
  slow = np.array([0, 0.5, 0], np.float32)
  steps = play(PLAIN._replace(noise=(noise.Slow(slow),)), 3, 10, pacer=pacer, by_rank=True)
  # the first step is not known; decided after ten
  np.testing.assert_array_equal(steps.info["late"][-1], [0, 8, 0])
  early, late, _ = steps.info["waited"][-1]
  assert early - late == pytest.approx(0.5 * 30e-3, rel=1e-4)  # forward and backward


def test_without_a_coupling_pacing_never_gains_and_costs_no_more_than_its_bucket():
  job = PLAIN._replace(noise=(noise.Wandering(np.float32(0.2), np.float32(300)),))
  bare = play(job, 8, 1500, per_node=4)
  eager = jaxpace.pace_early_ranks(threshold=0, noise=0, share_of_slack=1.0, cost=5e-3)
  paced = play(job, 8, 1500, per_node=4, pacer=eager)
  assert paced.delay.mean() > 0
  assert (paced.step_time >= bare.step_time - 1e-9).all()  # the same noise: step by step
  assert paced.step_time.sum() <= bare.step_time.sum() * (1 + 5e-3)
  np.testing.assert_allclose(paced.step_time - paced.cost, bare.step_time, rtol=1e-5)


def test_where_early_ranks_poll_on_the_late_ones_host_pacing_gains():
  """The coupling, and its size: the late rank loses `polling` seconds for each second the others
  wait."""
  slow = np.array([0, 0, 0, 0.4], np.float32)
  job = PLAIN._replace(noise=(noise.Slow(slow),), polling=np.float32(0.5))
  bare = play(job, 4, 600, per_node=4, by_rank=True)
  np.testing.assert_allclose(bare.polling[-1], [0, 0, 0, 0.5 * 12e-3], rtol=1e-4)
  paced = play(job, 4, 600, per_node=4, pacer=jaxpace.pace_early_ranks(window=16), by_rank=True)
  assert paced.step_time[-100:].mean() < bare.step_time[-100:].mean() - 3e-3


def test_impossible_shapes_are_refused():
  with pytest.raises(ValueError, match="per_node=3 must divide ranks=4"):
    simulation(Shape(4, 3))


def expected(work, failures):
  """Expected seconds of a segment of `work` seconds (Daly 2006, equation 13, no approximation)."""
  return ((1 / failures.rate + failures.restart)
          * math.expm1(failures.rate * (work + failures.checkpoint)))


@pytest.mark.parametrize("mtbf", [4000, 300])  # now and then, and twice in most segments
def test_failures_take_what_daly_says(mtbf):
  failures = Failures(rate=1 / mtbf, every=100, checkpoint=30.0, restart=120.0)
  run, segments = survive(np.full(100 * 20_000, 6.0), failures, seed=1)
  within_4_sigma(segments, expected(600.0, failures))
  parts = run["work"] + run["checkpoints"] + run["lost"] + run["restarts"]
  assert parts == pytest.approx(run["elapsed"])
  assert run["work"] == 100 * 20_000 * 6.0 and run["restarts"] == 120.0 * run["failures"]
