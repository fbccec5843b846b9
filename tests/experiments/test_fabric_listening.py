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
             "alone": {"none": arm(50), "turns": arm(51)}, "alone_of": [50, 100]}] * 3
  found = turns.summary(starts)
  assert found["loss"][0] == pytest.approx(0.2) and found["cost_alone"][0] == pytest.approx(0.02)
  assert found["recovered"]["both"][0] == pytest.approx(0.5) and found["recovered"]["again"][0] == 0
  assert found["recovered"]["one"][0] == pytest.approx(0.25)
  with pytest.raises(ValueError, match="--steps"):
    turns.of_run([line(0.05, 20)], settle=15)


def test_when_the_job_that_stays_is_silent():
  delays = np.zeros(100)
  delays[:60] = 2e-3
  found = turns.of_leave(line(0.1, delays=delays), left_at=5.0)
  assert found == {"silent_after": 10, "steps": 50, "held_ms": 20.0}
