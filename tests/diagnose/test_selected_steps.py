"""Which steps count."""

import dataclasses

import numpy as np
import pytest

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.selected_steps import count_steps
from jaxpace.diagnose.words.codes import codes
from jaxpace.diagnose.words.notes import Note
from jaxpace.runs.run import MISSING
from tests.diagnose.synthetic import run_of
from tests.diagnose.traces import barrier, make_run
from tests.lib.said import numbers, only
from tests.synthetic.synthetic_runs import SyntheticJob

MS = 1_000_000


def busy_with(slow, size=100):
  busy = np.full((2, size), 20 * MS)
  for k, factor in slow.items():
    busy[:, k] *= factor
  return barrier(busy, 2 * MS)


def test_the_first_step_has_nothing_to_start_from():
  selected = count_steps(make_run(*busy_with({})))
  assert not selected.mask[0]
  assert selected.size == 99
  assert selected.warmup.size == 0


def test_warmup_ends_at_the_last_slow_one_of_the_first_steps():
  selected = count_steps(make_run(*busy_with({1: 100, 4: 5, 30: 50})))
  assert selected.warmup.tolist() == [1, 2, 3, 4]
  assert selected.mask[30]  # a pause later on is what the job lives with
  assert selected.size == 95


def test_a_window_within_the_run_has_no_warmup():
  run = make_run(*busy_with({52: 50}), window=(51, 90))
  selected = count_steps(run)
  assert selected.size == 39
  assert selected.mask[51]
  assert selected.mask[52]
  assert not selected.mask[50]
  assert not selected.mask[90]


def test_every_attempt_warms_up():
  attempt = np.repeat([[0] * 50 + [1] * 50], 2, axis=0)
  selected = count_steps(make_run(*busy_with({1: 100, 51: 100, 52: 40}), attempt=attempt))
  assert selected.warmup.tolist() == [1, 51, 52]
  assert not selected.mask[50]  # first step of the second attempt


def test_holes_are_not_measured_across():
  enter, leave = busy_with({})
  steps = np.arange(100) + (np.arange(100) >= 40) * 5
  assert not count_steps(make_run(enter, leave, steps=steps)).mask[40]
  enter[:, :, 60] = leave[:, :, 60] = MISSING
  selected = count_steps(make_run(enter, leave, steps=steps))
  assert not selected.mask[60]
  assert not selected.mask[61]
  assert selected.mask[62]


def test_blocks_are_even_and_in_order():
  selected = count_steps(make_run(*busy_with({}, size=1000)))
  blocks = selected.block[selected.mask]
  assert (np.diff(blocks) >= 0).all()
  sizes = np.bincount(blocks)
  assert len(sizes) == selected.blocks == 199
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


def test_a_whole_record_is_left_whole():
  run, _ = run_of(JOB)
  assert Note.UNFINISHED not in codes(diagnose(run).notes)
  assert diagnose(run).selected.mask[-1]


def test_a_rank_that_stops_recording_while_the_others_go_on_for_long_does_not_end_the_count():
  run, _ = run_of(dataclasses.replace(JOB, steps=1200))  # 700 steps of 42 ms are 29 s
  found = diagnose(without_rows(run, [0], 500))
  assert found.selected.mask[-1] and Note.UNFINISHED not in codes(found.notes)


def test_a_restart_on_fewer_ranks_is_no_unfinished_end():
  run, _ = run_of(JOB)
  shrunk = without_rows(run, [3], 200)
  attempt = np.where(np.arange(JOB.steps) >= 200, np.where(shrunk.attempt >= 0, 1, -1),
                     shrunk.attempt).astype(np.int16)
  found = diagnose(dataclasses.replace(shrunk, attempt=attempt, collectives=tuple(
      dataclasses.replace(c, attempt=attempt) for c in shrunk.collectives)))
  assert found.selected.mask[-1] and Note.UNFINISHED not in codes(found.notes)
