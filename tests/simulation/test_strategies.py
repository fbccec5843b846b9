"""Synchronisation strategies: times against closed forms and a plain loop, messages, mathematics,
training."""

import heapq
import math

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.measure import compression
from jaxpace.simulation import allreduce, noise
from jaxpace.simulation.settings import SettingsError
from jaxpace.simulation.strategies import timeline
from jaxpace.simulation.strategies.cluster import (
  Cluster,
  bytes_per_step,
  check,
  draw,
  messages,
  service,
)
from jaxpace.simulation.strategies.schedule import PlayedSteps, play
from jaxpace.simulation.strategies.settings import (
  Backup,
  BoundedStaleness,
  Compressed,
  LocalSteps,
  ParameterServer,
  Synchronous,
  read,
)
from tests.quick import examples

KEY = jax.random.key(3)
NORMAL = Cluster(compute=0.1, noise=(noise.Normal(np.float32(0.05)),))
NOISY = Cluster(compute=0.1, update=1e-3, noise=(noise.Exponential(np.float32(0.2)),),
                gradient_bytes=1e8, latency=1e-5, rate=1e10)
_play = jax.jit(play, static_argnums=(0, 3, 4))
_draw = jax.jit(lambda cluster, *more: draw(cluster, *more).work(cluster.update),
                static_argnums=(2, 3))
_decoded = jax.jit(compression.decoded, static_argnums=0)
_averaged = jax.jit(compression.averaged, static_argnums=0)


def steps_of(strategy, cluster, ranks, steps):
  return timeline.rounds(_play(strategy, cluster, KEY, ranks, steps))


def within_4_sigma(values, mean):
  assert (abs(values.mean() - mean) < 4 * values.std() / math.sqrt(len(values))), (
      values.mean(), mean)


def harmonic(n):
  return sum(1 / k for k in range(1, n + 1))


def test_synchronous_steps_take_the_longest_of_the_ranks_and_the_ring():
  work = np.asarray(_draw(NOISY, KEY, 8, 200), np.float64)
  expected = (work.max(axis=1) + allreduce.ring(8, 1e8, 1e-5, 1e-10)).cumsum()
  found = steps_of(Synchronous(), NOISY, 8, 200)
  np.testing.assert_allclose(found.time, expected, rtol=1e-5)
  assert found.counted.all()
  within_4_sigma(np.diff(found.time),
                 0.101 + 0.02 * harmonic(8) + allreduce.ring(8, 1e8, 1e-5, 1e-10))


@pytest.mark.parametrize("wait_for", [1, 6])
def test_waiting_for_k_of_n_exponentials(wait_for):
  """mu (H_N - H_{N - k}) on top of what is not random; as many gradients count as were waited
  for."""
  cluster = NOISY._replace(gradient_bytes=0.0, latency=0.0)
  found = steps_of(Backup(wait_for), cluster, 8, 1500)
  within_4_sigma(np.diff(found.time), 0.101 + 0.02 * (harmonic(8) - harmonic(8 - wait_for)))
  assert (found.counted.sum(axis=1) == wait_for).all()
  work = np.asarray(_draw(cluster, KEY, 8, 1500))
  assert work[found.counted].mean() <= work.mean()  # those that count are the early ones


@pytest.mark.parametrize("every", [4, 16])
def test_local_steps_wait_for_the_slowest_sum(every):
  """mean + sigma E_N / sqrt(H) a step, and an H-th of an exchange; exact for sums of normal
  steps."""
  ranks, rounds = 64, 400
  cluster = NORMAL._replace(gradient_bytes=1e8, rate=1e10)
  found = steps_of(LocalSteps(every), cluster, ranks, every * rounds)
  step = np.diff(found.time[every - 1::every]) / every
  within_4_sigma(step, 0.1 + 0.005 * 2.344 / math.sqrt(every) + 2 * 63 / 64 * 1e8 / 1e10 / every)


