"""Table 1 with jobs that take turns, and the pacer of section 5.3: in small."""

import json
import pathlib
import types

import jax.numpy as jnp
import pytest

from experiments.paper import document, literal, turns
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
