"""The lab of ranks that poll: its barrier, its schedule, its verdicts, and a small run."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from experiments.lib import measured
from experiments.measure import polling, polling_ranks
from experiments.measure.polling_ranks import ARMS_OFF, Barrier, Setup

SETUP = Setup(ranks=2, cores=2, polling=True, work_ms=0.1, late_ms=3.0, costs=(1.0,), warm_up=90,
              block=6, rounds=2)


@pytest.mark.parametrize("kind", ["polling", "blocking"])
def test_the_barrier_meets_and_everyone_hears_everyone(kind: str) -> None:
  ranks, steps = 3, 50
  flags, numbers = np.zeros(ranks, np.int64), np.zeros(2 * ranks * 3, np.float32)
  blocking = threading.Barrier(ranks)
  barriers = [Barrier(r, ranks, kind == "polling", flags, numbers, blocking) for r in range(ranks)]
  heard: list[list[np.ndarray]] = [[] for _ in range(ranks)]

  def work(rank: int) -> None:
    for k in range(steps):
      heard[rank].append(barriers[rank].wait((rank, k, 10 * k + rank)))

  threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  for k in range(steps):
    expected = np.array([[rank, k, 10 * k + rank] for rank in range(ranks)], np.float32)
    for rank in range(ranks):
      np.testing.assert_array_equal(heard[rank][k], expected)
  assert (sum(barrier.polls for barrier in barriers) > 0) == (kind == "polling")


def test_a_rank_that_does_not_come_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(polling_ranks, "_PATIENCE", 0.01)
  barrier = Barrier(0, 2, True, np.zeros(2, np.int64), np.zeros(12, np.float32), None)
  with pytest.raises(TimeoutError, match="did not reach step 1"):
    barrier.wait((0, 0, 0))


def test_every_arm_once_a_round_in_the_same_order_everywhere() -> None:
  setup = SETUP._replace(costs=(1e-3, 1e-2), rounds=5)
  names = polling_ranks.order(setup)
  assert names == polling_ranks.order(setup)
  rounds = [names[i:i + 4] for i in range(0, 20, 4)]
  assert all(sorted(each) == sorted(polling_ranks.arms(setup)) for each in rounds)
  assert len({tuple(each) for each in rounds}) > 1


@pytest.mark.parametrize(("change", "again", "within", "expected"), [
    ([-24, -26, -21], [0, -1, 1], (-100, -20), "met"),
    ([-24, -26, -18], [0, -1, 1], (-100, -20), "not shown"),
    ([-10, -12, -8], [0, -1, 1], (-100, -20), "MISSED"),
    ([-10, -12, -8], [4, 3, 5], (-100, -20), "inconclusive: A/A fails"),
    ([0.2, 0.1, 0.4], [0, -0.2, 0.2], (-100, 0.5), "met"),
    ([0.4, 0.1, 0.7], [0, -0.2, 0.2], (-100, 0.5), "not shown"),
    ([0.4, 0.1, 0.7], [0, -0.9, 0.2], (-100, 0.5), "inconclusive: A/A fails"),
    ([3.0, 2.5, 3.5], [0, -1, 1.0], (-2, 2), "MISSED")])
def test_verdicts(change: list[float], again: list[float], within: tuple[float, float],
                  expected: str) -> None:
  assert polling.verdict(change, again, within) == expected


@pytest.mark.long
def test_a_small_run() -> None:
  """Real processes. A bucket that never is what limits: the early rank is delayed, unless the
  machine is very busy."""
  found = polling.measure(SETUP)
  paced = found["arms"]["cost 1"]
  assert set(found["arms"]) == {*ARMS_OFF, "cost 1"}
  for entry in found["arms"].values():
    assert entry["step_ms"][0] > 1 and entry["cpu_ms"][0] > 1 and entry["polls"][0] > 0
  assert found["arms"]["off"]["delay_ms"] == 0 <= paced["delay_ms"] < 20
  title = next(iter(polling.CASES))
  text = "\n".join(polling.lines({**measured.circumstances("x"), "cases": {title: found}}))
  assert "| off again |" in text and "Wanted: a change of -20 % or less." in text


def test_a_target_for_every_case_and_what_its_title_says() -> None:
  assert set(polling.TARGETS) == set(polling.CASES)
  for title, (ranks, polls, pinned) in polling.CASES.items():
    assert (title.startswith(f"{ranks} ranks that {'poll' if polls else 'block'}")
            and ("pinned" in title) == pinned)
