"""The choice of a mode, against jobs whose best mode is known."""

import numpy as np
import pytest

from jaxpace.live.housekeeping.modes import ALIGNED, ALONE, FROZEN, IN_SLACK, MODES
from jaxpace.live.housekeeping.selection import Selection, Situation

EVERY = 20


class Job:
  """Mean step times of blocks, by the mode: 10 ms, noise, and what each mode costs on top. One
  block late, as in a run.

  Args:
    extra: seconds a step by mode.
    noise: standard deviation of one step's time, s.
    period: steps between two collections of the interpreter's own.
    slack: what the earliest rank is early by.
  """

  def __init__(self, extra, noise=1e-3, period=30, slack=1.0, seed=0, correlation=0.0):
    self.extra, self.noise, self.period, self.slack = extra, noise, period, slack
    self.rng = np.random.default_rng(seed)
    self.selection = Selection(EVERY, key=seed)
    self.steps, self.time, self.bare = 0, 0.0, 0.0
    self.blocks = [self.selection.propose()]
    self.level, self.correlation = 0.0, correlation

  def block(self):
    mode, steps = self.blocks[-1]
    self.blocks.append(self.selection.propose())
    self.level = self.correlation * self.level + self.rng.normal() * self.noise / np.sqrt(steps)
    mean = 10e-3 + self.level
    self.bare += steps * (mean + self.extra.get(ALONE, 0.0))
    mean += self.extra.get(mode, 0.0)
    self.time += steps * mean
    self.steps += steps
    self.selection.record(mean, Situation(self.steps // self.period, 0.05, self.slack))
    return mode, steps

  def run(self, steps):
    """Returns the steps done in each mode in the last quarter."""
    last = dict.fromkeys(MODES, 0)
    until = self.steps + steps
    while self.steps < until:
      mode, count = self.block()
      if self.steps > until - steps / 4:
        last[mode] += count
    return last


def share(last, mode):
  return last[mode] / sum(last.values())


@pytest.mark.parametrize("best", [FROZEN, ALIGNED, IN_SLACK])
def test_the_best_of_several_that_gain_is_chosen_and_kept(best):
  extra = {ALONE: 1e-3, FROZEN: 0.7e-3, ALIGNED: 0.7e-3, IN_SLACK: 0.7e-3, best: 0.0}
  job = Job(extra, noise=0.5e-3)
  last = job.run(EVERY * 4000)
  assert job.selection.chosen == best and share(last, best) > 0.7
  assert job.time < job.bare
  found = job.selection.summary()[best]
  assert found["effect"] == pytest.approx(-1 / 11, abs=0.02) and found["shown"]
  assert found["interval"][0] < found["effect"] < found["interval"][1] < 0


def test_harmful_modes_are_left_alone_and_cost_little():
  job = Job({FROZEN: 2e-3, ALIGNED: 4e-3, IN_SLACK: 20e-3})
  last = job.run(EVERY * 4000)
  assert job.selection.chosen == ALONE and share(last, ALONE) > 0.9
  assert job.time < 1.02 * job.bare


@pytest.mark.parametrize("correlation", [pytest.param(0.0, marks=pytest.mark.long), 0.8])
def test_where_nothing_matters_nothing_is_chosen(correlation):
  chosen = 0
  for seed in range(20):
    job = Job({}, noise=2e-3, seed=seed, correlation=correlation)
    for _ in range(1000):
      job.block()
      chosen += job.selection.chosen != ALONE
      if job.selection.chosen != ALONE:
        break
  assert chosen <= 2  # at most 5 % of the runs, looked at after every block


def test_a_mode_that_no_longer_gains_is_given_up():
  extra = {ALONE: 1e-3, FROZEN: 0.0, ALIGNED: 1e-3, IN_SLACK: 1e-3}
  job = Job(extra, noise=0.3e-3)
  job.run(EVERY * 1500)
  assert job.selection.chosen == FROZEN
  extra[FROZEN] = 3e-3
  last = job.run(EVERY * 6000)
  assert job.selection.chosen != FROZEN and share(last, FROZEN) < 0.1


@pytest.mark.parametrize("slack", [None, 0.0, 0.049])
def test_in_slack_is_not_tried_without_enough_slack(slack):
  job = Job({ALONE: 1e-3, IN_SLACK: -5e-3}, slack=slack)
  assert {job.block()[0] for _ in range(800)} <= {ALONE, ALIGNED, FROZEN}


@pytest.mark.parametrize(("period", "units"),
                         [(5, (1,)), (EVERY, (1,)), (45, (2, 3)), (75, (3, 4)), (10**6, (8,))])
def test_a_unit_holds_a_pause_of_the_interpreters_own_too(period, units):
  job = Job({}, period=period)
  blocks = [job.block() for _ in range(200)]
  assert all(steps % EVERY == 0 for _, steps in blocks)
  assert blocks[-1][1] // EVERY in units and blocks[0] == (ALONE, 2 * EVERY)


def test_every_block_of_a_candidate_is_two_units():
  job = Job({ALONE: 1e-3}, noise=0.5e-3, slack=None)
  modes = [job.block()[0] for _ in range(400)]
  runs = [len(run) for run in "".join("x" if mode != ALONE else " " for mode in modes).split()]
  assert runs and min(runs) >= 2


def test_the_order_within_pairs_is_a_coins():
  orders = []
  for seed in range(2):
    job = Job({}, seed=seed * 1000)
    orders.append([job.block()[0] for _ in range(300)])
  assert orders[0] != orders[1]
  job = Job({}, seed=0)
  assert [job.block()[0] for _ in range(300)] == orders[0]  # and the same again
