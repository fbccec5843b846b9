"""Which steps count."""

import dataclasses

import numpy as np
import pytest

from jaxpace.diagnose.compare import compare
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.selected_steps import count_steps
from jaxpace.diagnose.words.codes import Verdict, codes
from jaxpace.diagnose.words.notes import Note
from jaxpace.runs.reader import read_run
from jaxpace.runs.run import MISSING
from tests.diagnose.synthetic import run_of
from tests.diagnose.traces import barrier, make_run
from tests.lib.said import numbers, only
from tests.runs.written import rewrite
from tests.synthetic.synthetic_groups import timestamps, write_timestamps
from tests.synthetic.synthetic_runs import SyntheticJob

MS = 1_000_000


def busy_with(slow, size=100):
  busy = np.full((2, size), 20 * MS)
  for k, factor in slow.items():
    busy[:, k] *= factor
  return barrier(busy, 2 * MS)


@pytest.mark.parametrize("slow, options, warmup, left_out", [
    ({}, {}, [], [0]),  # the first step has nothing to start from
    # The last slow one of the first steps; a pause later on is what the job lives with.
    ({1: 100, 4: 5, 30: 50}, {}, [1, 2, 3, 4], range(5)),
    ({52: 50}, {"window": (51, 90)}, [], [*range(51), *range(90, 100)]),
    ({1: 100, 51: 100, 52: 40}, {"attempt": [[0] * 50 + [1] * 50] * 2}, [1, 51, 52],
     [0, 1, 50, 51, 52])])
def test_each_attempt_warms_up_and_a_window_within_the_run_does_not(slow, options, warmup,
                                                                    left_out):
  selected = count_steps(make_run(*busy_with(slow), **options))
  assert selected.warmup.tolist() == warmup
  assert np.flatnonzero(~selected.mask).tolist() == list(left_out)


def test_holes_are_not_measured_across():
  enter, leave = busy_with({})
  enter[:, :, 60] = leave[:, :, 60] = MISSING
  steps = np.arange(100) + (np.arange(100) >= 40) * 5
  selected = count_steps(make_run(enter, leave, steps=steps))
  assert np.flatnonzero(~selected.mask).tolist() == [0, 40, 60, 61]


def test_blocks_are_even_and_in_order():
  selected = count_steps(make_run(*busy_with({}, size=1000)))
  blocks = selected.block[selected.mask]
  sizes = np.bincount(blocks)
  assert (np.diff(blocks) >= 0).all() and len(sizes) == selected.blocks == 199
  assert sizes.max() - sizes.min() <= 1


def test_a_rank_missing_for_a_while_does_not_hide_or_shift_the_others():
  enter, leave = barrier(np.array([[20], [26], [20]]) * MS + np.zeros((3, 200), np.int64), 2 * MS)
  enter[:, 2, 50:150] = leave[:, 2, 50:150] = MISSING
  diagnosis = diagnose(make_run(enter, leave))
  assert diagnosis.findings[0].ranks == (1,)
  assert abs(diagnosis.step_time.mean - 0.028) < 1e-12
  assert diagnosis.totals.present.tolist() == [199, 199, 98]
  assert abs(sum(diagnosis.shares.values()) - 1) < 1e-9


# Runs that still grow, or of which a process was killed: rows of some ranks end before the others'.

JOB = SyntheticJob(ranks=4, processes=2, hosts=2, steps=300, noise=0.02, late={2: 8e-3, 3: 8.2e-3})


def without_rows(run, ranks, first):
  """The run as if these ranks had recorded nothing from step `first` on."""
  gone = np.zeros(run.attempt.shape, bool)
  gone[ranks, first:] = True
  return dataclasses.replace(
      run, attempt=np.where(gone, -1, run.attempt).astype(np.int16),
      durations={name: np.where(gone, np.nan, values).astype(np.float32)
                 for name, values in run.durations.items()},
      collectives=tuple(dataclasses.replace(
          c, enter_ns=np.where(gone, MISSING, c.enter_ns),
          exit_ns=np.where(gone, MISSING, c.exit_ns),
          attempt=np.where(gone, -1, c.attempt).astype(np.int16)) for c in run.collectives))


@pytest.mark.parametrize("ranks", [[0, 1], [2, 3], [3]])
def test_steps_without_some_ranks_at_the_end_change_nothing(ranks):
  run, _ = run_of(JOB)
  cut = diagnose(dataclasses.replace(run, window=(None, 200)))
  found = diagnose(without_rows(run, ranks, 200))
  assert found.verdict == cut.verdict and found.verdict.code == cut.verdict.code
  assert {(f.first_step, f.last_step) for f in found.findings} == {(None, None)}
  assert found.shares == cut.shares and found.findings == cut.findings
  assert found.lateness.mean.tolist() == cut.lateness.mean.tolist()
  assert numbers(only(found.notes, Note.UNFINISHED)) == [100, 200]
  assert Note.UNMEASURED not in codes(found.notes)


