"""A pipeline played by itself, and reports held against the recurrence replayed without the
causes."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpace.diagnose.words.codes import Verdict
from tests.diagnose.synthetic import report
from tests.quick import long
from tests.synthetic.synthetic_groups import (
  STEP_GAP,
  Cause,
  Job,
  pipeline,
  play,
  rank_groups,
  work,
  write,
)


def told(path, job):
  """The report of a job that was played."""
  write(path / "run", job)
  return report(path / "run")


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


@pytest.mark.parametrize("as_pairs", [*long(True), False], ids=["pairs", "groups of indices"])
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


WIDE = {"data": 4, "tensor": 4}


def job(slots: str, *causes: Cause, **settings) -> Job:
  """Tensor-parallel and data-parallel collectives in this order, 120 ms of work in all."""
  axes = {"t": "tensor", "d": "data"}
  places = tuple(rank_groups(WIDE, axes[slot], 120e-3 / len(slots), 2e-3) for slot in slots)
  return Job(dict(WIDE), places, causes, **settings)


def shown(path, some: Job, *arguments):
  """The report, and seconds of a step with and without the job's causes."""
  played = write(path / "run", some)
  document = report(path / "run", *arguments)
  return document, played.step_time(1), play(some, some.causes).step_time(1)


@pytest.mark.parametrize("slots, noise", [("ttd", 0.02), ("dtt", 0.001)])
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_slow_transfers_of_one_group_are_contention_wherever_others_wait_for_them(
    tmp_path, slots, noise, axis):
  slow = Cause("contention", 30e-3, (5,), axis=axis, begin=0.3, end=0.8)
  document, step, without = shown(tmp_path, job(slots, slow, noise=noise))
  assert document["verdict_code"] == "fabric_contention"
  (finding,) = document["findings"]
  assert finding["share"] == pytest.approx(1 - without / step, abs=0.02)
  assert document["what_if"]["no_contention"]["step_time"] == pytest.approx(without, rel=0.01)
  assert document["what_if"]["no_skew"]["speedup"] < 1.03
  for row in document["per_rank"]:
    assert row["shares"]["contention"] == pytest.approx(1 - without / step, abs=0.02)


def test_slow_transfers_now_and_then_are_contention_in_the_step_that_waits_for_them(tmp_path):
  slow = Cause("contention", 30e-3, (5,), axis="data", every=3)
  document, step, without = shown(tmp_path, job("ttd", slow, noise=0.001))
  assert document["what_if"]["no_contention"]["step_time"] == pytest.approx(without, rel=0.01)
  assert document["shares"]["skew"] < 0.005
  assert document["verdict_code"] == Verdict.SLOW_TRANSFERS


def test_a_group_whose_link_is_always_slower_is_transfer_not_skew(tmp_path):
  slow = Cause("contention", 10e-3, (5,), axis="data")
  document, step, without = shown(tmp_path, job("ttd", slow, noise=0.001))
  assert document["shares"]["skew"] < 0.005 and document["shares"]["contention"] < 0.005
  quiet = 3 * 2e-3 / without
  assert document["shares"]["transfer"] == pytest.approx(
      (quiet * without + step - without) / step, abs=0.01)


@pytest.mark.parametrize("slots, at", [("ttd", 0), ("dtt", 2)])
def test_where_the_late_ranks_rows_are_missing_no_rank_of_its_groups_is_blamed(
    tmp_path, slots, at):
  late = job(slots, Cause("late", 30e-3, (5,), at), noise=0.005)
  write(tmp_path / "run", late)
  for table in ("steps", "collectives"):
    for part in (tmp_path / "run" / table).glob("*-p00005*"):
      part.unlink()
  document = report(tmp_path / "run")
  assert document["not_judged"] == [5] and not document["findings"]
  assert document["verdict_code"] == Verdict.UNSEEN_RANKS
  assert not any(row["late"] for row in document["per_rank"])
  assert document["shares"]["skew"] < 0.02
