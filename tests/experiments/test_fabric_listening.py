"""What is made of readings and of runs of jobs that take turns: known answers."""

import numpy as np
import pytest

from experiments.labs.fabric import listening_figures as listening
from experiments.labs.fabric import turns_figures as turns
from experiments.labs.fabric.machine import LabError
from experiments.labs.fabric.timeline import Timeline


def test_readings_that_never_overlap_are_told_apart_and_equal_ones_are_not():
  free, busy = np.linspace(1, 2, 50), np.linspace(4, 5, 40)
  assert listening.auc(free, busy) == 1.0 and listening.auc(busy, free) == 0.0
  assert listening.auc(free, free) == pytest.approx(0.5)
  found = listening.told_apart(free, busy)
  assert found["false"] == found["missed"] == found["rule_false"] == found["rule_missed"] == 0.0
  assert 2e3 <= found["threshold_ms"] < 4e3 and 2e3 < found["rule_ms"] < 4e3


def test_a_share_of_wrong_readings_is_found():
  draw = np.random.default_rng(0)
  free, busy = draw.uniform(1, 2, 1000), draw.uniform(4, 5, 1000)
  free[:50], busy[:30] = 4.5, 1.5
  found = listening.told_apart(free, busy)
  assert (found["false"], found["missed"]) == pytest.approx((0.05, 0.03))
  assert (found["rule_false"], found["rule_missed"]) == pytest.approx((0.05, 0.03))


def test_only_readings_wholly_within_a_bucket_or_outside_count():
  # A bucket under way from 10k to 10k + 4 s; a reading of 1 s every 0.7 s or so.
  began = np.arange(0, 300, 0.71371)
  sent = np.array([[k, k + 4.0] for k in range(0, 300, 10)])
  phase = began % 10
  inside, outside = phase + 1 < 4, (phase > 4) & (phase + 1 < 10)
  heard = np.stack([began, began + 1, np.where(inside, 0.5, 0.1), began + 1.25], axis=1)
  found = listening.figures_of(heard, sent)
  # Readings that begin or end with a bucket, give or take what rounding leaves.
  assert abs(found["busy"] - inside.sum()) <= 5 and abs(found["free"] - outside.sum()) <= 5
  assert found["auc"] > 0.98 and found["whole_ms"] == pytest.approx(350)
  with pytest.raises(LabError, match="--seconds"):
    listening.figures_of(heard[:30], sent)


def line(period, count=100, begin=0.0, delays=None):
  ends = begin + period * np.arange(count)
  return Timeline(np.arange(count), ends, np.zeros(count) if delays is None else delays,
                  np.zeros((count, 1)))


def test_periods_and_the_share_of_the_loss_that_comes_back():
  found = turns.of_run([line(0.05), line(0.1, begin=0.01)], settle=5)
  assert (found["mean_ms"] == pytest.approx([50, 100])
          and found["cv"] == pytest.approx([0, 0], abs=1e-9))

  def arm(*periods):
    return {"mean_ms": list(periods), "cv": [0.1, 0.2], "held_ms": [1.0, 2.0]}

  starts = [{"none": arm(60, 120), "again": arm(60, 120), "both": arm(55, 110), "one": arm(50, 130),
             "alone": {"none": arm(50), "turns": arm(51)}, "alone_of": [50, 100],
             "load_average": 2.5}] * 3
  found = turns.summary(starts)
  assert found["load_averages"] == [2.5] * 3 and found["cv_in_order"]["both"] == [0.15] * 3
  assert found["loss"][0] == pytest.approx(0.2) and found["cost_alone"][0] == pytest.approx(0.02)
  assert found["recovered"]["both"][0] == pytest.approx(0.5) and found["recovered"]["again"][0] == 0
  assert found["recovered"]["one"][0] == pytest.approx(0.25)
  with pytest.raises(ValueError, match="--steps"):
    turns.of_run([line(0.05, 20)], settle=15)


def test_when_the_job_that_stays_is_silent():
  delays = np.zeros(100)
  delays[:60] = 2e-3
  found = turns.of_leave(line(0.1, delays=delays), left_at=5.0)
  assert found == {"silent_after": 10, "steps": 50, "listened": 10, "held_ms": 20.0}
  delays[60:75] = 0.5e-3
  found = turns.of_leave(line(0.1, delays=delays), left_at=5.0)
  assert found == {"silent_after": 10, "steps": 50, "listened": 25, "held_ms": 27.5}


