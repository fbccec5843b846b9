"""What a trial of turns costs: in small."""

import json
import types

import numpy as np
import pytest

from experiments.paper import trial_cost
from jaxpace.coordination import take_turns as rule
from jaxpace.simulation import turns

MIDDLE = [0.02, 0.0, 0.0, 0.0, 0.9, 1.0, 1.1, 1.0, 1.0, 0.3, 0.01, 1.0, 0.1, 0.0, 1.0]


def made(step, listened):
  every = np.full((1, 2, 400), 0.0)
  return turns.Turns(every + step, every, every, every + listened, {"turns": every + 0.5})


def test_what_is_lost_is_counted_in_collectives_of_a_step():
  found = trial_cost.figures(made(1.1, 4), made(1.0, 0), np.array([0.5]), np.array([0.01]))
  assert found["gain"] == found["gain_early"] == found["gain_later"]
  assert found["gain"] == [pytest.approx(1 / 1.1 - 1, abs=1e-5)]
  assert found["lost"] == [pytest.approx(300 * 0.1 / 0.5)]
  assert found["listened"] == [pytest.approx(300 * 4 * 0.01 / 0.5)] and found["turns"] == [150]


def test_another_bank_lasts_no_longer_than_it_is_asked_for():
  before = rule._BANK
  with trial_cost.banked(1.5):
    assert float(rule._BANK) == 1.5
  with pytest.raises(KeyError), trial_cost.banked(2):
    raise KeyError
  assert rule._BANK is before


@pytest.mark.long
def test_a_trial_is_shorter_where_it_may_cost_less(tmp_path):
  worlds = {"pauses": [0.0, 0.0], "searches": [{"worlds": [{"values": MIDDLE}] * 2}]}
  (tmp_path / "worlds.json").write_text(json.dumps(worlds))
  args = types.SimpleNamespace(steps=320, apart=1, fabrics=["spread, 4:1"], arms=["both", "bank"],
                               worlds=str(tmp_path / "worlds.json"), out=str(tmp_path / "out.json"))
  trial_cost.run(args)
  found = json.loads((tmp_path / "out.json").read_text())["fabrics"]["spread, 4:1"]
  assert np.median(found["bank"]["lost"]) < np.median(found["both"]["lost"])
  page = (tmp_path / "out.md").read_text()
  assert "| spread, 4:1 | by bucket, both; a trial ends at a quarter of its cost |" in page
