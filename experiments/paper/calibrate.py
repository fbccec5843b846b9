"""Finds worlds whose *baseline* is the paper's: throughput and variation at five sizes, by Monte
Carlo.

Differential evolution (Storn and Price 1997) over what is not known, from several starts, some with
couplings left out. Every world that was ever within tolerance is kept: many fit equally well. The
coordination columns are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.paper import quick
from experiments.paper import world as worlds

THROUGHPUT_WITHIN, CV_WITHIN, CV_SHARE = 0.02, 0.004, 0.10
"""A world is kept if throughput is within 2 % and CV within the larger of 0.004 and 10 %, at every
size."""

_OUTSIDE = 1e3


class Fits(NamedTuple):
  """Outcomes of W worlds at all sizes."""

  throughput: np.ndarray  # [W, N] over the paper's, after the one free factor (samples a step)
  cv: np.ndarray  # [W, N]
  misfit: np.ndarray  # [W] largest deviation in units of its tolerance; at most 1 is within


def fits(mean: np.ndarray, cv: np.ndarray, sizes: Sequence[int] = worlds.NODES) -> Fits:
  """Compares with the paper's baseline columns.

  Args:
    mean: [W, N] steps, in units of compute.
    cv: [W, N].
    sizes: N of the paper's numbers of nodes. The misfit of some of them is at most that of all.
  """
  at = [worlds.NODES.index(nodes) for nodes in sizes]
  rate = np.array(sizes) / mean
  ratio = rate / np.array(worlds.THROUGHPUT["baseline"])[at]
  # Samples a step are free: the factor that makes the largest deviation least.
  ratio = ratio / np.sqrt(ratio.max(axis=1) * ratio.min(axis=1))[:, None]
  wanted = np.array(worlds.CV["baseline"])[at]
  off = np.concatenate([np.abs(ratio - 1) / THROUGHPUT_WITHIN,
                        np.abs(cv - wanted) / np.maximum(CV_WITHIN, CV_SHARE * wanted)], axis=1)
  return Fits(ratio, cv, np.where(np.isfinite(off).all(axis=1), off.max(axis=1), np.inf))


def sum_of_misfits(mean: np.ndarray, cv: np.ndarray) -> np.ndarray:
  """What the search lowers: [W] soft maximum of the deviations, which still falls where the largest
  can't."""
  made = fits(mean, cv)
  wanted = np.array(worlds.CV["baseline"])
  off = np.concatenate([np.abs(made.throughput - 1) / THROUGHPUT_WITHIN,
                        np.abs(cv - wanted) / np.maximum(CV_WITHIN, CV_SHARE * wanted)], axis=1)
  return np.where(np.isfinite(off).all(axis=1), (off**4).mean(axis=1) ** 0.25, np.inf)


def stack(values: np.ndarray, names: Sequence[str], fixed: dict[str, float]) -> worlds.World:
  """[W, D] values of `names`, and the fixed ones -> worlds with a leading axis."""
  columns = {name: jnp.asarray(values[:, k], jnp.float32) for k, name in enumerate(names)}
  given = {name: jnp.full(len(values), value, jnp.float32) for name, value in fixed.items()}
  return worlds.World(**columns, **given)


class Found(NamedTuple):
  """Worlds within tolerance."""

  values: np.ndarray  # [W, all fields]
  misfit: np.ndarray  # [W]
  preferred: np.ndarray  # [W] what `prefer` said of them; zeros without it
  best: float  # least misfit seen, also where none is within
  tried: int


Prefer = Callable[[worlds.World], np.ndarray]
"""Worlds [W] -> [W], what to lower among those within tolerance."""


def search(moments: quick.Moments, fixed: dict[str, float], *, population: int, rounds: int,
           seed: int, key: jax.Array, say: Callable[[int], None] | None = None,
           prefer: Prefer | None = None, begin: np.ndarray | None = None) -> Found:
  """Looks for worlds from one start.

  Args:
    moments: of the worlds at all sizes, as `quick.simulator` makes them.
    fixed: fields that are not searched: couplings left out, say.
    population: worlds at a time.
    rounds: of evolution.
    seed: of the search.
    key: of the simulated draws, the same for every world.
    say: told the rounds done.
    prefer: for the edges of the band: which of the worlds within tolerance to go on from. It never
      makes a world fit.
    begin: [any, all fields] worlds to begin with; the rest at random.
  """
  names = [name for name in worlds.World._fields if name not in fixed]
  low, high = np.array([worlds.BOUNDS[name] for name in names]).T
  random = np.random.default_rng(seed)
  kept: list[np.ndarray] = []
  misfits: list[np.ndarray] = []
  preferred: list[np.ndarray] = []
  best = np.inf

  def judge(values: np.ndarray) -> np.ndarray:
    nonlocal best
    made = stack(values, names, fixed)
    mean, cv = moments(key, made)
    exact = fits(mean, cv).misfit
    within = exact <= 1
    kept.append(np.stack([np.asarray(leaf) for leaf in made], axis=1)[within])
    misfits.append(exact[within])
    best = min(best, float(exact.min()))
    scores = sum_of_misfits(mean, cv)
    liked = prefer(made) if prefer is not None and within.any() else np.zeros(len(values))
    preferred.append(liked[within])
    # Any that fits is better than all that don't.
    return scores if prefer is None else np.where(within, liked, _OUTSIDE + scores)

  values = low + (high - low) * random.random((population, len(names)))
  if begin is not None and len(begin):
    at = [worlds.World._fields.index(name) for name in names]
    values[:len(begin)] = begin[:population, at].clip(low, high)
  scores = judge(values)
  for done in range(rounds):
    order = np.argsort(scores)
    leaders = values[order[random.integers(0, max(2, population // 8), population)]]
    a, b = (values[random.permutation(population)] for _ in range(2))
    scale = random.uniform(0.3, 0.9, (population, 1))
    trial = values + scale * (leaders - values) + scale * (a - b)
    crossed = random.random(values.shape) < 0.8
    crossed[np.arange(population), random.integers(0, len(names), population)] = True
    trial = np.where(crossed, trial, values)
    # Back into the box by reflection, so that its edges don't gather worlds.
    trial = np.where(trial < low, np.minimum(2 * low - trial, high), trial)
    trial = np.where(trial > high, np.maximum(2 * high - trial, low), trial)
    made = judge(trial)
    better = made < scores
    values, scores = np.where(better[:, None], trial, values), np.where(better, made, scores)
    if say:
      say(done + 1)
  tried = population * (rounds + 1)
  return Found(np.concatenate(kept), np.concatenate(misfits), np.concatenate(preferred), best,
               tried)


def again(moments: quick.Moments, values: np.ndarray, key: jax.Array, batch: int) -> np.ndarray:
  """[W] misfit of worlds [W, all fields] on other draws, so many at a time: what was fitted to
  chance doesn't stay."""
  result = []
  for start in range(0, len(values), batch):
    part = values[start:start + batch]
    # one shape: compiled once
    full = np.concatenate([part, np.repeat(part[-1:], batch - len(part), axis=0)])
    result.append(fits(*moments(key, stack(full, worlds.World._fields, {}))).misfit[:len(part)])
  return np.concatenate(result) if result else np.zeros(0)
