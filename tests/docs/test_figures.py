"""The figures of docs/how_it_works.md: drawn are the experiment's numbers, and the page says what
they mean."""

import json

import numpy as np
import pytest

from experiments.docs import concept_drawing, concept_figures
from tests.docs.blocks import ROOT

FOLDER = ROOT / "docs" / "figures"
DRAWN = json.loads((FOLDER / "concepts.json").read_text())


def test_one_step_is_made_as_it_is_drawn_and_adds_up():
  step, made = DRAWN["one_step"], concept_figures.one_step()
  for name, value in step.items():
    assert made[name] == pytest.approx(value, rel=1e-3)
  own = np.array(step["gap"]) + step["compute"]
  assert (own.argmax() == step["last"]
          and step["waiting"] == pytest.approx((own.max() - own).tolist(), abs=2e-3))
  for rank in range(4):
    assert (sum(step[name][rank] for name in concept_drawing.BARS)
            == pytest.approx(step["step_ms"], abs=4e-3))
  assert sum(step["mean"].values()) == pytest.approx(step["step_ms"], abs=4e-3)


def test_late_for_good_and_by_turns_wait_alike_and_are_told_apart():
  good, turns = DRAWN["late"].values()
  assert good["skew"] == pytest.approx(turns["skew"], abs=0.02) and good["skew"] > 0.1
  assert [(f["mode"], f["ranks"]) for case in (good, turns) for f in case["findings"]] == [
      ("persistent_straggler", [5]), ("synchronization_amplification", [])]
  last = np.array(turns["lateness_ms"]).argmax(axis=0)
  assert ((np.array(good["lateness_ms"]).argmax(axis=0) == 5).all()
          and np.bincount(last, minlength=8).min() > 0)


def test_what_is_drawn_as_simulated_is_the_closed_form():
  ranks = DRAWN["growth"]["ranks"]
  for name, (_, closed) in concept_figures.SPREADS.items():
    found = DRAWN["growth"][name]
    assert found["closed"] == pytest.approx([closed(n) for n in ranks], abs=1e-4)
    assert found["simulated"] == pytest.approx(found["closed"], rel=0.03)
  assert concept_figures.slowest_normal(64) == pytest.approx(2.344, abs=1e-3)
  assert (DRAWN["growth"]["exponential, 5 %"]["closed"][ranks.index(64)]
          == pytest.approx(1 + 0.05 * 4.744, abs=1e-3))


def test_pacing_gains_where_there_is_a_coupling_and_nowhere_else():
  turns, slow, polled, pauses, apart, together = DRAWN["paced"].values()
  for null in (turns, slow, pauses, apart):
    assert all(0 <= change <= 1e-2 for change in null)  # the cost that the pacer was allowed
  assert all(change < -0.02 for change in (*polled, *together))


@pytest.mark.parametrize("name", concept_figures.FIGURES)
def test_every_figure_is_drawn(name, tmp_path):
  written = concept_drawing.save(getattr(concept_drawing, name)(DRAWN[name]),
                                 tmp_path / f"{name}.svg").read_text()
  committed = (FOLDER / f"{name}.svg").read_text()
  for text in (written, committed):
    # light, whatever the page's theme
    assert text.startswith("<?xml") and concept_drawing.PAPER in text
  words = {"one_step": "mean rank", "late": "blames nobody", "growth": "exponential, 5 %",
           "paced": "two jobs on one link"}
  assert words[name] in written and words[name] in committed
