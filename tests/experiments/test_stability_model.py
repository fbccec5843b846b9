"""Groups, failures with cold starts and projections: against order statistics, Daly and Young."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from experiments.stability import job as stability
from experiments.stability import projection, survival
from experiments.stability.diagnosis import growth
from experiments.stability.job import Machine, Policy, Series
from experiments.stability.projection import Trouble
from experiments.stability.survival import Power
from jaxpace.simulation.failures import Failures, expected
from tests.quick import examples

MACHINE = Machine(group=8, barriers=4, compute=6.0, gap=0.05, gradient=0.0, rate=50e9, latency=0.0,
                  jitter=0.01, drift=0.0, spread=0.5, warm=600.0, wander=0.0, memory=900.0,
                  pause=0.0, pause_rate=0.0)
POWER = Power(700.0, 300.0, 100.0)
EVEN = Series(np.full((2, 50), 2.0), np.full((2, 50), 1.5))


def highest(number):
  """Mean and variance of the largest of so many standard normals, by integration."""
  def moment(power):
    return integrate.quad(lambda x: x**power * number * stats.norm.pdf(x) * stats.norm.cdf(x) ** (
        number - 1), -9, 9)[0]
  return moment(1), moment(2) - moment(1) ** 2


def simulated(machine, local=1, seed=0, aligned=False):
  """16 groups, 1,000 steps, 4 runs: one size, so that it is compiled once."""
  return stability.series(machine, 16, Policy(1.0, aligned, local), 1000, 4, seed)


@pytest.mark.long
def test_a_group_waits_for_its_slowest_at_every_barrier():
  """Mean over groups: mean and variance of the mean over barriers of the largest of 8; 4 standard
  errors."""
  busy = simulated(MACHINE).busy
  mean, variance = highest(8)
  each = 6 * 0.01 * math.sqrt(4)
  assert (busy.mean() == pytest.approx(6 + each * mean,
                                       abs=4 * each * math.sqrt(variance / 4 / 16 / 4000)))
  # nearly normal
  assert (busy.var() == pytest.approx(each**2 * variance / 4 / 16,
                                      rel=4 * math.sqrt(2.2 / busy.size)))


@pytest.mark.long
@pytest.mark.parametrize("local", [1, 2])
def test_groups_wait_for_the_slowest_and_less_so_the_fewer_averages(local):
  """mean + sigma E_N / sqrt(H): the central limit makes a group's step nearly normal; the
  projection says the same."""
  times = simulated(MACHINE, local).times
  mean, variance = highest(8)
  each = 6 * 0.01 * math.sqrt(4)
  wanted = 6.05 + each * (mean + math.sqrt(variance / 4 / local) * highest(16)[0])
  assert times.mean() == pytest.approx(wanted, rel=1e-3)
  assert (projection.warm_step(MACHINE, 16, Policy(1.0, local=local), 400)
          == pytest.approx(wanted, rel=1e-3))


@pytest.mark.long
def test_members_that_warm_up_slow_the_group_by_the_slowest():
  machine = MACHINE._replace(jitter=0.0, drift=0.03, spread=0.0)
  times = simulated(machine).times[0]
  at = np.arange(1000)
  np.testing.assert_allclose(times, 6.05 + 0.18 * -np.expm1(-at * 6.05 / 600), rtol=1e-5)
  slowest = simulated(machine._replace(spread=0.5)).times[:, -1]
  assert (slowest.mean() - 6.05 == pytest.approx(0.18 * (1 + 0.5 * highest(128)[0]),
                                                 abs=4 * 0.18 * 0.5 * 0.5 / 2))


@pytest.mark.long
def test_aligned_pauses_cost_d_p_and_others_d_times_the_chance_of_any():
  machine = MACHINE._replace(jitter=0.0, pause=1.0, pause_rate=1e-3)
  one = -math.expm1(-1e-3 * 6.05)
  for aligned, wanted in ((True, one), (False, 1 - (1 - one) ** 128)):
    times = simulated(machine, aligned=aligned, seed=3).times
    assert (times.mean() - 6.05 == pytest.approx(wanted,
                                                 abs=4 * math.sqrt(wanted * (1 - wanted) / 4000)))


@pytest.mark.long
def test_wandering_members_are_remembered_and_still_ones_are_not():
  still, moved = (simulated(MACHINE._replace(wander=w), seed=5).times[0] for w in (0.0, 0.01))
  assert not growth.grow(still).rises and growth.grow(moved).rises


def test_a_policy_that_does_not_divide_the_steps_is_refused():
  with pytest.raises(ValueError, match="multiple of local=3"):
    stability.series(MACHINE, 2, Policy(1.0, local=3), 100, 1, 0)


def test_long_runs_take_what_daly_says():
  """(1 / rate + restart) (exp(rate (work + checkpoint)) - 1) a segment, within 4 standard errors
  over 200 runs."""
  rate, every, checkpoint, restart = 1 / 300, 25, 10.0, 30.0
  took = np.array(
      [survival.live(EVEN, 1, 500, rate, every, checkpoint, restart, POWER, seed).done[-1]
       for seed in range(200)])
  wanted = 20 * expected(50.0, Failures(rate, every, checkpoint, restart))
  assert abs(took.mean() - wanted) < 4 * took.std(ddof=1) / math.sqrt(len(took))


def test_without_failures_nothing_is_lost():
  lived = survival.live(EVEN, 1, 100, 0.0, 30, 5.0, 60.0, POWER, 0)
  assert (lived.lost, lived.failures, lived.restarts) == (0, 0, 0)
  assert lived.done[-1] == 200 + 3 * 5 and lived.useful == 200
  assert lived.energy == pytest.approx(100 * (1.5 * 700 + 0.5 * 300) + 15 * 100)
  found = survival.ratios(lived, 1.5, POWER, 30)
  assert found.reruns == 0 and found.cost == pytest.approx(215 / 150)
  assert (found.energy == pytest.approx(lived.energy / (150 * 700))
          and found.variance == pytest.approx(0))


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**30), every=st.integers(1, 40), local=st.integers(1, 4),
       mtbf=st.floats(20, 5000))
def test_the_parts_of_a_run_add_up(seed, every, local, mtbf):
  random = np.random.default_rng(seed)
  times = 1 + random.random((3, 40))
  every *= local
  if every * 2 > mtbf:  # hardly any segment would ever be done
    mtbf = every * 2
  lived = survival.live(Series(times, times / 2), local, 120, 1 / mtbf, every, 0.5, 3.0,
                        POWER, seed)
  assert (lived.done[-1] == pytest.approx(lived.useful + lived.lost + lived.checkpoints
                                          + lived.restarts))
  assert (np.diff(lived.done) > 0).all() and lived.restarts == 3.0 * lived.failures
  starts = np.flatnonzero(lived.fresh == 0)
  assert (starts % every == 0).all()  # work goes on from checkpoints only
  least = 100 * (lived.done[-1] - lived.lost)
  assert least < lived.energy < 700 * lived.done[-1]


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_were_cut_off_took_energy_too(seed):
  """Every second of a step takes 600 J, of one that failed as of one that lasted; of a restart, 100
  J."""
  lived = survival.live(EVEN, 1, 200, 1 / 80, 10, 0.0, 30.0, POWER, seed)
  assert lived.failures > 0
  assert lived.energy == pytest.approx(600 * (lived.useful + lived.lost) + 100 * lived.restarts)


def test_the_projection_picks_young_and_aligned_pauses_and_agrees_with_the_run():
  machine = MACHINE._replace(pause=0.2, pause_rate=1 / 600)
  trouble = Trouble(mtbf=1145 * 3600.0, node=8, checkpoint=60.0, restart=600.0)
  options = [Policy(interval, aligned) for interval in (3 * 3600.0, 0.0)
             for aligned in (False, True)]
  chosen = projection.choose(machine, 64, options, trouble)
  job = trouble.mtbf / 64
  assert projection.failure_rate(machine, 64, trouble) == pytest.approx(1 / job)
  assert chosen.policy.aligned
  assert chosen.policy.interval == pytest.approx(math.sqrt(2 * 60 * job), rel=0.01)
  every = round(chosen.policy.interval / chosen.step)
  even = Series(np.full((1, 10), chosen.step), np.full((1, 10), 6.0))
  costs = [survival.ratios(survival.live(even, 1, 40_000, 1 / job, every, 60.0, 600.0, POWER,
                                         seed), 6.05, POWER,
                           20).cost for seed in range(30)]
  assert abs(np.mean(costs) - chosen.cost) < 4 * np.std(costs, ddof=1) / math.sqrt(30) + 0.002


@pytest.mark.long
def test_the_same_seed_gives_the_same_run():
  first, again, other = (simulated(MACHINE, seed=seed).times for seed in (9, 9, 10))
  np.testing.assert_array_equal(first, again)
  assert not np.array_equal(first, other)