def test_local_steps_meet_every_so_many_steps():
  met = np.ptp(_play(LocalSteps(4), NOISY, KEY, 8, 200).finish, axis=1) == 0
  np.testing.assert_array_equal(met, np.arange(1, 201) % 4 == 0)


@pytest.mark.parametrize("strategy", [LocalSteps(1), Backup(8), BoundedStaleness(0)])
def test_limits_that_are_synchronous(strategy):
  together = steps_of(Synchronous(), NOISY, 8, 200)
  np.testing.assert_allclose(steps_of(strategy, NOISY, 8, 200).time, together.time, rtol=1e-5)


@pytest.mark.parametrize("staleness", [None, 150])
def test_without_a_bound_every_rank_goes_at_its_own_pace(staleness):
  slow = NOISY._replace(noise=(*NOISY.noise, noise.Slow(np.arange(8, dtype=np.float32) / 8)))
  found = steps_of(BoundedStaleness(staleness), slow, 8, 120)
  own = np.asarray(_draw(slow, KEY, 8,
                         120), np.float64).mean(axis=0) + allreduce.ring(8, 1e8, 1e-5, 1e-10)
  np.testing.assert_allclose(found.paces, own, rtol=1e-5)


@pytest.mark.parametrize("staleness", [1, 3])
def test_bounded_staleness_is_the_recursion_in_a_plain_loop(staleness):
  cluster = NOISY._replace(noise=(noise.Heavy(np.float32(0.3), np.float32(1.5)),))
  work = np.asarray(_draw(cluster, KEY, 5, 60), np.float64) + allreduce.ring(5, 1e8, 1e-5, 1e-10)
  finish = np.zeros((61, 5))
  for c in range(1, 61):
    oldest = c - 1 - staleness
    finish[c] = np.maximum(finish[c - 1], finish[oldest].max() if oldest > 0 else 0) + work[c - 1]
  found = steps_of(BoundedStaleness(staleness), cluster, 5, 60)
  np.testing.assert_allclose(found.time, finish[1:].max(axis=1), rtol=1e-5)


def test_more_staleness_never_costs_time_and_the_bound_holds():
  slow = NOISY._replace(noise=(*NOISY.noise, noise.Slow(np.array([0, 0, 0, 0.5], np.float32))))
  ends = []
  for staleness in (0, 2, None):
    played = _play(BoundedStaleness(staleness), slow, KEY, 4, 120)
    finish = (np.asarray(played.finish, np.float64)
              + np.concatenate([[0], np.cumsum(played.moved)[:-1]])[:, None])
    start = finish - np.asarray(played.finish) + np.asarray(played.start)
    ends.append(finish[-1].mean())
    if staleness is not None:
      late = finish.max(axis=1)
      assert (start[staleness + 1:].min(axis=1) >= late[:len(late) - staleness - 1] - 1e-4).all()
  assert ends == sorted(ends, reverse=True) and ends[0] > 1.05 * ends[-1]


def test_ages_of_single_updates():
  """In lockstep the i-th update of a step is i updates old; without a bound they are R - 1 on
  average."""
  lockstep = timeline.updates(_play(BoundedStaleness(0), NOISY, KEY, 8, 200))
  np.testing.assert_array_equal(lockstep.delay, np.tile(np.arange(8), 200))
  free = timeline.updates(_play(BoundedStaleness(None), NOISY, KEY, 8, 400))
  assert free.delay.mean() == pytest.approx(7, rel=0.05)
  assert (np.diff(free.time) >= 0).all()


@pytest.mark.parametrize("ranks", [1, 12])
def test_a_server_is_as_quick_as_its_ranks_or_its_link(ranks):
  """Without noise: min(N / (Z + S), 1 / S) updates a second, exactly. Each is N - 1 others' updates
  old."""
  cluster = Cluster(compute=0.1, gradient_bytes=1e8, latency=1e-3, rate=1e10, server_rate=5e9)
  away, busy = 0.1 + 2e-3 + 0.01, 0.02
  assert float(service(ParameterServer(), cluster)) == pytest.approx(busy)
  found = timeline.updates(_play(ParameterServer(), cluster, KEY, ranks, 200))
  rate = ranks * 100 / (found.time[-1] - found.time[-1 - ranks * 100])
  assert rate == pytest.approx(min(ranks / (away + busy), 1 / busy), rel=1e-3)
  assert (found.delay[ranks:] == ranks - 1).all()
  assert (np.bincount(found.rank, minlength=ranks) == 200).all()


