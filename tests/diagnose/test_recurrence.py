"""The recurrence by itself, and reports of what it wrote held against it replayed without the
causes."""

import numpy as np
import pytest

from jaxpace.diagnose.words.notes import Note
from jaxpace.diagnose.words.verdicts import Verdict
from tests.diagnose.grouped import report
from tests.diagnose.recurrence import (
  STEP_GAP,
  Cause,
  Job,
  gain,
  pipeline,
  play,
  rank_groups,
  work,
  write,
)
from tests.quick import long

MESH = {"data": 2, "tensor": 2}


def told(path, job):
  """The report of a job that was played."""
  write(path / "run", job)
  return report(path / "run")


def even(mesh=MESH, **settings):
  """Two collectives along the quickest axis and one along the slowest, 10 ms before each."""
  first, last = next(iter(mesh)), next(reversed(mesh))
  return Job(dict(mesh),
             (rank_groups(mesh, last, 10e-3, 1e-3), rank_groups(mesh, last, 10e-3, 1e-3),
                          rank_groups(mesh, first, 10e-3, 2e-3)), **settings)


def test_ranks_that_do_the_same_take_the_sum_of_what_they_do():
  assert play(even()).step_time() == pytest.approx(34e-3 + STEP_GAP)
  assert play(even()).waited() == pytest.approx(0, abs=1e-12)


def test_a_rank_that_is_late_holds_up_all_that_collectives_join():
  late = Cause("late", 20e-3, (1,), 0)
  job = even(causes=(late,))
  assert gain(job, late) == pytest.approx(54.5 / 34.5)
  apart = Job(MESH, (rank_groups(MESH, "tensor", 10e-3, 1e-3),), (late,))
  # Two groups that never meet: each takes its own time, and the mean of both is the job's.
  assert play(apart).step_time() == pytest.approx(((31.5 + 11.5) / 2) * 1e-3)


def test_a_pipeline_fills_and_drains():
  mesh, places = pipeline(4, 2, 8, [10e-3] * 4, transfer=0.0)
  step = (8 + 3) * 30e-3 + 2e-3 + STEP_GAP
  assert play(Job(mesh, places)).step_time() == pytest.approx(step)
  slow = pipeline(4, 2, 8, [10e-3] * 3 + [15e-3], transfer=0.0)[1]
  assert play(Job(mesh, slow)).step_time() == pytest.approx(step + 8 * 15e-3)
  busy = work(Job(mesh, places))[0]
  assert np.nansum(busy, axis=0) == pytest.approx(np.full((8, 240), 240e-3))


@pytest.mark.parametrize("as_pairs, seed", [(True, 0), (False, 0), *long((False, None))])
def test_each_rank_goes_through_its_collectives_in_its_own_order(tmp_path, as_pairs, seed):
  """Stages that share no collective with the first one have no time in common with it."""
  mesh, places = pipeline(4, 2, 8, [10e-3] * 4, as_pairs=as_pairs)
  numbers = range(len(places)) if seed is None else np.random.default_rng(seed).permutation(
      len(places))
  job = Job(mesh, places, noise=0.01, steps=60, slots=tuple(int(n) for n in numbers))
  document = told(tmp_path, job)
  compute = [row["shares"]["compute"] * row["step_time"] for row in document["per_rank"]]
  assert compute == pytest.approx([240e-3] * 8, rel=2e-3)


PIPELINES = pytest.mark.parametrize("as_pairs", [*long(True), False],
                                    ids=["pairs", "groups of indices"])


@PIPELINES
def test_an_even_pipeline_waits_for_nobody(tmp_path, as_pairs):
  mesh, places = pipeline(4, 2, 8, [10e-3] * 4, as_pairs=as_pairs)
  document = told(tmp_path, Job(mesh, places, noise=0.01, steps=60))
  assert document["verdict_code"] == Verdict.HEALTHY and not document["findings"]
  assert [row["lateness"] for row in document["per_rank"]] == pytest.approx([0] * 8, abs=1e-3)
  assert 1 <= document["what_if"]["no_skew"]["speedup"] < 1.01
  assert Note.BUBBLES in document["note_codes"] and Note.SPREAD not in document["note_codes"]


@PIPELINES
def test_a_slow_last_stage_of_a_pipeline_is_named(tmp_path, as_pairs):
  slow = [10e-3, 10e-3, 10e-3, 15e-3]
  mesh, places = pipeline(4, 2, 8, slow, as_pairs=as_pairs)
  document = told(tmp_path, Job(mesh, places, noise=0.01, steps=60))
  (finding,) = document["findings"]
  assert finding["mode"] == "persistent_straggler"
  assert sorted(finding["ranks"]) == [6, 7]
  assert [row["rank"] for row in document["per_rank"] if row["late"]] == sorted(finding["ranks"])
  even = Job(mesh, pipeline(4, 2, 8, [10e-3] * 4, as_pairs=as_pairs)[1], noise=0.01, steps=60)
  after = document["what_if"]["without_late_ranks"]
  assert after["step_time"] == pytest.approx(play(even).step_time(), rel=0.01)
  assert f"{after['speedup']:.2f} times" in document["verdict"]
  # All stages as busy as their mean: (10 + 10 + 10 + 15) / 4 ms.
  mean = play(Job(mesh, pipeline(4, 2, 8, [11.25e-3] * 4, as_pairs=as_pairs)[1])).step_time()
  assert document["what_if"]["no_skew"]["step_time"] == pytest.approx(mean, rel=0.01)


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "tensor": 4}], ids=["data", "tensor"])
def test_rows_lost_at_random_change_nothing_that_is_said(tmp_path, mesh):
  """Of each rank 6 %: no rank is away, and what-if is that of the job with all rows."""
  late = Cause("late", 10e-3, (5,), 0)
  job = even(mesh, causes=(late,), noise=0.02, missing=0.06, steps=235)
  document = told(tmp_path, job)
  (finding,) = document["findings"]
  assert finding["mode"] == "persistent_straggler" and finding["ranks"] == [5]
  assert document["what_if"]["without_rank"]["5"]["speedup"] == pytest.approx(gain(job, late),
                                                                              rel=5e-3)
  assert Note.RANKS_AWAY not in document["note_codes"] and not document["not_judged"]
