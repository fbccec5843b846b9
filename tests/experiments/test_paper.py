"""The paper's Table 1 and figures: what is compared with what, in small."""

import functools
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.paper import (
  calibrate,
  document,
  literal_table1,
  on_one_link,
  paced,
  quick,
  turns,
)
from experiments.paper import world as worlds
from jaxpace.core.types import Decision, Hold, Pacer
from jaxpace.simulation.job import Shape
from jaxpace.simulation.jobs import LinkShares, several


def test_the_papers_own_figures_fit_and_others_do_not():
  nodes = np.array(worlds.NODES)
  mean = nodes / np.array(worlds.THROUGHPUT["baseline"])
  cv = np.array(worlds.CV["baseline"])
  # the unit of time is free
  rows = np.stack([mean, 7 * mean, mean, mean * np.array([1, 1, 1, 1, 1.05])])
  varied = np.stack([cv, cv, cv * np.array([1, 1, 1, 1, 1.2]), cv])
  misfit = calibrate.fits(rows, varied).misfit
  assert misfit[0] == pytest.approx(0, abs=1e-9) and misfit[1] == pytest.approx(0, abs=1e-9)
  assert misfit[2] == pytest.approx(0.2 / 0.1)
  assert misfit[3] == pytest.approx((1.05**0.5 - 1) / 0.02)  # the free factor shares it out
  assert calibrate.fits(rows[:1], cv[None] * np.nan).misfit[0] == np.inf
  assert list(np.argsort(calibrate.sum_of_misfits(rows[[0, 3]], varied[[0, 3]]))) == [0, 1]


def some_worlds(count, **values):
  """Worlds drawn from their ranges, some values given."""
  low, high = np.array(list(worlds.BOUNDS.values())).T
  drawn = low + (high - low) * np.random.default_rng(1).random((count, len(low)))
  return calibrate.stack(drawn, worlds.World._fields, {})._replace(**{
      name: np.full(count, value, np.float32) for name, value in values.items()})


@pytest.mark.long
def test_step_times_are_those_of_the_simulator_without_pacers_and_with():
  made, key, pauses, steps, nodes = some_worlds(2, lost=0.0), jax.random.key(3), (0.05, 0.1), 130, 2
  pacer = Pacer(lambda ranks: (),
                lambda seen, state: (Decision(0.3 * jnp.nan_to_num(seen.waits[0]), {}), state))
  bare = quick.simulator(steps, 1, pauses, [nodes])(key, made)
  alike = paced.simulator(nodes, steps, 1, pauses)(key, made, worlds.ON)
  assert bare[0][:, 0] == pytest.approx(np.asarray(alike.mean), rel=1e-5)
  assert bare[1][:, 0] == pytest.approx(np.asarray(alike.cv), abs=1e-5)

  having = paced.simulator(nodes, steps, 1, pauses, pacer)(key, made, worlds.ON)
  plan = several([Shape(nodes * worlds.PER_NODE, worlds.PER_NODE), Shape(1, overlap=False)],
                 [pacer, None], buckets=[worlds.BUCKETS] * 2, steps=steps, max_delay=10.0)

  @jax.jit
  def reference(world):
    first, second = jax.random.split(jax.random.split(key, 1)[0])
    start = jax.random.uniform(second) * worlds.alone(world, nodes)
    history, _ = plan(first, [worlds.job(world, nodes, pauses, worlds.ON),
                              worlds.neighbour(world, nodes)],
                      LinkShares(jnp.ones((2, 1, 1)) * world.claim, jnp.ones((2, 1)),
                                 jnp.ones((2, 1))),
                      jnp.stack([jnp.float32(0), start]), np.full(2, 2**30, np.int32))
    return jnp.mean(history.step_time[worlds.WARMUP:]), jnp.mean(history.delay[worlds.WARMUP:])

  assert float(having.delay.max()) > 0
  for k in range(2):
    mean, delay = reference(jax.tree.map(lambda leaf, k=k: leaf[k], made))
    assert float(having.mean[k]) == pytest.approx(float(mean), rel=1e-5)
    assert (float(having.delay[k] * having.mean[k])
            == pytest.approx(float(delay), rel=1e-3, abs=1e-6))


MIDDLE = dict.fromkeys(worlds.World._fields, 0.0) | {
    "growth": 0.9, "power": 1.0, "ratio": 1.1, "mass": 1.0, "claim": 1.0, "lost": 0.3,
    "length": 1.0, "step": 1.0, "jitter": 0.02}


def settings(tmp_path, *worlds, **more):
  """Arguments of a program of the paper that goes by these worlds: what differs from MIDDLE."""
  record = {"pauses": [0.0, 0.0],
            "searches": [{"worlds": [{"values": list((MIDDLE | world).values())}
                                     for world in worlds]}]}
  (tmp_path / "worlds.json").write_text(json.dumps(record))
  return types.SimpleNamespace(worlds=str(tmp_path / "worlds.json"),
                               out=str(tmp_path / "out.json"), **more)


def made(tmp_path):
  return json.loads((tmp_path / "out.json").read_text()), (tmp_path / "out.md").read_text()


@pytest.mark.long
def test_the_literal_pacer_in_small(tmp_path):
  literal_table1.run(settings(tmp_path, {}, {}, steps=120, sizes=["4", "8"]))
  found, page = made(tmp_path)
  found = found["sizes"]
  assert 0 < found["8"]["literal"]["delay"][0] < 0.5
  assert found["8"]["literal"]["cost"][0] <= found["8"]["literal"]["delay"][0] * 16
  assert "share 1" in found["8"] and "share 1" not in found["4"]
  assert "| 8 | +0.8 % |" in page


