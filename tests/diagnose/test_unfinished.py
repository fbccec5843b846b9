"""Reports on runs that still grow, or of which a process was killed: rows of some ranks end before
the others'."""

import dataclasses

import numpy as np
import pytest

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.words.codes import codes
from jaxpace.diagnose.words.notes import Note
from jaxpace.runs.run import MISSING
from tests.diagnose.synthetic import run_of
from tests.lib.said import numbers, only
from tests.synthetic.synthetic_runs import SyntheticJob

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