@pytest.mark.parametrize("steps, gone", [(300, []), (1200, [0])])
def test_a_rank_that_stops_recording_while_the_others_go_on_for_long_does_not_end_the_count(
    steps, gone):
  run, _ = run_of(dataclasses.replace(JOB, steps=steps))  # 700 steps of 42 ms are 29 s
  found = diagnose(without_rows(run, gone, 500))
  assert found.selected.mask[-1] and Note.UNFINISHED not in codes(found.notes)


def test_a_restart_on_fewer_ranks_is_no_unfinished_end():
  run, _ = run_of(JOB)
  shrunk = without_rows(run, [3], 200)
  attempt = np.where(np.arange(JOB.steps) >= 200, np.where(shrunk.attempt >= 0, 1, -1),
                     shrunk.attempt).astype(np.int16)
  found = diagnose(dataclasses.replace(shrunk, attempt=attempt, collectives=tuple(
      dataclasses.replace(c, attempt=attempt) for c in shrunk.collectives)))
  assert found.selected.mask[-1] and Note.UNFINISHED not in codes(found.notes)


# Ranks whose rows are missing in a stretch of the run: meanwhile nothing is put down to others, nor
# cleared.

STEPS, LATE = 400, 3


def written(path, late, gone=None):
  """Four ranks, the last 20 ms late in the steps `late` and without rows in the steps `gone`; None:
  it left none."""
  random = np.random.default_rng(0)
  arrivals = 60e-3 + random.exponential(1e-4, (1, 4, STEPS))
  arrivals[0, LATE, slice(*late)] += 20e-3
  enter, leave = timestamps(arrivals, [5e-3])
  write_timestamps(path, enter, leave, left_out=(LATE,) if gone is None else ())
  for file in path.glob(f"*/*-p{LATE:05d}.*.parquet"):
    rewrite(file,
            lambda t: t.filter([not gone[0] <= step < gone[1] for step in t["step"].to_pylist()]))
  return read_run(path)


@pytest.mark.parametrize(("late", "gone"),
                         [((300, 400), (300, 390)), ((0, 150), (0, 150))])
def test_a_rank_that_is_late_while_its_rows_are_missing_is_not_cleared(tmp_path, late, gone):
  found = diagnose(written(tmp_path / "run", late, gone))
  assert Verdict.CONTENTION not in [finding.mode for finding in found.findings]
  assert found.unseen == (LATE,)
  assert found.verdict.code == Verdict.UNSEEN_RANKS and "host3" in found.verdict
  assert Note.RANKS_AWAY in codes(found.notes)
  assert found.shares["contention"] < 1e-3


@pytest.mark.parametrize("gone", [(250, 400), (80, 400), None])
def test_compare_calls_nothing_gone_that_it_cannot_see(tmp_path, gone):
  before = diagnose(written(tmp_path / "a", (0, 400), (0, 0)))
  after = diagnose(written(tmp_path / "b", (0, 400), gone))
  found = compare(before, after)
  assert not found.gone and (gone == (250, 400) or after.unseen == (LATE,))
  assert gone == (250, 400) or (numbers(found.verdict)[-1] == LATE
                                and codes(found.inconclusive) == [Note.RANKS_UNSEEN])


@pytest.mark.parametrize("late, gone, code, named", [
    ((0, 0), (250, 400), Verdict.HEALTHY, []),
    ((150, 400), (150, 250), Verdict.PERSISTENT, [LATE])])
def test_one_without_rows_in_time_is_no_matter_and_one_that_is_named_not_said_to_be_unknown(
    tmp_path, late, gone, code, named):
  found = diagnose(written(tmp_path / "run", late, gone))
  assert found.verdict.code == code and (named or not found.unseen)
  assert [rank for finding in found.findings for rank in finding.ranks] == named


def test_slow_transfers_beside_a_rank_that_never_left_rows_may_be_waiting(tmp_path):
  found = diagnose(written(tmp_path / "run", (200, 400)))
  assert found.verdict.code == Verdict.UNSEEN_RANKS and found.unseen == (LATE,)
  assert not found.findings and found.shares["contention"] == 0
  assert found.no_contention is None or found.no_contention.saving == 0