def test_more_servers_shift_the_limit():
  cluster = NOISY._replace(server_rate=1e9)
  for servers in (1, 4):
    found = timeline.updates(_play(ParameterServer(servers), cluster, KEY, 16, 100))
    assert 800 / (found.time[-1] - found.time[-801]) == pytest.approx(10 * servers, rel=1e-3)


@pytest.mark.parametrize("server_rate", [math.inf, 2e10, 1e9])
def test_a_server_is_the_queue_in_a_plain_loop(server_rate):
  """First come, first served, in float64: without a limit, with ranks that meet at times, and
  saturated."""
  ranks, cluster = 16, NOISY._replace(server_rate=server_rate)
  found = timeline.updates(_play(ParameterServer(), cluster, KEY, ranks, 100))
  away = np.asarray(_draw(cluster, KEY, ranks, 200), np.float64) + 2 * 1e-5 + 1e8 / 1e10
  arrivals = [(away[0, rank], rank) for rank in range(ranks)]
  heapq.heapify(arrivals)
  done, fetched, free = [0] * ranks, [0] * ranks, 0.0
  for version, (time, rank, delay) in enumerate(zip(found.time, found.rank, found.delay,
                                                    strict=True)):
    arrival, own = heapq.heappop(arrivals)
    free = max(arrival, free) + 1e8 / server_rate
    assert (rank, delay) == (own, version - fetched[own]) and time == pytest.approx(free, rel=1e-5)
    done[own], fetched[own] = done[own] + 1, version + 1
    heapq.heappush(arrivals, (free + away[done[own], own], own))
  assert len(found.time) == 1600


def test_servers_say_how_far_a_run_holds_if_one_rank_does_all_the_work():
  slow = Cluster(compute=0.1, noise=(noise.Slow(np.array([0, 50, 50, 50], np.float32)),))
  found = timeline.updates(_play(ParameterServer(), slow, KEY, 4, 30))
  assert np.bincount(found.rank)[0] == 60 and len(found.time) < 120


def test_long_runs_lose_no_digits():
  cluster = Cluster(compute=0.1)
  found = steps_of(BoundedStaleness(2), cluster, 2, 20_000)
  np.testing.assert_allclose(found.time[-1], 20_000 * float(np.float32(0.1)), rtol=1e-6)


def test_messages_cost_what_their_bytes_do():
  def of(strategy, **more):
    return messages(strategy, NOISY._replace(latency=0.0, **more), 8)

  dense = of(Synchronous())
  assert dense.bytes == pytest.approx(2 * 7 / 8 * 1e8)
  assert of(Compressed("fp16")).bytes == pytest.approx(dense.bytes / 2)
  assert float(of(Compressed("fp16")).seconds) == pytest.approx(float(dense.seconds) / 2)
  assert of(Compressed("int8")).bytes == pytest.approx(dense.bytes / 4, rel=1e-5)
  kept = of(Compressed("top_k", keep=0.01))
  # each to all others: a value and its position
  assert kept.bytes == pytest.approx(7 * 0.01 * 1e8 * 2)
  assert float(kept.seconds) == pytest.approx(kept.bytes / 1e10)
  coded = of(Compressed("int8", passes=3), codec_rate=1e11)
  assert float(coded.seconds - of(Compressed("int8")).seconds) == pytest.approx(3 * 1e8 / 1e11)
  assert bytes_per_step(LocalSteps(10), NOISY, 8) == pytest.approx(dense.bytes / 10)
  assert bytes_per_step(ParameterServer(), NOISY, 8) == 1e8
  assert float(messages(Synchronous(), NOISY, 1).seconds) == 0


