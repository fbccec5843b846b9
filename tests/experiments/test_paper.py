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
  first_come,
  literal,
  literal_table1,
  paced,
  quick,
  turns,
)
from experiments.paper import world as worlds
from jaxpace.core.types import Decision, Observation, Pacer
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
                      LinkShares(jnp.ones((2, 1)) * world.claim, jnp.ones((2,))),
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
