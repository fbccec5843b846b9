"""Scenes with more of the paper in them, first come first served, one reading of section 5.3: in
small."""

import functools
import json
import types

import jax
import numpy as np
import pytest

from experiments.paper import (
  first_come,
  literal_table1,
  scenarios,
  scene,
)
from experiments.paper import world as worlds

MIDDLE = dict.fromkeys(worlds.World._fields, 0.0) | {
    "growth": 0.9, "power": 1.0, "ratio": 1.1, "mass": 1.0, "claim": 1.0, "lost": 0.3,
    "length": 1.0, "step": 1.0, "jitter": 0.02}


def served(ready, work, start, steps):
  ready, work = np.asarray(ready, np.float32)[:, None], np.asarray(work, np.float32)[:, None]
  play = jax.jit(functools.partial(first_come.play, steps=steps))
  return np.asarray(play(ready, work, np.asarray(start, np.float32)))


def test_first_come_first_served_by_hand():
  """Both are ready at 1 and 1.1: the second waits for the whole of the first's bucket."""
  assert served([[1.1], [1.0]], [[0.4], [0.4]], [0, 0], 1)[0] == pytest.approx(1.8, abs=1e-5)
  assert served([[1.0], [1.1]], [[0.4], [0.4]], [0, 0], 1)[0] == pytest.approx(1.4, abs=1e-5)
  # By bucket: the first one's second comes after the other's.
  times = served([[1.0, 1.0], [1.1, 1.1]], [[0.4, 0.4], [0.4, 0.4]], [0, 0], 1)
  assert times[0] == pytest.approx(2.2, abs=1e-5)


def records(tmp_path):
  record = {"pauses": [0.0, 0.0], "searches": [{"worlds": [{"values": list(MIDDLE.values())}] * 2}]}
  (tmp_path / "worlds.json").write_text(json.dumps(record))
  return str(tmp_path / "worlds.json")


@pytest.mark.long
def test_scenarios_in_small(tmp_path, monkeypatch):
  """One kind of scene, and one fabric, from one world: fitted, kept whatever the fit, run."""
  monkeypatch.setattr(scenarios, "WITHIN", 1e6)
  fabric = scene.Scene("spread, 4:1", fabric=("spread", 4, 1.0))
  monkeypatch.setattr(scenarios, "FABRICS", [fabric])
  args = types.SimpleNamespace(steps=150, long=0, drawn=150, apart=1, rounds=2, candidates=4,
                               only=["steady", "fabrics"], worlds=records(tmp_path),
                               out=str(tmp_path / "out.json"))
  scenarios.run(args)
  found = json.loads((tmp_path / "out.json").read_text())
  assert found["scenes"]["steady"]["kept"] == 1
  of = found["scenes"]["steady"]["sizes"]["64"]
  assert set(of) == {name for name, arm in scenarios.ARMS.items() if not arm.guarded}
  assert of["first_come"]["gain"][0] > 0
  assert found["fabrics"]["spread, 4:1"]["64"]["first_come"]["gain"][0] > 0
  page = (tmp_path / "out.md").read_text()
  assert "| spread, 4:1 | 64 |" in page and "1 of 1 kept." in page


@pytest.mark.long
def test_the_literal_pacer_in_small(tmp_path):
  args = types.SimpleNamespace(steps=120, sizes=["4", "8"], worlds=records(tmp_path),
                               out=str(tmp_path / "out.json"))
  literal_table1.run(args)
  found = json.loads((tmp_path / "out.json").read_text())["sizes"]
  assert 0 < found["8"]["literal"]["delay"][0] < 0.5
  assert found["8"]["literal"]["cost"][0] <= found["8"]["literal"]["delay"][0] * 16
  assert "share 1" in found["8"] and "share 1" not in found["4"]
  assert "| 8 | +0.8 % |" in (tmp_path / "out.md").read_text()
