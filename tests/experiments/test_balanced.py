"""The experiment on ranks slowed down: its sums, on figures made up."""

import itertools

import numpy as np
import pytest

from experiments.measure import balanced, balanced_simulated, balanced_table1, balanced_worker
from experiments.measure.balanced_worker import AGAIN, EVEN, FIXED, SHARED
from experiments.paper import world as worlds

HEALTHY, SLOW = (1.0,) * 4, (1.0, 1.0, 1.0, 2.0)


def stage(slow=SLOW, shared=11.0):
  seconds = ({EVEN: 16.0, AGAIN: 16.0, SHARED: shared}
             | ({FIXED[0]: 10.0, FIXED[1]: 12.0} if max(slow) > 1 else {}))
  return {"slow": list(slow), "each": [1e-3 * value for value in slow], "spread": [0.1] * 4,
          "processor": 0.2, "history": [[8, 8, 8, 8]] * 20 + [[9, 9, 8, 6]] * 5
          + [[9, 9, 9, 5]] * 15, "by_speed": [[9, 9, 9, 5]],
          "fixed": {FIXED[0]: [9, 9, 9, 5], FIXED[1]: [9, 9, 8, 6]} if max(slow) > 1 else {},
          "seconds": {arm: [1e-3 * value * (1 + 0.01 * k) for k in range(4)]
                      for arm, value in seconds.items()}}


def test_what_was_recovered_and_how_soon():
  found = balanced.judge(stage())
  assert (found["best"] == FIXED[0]
          and found["recovered_percent"] == pytest.approx([100 * 5 / 6] * 3, rel=1e-2))
  assert found["followed_after"] == 25, ("with 6 of the slow ones the step takes 12, of 16 and at "
                                         "best 10")
  assert found["change_percent"][SHARED] == pytest.approx([(11 / 16 - 1) * 100] * 3, rel=1e-3)
  assert found["change_percent"][AGAIN] == [0, 0, 0] and found["rounds"] == 4
  assert found["measured_slow"] == [1, 1, 1, 2]
  late = stage()
  late["history"][-1] = [8, 8, 8, 8]
  assert balanced.judge(late)["followed_after"] is None
  assert "recovered_percent" not in balanced.judge(stage(slow=HEALTHY))


def test_the_last_rank_of_each_block():
  """Three steps of learning, then two rounds of blocks of five, of which the first three don't
  count."""
  one = stage(HEALTHY)
  order = [EVEN, SHARED, AGAIN, SHARED, AGAIN, EVEN]
  rows = np.full((3 + 5 * len(order), 4), 0.01)
  for number in range(len(order)):
    rows[3 + 5 * number:][:3, 0] = 9.0
    rows[3 + 5 * number + 3:][:2, number % 4] = 0.1 * (number + 1)
  one |= {"history": [[8] * 4] * 2, "order": order, "arrivals": rows.tolist(),
          "ran": np.full(rows.shape, 8).tolist(),
          "seconds": {arm: [1.0, 1.0] for arm in (EVEN, AGAIN, SHARED)}}
  last = balanced.lasts(one)
  assert last[EVEN] == pytest.approx([0.1, 0.6]) and last[AGAIN] == pytest.approx([0.3, 0.5])
  assert last[SHARED] == pytest.approx([0.2, 0.4])
  found = balanced.judge(one)
  assert found["last_change_percent"][SHARED][0] == pytest.approx(
      50 * (0.2 / 0.2 + 0.4 / 0.55 - 2), rel=1e-3)


def test_a_job_that_recovers_follows_back_to_even_counts():
  even = np.full(4, 8)
  back = [[10, 9, 9, 4]] * 17 + [[8, 8, 8, 8]] * 9
  assert (balanced.followed(back, np.ones(4), even) == 17
          and balanced.followed(back[:17], np.ones(4), even) is None)
  assert balanced.followed(back[17:], np.ones(4), even) == 0


def test_what_healthy_ranks_lose_is_told_by_the_steps_themselves():
  """Half of the steps with one micro-batch too many on a rank: an eighth more in these, whatever
  the noise."""
  rng = np.random.default_rng(0)
  each = np.exp(rng.normal(0, 0.3, (200, 1))) * np.ones(4)
  ran = np.where(np.arange(200)[:, None] % 100 < 50, [8, 8, 8, 8], [9, 8, 8, 7])
  # What is known at a step is of the one before.
  arrivals = np.concatenate([np.full((1, 4), 99.0), (each * ran)[:-1]])
  found = balanced.lost(arrivals, ran)
  share = (each * (ran[:, :1] == 9))[:-1].sum() / each[:-1].sum()
  assert found["lost_percent"][0] == pytest.approx(12.5 * share, rel=0.15)
  assert found["uneven_percent"] == pytest.approx(50, abs=0.5) and found["lost_steps"] == 199
  nothing = balanced.lost(arrivals, np.full((200, 4), 8))
  assert nothing["lost_percent"] == [0, 0, 0] and nothing["uneven_percent"] == 0


