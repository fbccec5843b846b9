"""The stability experiment on made-up steps: its figures have every row, and its page says what the
figures say."""

import numpy as np
import pytest

from configs import stability as configured
from experiments.stability import alarms as stability_alarms
from experiments.stability import run as stability
from experiments.stability import tables as stability_tables
from experiments.stability.job import Series

CIRCUMSTANCES = {"command": "c", "date": "d", "load_average_at_start": 0.0,
                 "machine": {"cores": 1, "platform": "p", "jax": "j", "python": "3"}}


def made_up(machine, groups, policy, steps, runs, seed):
  """Steps around 6.5 s, slower the more groups; they remember each other where the machine does."""
  drawn = (0.02 * np.random.default_rng(seed + policy.local).normal(
      size=(runs, steps // policy.local)))
  if machine.wander:
    drawn = np.cumsum(drawn, axis=1) * 0.1
  return Series(6.5 + 0.02 * np.log(groups) + drawn, np.full_like(drawn, 6.0))


@pytest.fixture(scope="module")
def figures():
  config = configured.get_config()
  config.update({"sizes": (64, 128, 256, 512), "steps": 800, "runs": 3, "days": 2.0, "plays": 3,
                 "draws": 2})
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(stability.stability, "series", made_up)
    patched.setattr(stability, "RECORDED_GROUPS", 4)
    patched.setattr(stability, "RECORDED_STEPS", 220)
    return stability.measure(config)


@pytest.mark.long
def test_every_size_and_policy_is_there(figures):
  assert set(figures["policies"]) == set(figures["knees"]) == {"rare", "frequent"}
  for cells in figures["policies"]["frequent"].values():
    assert set(cells) == set(stability_tables.CONTROLS)
    assert all(cell["cost"][0] > 1 and 0 <= cell["reruns"][0] < 1 for cell in cells.values())
  assert figures["compounding"]["64"]["null"]["rises"] == 0
  assert figures["compounding"]["64"]["baseline"]["rises"] == 3
  assert figures["recorded"]["stability"]["steps"] > 200


def test_the_page_says_what_the_tests_said(figures):
  text = "\n".join(stability_tables.page({**CIRCUMSTANCES, **stability.rounded(figures)}))
  assert ("in 0 of 12 runs" in text and "With drift and wander: 12 of 12" in text
          and "does not compound" in text)
  assert figures["recorded"]["decision"] in text
  assert text.count("No knee") + text.count("Throughput peaks") == 14
  assert "(of independent steps 0.0 to 26.5 % of the runs, of these 73.5 to 100.0 %" in text


@pytest.mark.long
def test_a_knee_is_claimed_where_there_is_one():
  rows = stability_alarms.alarms([64, 128, 256, 512, 1024], 8, 12)
  assert len(rows) == 12
  for row in rows:
    there = row["world"].startswith("a knee")
    if row["noise"] < 0.1:
      assert row["knees"] == (12 if there else 0)
    assert row["knees"] <= row["kappa"]
  text = "\n".join(stability_alarms.page({**CIRCUMSTANCES, "sizes": [64], "runs": 8, "rows": rows}))
  assert text.count(" of 12 |") == 2 * len(rows) and "| 12 of 12 | 0.7354 | 1 | 12 of 12 |" in text


def test_more_together_needs_the_whole_interval():
  assert [stability_tables.amplifies({"interval": i})
          for i in ([1.01, 1.02], [0.9, 1.1], [0.9, 0.99])] == [
              "more", "not shown", "less"]
