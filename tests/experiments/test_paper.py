"""The paper's Table 1 and figures: what is compared with what, in small."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.paper import (
  calibrate,
  paced,
  quick,
)
from experiments.paper import world as worlds
from jaxpace.core.types import Decision, Pacer
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
    history, _ = plan.run(first, [worlds.job(world, nodes, pauses, worlds.ON),
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
