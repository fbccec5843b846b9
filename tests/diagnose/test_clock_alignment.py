"""Alignment of clocks against a job whose truth is known, on clocks that are off, drift and
wander."""

import dataclasses

import numpy as np
import pytest

from jaxpace.diagnose.clock_alignment import align
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import MISSING
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob

JOB = SyntheticJob(ranks=8, steps=900, processes=4, hosts=4, noise=0.1, collectives=2,
                   late={3: 4e-3})
RANKS_EACH = 2


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
  path = tmp_path_factory.mktemp("align")
  truth = synthetic_runs.write(path, JOB, origins=[0] * JOB.processes)
  return read_run(path), truth


def on_clocks(run, truth, clock, late=None):
  """The run as ranks with these clocks would have timestamped it."""
  late = np.zeros(truth.exit.shape, np.int64) if late is None else late
  timestamped = []
  for c, collective in enumerate(run.collectives):
    enter, leave = (np.stack([clock(rank // RANKS_EACH, times[rank]) for rank in range(JOB.ranks)])
                    for times in (truth.enter[c], truth.exit[c] + late[c]))
    timestamped.append(dataclasses.replace(collective, enter_ns=enter, exit_ns=leave))
  return dataclasses.replace(run, collectives=tuple(timestamped))


def error(run, truth):
  """Largest deviation of entries, in seconds, from where they truly lay relative to the other
  ranks' ones."""
  alignment = align(run)
  worst = 0.0
  for c, collective in enumerate(run.collectives):
    off = alignment.apply(collective.enter_ns) - truth.enter[c]
    worst = max(worst, float(np.abs(off - np.median(off, axis=0)).max()) * 1e-9)
  return worst


def drifting(process, times):
  """Off by hours, fast or slow by up to 90 millionths, and wandering by milliseconds within
  minutes."""
  seconds = times * 1e-9
  away = (-90, 40, 90, 5)[process] * 1e-6 * seconds + (process - 1) * 2e-3 * np.sin(seconds / 40)
  return times + np.rint(away * 1e9).astype(np.int64) + (10**15, -(10**12), 7, 3 * 10**16)[process]


def test_clocks_that_are_off_drift_and_wander_are_aligned(recorded):
  run, truth = recorded
  assert error(on_clocks(run, truth, drifting), truth) < 0.1e-3


def test_exits_that_are_late_now_and_then_do_not_move_a_clock(recorded):
  run, truth = recorded
  random = np.random.default_rng(1)
  late = random.exponential(0.1e6, truth.exit.shape).astype(np.int64)
  # behind a slow host
  late[:, 4] += (14e6 * (random.random(late[:, 4].shape) < 0.3)).astype(np.int64)
  late[:, 5] += 14_000_000  # always: the other rank of its process holds the clock
  one = on_clocks(run, truth, drifting, late)
  collectives = tuple(
      dataclasses.replace(c, exit_ns=np.where(np.arange(JOB.ranks)[:, None] == 5, MISSING,
                                              c.exit_ns))
      for c in one.collectives)
  assert error(dataclasses.replace(one, collectives=collectives), truth) < 0.2e-3


def test_a_stretch_in_which_a_clock_jumped_does_not_move_the_rest(recorded):
  run, truth = recorded
  one = on_clocks(run, truth, drifting)
  strange = np.zeros(one.attempt.shape, bool)
  strange[6:, 100:110] = True
  one = dataclasses.replace(one, collectives=tuple(
      dataclasses.replace(c, enter_ns=np.where(strange, MISSING, c.enter_ns),
                          exit_ns=np.where(strange, c.exit_ns - 2 * 10**12, c.exit_ns))
      for c in one.collectives))
  alignment = align(one)
  off = alignment.apply(one.collectives[0].enter_ns) - truth.enter[0]
  assert np.abs(off - np.median(off, axis=0))[~strange].max() < 0.1e6


@pytest.mark.parametrize("hour", [3600 * 10**9, -3600 * 10**9])
def test_a_clock_that_jumped_half_way_is_right_before_or_after(recorded, hour):
  run, truth = recorded
  half = JOB.steps // 2

  def jumping(process, times):
    moved = times + 7 + (hour if process == 3 else 0) * (np.arange(JOB.steps) >= half)
    return moved.astype(np.int64)

  one = on_clocks(run, truth, jumping)
  off = align(one).apply(one.collectives[0].enter_ns) - truth.enter[0]
  off = np.abs(off - np.median(off, axis=0))
  assert off[:6].max() < 0.1e6
  assert min(off[6:, :half].max(), off[6:, half:].max()) < 0.1e6


def test_attempts_follow_each_other_and_what_is_missing_stays_missing(recorded):
  run, truth = recorded
  attempt = run.attempt.copy()
  attempt[:, 450:] = 1

  def rebooted(process, times):
    late = times > truth.exit[1, 0, 449]
    return np.where(late, times - 2 * 10**12, drifting(process, times))

  one = on_clocks(run, truth, rebooted)
  collectives = []
  for c in one.collectives:
    leave = c.exit_ns.copy()
    leave[2, ::7] = MISSING
    leave[3, 5] = np.iinfo(np.int64).max - 3  # damaged
    collectives.append(dataclasses.replace(c, exit_ns=leave, attempt=attempt))
  one = dataclasses.replace(one, attempt=attempt, collectives=tuple(collectives))
  alignment = align(one)
  exits = alignment.apply(one.collectives[0].exit_ns)
  assert (exits[2, ::7] == MISSING).all() and exits[3, 5] == MISSING
  good = exits[[0, 1, 4, 5, 6, 7]]
  assert (np.diff(good, axis=1) > 0).all()
  assert np.ptp(good, axis=0).max() < 0.2e6


def test_processes_of_one_host_that_read_one_clock_share_its_correction(tmp_path):
  synthetic_runs.write(tmp_path, SyntheticJob(ranks=4, steps=50, processes=4, hosts=2),
                     origins=[10**9, 10**9, 5 * 10**15,
                              10**9])
  assert align(read_run(tmp_path)).clock.tolist() == [0, 0, 2, 3]
