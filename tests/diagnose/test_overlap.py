"""Exposed and hidden time of collectives, against jobs whose truth is known and a plain reading of
the definition."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxpace.diagnose import selected_steps, step_times
from jaxpace.diagnose.accounting import overlap_of, split
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.diagnosis import to_json
from jaxpace.diagnose.step_times import busy
from jaxpace.runs.reader import read_run
from jaxpace.show.html.markup import DocumentFigures
from jaxpace.show.html.sections import collectives
from jaxpace.show.terminal import render
from tests.diagnose.traces import barrier, make_run
from tests.synthetic.synthetic_overlap import OverlappingJob, simulate, write

MS = 1_000_000


def reference(enter, leave, first):
  """One rank's step, whole ns, instant by instant: (exposed, hidden, behind) of each collective,
  and what is computed meanwhile."""
  size = len(enter)
  edges = sorted({first, *enter, *leave})
  parts, computing = np.zeros((size, 3), int), 0
  for begin, end in zip(edges[:-1], edges[1:], strict=True):
    under_way = [c for c in range(size) if enter[c] <= begin and leave[c] >= end]
    # Who is waited for until its exit: nothing is entered any more before that.
    waited = [c for c in range(size) if leave[c] >= end and max(
        [enter[c], *(e for e in enter if e < leave[c])]) <= begin]
    soonest = min(waited, key=lambda c: (leave[c], c), default=None)
    for c in under_way:
      parts[c, 1 if soonest is None else 0 if c == soonest else 2] += end - begin
    computing += (end - begin) * (soonest is None and bool(under_way))
  return parts, computing


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_is_what_the_definition_says(size, seed):
  random = np.random.default_rng(seed)
  enter = random.integers(100, 140, (size, 3, 4))
  leave = enter + random.integers(1, 30, enter.shape)
  first = random.integers(80, 100, (3, 4))
  *parts, hidden = split(first, enter, leave)
  for r in range(3):
    for k in range(4):
      own, computing = reference(enter[:, r, k].tolist(), leave[:, r, k].tolist(), first[r, k])
      total = np.stack(parts, 1)[..., r, k] * 1e9
      assert total.sum(axis=1) == pytest.approx((leave - enter)[:, r, k])
      assert total[:, 1] == pytest.approx(own[:, 1])
      # Of collectives that end together either is waited for.
      assert total[:, 0].sum() == pytest.approx(own[:, 0].sum())
      assert hidden[r, k] * 1e9 == pytest.approx(computing)


@given(st.builds(OverlappingJob, steps=st.just(25), buckets=st.integers(1, 6),
                 transfer=st.floats(1e-3, 25e-3), tail=st.floats(0, 5e-3),
                 noise=st.floats(0, 0.05), seed=st.integers(0, 99)))
def test_is_a_bound_and_what_is_under_way_is_exact(job):
  """That a rank waited for an early bucket before it went on, no timestamp excludes."""
  truth = simulate(job)
  found = diagnose(make_run(truth.enter, truth.exit)).overlap
  exposed, hidden = (x[:, 1:].mean() * 1e-9 for x in (truth.exposed, truth.hidden))
  assert found.exposed >= exposed - 1e-12 and found.computing <= hidden + 1e-12
  assert found.exposed + found.computing == pytest.approx(exposed + hidden, rel=1e-9)


def test_without_overlap_all_is_exposed_and_is_what_the_accounts_call_waiting():
  random = np.random.default_rng(1)
  enter, leave = barrier(random.integers(10 * MS, 30 * MS, (3, 40)), 2 * MS)
  run = make_run(enter, leave)
  assert busy(run, slice(0, 40)).in_flight is None
  found = diagnose(run).overlap
  assert found.computing == 0 and not found.tells
  (one,) = found.collectives
  assert one.in_flight == one.exposed == pytest.approx((leave - enter)[..., 1:].mean() * 1e-9)


def test_chunks_and_missing_rows_do_not_matter(monkeypatch):
  truth = simulate(OverlappingJob(noise=0.05))
  attempt = np.zeros(truth.enter.shape[1:], np.int16)
  attempt[2, 20:25] = -1
  run = make_run(np.where(attempt < 0, step_times.MISSING, truth.enter),
                 np.where(attempt < 0, step_times.MISSING, truth.exit), attempt=attempt)
  whole = diagnose(run).overlap
  monkeypatch.setattr(selected_steps, "CELLS", 7)
  parts = diagnose(run).overlap
  np.testing.assert_allclose([one[-3:] for one in parts.collectives],
                             [one[-3:] for one in whole.collectives])
  assert parts.computing == pytest.approx(whole.computing)


def test_steps_without_a_rank_add_nothing():
  truth = simulate(OverlappingJob(steps=3))
  work = busy(make_run(truth.enter, truth.exit), slice(0, 3))
  sums, computing = overlap_of(work._replace(valid=np.zeros_like(work.valid)))
  assert sums.shape == (3, 4) and not sums.any() and computing == 0


def test_report_of_a_run_says_it_in_all_three_forms(tmp_path):
  truth = write(tmp_path, OverlappingJob(transfer=16e-3))
  diagnosis = diagnose(read_run(tmp_path))
  document = json.loads(json.dumps(to_json(diagnosis)))
  assert sum(document["shares"].values()) == pytest.approx(1)
  found = document["overlap"]
  assert found["exposed"] == pytest.approx(truth.exposed[:, 1:].mean() * 1e-9)
  assert found["exposed_share"] == pytest.approx(found["exposed"] / document["step_time"]["mean"])
  assert found["hidden"] == pytest.approx(truth.hidden[:, 1:].mean() * 1e-9)
  assert found["under_way"] == pytest.approx(found["exposed"] + found["hidden"])
  for row in document["collectives"]:
    assert row["in_flight"] == pytest.approx(row["exposed"] + row["hidden"] + row["behind_others"])
    assert row["meanwhile"] is None
  shown = io.StringIO()
  render(diagnosis, Console(width=120, file=shown))
  assert "Computing while sending" in shown.getvalue() and "bucket 3" in shown.getvalue()
  assert "at least 15.0 ms are hidden behind computing" in " ".join(shown.getvalue().split())
  page = str(collectives(DocumentFigures(document)))
  assert "Computing while sending" in page and "overlap/collectives/3/exposed" in page
