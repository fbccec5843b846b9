"""What is read from two jobs' stretches, and that the fit finds the weight that made them."""

import numpy as np
import pytest

from experiments.labs.fabric import attraction
from experiments.labs.fabric.attraction import Stretch


def test_equal_sharing_keeps_the_lead_and_makes_both_wait_for_the_overlap():
  lead = np.array([0.0, 5e-3, 15e-3, 25e-3])
  leader, follower = attraction.shared(lead, 25e-3, 0.0)
  np.testing.assert_allclose(leader, 50e-3 - lead, rtol=8e-3)
  np.testing.assert_allclose(follower, leader, rtol=8e-3)


def test_the_link_is_never_idle_in_between():
  lead = np.linspace(1e-3, 24e-3, 6)
  _, follower = attraction.shared(lead, 25e-3, 0.75)
  np.testing.assert_allclose(lead + follower, 50e-3, rtol=8e-3)


def test_meetings_are_of_steps_that_overlap_whoever_leads():
  one = Stretch(np.arange(6) * 0.1, np.arange(6) * 0.1 + 0.03)
  other = Stretch(np.arange(6) * 0.1 + 0.02, np.arange(6) * 0.1 + 0.04)
  np.testing.assert_allclose(attraction.meetings(one, other), [[0.02, 0.03, 0.02]] * 4)
  np.testing.assert_allclose(attraction.meetings(other, one), attraction.meetings(one, other))
  apart = Stretch(one.begin + 0.05, one.end + 0.05)
  assert attraction.meetings(one, apart).shape == (0, 3)


@pytest.mark.long
@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_the_fit_finds_the_weight(weight):
  rng = np.random.default_rng(4)
  lead = 25e-3 * np.concatenate([0.05 * rng.random(300), rng.random(60)])
  leader, follower = attraction.shared(lead, 25e-3, weight)
  met = np.stack([lead, leader + 3e-4 * rng.normal(size=360), follower], axis=1)
  found, error = attraction.fit(met, 25e-3)
  assert found == pytest.approx(weight, abs=0.11) and error < 5e-4
  rows = attraction.by_lead(met, 25e-3, found)
  assert sum(row["steps"] for row in rows) == 360
  assert all(abs(row["change_ms"] - row["model_ms"]) < 0.7 for row in rows)
