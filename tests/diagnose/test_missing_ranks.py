"""Ranks whose rows are missing in a stretch of the run: meanwhile nothing is put down to others,
nor cleared."""

import numpy as np
import pytest

from jaxpace.diagnose.compare import compare
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.words.codes import codes
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.notes import Note
from jaxpace.diagnose.words.verdicts import Verdict
from jaxpace.runs.reader import read_run
from tests.diagnose import grouped
from tests.runs.written import rewrite

STEPS, LATE = 400, 3


def written(path, late, gone=None):
  """Four ranks, the last 20 ms late in the steps `late` and without rows in the steps `gone`; None:
  it left none."""
  random = np.random.default_rng(0)
  arrivals = 60e-3 + random.exponential(1e-4, (1, 4, STEPS))
  arrivals[0, LATE, slice(*late)] += 20e-3
  enter, leave = grouped.play(arrivals, [5e-3])
  grouped.write(path, enter, leave, left_out=(LATE,) if gone is None else ())
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


def test_compare_calls_nothing_gone_that_it_cannot_see(tmp_path):
  before = diagnose(written(tmp_path / "a", (0, 400), (0, 0)))
  after = diagnose(written(tmp_path / "b", (0, 400), (250, 400)))
  found = compare(before, after)
  assert not found.gone


def test_a_rank_without_rows_in_time_is_no_matter(tmp_path):
  found = diagnose(written(tmp_path / "run", (0, 0), (250, 400)))
  assert not found.unseen and found.verdict.code == Verdict.HEALTHY


def test_a_rank_that_a_finding_names_is_not_said_to_be_unknown(tmp_path):
  found = diagnose(written(tmp_path / "run", (150, 400), (150, 250)))
  assert found.verdict.code == Verdict.PERSISTENT and found.findings[0].ranks == (LATE,)


def test_slow_transfers_beside_a_rank_that_never_left_rows_may_be_waiting(tmp_path):
  found = diagnose(written(tmp_path / "run", (200, 400)))
  assert found.verdict.code == Verdict.UNSEEN_RANKS and found.unseen == (LATE,)
  for finding in found.findings:
    assert finding.mode == Verdict.CONTENTION and finding.evidence[-1].code == Evidence.ROWS_MISSING
