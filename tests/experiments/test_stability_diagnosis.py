"""Variance growth, drift, the scalability law, and what one run supports: against closed forms and
known truths."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal

from experiments.stability.diagnosis import drift, growth, knee, recorded
from jaxpace.diagnosis.diagnose import diagnose
from jaxpace.diagnosis.findings import PERSISTENT, Finding
from tests.diagnosis.traces import barrier, make_run
from tests.quick import examples


def autoregressive(keep, number, seed):
  """A stationary AR(1) of variance 1 around 10."""
  drawn = np.random.default_rng(seed).normal(size=number + 500) * math.sqrt(1 - keep * keep)
  return 10 + signal.lfilter([1], [1, -keep], drawn)[500:]


@pytest.mark.parametrize("keep", [-0.4, 0.3, 0.9])
def test_the_closed_form_is_the_sum_over_autocovariances(keep):
  for width in (1, 2, 7, 64):
    lags = np.arange(1, width)
    assert growth.autoregressive(keep, np.array([width]))[0] == pytest.approx(
        1 + 2 * np.sum((1 - lags / width) * keep**lags), rel=1e-9)


@pytest.mark.parametrize("keep", [0.0, 0.6])
def test_the_ratio_of_an_autoregression_is_its_closed_form(keep):
  """Mean over 200 runs, within 4 standard errors, at every K: the estimated mean of a run is
  allowed for."""
  windows = np.array([2, 8, 32])
  found = growth.variance_ratio(np.stack([autoregressive(keep, 1600, seed) for seed in range(200)]),
                                windows)
  error = found.std(axis=0, ddof=1) / math.sqrt(len(found))
  # For finite runs the sample variance of one step is itself a little low, by the run's own memory.
  short = 1 - growth.autoregressive(keep, np.array([1600.0])) / 1600
  assert np.all(np.abs(found.mean(axis=0) * short - growth.autoregressive(keep, windows)) < 4
                * error + 0.01)


def test_short_runs_are_not_biased():
  """Windows of a fifth of the run: without the correction for the estimated mean the ratio would be
  0.8."""
  found = growth.variance_ratio(np.random.default_rng(4).normal(size=(4000, 100)), np.array([20]))
  assert found.mean() == pytest.approx(1, abs=4 * found.std() / math.sqrt(4000))


def test_false_alarms_are_as_rare_as_stated_and_memory_is_found():
  """At 0.05, on heavy tails without a fourth moment; 200 runs, within 4 standard errors of a
  binomial count."""
  raised = [growth.grow(5 + np.random.default_rng(seed).pareto(2.5, 240), seed, 99).p <= 0.05
            for seed in range(200)]
  assert 0.05 - 4 * 0.0154 <= np.mean(raised) <= 0.05 + 4 * 0.0154
  assert all(growth.grow(autoregressive(0.5, 600, seed), seed).rises for seed in range(10))
  # a fall is no rise
  assert not any(growth.grow(autoregressive(-0.5, 600, seed), seed).rises for seed in range(10))


@pytest.mark.parametrize("keep", [0.0, 0.8])
def test_the_band_holds_the_closed_form(keep):
  inside = []
  for seed in range(60):
    found = growth.grow(autoregressive(keep, 1000, seed), seed, 1)
    exact = growth.autoregressive(keep, found.windows)
    inside.append((found.low <= exact) & (exact <= found.high))
  assert np.mean(inside) >= 0.9


def test_long_runs_are_added_up_and_say_so():
  found = growth.grow(autoregressive(0.0, 3 * growth.MOST, 1), permutations=9)
  assert found.block == 3 and found.windows[0] == 6
  assert np.abs(found.ratio[:4] - 1).max() < 0.2


def test_nothing_is_said_of_short_or_constant_runs():
  assert growth.grow(np.ones(growth.LEAST)) is None
  assert growth.grow(autoregressive(0.5, growth.LEAST - 1, 0)) is None
  assert growth.grow(np.append(autoregressive(0.5, growth.LEAST - 1, 0), np.nan)) is None
  assert drift.drift(autoregressive(0, drift.LEAST - 1, 0)) is None
  assert drift.drift(np.zeros(500)) is None


def test_a_drift_comes_back_and_goes_away():
  steps = 10 + 0.1 * np.random.default_rng(0).normal(size=1000) + np.linspace(0, 1, 1000)
  found = drift.drift(steps)
  assert found.drifts and found.low <= 1 / 10.5 <= found.high
  assert found.change == pytest.approx(1 / 10.5, rel=0.05)
  left = drift.without(steps)
  assert left.mean() == pytest.approx(steps.mean())
  assert np.polyfit(np.arange(1000), left, 1)[0] == pytest.approx(0, abs=1e-12)
  assert growth.grow(steps).rises and not growth.grow(left).rises


@pytest.mark.parametrize("slope", [0.0, 0.04, 0.08])
def test_its_p_is_that_of_all_orders_of_the_blocks(slope):
  """As many signs between blocks as would come up in a random order of them, counted."""
  rng = np.random.default_rng(2)
  values = 100 + rng.normal(size=24) + slope * np.arange(24)

  def signs(ordered):
    first, second = np.triu_indices(24, 1)
    return np.abs(np.sign(ordered[..., second] - ordered[..., first]).sum(axis=-1))

  found = drift.drift(np.repeat(values, 10))
  assert found.blocks == 24
  p = np.mean(signs(rng.permuted(np.tile(values, (20_000, 1)), axis=1)) >= signs(values))
  assert found.p == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 20_000) + 0.005)


@pytest.mark.parametrize("keep", [0.0, 0.8])
def test_drift_is_seldom_seen_where_there_is_none(keep):
  alarms = [drift.drift(autoregressive(keep, 1500, seed)).drifts for seed in range(300)]
  assert np.mean(alarms) <= 2 * drift.ALPHA + 4 * math.sqrt(drift.ALPHA / 300)


@settings(max_examples=examples(15), deadline=None)
@given(sigma=st.floats(1e-4, 0.2), kappa=st.floats(1e-7, 1e-3), rate=st.floats(0.1, 100))
def test_the_law_comes_back(sigma, kappa, rate):
  sizes = 2.0 ** np.arange(3, 13)
  exact = knee.throughput(sizes, rate, sigma, kappa)
  found = knee.fit(sizes, np.tile(exact[:, None], 3))
  assert (found.rate, found.sigma, found.kappa) == pytest.approx((rate, sigma, kappa), rel=1e-4)
  assert found.misfit < 1e-6
  around = found.peak * np.array([0.98, 1.0, 1.02])
  assert knee.throughput(around, rate, sigma, kappa).argmax() == 1
  assert (found.knee is not None) == (found.peak <= sizes[-1])


def test_the_knee_has_an_interval_or_a_reason():
  sizes = 2.0 ** np.arange(3, 11)
  random = np.random.default_rng(3)

  def noisy(sigma, kappa):
    return (knee.throughput(sizes, 2.0, sigma, kappa)[:, None]
            * (1 + 0.01 * random.normal(size=(8, 6))))

  shown = knee.fit(sizes, noisy(0.01, 2e-5))
  exact = math.sqrt(0.99 / 2e-5)
  assert shown.knee is not None and shown.peak == pytest.approx(exact, rel=0.05)
  assert shown.peak_interval[0] * 0.98 <= exact <= shown.peak_interval[1] * 1.02
  none = knee.fit(sizes, noisy(0.01, 0.0))
  assert none.knee is None and "not shown" in none.why
  beyond = knee.fit(sizes, noisy(1e-4, 3e-7))
  assert beyond.knee is None and "beyond the largest" in beyond.why
  with pytest.raises(ValueError, match="4 sizes"):
    knee.fit(sizes[:3], noisy(0.01, 0)[:3])
  with pytest.raises(ValueError, match="above 0"):
    knee.fit(sizes, -noisy(0.01, 0))


def run_of(steps, ranks=4, **more):
  """A recorded run whose step times are these, in ms; the ranks take turns in being last."""
  busy = (np.full((ranks, len(steps)), 1_000_000)
          + np.random.default_rng(1).integers(0, 20_000, (ranks, len(steps))))
  enter, leave = barrier(busy, (np.asarray(steps) * 1e6 - 1e6).astype(np.int64))
  return make_run(enter, leave, **more)


def finding(mode):
  return Finding(mode=mode, share=0.2, confidence=1.0, ranks=(3,), hosts=(), evidence=(), advice="")


def test_what_a_run_supports():
  calm, coupled = (recorded.recorded(diagnose(run_of(autoregressive(keep, 800, 5))))
                   for keep in (0.0, 0.9))
  assert not calm.settled.rises and calm.decision.startswith("Neither shown")
  assert coupled.settled.rises and "steps remember each other" in coupled.decision
  assert coupled.reruns == 0 and coupled.restarts == 0
  assert any("No knee" in sentence for sentence in coupled.silent)
  short = recorded.recorded(diagnose(run_of(autoregressive(0.9, 100, 5))))
  assert short.growth is None and short.drift is None
  assert {"How variance grows: 99 steps count, 200 are needed.",
          "Drift: 99 steps count, 120 are needed."} <= {
              *short.silent}


def test_reruns_are_counted_by_attempt():
  attempt = np.zeros((4, 400), int)
  attempt[:, 250:] = 1
  run = dataclasses.replace(run_of(autoregressive(0, 400, 2), attempt=attempt), duplicates=4 * 50)
  found = recorded.recorded(diagnose(run))
  assert found.restarts == 1
  assert found.reruns == pytest.approx(50 / 450)
  assert "11.1 %" in found.decision


def test_the_decision_names_components_first():
  memory = growth.grow(autoregressive(0.9, 800, 1))
  line = growth.grow(autoregressive(0.0, 800, 1))
  flat = drift.drift(autoregressive(0.0, 800, 1))
  assert recorded.decide((finding(PERSISTENT),), memory, memory, flat,
                         0).startswith("Infrastructure first")
  assert recorded.decide((finding(PERSISTENT),), None, None, None,
                         0).startswith("Infrastructure first")
  assert recorded.decide((), memory, memory, flat, 0).startswith("Structural coupling")
  assert recorded.decide((finding("synchronization_amplification"),), line, line, flat,
                         0).startswith("Structural")
  assert recorded.decide((), None, None, None, 0).startswith("Not decided")
