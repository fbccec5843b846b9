"""Scenes with more of the paper in them, first come first served, one reading of section 5.3: in
small."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.paper import (
  first_come,
  literal_table1,
  quick,
  scenarios,
  scenarios_page,
  scene,
  scene_fit,
)
from experiments.paper import world as worlds

MIDDLE = dict.fromkeys(worlds.World._fields, 0.0) | {
    "growth": 0.9, "power": 1.0, "ratio": 1.1, "mass": 1.0, "claim": 1.0, "lost": 0.3,
    "length": 1.0, "step": 1.0, "jitter": 0.02}


def one_world():
  return worlds.World(*(jnp.float32(value) for value in MIDDLE.values()))


def assembled(kind, nodes, **sends):
  values = {name: np.float32(MIDDLE[name]) for name in scene.Sends._fields} | sends
  drawn = scene.draws(kind, nodes, 30, (0.0, 0.0))(jax.random.key(1), one_world())
  return scene.assemble(kind, nodes, drawn, scene.Sends(**values))


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


@pytest.mark.long
def test_first_come_first_served_alone_is_the_bare_run():
  rng = np.random.default_rng(0)
  ready = np.sort(rng.uniform(0.5, 1.5, (40, 2)), axis=1).astype(np.float32)
  work = rng.uniform(0.1, 0.4, (40, 2)).astype(np.float32)
  found = first_come.play(jnp.stack([ready, ready]), jnp.stack([work, work]),
                          jnp.float32([0, 1e9]), 40)
  drafts = quick.Drafts(jnp.asarray(ready), jnp.asarray(work))
  expected = quick.play(drafts, drafts, jnp.float32(1e9), jnp.float32(1))
  np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5)


@pytest.mark.long
def test_a_scene_has_its_buckets_and_all_of_the_transfer_most_of_it_behind_the_backward_pass():
  made = assembled(scene.SCENES["buckets"], 64)
  assert made.work.shape == (2, 30, 12) and not made.crowded
  np.testing.assert_allclose(made.work[0].sum(axis=1), 0.9, rtol=1e-5)
  assert float(made.ready[0, :, 0].mean()) < 0.45, "the first is ready early in the backward pass"
  assert (np.diff(np.asarray(made.ready[0]), axis=1) > 0).all()
  assert (np.asarray(made.ready[1]).std(axis=1) < 1e-6).all(), "the neighbour's all at once"
  np.testing.assert_allclose(made.speeds, [1, 0.5 * 0.7], rtol=1e-6)


@pytest.mark.long
def test_a_steady_neighbour_sends_as_much_at_every_size_and_others_grow():
  few, many = (assembled(scene.SCENES["three"], nodes) for nodes in (8, 64))
  sums = [np.asarray(made.work.sum(axis=2).mean(axis=1)) for made in (few, many)]
  assert sums[1][3] == pytest.approx(sums[0][3], rel=1e-5)
  assert (sums[1][:3] / sums[0][:3]).tolist() == pytest.approx([63 / 7] * 3, rel=1e-4)
  assert len(many.speeds) == 4 and float(many.speeds[3]) == pytest.approx(0.25 * 0.7)


@pytest.mark.long
def test_incast_drops_more_the_more_nodes_and_more_where_another_sends():
  few, many = (assembled(scene.SCENES["incast"], nodes) for nodes in (4, 64))
  plain = assembled(scene.SCENES["buckets"], 64)
  late = [np.asarray(made.work[0] - made.work[0].min()) > 0.1 for made in (few, many, plain)]
  assert late[0].mean() < late[1].mean() and not late[2].any()
  assert 0.01 < (np.asarray(many.crowded) > 0).mean() < 0.12
  assert not (np.asarray(many.crowded)[0][late[1]] > 0).any()


def test_a_fabric_couples_jobs_only_where_their_messages_share_its_uplinks():
  alone, speed = scene.on_fabric(64, "spread", 4, 1.0)
  assert speed == pytest.approx(0.5, abs=0.02)
  assert scene.on_fabric(64, "packed", 8, 1.0)[1] == pytest.approx(1.0)
  assert scene.on_fabric(64, "spread", 1, 1.0) == pytest.approx((alone / 2, 1.0), rel=0.03)
  assert scene.on_fabric(16, "spread", 4, 0.5)[0] == pytest.approx(
      2 * scene.on_fabric(16, "spread", 4, 1.0)[0], rel=0.02), "one slow path holds the ring up"


def test_exposed_time_is_what_the_step_takes_beyond_its_compute():
  steps = np.full((1, 2, 60), 1.5)
  found = scenarios.figures(steps, 1.2 * steps, np.full((1, 60), 1.2), False)
  assert found["exposed"] == [0.2] and found["bare_exposed"] == [pytest.approx(1 / 3, abs=1e-6)]
  assert found["gain"] == [pytest.approx(0.2)] and found["neighbour_gain"] == [pytest.approx(0.2)]


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


def test_the_search_finds_what_fits(monkeypatch):
  """By a baseline that is the paper's where the first number is 0.9, and the last one 0.2."""
  rate = np.array(worlds.NODES) / np.array(worlds.THROUGHPUT["baseline"])

  def moments(_, sends):
    off = (np.array(sends.growth) - 0.9)[..., None] * np.linspace(-1, 1, 5)
    spread = 1 + 5 * (np.array(sends.load) - 0.2)[..., None]
    return rate * (1 + off), spread * np.array(worlds.CV["baseline"]) * np.ones_like(off)

  monkeypatch.setattr(scene_fit, "bare", lambda *_: moments)
  begin = dict(MIDDLE, growth=0.5, load=0.4)
  made = worlds.World(*(np.float32([value, value]) for value in begin.values()))
  found, misfits = scene_fit.fit(scene.SCENES["buckets"], made, [], 10, 30, 12)
  assert (misfits < 0.5).all()
  np.testing.assert_allclose(found.growth, 0.9, atol=0.02)
  np.testing.assert_allclose(found.load, 0.2, atol=0.02)
  for name, values in found._asdict().items():
    low, high = worlds.BOUNDS[name]
    assert ((np.float32(low) <= values) & (values <= np.float32(high))).all()


def test_all_arms_of_what_was_kept_have_a_row():
  of = {name: {key: [0.1] for key in ("gain", "cv", "bare_cv", "neighbour_gain")}
        for name in scenarios.ARMS}
  figures = {"steps": 300, "long": 2000, "block": 64, "drawn": 600, "scenes": {
      "buckets": {"about": "12 buckets", "kept": 1, "tried": 3, "sizes": {"32": of, "64": of}},
      "three": {"about": "three", "kept": 0, "tried": 3}}}
  rows = [line for line in scenarios_page.arms(figures) if line.startswith("| 12 buckets")]
  assert len(rows) == len(scenarios.ARMS) and "| 1 of 3 | by bucket, all | +10.0" in rows[0]


def test_a_scene_that_never_fits_is_said_to():
  figures = {"scenes": {"buckets": {"about": "12 buckets", "kept": 0, "tried": 3,
                                    "misfit": [4.0, 2.5, 3.0]}}}
  assert scenarios_page.scene(figures, "buckets")[0] == (
      "None of 3 fits: least misfit 2.50 tolerances.")


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
