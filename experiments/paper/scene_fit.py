"""Looks for what is sent in a scene such that its baseline is the paper's: by that column alone,
without a pacer."""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.paper import calibrate
from experiments.paper import on_one_link as simulated
from experiments.paper import world as worlds
from experiments.paper.scene import Draws, Scene, Sends, assemble, draws

KEY = 2040
"""Of the draws that the search sees, and of the search."""
_SPREAD = Sends(growth=0.3, power=0.15, ratio=0.05, mass=0.3, claim=0.08, lost=0.08, load=0.08)
"""How far from the record the search begins; growth and mass by a factor."""


def all_draws(scene: Scene, made: worlds.World, steps: int, pauses: tuple[float, float],
              key: int) -> list[Draws]:
  """Of all worlds, by size: leaves [W, ...]."""
  return [_drawer(scene, nodes, steps, pauses)(jax.random.key(key), made)
          for nodes in worlds.NODES]


@functools.cache
def _drawer(scene: Scene, nodes: int, steps: int, pauses: tuple[float, float]) -> Any:
  """Compiled once for all draws."""
  return jax.jit(jax.vmap(draws(scene, nodes, steps, pauses), in_axes=(None, 0)))


@functools.cache
def bare(scene: Scene, steps: int) -> Any:
  """Makes a function (draws by size, sends [W, C]) -> mean step and CV [W, C, N], without a
  pacer."""
  run = simulated.simulator(simulated.nothing(), steps)

  def moments(drawn: list[Draws], sends: Sends) -> tuple[jax.Array, jax.Array]:
    count = sends.growth.shape
    scenes = []
    for nodes, own in zip(worlds.NODES, drawn, strict=True):
      one = functools.partial(assemble, scene, nodes)
      each = jax.vmap(jax.vmap(one, in_axes=(None, 0)))(own, sends)
      scenes.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), each))
    together = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *scenes)
    together = together._replace(obeys=jnp.zeros_like(together.obeys))
    ear = simulated.Ear(*map(np.float32, simulated.Ear()))
    kept = run(jax.random.key(0), together, ear, ()).step_time[:, 0, worlds.WARMUP:]
    mean = jnp.mean(kept, axis=1)
    cv = jnp.std(kept, axis=1) / mean
    shape = (len(worlds.NODES), *count)
    return jnp.moveaxis(mean.reshape(shape), 0, -1), jnp.moveaxis(cv.reshape(shape), 0, -1)

  return jax.jit(moments)


def fit(scene: Scene, made: worlds.World, drawn: list[Draws], steps: int, rounds: int,
        candidates: int) -> tuple[Sends, np.ndarray]:
  """Looks, for each world, for what is sent that makes its baseline the paper's: differential
  evolution, each world's candidates by themselves, beginning around what is on record.

  Returns:
    [W] each, and [W] their misfits, in tolerances, on these draws.
  """
  random = np.random.default_rng(KEY)
  moments = bare(scene, steps)
  names = Sends._fields
  low, high = np.array([worlds.BOUNDS[name] for name in names]).T
  spread = np.array([getattr(_SPREAD, name) for name in names])
  factor = np.array([name in ("growth", "mass") for name in names])

  def judge(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, cv = moments(drawn, Sends(*np.moveaxis(values, -1, 0).astype(np.float32)))
    flat = [np.asarray(each, np.float64).reshape(-1, len(worlds.NODES)) for each in (mean, cv)]
    return (calibrate.sum_of_misfits(*flat).reshape(values.shape[:2]),
            calibrate.fits(*flat).misfit.reshape(values.shape[:2]))

  recorded = np.stack([np.asarray(getattr(made, name), np.float64) for name in names], axis=1)
  step = random.standard_normal((len(recorded), candidates, len(names))) * spread
  step[:, 0] = 0
  values = np.where(factor, recorded[:, None] * np.exp(step), recorded[:, None] + step)
  values = values.clip(low, high)
  scores, misfits = judge(values)
  shape = scores.shape
  for done in range(rounds):
    leader = np.argsort(scores, axis=1)[np.arange(shape[0])[:, None],
                                        random.integers(0, max(2, candidates // 6), shape)]
    others = [np.argsort(random.random(shape), axis=1) for _ in range(2)]
    best, a, b = (np.take_along_axis(values, place[..., None], axis=1)
                  for place in (leader, *others))
    scale = random.uniform(0.4, 0.9, (*shape, 1))
    trial = values + scale * (best - values) + scale * (a - b)
    trial = np.where(random.random(trial.shape) < 0.9, trial, values)
    # Back into the box by reflection, so that its edges don't gather worlds.
    trial = np.where(trial < low, np.minimum(2 * low - trial, high), trial)
    trial = np.where(trial > high, np.maximum(2 * high - trial, low), trial)
    found, exact = judge(trial)
    better = found < scores
    values = np.where(better[..., None], trial, values)
    scores, misfits = np.where(better, found, scores), np.where(better, exact, misfits)
    if done % 10 == 9:
      least = misfits[np.arange(shape[0]), scores.argmin(axis=1)]
      print(f"    round {done + 1}: misfit {np.median(least):.2f} in the middle, least "
            f"{least.min():.2f}, {np.mean(least <= 1):.0%} within", file=sys.stderr, flush=True)
  at = np.arange(shape[0]), scores.argmin(axis=1)
  return Sends(*values[at].T.astype(np.float32)), misfits[at]