@pytest.mark.parametrize(("codec", "sent", "passed_over"), [
    ("fp16", 14, 2 * 1e8), ("int8", 14, 4 * 1e8), ("top_k", 7, 8 * 1e8 + 7 * 2e6)])
def test_coding_passes_over_the_gradient_and_over_what_others_kept(codec, sent, passed_over):
  """On top of latencies: so many passes, and of top_k the kept values and positions of the seven
  others."""
  strategy = Compressed(codec, keep=0.01)
  cluster = NOISY._replace(latency=1e-3, rate=math.inf, codec_rate=1e11)
  assert (float(messages(strategy, cluster, 8).seconds)
          == pytest.approx(sent * 1e-3 + passed_over / 1e11))
  assert float(messages(strategy, cluster, 1).seconds) == 0


def test_many_clusters_run_in_one_compiled_program():
  def end(deviation):
    played = play(Synchronous(), NORMAL._replace(noise=(noise.Normal(deviation),)), KEY, 4, 50)
    assert isinstance(played, PlayedSteps)
    return jnp.sum(played.moved)

  ends = np.asarray(jax.jit(jax.vmap(end))(jnp.array([0.0, 0.05, 0.1])))
  assert ends[0] == pytest.approx(5.0, rel=1e-5)
  assert ends[2] - ends[0] == pytest.approx(2 * (ends[1] - ends[0]), rel=1e-3)


VECTORS = hnp.arrays(np.float32, 40, elements=st.floats(-1e3, 1e3, width=32))


@settings(max_examples=examples(30), deadline=None)
@given(values=VECTORS, keep=st.sampled_from((0.001, 0.1, 1.0)))
def test_top_k_keeps_the_largest_as_they_are(values, keep):
  strategy = Compressed("top_k", keep=keep)
  left = np.asarray(_decoded(strategy, jnp.asarray(values)))
  kept = left != 0
  assert kept.sum() <= compression.kept_elements(strategy, len(values))
  np.testing.assert_array_equal(left[kept], values[kept])
  if (~kept).any() and kept.any():
    assert np.abs(values[~kept]).max() <= np.abs(values[kept]).min()


@settings(max_examples=examples(30), deadline=None)
@given(values=VECTORS)
def test_rounding_is_at_most_half_a_digit(values):
  largest = np.abs(values).max()
  left = np.asarray(_decoded(Compressed("int8"), jnp.asarray(values)))
  assert np.abs(left - values).max() <= largest / 127 * 0.501
  left = np.asarray(_decoded(Compressed("fp16"), jnp.asarray(values)))
  np.testing.assert_array_equal(left, values.astype(np.float16).astype(np.float32))


def test_fp16_never_overflows():
  left = _decoded(Compressed("fp16"), jnp.array([1e6, -1e6, 1.0], jnp.float32))
  np.testing.assert_array_equal(left, [65504, -65504, 1])


@pytest.mark.parametrize("strategy",
                         [Compressed("top_k", keep=0.1), Compressed("int8"), Compressed("fp16")])
def test_error_feedback_leaves_nothing_out_for_good(strategy):
  """What has arrived and what is still owed are together the mean of all gradients."""
  gradients = jax.random.normal(KEY, (30, 4, 50), jnp.float32)
  errors, arrived = compression.no_errors(4, 50), jnp.zeros((50,))
  for own in gradients:
    mean, errors = _averaged(strategy, own, errors)
    arrived = arrived + mean
  owed = errors.ranks.mean(axis=0) + errors.sums
  np.testing.assert_allclose(arrived + owed, gradients.mean(axis=1).sum(axis=0), atol=1e-4)
  without = _averaged(Compressed(strategy.codec, strategy.keep, False), gradients[0],
                                 compression.no_errors(4, 50))[1]
  assert not without.ranks.any() and not without.sums.any()


