"""Table 1 with jobs that take turns, and the pacer of section 5.3: in small."""

import json
import pathlib
import types

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.paper import document, identified, literal, mechanisms, turns, turns_page
from experiments.paper import world as worlds
from jaxpace.core.types import Observation


def observed(wait):
  nan = jnp.full((2,), jnp.nan)
  return Observation(jnp.int32(1), jnp.int32(0), nan, nan, jnp.float32([wait]), jnp.float32(1),
                     jnp.float32(1), jnp.float32([wait]))


def delays(waits, **more):
  pacer = literal.pacer(0.2, window=16, **more)
  state, asked = pacer.init(2), []
  for wait in waits:
    decision, state = pacer.update(observed(wait), state)
    asked.append(float(decision.delay))
  return asked


def test_the_literal_pacer_delays_by_half_of_what_was_waited_beyond_the_least():
  asked = delays([0.1, 0.3] * 20)
  assert asked[-1] == pytest.approx(0.5 * 0.2, rel=0.15) and asked[-2] == pytest.approx(0, abs=1e-6)


def test_it_is_passive_while_waits_do_not_vary_and_within_its_bound():
  assert max(delays([0.3, 0.301] * 20)) == 0
  assert max(delays([0.1, 3.0] * 20)) == np.float32(0.2)
  assert max(delays([np.nan] * 5 + [0.1, 0.3, -1.0])) <= 0.2


def figures_of(gain, **more):
  of = {"gain": gain, "cv": [0.1, 0.2], "bare_cv": [0.2, 0.3], "mean": [1, 1], "listened": [2, 2],
        "turns": [1, 1], "neighbour_gain": [0.1, 0.2], "exposed": [0.3, 0.4],
        "bare_exposed": [0.5, 0.6], "hidden": [0.1, 0.2], "bare_hidden": [0.1, 0.2]}
  sizes = {str(n): {"both": of, "one": of, "alone": of} for n in worlds.NODES}
  return {"command": "c", "date": "d", "machine": {"cores": 2, "platform": "p", "jax": "j",
                                                   "python": "3"},
          "load_average_at_start": 1.0, "sizes": sizes, "worlds": 2, "steps": 400, "long": 1000,
          "listening": 0.01, "block": 64, "ear": {"busy": 4.0, "scatter": 0.2, "wrong": 0.02},
          "arms": {name: arm.about for name, arm in turns.ARMS.items()}} | more


def test_the_page_says_how_many_worlds_come_up_to_the_paper_and_what_was_not_run():
  page = "\n".join(turns_page.page(figures_of([0.05, 0.15])))
  assert "| 64 | +11.0 % | +5.0 .. +10.0 .. +15.0 % | 50 % |" in page
  assert "| 64 | +15.0 .. +15.0 .. +15.0 % | +5.0 .. +5.0 .. +5.0 % |" in page
  assert page.count("Not run.") == 1


def on_record(loads, gains, searches):
  """Records of worlds, one for each load."""
  turned = figures_of(gains)
  fields = list(worlds.World._fields)
  made = [{"start": name, "fixed": {"load": 0.0} if load == 0 else {},
           "worlds": [{"values": [load if field == "load" else 0.4 for field in fields]}]}
          for load, name in zip(loads, searches, strict=True)]
  return {"table1_turns.json": turned,
          "table1_worlds.json": {"fields": fields, "searches": made}}


def test_columns_say_what_is_on_record_and_leave_out_what_is_not():
  paced = {str(n): {"all": {"gain": [-0.01, 0.0], "cv": [0.2, 0.3], "bare_cv": [0.3, 0.3]}}
           for n in worlds.NODES}
  records = {"table1.json": {"sizes": paced}, "table1_turns.json": figures_of([0.05, 0.15])}
  row = next(line for line in mechanisms.gains(records) if line.startswith("| 64"))
  assert row == ("| 64 | +11.0 % | – | -1.0 .. +0.0 % | +5.0 .. +15.0 % | +5.0 .. +15.0 % | – |")
  letter = {"gain": [-0.1, -0.05], "cv": [0.1, 0.1], "bare_cv": [0.2, 0.2]}
  records["table1_literal.json"] = {"sizes": {"64": {"literal": letter, "share 0.1": letter}}}
  said = " ".join(identified.literal(records))
  assert "from 0.200 to 0.100" in said and "-7.5 % with 0.1" in said


def test_worlds_of_two_kinds_stand_side_by_side_and_their_middle_is_no_figure():
  records = on_record([0.0, 0.3], [0.24, 0.02], ["near equal periods 1", "all couplings"])
  said = " ".join(identified.said(records))
  assert "by +2.0 to +24.0 %" in said and "none at all five sizes" in said
  assert "1 of the 1 worlds without other traffic" in said
  row = next(line for line in identified.groups(records) if line.startswith("| gain, 64"))
  assert row.endswith("| +24.0 .. +24.0 .. +24.0 % | +2.0 .. +2.0 .. +2.0 % |")
  assert identified.said({}) == ["Not run yet."]


def test_the_page_of_the_paper_says_what_its_records_say():
  """Its tables are made anew: who changes a record draws the page again."""
  root = pathlib.Path(__file__).parents[2]
  text = (root / "docs/paper.md").read_text()
  made = document.filled(text, root / "docs/measurements/table1.json")
  assert made == text, "python -m experiments.paper.figures"


@pytest.mark.long
def test_a_small_table(tmp_path):
  """Two worlds on record that differ in what sharing loses, at one size: run, kept, not run
  again."""
  middle = dict.fromkeys(worlds.World._fields, 0.0) | {
      "growth": 0.9, "power": 1.0, "ratio": 1.1, "mass": 1.0, "claim": 1.0, "length": 1.0,
      "step": 1.0}
  made = [dict(middle, lost=lost) for lost in (0.0, 0.5)]
  record = {"pauses": [0.0, 0.0],
            "searches": [{"worlds": [{"values": list(world.values())} for world in made]}]}
  (tmp_path / "worlds.json").write_text(json.dumps(record))
  args = types.SimpleNamespace(steps=250, long=200, drawn=200, apart=1, sizes=["64"],
                               arms=["both", "alone", "first_come"],
                               worlds=str(tmp_path / "worlds.json"), out=str(tmp_path / "out.json"))
  turns.run(args)
  found = json.loads((tmp_path / "out.json").read_text())["sizes"]["64"]
  assert (found["both"]["gain"][1] > 0.05
          and found["both"]["gain"][1] > found["both"]["gain"][0] > -0.02)
  assert found["first_come"]["gain"][1] > 0.2
  assert found["both"]["exposed"][1] < found["both"]["bare_exposed"][1]
  assert found["alone"]["gain"] == [0.0, 0.0] and found["alone"]["listened"] == [0.0, 0.0]
  assert "Both jobs take turns" in (tmp_path / "out.md").read_text()
  before = (tmp_path / "out.json").stat().st_mtime_ns
  again = turns._Runner.run
  try:
    turns._Runner.run = lambda *_: pytest.fail("it is on record")
    turns.run(args)
  finally:
    turns._Runner.run = again
  assert (tmp_path / "out.json").stat().st_mtime_ns >= before
