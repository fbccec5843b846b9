"""Pauses, slow transfers and missing ranks on tensor x data meshes: reports against the recurrence
replayed without them."""

from __future__ import annotations

import pytest

from jaxpace.diagnose.words.verdicts import Verdict
from tests.diagnose.grouped import report
from tests.diagnose.recurrence import Cause, Job, play, rank_groups, write
from tests.diagnose.test_groups import check_shares

MESH = {"data": 4, "tensor": 4}


def job(slots: str, *causes: Cause, **settings) -> Job:
  """Tensor-parallel and data-parallel collectives in this order, 120 ms of work in all."""
  axes = {"t": "tensor", "d": "data"}
  places = tuple(rank_groups(MESH, axes[slot], 120e-3 / len(slots), 2e-3) for slot in slots)
  return Job(dict(MESH), places, causes, **settings)


def told(path, some: Job, *arguments):
  """The report, and seconds of a step with and without the job's causes."""
  played = write(path / "run", some)
  document = report(path / "run", *arguments)
  check_shares(document)
  return document, played.step_time(1), play(some, some.causes).step_time(1)


@pytest.mark.parametrize("slots, noise", [("ttd", 0.001), ("dtt", 0.02)])
def test_a_rank_that_pauses_is_named_and_its_pauses_are_not_compute(tmp_path, slots, noise):
  pause = Cause("pause", 200e-3, (5,), every=10)
  document, step, without = told(tmp_path, job(slots, pause, noise=noise), "--without", "pauses")
  assert document["verdict_code"] == "runtime_jitter"
  (finding,) = document["findings"]
  assert finding["ranks"] == [5]
  assert finding["share"] == pytest.approx(1 - without / step, abs=0.01)
  assert document["what_if"]["asked"][0]["step_time"] == pytest.approx(without, rel=0.01)
  # No more of the waiting is for longer compute than without the pauses.
  assert document["shares"]["skew"] < 0.03


@pytest.mark.parametrize("slots, noise", [("ttd", 0.02), ("dtt", 0.001)])
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_slow_transfers_of_one_group_are_contention_wherever_others_wait_for_them(
    tmp_path, slots, noise, axis):
  slow = Cause("contention", 30e-3, (5,), axis=axis, begin=0.3, end=0.8)
  document, step, without = told(tmp_path, job(slots, slow, noise=noise))
  assert document["verdict_code"] == "fabric_contention"
  (finding,) = document["findings"]
  assert finding["share"] == pytest.approx(1 - without / step, abs=0.02)
  assert document["what_if"]["no_contention"]["step_time"] == pytest.approx(without, rel=0.01)
  assert document["what_if"]["no_skew"]["speedup"] < 1.03
  for row in document["per_rank"]:
    assert row["shares"]["contention"] == pytest.approx(1 - without / step, abs=0.02)


def test_slow_transfers_now_and_then_are_contention_in_the_step_that_waits_for_them(tmp_path):
  slow = Cause("contention", 30e-3, (5,), axis="data", every=3)
  document, step, without = told(tmp_path, job("ttd", slow, noise=0.001))
  assert document["what_if"]["no_contention"]["step_time"] == pytest.approx(without, rel=0.01)
  assert document["shares"]["skew"] < 0.005
  assert document["verdict_code"] == Verdict.SLOW_TRANSFERS


def test_a_group_whose_link_is_always_slower_is_transfer_not_skew(tmp_path):
  slow = Cause("contention", 10e-3, (5,), axis="data")
  document, step, without = told(tmp_path, job("ttd", slow, noise=0.001))
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
  check_shares(document)
  assert document["not_judged"] == [5] and not document["findings"]
  assert document["verdict_code"] == Verdict.UNSEEN_RANKS
  assert not any(row["late"] for row in document["per_rank"])
  assert document["shares"]["skew"] < 0.02


@pytest.mark.parametrize("noise", [0.001, 0.02])
def test_a_rank_in_time_is_not_named_beside_the_late_one_nor_has_it_causes(tmp_path, noise):
  mesh = {"data": 4, "tensor": 2}
  places = tuple(rank_groups(mesh, axis, 30e-3, 2e-3) for axis in ("tensor", "tensor", "data"))
  write(tmp_path / "run", Job(mesh, places, (Cause("late", 20e-3, (1,), 0),), noise=noise))
  (finding,) = report(tmp_path / "run")["findings"]
  assert finding["ranks"] == [1] and not set(finding["causes"]) & {"throttled", "steal", "gc"}
