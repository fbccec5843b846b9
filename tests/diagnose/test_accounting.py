"""The account of a step against a plain, slow reading of its definition."""

import dataclasses
import doctest
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.diagnose import selected_steps, step_times
from jaxpace.diagnose.accounting import account
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.floor import SHARES
from jaxpace.diagnose.step_times import busy
from jaxpace.runs.run import MISSING, HeldTimes
from tests.diagnose.traces import barrier, make_run

MS = 1_000_000


@st.composite
def traces(draw):
  """Random entries and exits with holes, restarts, gaps and delays of any size, on clocks of any
  origin."""
  ranks, size, slots = draw(st.integers(1, 4)), draw(st.integers(2, 7)), draw(st.integers(1, 3))
  random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  stretches = random.integers(0, 50 * MS, (ranks, size * slots * 2))
  if draw(st.booleans()):
    stretches -= random.integers(0, 20 * MS, stretches.shape)  # overlapping collectives
  timestamps = np.cumsum(stretches, axis=1).reshape(ranks, size, slots, 2)
  enter, leave = timestamps[..., 0].transpose(2, 0, 1).copy(), timestamps[...,
                                                                          1].transpose(2, 0,
                                                                                       1).copy()
  attempt = np.zeros((ranks, size), np.int16)
  if draw(st.booleans()):
    attempt[:, random.integers(0, size):] = 1
    attempt[0, random.integers(0, size)] = 0
  if draw(st.booleans()):
    for _ in range(draw(st.integers(1, 4))):
      r, k = random.integers(0, ranks), random.integers(0, size)
      enter[:, r, k] = leave[:, r, k] = MISSING
      attempt[r, k] = -1
  gap = random.integers(0, 30 * MS, (ranks, size)).astype(float)
  gap[random.random(gap.shape) < 0.1] = np.nan
  delay = (random.integers(0, 30 * MS, (ranks, size)).astype(float)
           * (random.random(gap.shape) < 0.5))
  steps = np.arange(size) + 10 + (np.arange(size) > size // 2) * draw(st.integers(0, 1))
  return make_run(enter, leave, gap=gap, delay=delay, attempt=attempt, steps=steps)


def reference(run):
  """DESIGN's words, one rank, step and collective at a time, in exact nanoseconds where they are
  whole."""
  result = {}
  for k in range(1, len(run.steps)):
    newest = max(run.attempt[:, k])
    ranks = [r for r in range(run.ranks) if run.steps[k] == run.steps[k - 1] + 1
             and newest == max(run.attempt[:, k - 1]) >= 0
             and run.attempt[r, k] == run.attempt[r, k - 1] == newest]
    rows = {}
    for r in ranks:
      at = max(int(c.exit_ns[r, k - 1]) for c in run.collectives)
      begin, segments = at, []
      for c in run.collectives:
        enter = max(int(c.enter_ns[r, k]), at)
        leave = max(int(c.exit_ns[r, k]), enter)
        segments.append((enter - at, leave - enter))
        at = leave
      delay = min(float(np.nan_to_num(run.durations["delay_applied"][r, k])), segments[0][0] * 1e-9)
      gap = min(float(np.nan_to_num(run.durations["gap"][r, k])), segments[0][0] * 1e-9 - delay)
      rows[r] = at - begin, segments, segments[0][0] * 1e-9 - gap - delay, gap, delay
    for r, (step, segments, *own) in rows.items():
      waiting = [0.0, 0.0, 0.0]
      for c, (arrival, _) in enumerate(segments):
        last = max(ranks, key=lambda x: rows[x][1][c][0])
        early = (rows[last][1][c][0] - arrival) * 1e-9
        if c:
          waiting[0] += early
          continue
        excess = [max(b - a, 0.0) for a, b in zip(own, rows[last][2:], strict=True)]
        for i in range(3):
          waiting[i] += early * excess[i] / sum(excess) if sum(excess) else 0.0
      transfer = sum(min(rows[x][1][c][1] for x in ranks) for c in range(len(segments))) * 1e-9
      own[0] += sum(a for a, _ in segments[1:]) * 1e-9
      result[r, k] = step * 1e-9, *own, *waiting, transfer
  return result


@given(traces())
def test_matches_its_definition_and_adds_up_exactly(run):
  split = account(busy(run, slice(0, len(run.steps))))
  expected = reference(run)
  known = {(int(r), int(k)) for r, k in zip(*np.nonzero(np.isfinite(split.step)), strict=True)}
  assert known == set(expected)
  for (r, k), (step, compute, gap, delay, *waiting, transfer) in expected.items():
    measured = [getattr(split, name)[r, k] for name in (
        "step", "compute", "runtime", "pacing", "waiting_compute", "waiting_runtime",
        "waiting_pacing")]
    np.testing.assert_allclose(measured, [step, compute, gap, delay, *waiting], atol=1e-9)
    np.testing.assert_allclose(split.transfer[:, k].sum(), transfer, atol=1e-12)
    total = sum(measured[1:]) + split.transfer[:, k].sum() + split.spread[r, k]
    assert total == pytest.approx(step, abs=1e-12)


@pytest.mark.parametrize("where", [0, 1, 2, None])
def test_what_is_held_before_any_collective_is_pacing_and_nothing_else(where):
  """All ranks are held alike before one collective of three, or before each: only pacing grows."""
  random = np.random.default_rng(7)
  busy_for = random.integers(1, 9 * MS, (3, 2, 8))
  waits, gap = random.integers(1, 5 * MS, (3, 2, 8)), random.integers(0, MS, (2, 8)).astype(float)
  hold = np.zeros((3, 1, 8), np.int64)
  hold[slice(None) if where is None else where] = random.integers(10 * MS, 20 * MS, 8)

  def split(hold):
    exits = np.cumsum((busy_for + hold + waits).transpose(1, 2, 0).reshape(2, -1), axis=1)
    leave = exits.reshape(2, 8, 3).transpose(2, 0, 1)
    run = make_run(leave - waits, leave, gap=gap)
    held = [HeldTimes(*[np.broadcast_to(each, (2, 8))] * 3) for each in hold]
    collectives = tuple(dataclasses.replace(c, held=times)
                        for c, times in zip(run.collectives, held, strict=True))
    return account(busy(dataclasses.replace(run, collectives=collectives), slice(0, 8)))

  found, bare = split(hold), split(hold * 0)
  spent = np.broadcast_to(hold.sum(axis=0)[:, 1:] * 1e-9, (2, 7))
  for name in ("step", "pacing"):
    np.testing.assert_allclose((getattr(found, name) - getattr(bare, name))[:, 1:], spent,
                               atol=1e-9)
  for name in ("compute", "runtime", "waiting_compute", "waiting_runtime", "waiting_pacing",
               "transfer"):
    np.testing.assert_allclose(getattr(found, name), getattr(bare, name), atol=1e-9)


@given(traces(), st.lists(st.integers(-2**60, 2**60), min_size=4, max_size=4))
def test_a_clocks_origin_does_not_matter(run, origins):
  moved = []
  for c in run.collectives:
    origin = np.array(origins[:run.ranks])[:, None]
    moved.append(dataclasses.replace(c,
                                     enter_ns=np.where(c.enter_ns == MISSING, MISSING,
                                                       c.enter_ns + origin),
                                     exit_ns=np.where(c.exit_ns == MISSING, MISSING,
                                                      c.exit_ns + origin)))
  before = account(busy(run, slice(0, len(run.steps))))
  after = account(busy(dataclasses.replace(run, collectives=tuple(moved)),
                       slice(0, len(run.steps))))
  for a, b in zip(before, after, strict=True):
    np.testing.assert_array_equal(a, b)


@given(traces())
def test_shares_sum_to_one_and_waiting_splits_by_finding(run):
  diagnosis = diagnose(run)
  if diagnosis.step_time is None or diagnosis.step_time.mean == 0:
    return
  assert tuple(diagnosis.shares) == SHARES
  assert sum(diagnosis.shares.values()) == pytest.approx(1.0, abs=1e-9)
  earliness = np.nansum(diagnosis.totals.earliness[:, diagnosis.selected.mask], axis=0).mean()
  parts = diagnosis.lateness.earliness
  assert parts == pytest.approx(earliness, abs=1e-12)
  assert (diagnosis.totals.blame.sum()
          == pytest.approx(earliness * diagnosis.selected.size, abs=1e-12))


@pytest.mark.parametrize("cells", [1, 7, 64])
def test_chunks_do_not_matter(monkeypatch, cells):
  random = np.random.default_rng(0)
  enter, leave = barrier(random.integers(10 * MS, 30 * MS, (3, 40)), 2 * MS)
  run = make_run(enter, leave)
  whole = diagnose(run)
  monkeypatch.setattr(selected_steps, "CELLS", cells)
  parts = diagnose(run)
  assert parts.shares == pytest.approx(whole.shares)
  np.testing.assert_allclose(parts.totals.lateness, whole.totals.lateness, atol=1e-12)
  np.testing.assert_array_equal(parts.totals.last, whole.totals.last)


def test_the_documents_example_holds():
  path = pathlib.Path(__file__).parents[2] / "docs" / "accounting.md"
  assert doctest.testfile(str(path), module_relative=False).failed == 0
  busy_ns, gap = np.tile([[10 * MS],
                          [20 * MS]], (1, 60)), np.tile([[1.0 * MS], [4.0 * MS]], (1, 60))
  diagnosis = diagnose(make_run(*barrier(busy_ns, 2 * MS), gap=gap))
  expected = {"compute": 12.5, "skew": 3.5, "transfer": 2, "contention": 0, "runtime": 4,
              "pacing": 0}
  assert diagnosis.shares == pytest.approx({k: v / 22 for k, v in expected.items()}, abs=1e-7)
  assert diagnosis.no_skew.step_time == pytest.approx(17e-3)
  assert diagnosis.no_skew.speedup == pytest.approx(22 / 17)
  assert diagnosis.without_rank[1].step_time == pytest.approx(12e-3)


def test_of_a_large_run_no_more_busy_times_are_kept_than_fit(monkeypatch):
  run = _small()
  parts = [slice(k, k + 2) for k in range(0, len(run.steps), 2)]
  size = sum(x.nbytes for x in busy(_small(), parts[0]) if isinstance(x, np.ndarray))
  monkeypatch.setattr(step_times, "KEPT", 2 * size + 1)
  first = [busy(run, part) for part in parts]
  again = [busy(run, part) for part in parts]
  assert [one is other for one, other in zip(first, again, strict=True)] == (
      [True, True, *[False] * (len(parts) - 2)])
  for one, other in zip(first, again, strict=True):
    for x, y in zip(one[:7], other[:7], strict=True):
      np.testing.assert_array_equal(x, y)


def _small():
  enter = np.arange(3 * 8, dtype=np.int64).reshape(1, 3, 8) % 8 * 20 * MS
  return make_run(enter, enter + 5 * MS)