@pytest.mark.parametrize(("config", "said"), [
    ({"kind": "gossip"}, "kind='gossip' must be one of synchronous, bounded_staleness"),
    ({"kind": "backup"}, "wait_for is missing"),
    ({"kind": "backup", "wait_for": 0}, "wait_for=0 must be a whole number from 1 to"),
    ({"kind": "backup", "wait_for": 2.5}, "wait_for=2.5 must be a whole number"),
    ({"kind": "bounded_staleness", "staleness": -1},
     r"staleness=-1 must be a whole number from 0 to 10,000, or None"),
    ({"kind": "parameter_server", "servers": True}, "servers=True must be a whole number from 1"),
    ({"kind": "local_steps", "every": 0}, "every=0 must be a whole number from 1"),
    ({"kind": "local_steps", "outer_momentum": 1.5},
     "outer_momentum=1.5 must be a number from 0 to 0.999"),
    ({"kind": "local_steps", "outer_rate": float("nan")}, "outer_rate=nan must be a number"),
    ({"kind": "compressed", "codec": "int4"}, "codec='int4' must be one of fp16, int8, top_k"),
    ({"kind": "compressed", "codec": "top_k", "keep": 0},
     "keep=0 must be a number from 1e-09 to 1"),
    ({"kind": "compressed", "codec": "top_k", "error_feedback": 1},
     "error_feedback=1 must be True or False"),
    ({"kind": "synchronous", "every": 2}, "every is no field of synchronous; there are none"),
])
def test_wrong_settings_are_named(config, said):
  with pytest.raises(SettingsError, match=said):
    read(config)


def test_what_is_impossible_with_so_many_ranks():
  with pytest.raises(SettingsError,
                     match=r"wait_for=9 must be a whole number from 1 to 8 \(there are 8 ranks\)"):
    play(Backup(9), NOISY, KEY, 8, 10)
  with pytest.raises(SettingsError, match=r"ranks=0 must be a whole number from 1"):
    play(Synchronous(), NOISY, KEY, 0, 10)


@pytest.mark.parametrize(("change", "said"), [
    ({"rate": 0.0}, "rate=0.0 must be above 0 B/s"),
    ({"compute": -1.0}, "compute=-1.0 must be a number from 0 up"),
    ({"gradient_bytes": math.inf}, "gradient_bytes=inf must be")])
def test_impossible_clusters_are_refused(change, said):
  assert check(NOISY) is NOISY
  with pytest.raises(SettingsError, match=said):
    check(NOISY._replace(**change))


@pytest.mark.long  # compiles two trainings
def test_training_one_by_one_without_age_is_synchronous_training():
  """In lockstep, R updates of a R-th of the rate are one step with the mean gradient."""
  optax, training = (pytest.importorskip("optax"),
                     pytest.importorskip("experiments.measure.strategies_training"))
  task, keys = training.task(2, 4), jax.random.split(KEY, 1)
  cluster = NOISY._replace(gradient_bytes=0.0)
  rounds = steps_of(Synchronous(), cluster, 2, 12)
  together = training.in_rounds(task, Synchronous(), rounds, optax.sgd, (0.3,), keys, 3)
  lockstep = timeline.updates(_play(BoundedStaleness(0), cluster, KEY, 2, 12))
  alone = training.one_by_one(task, lockstep, optax.sgd, (0.3,), keys, 3)
  np.testing.assert_allclose(alone.loss, together.loss, rtol=1e-4)
  assert together.loss[-1] < 0.9 * together.loss[0]
  np.testing.assert_array_equal(alone.done, 2 * together.done)


def test_when_a_loss_is_first_reached():
  seconds_to = pytest.importorskip("experiments.measure.strategies").seconds_to
  seconds = np.array([0.0, 10.0, 20.0, 30.0])
  assert seconds_to(0.5, seconds, [2.0, 1.0, 0.2, 0.9]) == pytest.approx(10 + 10 * 0.5 / 0.8)
  assert seconds_to(0.1, seconds, [2.0, 1.0, 0.2, 0.9]) is None
  assert seconds_to(0.5, seconds, [2.0, None, 0.4, None]) == 20.0