@pytest.mark.long
def test_recorded_noise_is_played_again():
  rng = np.random.default_rng(1)
  ran = np.array([[8, 8, 8, 8], [9, 9, 9, 5]])[rng.integers(0, 2, 200)]
  for slow in (np.ones(4), np.array([1, 1, 1, 2.0])):
    each = slow * np.exp(rng.normal(0, 0.05, (200, 4)))
    arrivals = np.concatenate([np.full((1, 4), 99.0), (each * ran)[:-1]])
    found = balanced.played_again(arrivals, ran, slow)
    if slow.max() == 1:
      assert found["played_percent"][0] == 0 and found["played_uneven_percent"] == 0
      assert "played_recovered_percent" not in found
    else:
      assert found["played_percent"][0] == pytest.approx(100 * (10 / 16 - 1), abs=2)
      assert found["played_recovered_percent"][0] == pytest.approx(100, abs=3)
  assert balanced.played_again(arrivals[:50], ran[:50], slow) == {}


def test_an_interval_of_a_quotient():
  rng = np.random.default_rng(0)
  held = 0
  for _ in range(300):
    saved = rng.normal(10, 1, 6)
    _, low, high = balanced._quotient(0.9 * saved + rng.normal(0, 0.5, 6), saved)
    held += low <= 90 <= high
  assert 0.92 <= held / 300 <= 0.98
  assert (balanced._quotient(np.array([1.0, -1, 2]),
                             np.array([1.0, -2, 4]))[1:] == [None, None]), "nothing sure is saved"


def test_the_page_has_every_stage_and_says_what_failed():
  one = {"number": 3, "command": "the command", "load_average_at_start": 0.1}
  figures = {"machine": {"cores": 2, "platform": "x", "jax": "y", "python": "z"}, "command": "c",
             "date": "d", "load_average_at_start": 0.1, "intervals": "student",
             "jobs": {"sleep-32": {"stages": [one | balanced.judge(stage())]},
                      "quota-16": {"stages": [], "failed": "no right"}}}
  page = "\n".join(balanced.lines(figures))
  assert "9/9/9/5" in page and "Could not be run to the end: no right" in page and "83.3" in page
  assert "`the command`" in page


def test_the_best_counts_by_hand():
  seconds = np.array([1.0, 1.7, 3.1])
  every = [c for c in itertools.product(range(9), repeat=3) if sum(c) == 8]
  best = min((np.array(c) * seconds).max() for c in every)
  assert (balanced_worker.quickest(seconds, 8) * seconds).max() == best
  without = balanced_worker.quickest(seconds, 8, (2,))
  assert (without[2] == 0 and (without * seconds).max()
          == min((np.array(c) * seconds).max() for c in every if not c[2]))


def test_what_takes_turns():
  assert list(balanced_worker.arms(HEALTHY, 32)) == [EVEN, AGAIN, SHARED]
  ways = balanced_worker.arms(SLOW, 32)
  assert ways[FIXED[0]][1].tolist() in ([10, 9, 9,
                                         4], [9, 9, 9, 5]) and ways[FIXED[1]][1].sum() == 32
  assert all(counts.sum() == 32 for _, counts in ways.values() if counts is not None)
  assert ways[balanced_worker.WITHOUT][1][3] == 0
  for _, _, _, total, _, stages in balanced.JOBS.values():
    assert all(balanced_worker.arms(slow, total) for slow in stages)


def test_made_up_speeds_are_what_they_are_called():
  rng = np.random.default_rng(0)
  for name, (speeds, _) in balanced_simulated.SCENARIOS.items():
    made = speeds(8, rng)
    assert made.shape == (balanced_simulated.STEPS, 8) and (made > 0).all(), name
    slow = (made.mean(axis=0) > 1.05).sum()
    assert ("drift" in name
            or slow == (0 if "healthy" in name else 4 if "half the ranks" in name else 1)), name


@pytest.mark.long
def test_computes_of_the_worlds_of_table_1():
  values = {name: np.float32(0) for name in worlds.World._fields}
  steady = balanced_table1.computes(worlds.World(**values | {"slow": np.float32(0.06)}), 32, 0)
  assert steady.shape == (balanced_table1.STEPS, 64)
  np.testing.assert_allclose(steady,
                             np.broadcast_to(np.where(np.arange(64) % 32 == 3, 1.06, 1.0),
                                             steady.shape), rtol=1e-6)
  noisy = balanced_table1.computes(worlds.World(**values | {"jitter": np.float32(0.02)}), 32, 0)
  assert (noisy.std() == pytest.approx(0.02, rel=0.05)
          and np.corrcoef(noisy[:-1, 0], noisy[1:, 0])[0, 1] < 0.2)