def test_the_page_of_the_paper_says_what_its_records_say():
  """Its tables are made anew: who changes a record draws the page again."""
  root = pathlib.Path(__file__).parents[2]
  text = (root / "docs/paper.md").read_text()
  made = document.filled(text, root / "docs/measurements/table1.json")
  assert made == text, "python -m experiments.paper.figures"


@pytest.mark.long
def test_a_small_table(tmp_path, monkeypatch):
  """Two worlds on record that differ in what sharing loses, at one size: run, kept, not run
  again."""
  args = settings(tmp_path, {"lost": 0.0, "jitter": 0.0}, {"lost": 0.5, "jitter": 0.0}, steps=250,
                  long=200, drawn=200, apart=1, sizes=["64"], arms=["both", "alone", "first_come"])
  turns.run(args)
  found, page = made(tmp_path)
  found = found["sizes"]["64"]
  assert (found["both"]["gain"][1] > 0.05
          and found["both"]["gain"][1] > found["both"]["gain"][0] > -0.02)
  assert found["first_come"]["gain"][1] > 0.2
  assert found["both"]["exposed"][1] < found["both"]["bare_exposed"][1]
  assert found["alone"]["gain"] == [0.0, 0.0] and found["alone"]["listened"] == [0.0, 0.0]
  assert "Both jobs take turns" in page
  monkeypatch.setattr(turns._Runner, "run", lambda *_: pytest.fail("it is on record"))
  turns.run(args)


# Jobs that hold their collectives back, on one link: against closed forms, and against the other
# event loop.

STEPS = 60


def drawn(ready, work, start, shared, obeys, tiny=1e-3):
  """One scene of jobs whose steps are all alike: ready and work [J, B]."""
  ready, work = np.asarray(ready, np.float32), np.asarray(work, np.float32)
  jobs = len(work)
  speeds = [1.0] + [shared] * (jobs - 1)
  repeat = (jobs, 4, work.shape[1])
  return on_one_link.Drawn(*(jnp.asarray(value)[None] for value in (
      np.broadcast_to(ready[:, None], repeat), np.broadcast_to(work[:, None], repeat),
      np.asarray(start, np.float32), np.asarray(speeds, np.float32),
      np.full(jobs, tiny, np.float32), np.asarray(obeys))))


def stacked(make, jobs):
  return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *[
      make(key).init(1) for key in range(jobs)])


@functools.lru_cache
def compiled(make, steps):
  return jax.jit(on_one_link.simulator(make(0), steps))


def played(scene, make, ear=None, steps=STEPS):
  ear = on_one_link.Ear(wrong=0.0, scatter=0.0) if ear is None else ear
  jobs = scene.start.shape[1]
  return jax.tree.map(lambda values: np.asarray(values)[0],
                      compiled(make, steps)(jax.random.key(3), scene, ear, stacked(make, jobs)))


def nothing(key):
  return on_one_link.nothing()


def waits(key):
  """Knows the link by heart: waits for as long as others send, and no longer."""
  def hold(moment, state):
    busy = moment.heard > np.float32(1e-2)
    return Hold(jnp.float32(0), (moment.listened == 0) | busy), state
  return Pacer(lambda ranks: (), lambda seen, state: (Decision(jnp.float32(0), {}), state), hold)


def test_without_holds_it_is_the_other_event_loop():
  rng = np.random.default_rng(0)
  ready = np.sort(rng.uniform(0.5, 1.5, (2, 50, 2)), axis=2).astype(np.float32)
  work = rng.uniform(0.1, 0.4, (2, 50, 2)).astype(np.float32)
  scene = on_one_link.Drawn(*(jnp.asarray(value)[None] for value in (
      ready, work, np.array([0, 0.3], np.float32), np.array([1, 0.35], np.float32),
      np.full(2, 1e-3, np.float32), np.array([True, True]))))
  found = played(scene, nothing, steps=50)
  expected = quick.play(quick.Drafts(ready[0], work[0]), quick.Drafts(ready[1], work[1]),
                        jnp.float32(0.3), jnp.float32(0.35))
  np.testing.assert_allclose(found.step_time[0], np.asarray(expected), rtol=1e-5)
  assert found.held[0].max() == 0 and found.listened[0].max() == 0


def test_one_waits_for_the_other_and_nobody_is_late_but_for_listening():
  """Both are ready at once: who listens second waits for the whole bucket of the first."""
  scene = drawn([[1], [1.01]], [[0.4], [0.4]], [0, 0], 0.5, [True, True], tiny=5e-3)
  bare = drawn([[1], [1.01]], [[0.4], [0.4]], [0, 0], 0.5, [False, False], tiny=5e-3)
  with_turns, without = played(scene, waits, steps=1), played(bare, waits, steps=1)
  assert with_turns.step_time[0, 0] == pytest.approx(1.405, abs=1e-4), "it listened once"
  assert with_turns.sent[0, 0] == pytest.approx(0.4, abs=1e-3)
  # Sharing: alone for 0.01, then at half speed until the first is over.
  assert without.step_time[0, 0] == pytest.approx(1.01 + 2 * 0.39, abs=1e-3)
