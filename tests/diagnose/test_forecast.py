"""Forecasts against closed forms of the largest of N, against played jobs, and where they must be
silent."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jaxpace.costs.fabric_file import ALL_REDUCE, Level, MeasuredFabric
from jaxpace.diagnose import forecast_tails as tails
from jaxpace.diagnose.forecast import RESAMPLED, TAIL, forecast, to_json
from jaxpace.diagnose.forecast_sample import correlation_time, take_sample
from jaxpace.diagnose.forecast_tails import predict_offsets, separate
from jaxpace.diagnose.words.codes import Silence, codes
from jaxpace.diagnose.words.notes import Note
from jaxpace.runs.run import MISSING, RunError
from tests.diagnose.traces import barrier, known, make_run
from tests.lib.said import numbers, only
from tests.quick import examples

NS = 1e9


def recorded(arrival, transfer=2e-3, **options):
  return make_run(*barrier(np.rint(np.asarray(arrival) * NS), round(transfer * NS)), **options)


def with_collectives(busy, sizes, took):
  """A run whose steps have collectives of these sizes, bytes, that take so long, seconds."""
  enter, leave, at = [], [], np.zeros(8)
  for k in range(busy.shape[1]):
    for c, seconds in enumerate(took):
      start = at + (busy[:, k] if c == 0 else 1e6)
      at = np.full(8, start.max() + round(seconds * NS))
      enter.append(start)
      leave.append(at)
  shape = (busy.shape[1], len(sizes), 8)
  run = make_run(np.reshape(enter, shape).transpose(1, 2, 0),
                 np.reshape(leave, shape).transpose(1, 2, 0))
  return type(run)(**{**vars(run), "collectives": tuple(
      type(c)(c.slot, "psum", size, c.enter_ns, c.exit_ns, c.attempt)
      for c, size in zip(run.collectives, sizes, strict=True))})


def pooled(values):
  values = np.atleast_2d(values)
  pool = tails.pool(values, np.zeros(values.shape[1], np.int64))
  return pool.drawn(np.ones((1, 1)))


@pytest.mark.parametrize("number", [1, 2, 8, 64, 1000])
def test_the_largest_of_many(number):
  """μ·H_N for exponential noise, N / (N + 1) for uniform, 2.344 σ at 64 for normal."""
  levels = (np.arange(400_000) + 0.5) / 400_000
  mean, variance = tails.largest(pooled(-np.log1p(-levels)), number)
  assert mean[0] == pytest.approx((1 / np.arange(1, number + 1)).sum(), rel=2e-3)
  assert variance[0] == pytest.approx((1 / np.arange(1, number + 1)**2).sum(), rel=0.02)
  assert (tails.largest(pooled(levels), number)[0][0]
          == pytest.approx(number / (number + 1), rel=1e-3))
  if number == 64:
    assert (tails.largest(pooled(stats.norm.ppf(levels)), number)[0][0]
            == pytest.approx(2.344, abs=2e-3))


@pytest.mark.parametrize("shape", [-0.2, 0.0, 0.25])
def test_a_pareto_tail_is_found_and_goes_on(shape):
  """From 20,000 values to the largest of 2,000, which 400,000 quantiles say."""
  truth = stats.genpareto(shape) if shape else stats.expon()
  values = truth.rvs(20_000, random_state=3)
  found = tails.largest(tails.with_tail(pooled(values), 1000), 2000)[0][0]
  exact = tails.largest(pooled(truth.ppf((np.arange(400_000) + 0.5) / 400_000)), 2000)[0][0]
  assert found == pytest.approx(exact, rel=0.12)


def test_the_largest_of_ranks_with_offsets():
  random = np.random.default_rng(1)
  values, offsets = random.normal(size=50_000), np.array([[0.0, 0.5, -1.0, 3.0]])
  played = random.normal(size=(100_000, 4)) * 2 + offsets
  mean, variance = tails.largest_apart(pooled(values), offsets, np.array([2.0]))
  assert mean[0] == pytest.approx(played.max(axis=1).mean(), abs=0.03)
  assert variance[0] == pytest.approx(played.max(axis=1).var(), rel=0.05)
  same = tails.largest_apart(pooled(values), np.zeros((1, 300)), np.ones(1))[0][0]
  assert same == pytest.approx(tails.largest(pooled(values), 300)[0][0], abs=0.02)


def test_what_ranks_share_is_told_from_what_each_has():
  random = np.random.default_rng(2)
  shared, own = 6e-3 * random.normal(size=4000), 1e-3 * random.normal(size=(8, 4000))
  lasting = np.array([0, 0, 0, 0, 0, 0, 0, 4e-3])
  noise = separate(50e-3 + shared + own + lasting[:, None], np.arange(4000) * 50 // 4000)
  assert noise.own_deviation == pytest.approx(1e-3, rel=0.03)
  assert noise.shared_deviation == pytest.approx(6e-3, rel=0.05)
  np.testing.assert_allclose(noise.offsets, lasting - lasting.mean(), atol=1e-4)
  assert noise.offsets_spread == pytest.approx(lasting.std(ddof=1), rel=0.05)
  none = separate(50e-3 + own, np.arange(4000) * 50 // 4000)
  assert none.offsets_spread == 0 and not none.offsets.any() and none.shared_deviation < 2e-4


def test_new_ranks_are_students_t_and_old_ones_stay():
  random = np.random.default_rng(3)
  lasting = 2e-3 * random.normal(size=8)
  noise = separate(lasting[:, None] + 1e-6 * random.normal(size=(8, 500)), np.arange(500) // 10)
  drawn = predict_offsets(noise, 9, 40_000, random)
  np.testing.assert_array_equal(drawn[0, :8], noise.offsets)
  scale = noise.offsets.std(ddof=1) * np.sqrt(1 + 1 / 8)
  for level in (0.05, 0.25, 0.75, 0.95):
    assert np.mean(drawn[:, 8] < stats.t(7).ppf(level) * scale) == pytest.approx(level, abs=0.01)
  fewer = predict_offsets(noise, 3, 100, random)
  assert fewer.shape == (100, 3) and np.isin(fewer, noise.offsets).all()


@pytest.mark.parametrize(("kind", "at_64"), [("normal", 2.344), ("exponential", 4.744 - 1)])
@pytest.mark.parametrize("shared", [0.0, 10e-3])
def test_from_8_ranks_to_64_by_the_closed_form(kind, at_64, shared):
  random = np.random.default_rng(4)
  own = (random.normal(size=(8, 3000)) if kind == "normal"
         else random.exponential(size=(8, 3000)) - 1)
  run = recorded(60e-3 + 3e-3 * own + shared * random.gamma(2.0, size=3000), 2e-3, bytes_of=1 << 20)
  alpha = 2e-3 / 14
  found = forecast(take_sample(run), [8, 64], fabric=known(alpha))
  same, point = found.points
  recorded_step = np.diff(run.collectives[0].exit_ns[0]).mean() / NS
  assert same.step_time.estimate == pytest.approx(recorded_step, rel=1e-3)
  assert same.change.estimate == pytest.approx(0, abs=1e-3)
  common = (float(np.mean(run.collectives[0].enter_ns[:, 1:] - run.collectives[0].exit_ns[:, :-1]))
            / NS)
  expected = common + 3e-3 * at_64 + 126 * alpha
  assert point.step_time.estimate == pytest.approx(expected, rel=0.015)
  assert abs(expected - point.step_time.estimate) < point.step_time.high - point.step_time.low
  assert point.waiting == pytest.approx(3e-3 * at_64, rel=0.08)
  assert point.transfer == pytest.approx(126 * alpha, rel=1e-6) and point.method == RESAMPLED
  assert point.efficiency.estimate == pytest.approx(common / expected, rel=0.02)
  # sd of the largest of 64: 0.4286 σ for normal, sqrt(sum 1/k²) for exponential noise
  if not shared:
    deviation = 3e-3 * (0.4286 if kind == "normal" else np.sqrt((1 / np.arange(1, 65)**2).sum()))
    assert point.cv.estimate == pytest.approx(deviation / expected, rel=0.12)


def test_lasting_differences_make_more_ranks_slower_and_are_said():
  random = np.random.default_rng(5)
  lasting = 2e-3 * random.normal(size=(64, 1))
  run = recorded(60e-3 + lasting[:8] + 0.5e-3 * random.normal(size=(8, 1000)))
  found = forecast(take_sample(run), [64], per_host=64, fabric=known(2e-3 / 14))
  truth = (60e-3 + (lasting + 0.5e-3 * random.normal(size=(64, 1000))).max(axis=0).mean()
           + 126 * 2e-3 / 14)
  [point] = found.points
  assert point.step_time.low < truth < point.step_time.high
  assert point.step_time.high - point.step_time.low > 1e-3
  assert Note.RANKS_DIFFER_FOR_GOOD in codes(found.notes)


def test_silent_where_the_run_is_too_short():
  random = np.random.default_rng(6)
  run = recorded(60e-3 + 1e-3 * random.normal(size=(8, 201)))
  found = forecast(take_sample(run), [15, 160, 161, 1], per_host=4096)
  assert [p.method for p in found.points] == [RESAMPLED, TAIL, None, RESAMPLED]  # 8 x 200 / 10
  silent = found.points[2].silent
  assert silent.code == Silence.TOO_SHORT and numbers(silent) == [161, 161, 8, 200, 160, 202]
  assert found.points[3].transfer == 0 and found.points[3].waiting == pytest.approx(0, abs=1e-4)
  assert Note.TAIL in codes(found.notes)


def test_silent_where_a_tier_begins_that_was_not_measured():
  random = np.random.default_rng(7)
  arrival = 60e-3 + 1e-3 * random.normal(size=(8, 300))
  one_host = take_sample(recorded(arrival, hosts=dict.fromkeys(range(8), "a")))
  [near, far] = forecast(one_host, [8, 16]).points
  assert (near.silent is None and far.silent.code == Silence.NEW_TIER
          and "--ranks-per-host" in far.silent)
  assert numbers(far.silent) == [8, 16, 2]
  assert forecast(one_host, [16], per_host=16).points[0].silent is None
  assert forecast(one_host, [16], fabric=known()).points[0].silent is None
  beyond = forecast(one_host, [17], fabric=known(ranks=16)).points[0].silent
  assert beyond.code == Silence.BEYOND_FABRIC and 16 in numbers(beyond)
  two_hosts = take_sample(recorded(arrival, hosts={p: "ab"[p // 4] for p in range(8)}))
  found = forecast(two_hosts, [16])
  assert found.points[0].silent is None and Note.SAME_TIER in codes(found.notes)
  lacking = MeasuredFabric((Level({"shift": known().levels[0].costs["shift"]}),),
                           "some.json")
  uncosted = forecast(one_host, [16], fabric=lacking).points[0].silent
  assert uncosted.code == Silence.NO_COST and ALL_REDUCE in uncosted


def test_one_size_gives_bounds_and_two_sizes_a_law():
  random = np.random.default_rng(8)
  busy = np.rint((60e-3 + 1e-3 * random.normal(size=(8, 300))) * NS)
  run = make_run(*barrier(busy, 14_000_000), bytes_of=1 << 20)
  one = forecast(take_sample(run), [32], per_host=32, algorithm="ring")
  [point] = one.points
  latency, bandwidth = 62 / 14, (31 / 32) / (7 / 8)
  assert point.transfer == pytest.approx(14e-3 * (latency + bandwidth) / 2, rel=0.01)
  width = point.step_time.high - point.step_time.low
  assert 14e-3 * (latency - bandwidth) * 0.8 < width < 14e-3 * (latency - bandwidth) * 1.2
  assert Note.ONE_SIZE in codes(one.notes)
  alpha, beta, sizes = 20e-6, 1e-9, (1 << 12, 1 << 22)
  run = with_collectives(busy, sizes, [14 * alpha + 2 * 7 / 8 * size * beta for size in sizes])
  [point] = forecast(take_sample(run), [32], per_host=32).points
  assert (point.transfer == pytest.approx(sum(62 * alpha + 2 * 31 / 32 * s * beta for s in sizes),
                                          rel=1e-4))


def test_ranks_of_a_process_that_are_late_together_are_one():
  """A pause of a process stops both of its ranks: 32 ranks are 16 processes, not 32 dice."""
  random = np.random.default_rng(9)
  by_process = 60e-3 + 3e-3 * random.exponential(size=(4, 2001))
  run = recorded(np.repeat(by_process, 2, axis=0), processes=np.arange(8) // 2)
  sample = take_sample(run)
  assert sample.unit == 2 and sample.units == 4
  [point] = forecast(sample, [32], per_host=32, fabric=known(2e-3 / 14)).points
  assert point.waiting == pytest.approx(3e-3 * ((1 / np.arange(1, 17)).sum() - 1), rel=0.06)
  alone = take_sample(recorded(60e-3 + 3e-3 * random.exponential(size=(8, 500)),
                               processes=np.arange(8) // 2))
  assert alone.unit == 1


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_correlation_time_of_an_autoregression(keep):
  random = np.random.default_rng(10)
  values = random.normal(size=(4, 20_000))
  for k in range(1, 20_000):
    values[:, k] += keep * values[:, k - 1]
  assert correlation_time(values) == pytest.approx((1 + keep) / (1 - keep), rel=0.15)
  assert correlation_time(np.ones((1, 50))) == 1


def test_missing_ranks_are_left_out_and_too_little_is_a_sentence():
  random = np.random.default_rng(11)
  run = recorded(60e-3 + 1e-3 * random.normal(size=(4, 400)))
  gone = np.zeros((4, 400), bool)
  gone[3, 100:] = gone[0, 50:60] = True
  for values in (run.collectives[0].enter_ns, run.collectives[0].exit_ns):
    values[gone] = MISSING
  run.collectives[0].attempt[gone] = -1
  run.attempt[gone] = -1
  sample = take_sample(run)
  assert sample.units == 3 and sample.ranks == 4 and sample.steps == 399 - 11
  assert numbers(only(sample.notes, Note.RANKS_LEFT_OUT))[0] == 3
  with pytest.raises(RunError, match="is of one rank"):
    take_sample(recorded(60e-3 + 1e-3 * random.normal(size=(1, 400))))
  with pytest.raises(RunError, match="59 steps in which every rank"):
    take_sample(recorded(60e-3 + 1e-3 * random.normal(size=(4, 60))))


@settings(max_examples=examples(25))
@given(st.integers(2, 6), st.integers(110, 200), st.integers(0, 10**6), st.integers(1, 200),
       st.sampled_from(["none", "constant", "freak", "identical"]))
def test_any_run_gives_numbers_that_can_be_written(ranks, steps, seed, wanted, oddity):
  random = np.random.default_rng(seed)
  arrival = random.gamma(2.0, 10.0**random.integers(-5, 0), size=(ranks, steps))
  if oddity == "constant":
    arrival[:] = 1e-3
  elif oddity == "identical":
    arrival[:] = arrival[0]
  elif oddity == "freak":
    arrival[0, steps // 2] = 3600.0
  run = recorded(arrival, 0.0 if seed % 2 else 1e-3)
  found = forecast(take_sample(run), [wanted], per_host=4096, draws=40)
  json.dumps(to_json(found, run), allow_nan=False)
  [point] = found.points
  if point.silent is None:
    for value in (point.step_time, point.cv, point.efficiency):
      assert 0 <= value.low <= value.estimate <= value.high