def measured_at(congestion, mean):
  """A file's figures, of one start of one setting."""
  def arm(*periods):
    return {"mean_ms": list(periods), "cv": [0.1, 0.2], "held_ms": [1.0, 2.0]}

  start = {"none": arm(60, 120), "again": arm(60, 120), "both": arm(mean, 2 * mean),
           "alone": {"none": arm(50), "turns": arm(51)}, "alone_of": [50, 100], "load_average": 1.0}
  return {"commands": [{"command": f"turns {congestion}", "date": "2026-11-23",
                        "load_average_at_start": 1.0}],
          "parts": [{"trunk_mbit": 100.0, "congestion": congestion, "steps": 130, "settle": 65,
                     "buckets": 8, "gradient_kb": 300.0, "compute_ms": 36.0, "learn": 24,
                     "trial": 24, "priority": "with precedence",
                     "by_ratio": {"1.0": {"starts": [start], "leaves": [], "guarded": []}}}]}


def test_starts_of_the_same_settings_go_together_and_others_do_not():
  figures = {"commands": [], "parts": []}
  for congestion, mean in (("cubic", 55), ("bbr", 60), ("cubic", 50)):
    turns.merge(figures, measured_at(congestion, mean))
  cubic, bbr = figures["parts"]
  assert (cubic["congestion"], bbr["congestion"]) == ("cubic", "bbr")
  assert cubic["by_ratio"]["1.0"]["summary"]["in_order"]["both"] == [0.5, 1.0]
  assert bbr["by_ratio"]["1.0"]["summary"]["starts"] == 1 and len(figures["commands"]) == 3


def guarded_run(first_half, second_half):
  """Two jobs, the first of which obeys, and what its guard said."""
  def of(period, count):
    ends = np.cumsum(period * np.repeat([first_half, second_half], count // 2))
    return Timeline(np.arange(count), ends, np.full(count, 1e-3), np.zeros((count, 1)))

  on = np.r_[np.ones(100), np.zeros(100)]
  guard = {"guard_on": on, "pairs": np.full(200, 3.0), "effect": np.r_[np.full(199, 0.1), np.nan],
           "effect_low": np.full(200, 0.05),
           "effect_high": np.full(200, 0.15)}
  found = turns.of_guarded([of(0.05, 200), of(0.1, 100)], {"a": guard}, settle=0, parts=2)
  without = turns.of_run([line(0.06), line(0.12)], settle=5)
  return {"obey": ["a"], "steps": {"a": 200, "b": 100}, "seed": 0, "load_average": 1.0,
          "alone_of": [50.0, 100.0], "none": [without, without], **found}


def test_a_long_run_under_the_guard_is_told_in_parts():
  found = guarded_run(1.2, 1.0)
  assert found["guards"]["a"]["on"] == [1.0, 0.0]
  assert found["guards"]["a"]["effect"] == pytest.approx(0.1)
  unsure = {name: np.full(4, value) for name, value in
            {"guard_on": 1, "pairs": 1, "effect": 0.1, "effect_low": np.nan,
             "effect_high": np.nan}.items()}
  said = turns.of_guarded([line(0.05), line(0.05)], {"b": unsure}, settle=5, parts=2)["guards"]["b"]
  assert said["effect"] == pytest.approx(0.1) and said["effect_low"] is said["effect_high"] is None
  before, after = found["parts"]
  assert before["mean_ms"][0] > 55 and after["mean_ms"] == pytest.approx([50, 100], rel=0.03)


def test_the_page_has_a_row_for_each_arm_each_leave_and_each_long_run():
  figures = {"command": "turns", "date": "2026-11-23", "load_average_at_start": 1.0,
             "machine": {"cores": 2, "platform": "x", "jax": "0", "python": "3"},
             "commands": [], "parts": []}
  turns.merge(figures, measured_at("bbr", 55))
  here = figures["parts"][0]["by_ratio"]["1.0"]
  here["leaves"].append({"silent_after": 7, "steps": 70, "listened": 9, "held_ms": 20.0})
  here["guarded"].append(guarded_run(1.2, 1.0))
  page = "\n".join(turns.page(figures))
  assert "| bbr | 36 | 1.0 | 1 | 20.0 % | by message, all obey | 50.0 % | 50 |" in page
  assert "| bbr | 36 | 1.0 | 7 | 9 | 70 | 20 |" in page
  assert "| bbr | 36 | 1.0 | a | 200, 100 | 1 |" in page and "10.0 % [5.0, 15.0] | 3 |" in page
