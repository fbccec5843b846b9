"""Table 1 of the paper: what its baseline columns say of the gain of taking turns, by Bayes' rule.

    python -m experiments.paper.posterior

Some twenty minutes of a processor; what was interrupted goes on where it was. The prior is uniform
over the box of `experiments.paper.world.BOUNDS`, all couplings at once. A world fits if the
simulated baseline is within the tolerance of `experiments.paper.calibrate` at all sizes. Sequential
Monte Carlo draws from the prior and lowers the tolerance in stages (Del Moral, Doucet and Jasra
2012, doi:10.1007/s11222-011-9271-y): half of the worlds survive a stage and are moved by Metropolis
steps that leave the prior below that tolerance unchanged. No run begins around a world that was
found, and every simulation has draws of its own. The coordination columns are used nowhere.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.paper import calibrate, posterior_page, quick, turns
from experiments.paper import world as worlds
from experiments.paper.table1 import COLLECTIONS, pauses

OUT = pathlib.Path("docs/measurements/table1_posterior.json")
ARMS = ("both", "one", "first_come")
RUNS = ((0, 512, 1.0), (1, 256, 2.0), (2, 256, 2.0))
"""Seed, worlds and tolerance of each run: a narrow one, and two of a wider tolerance, which keep
more of their first draws."""
MOVED, MOST = 1.5, 16
"""Accepted moves of a world in a stage, on average, and sweeps at most."""
_FIRST, _REST = (4, 16), (8, 32, 64)
"""Sizes that most worlds fail at, for little; and the others."""

Judge = Callable[[np.ndarray, float], np.ndarray]
"""(Points of the unit cube [W, D], tolerance) -> [W] misfit, or a lower bound above the
tolerance."""


class Sample(NamedTuple):
  """Points of the unit cube whose misfit is at most the last tolerance."""

  points: np.ndarray  # [W, D]
  misfit: np.ndarray  # [W]
  tolerances: list[float]  # of each stage
  accepted: list[float]  # share of the moves of each stage
  ancestors: int  # of the first draws, how many have a descendant
  log_evidence: float  # of the prior's mass within the last tolerance
  tried: int


def sample(judge: Judge, dimensions: int, population: int, tolerance: float,
           random: np.random.Generator, last: int = MOST,
           say: Callable[[str], None] = lambda _: None) -> Sample:
  """Samples the uniform prior within a tolerance.

  Args:
    judge: simulates points.
    dimensions: D.
    population: W, even.
    tolerance: to come down to.
    random: of the draws and moves.
    last: sweeps of moves at the last tolerance.
    say: told the stages.
  """
  points = random.random((population, dimensions))
  misfit = judge(points, np.inf)
  line, tolerances, rates = np.arange(population), [], []
  evidence, tried, least = 0.0, population, np.inf
  while least > tolerance:
    least = max(tolerance, float(np.median(misfit)))
    alive = np.flatnonzero(misfit <= least)
    evidence += float(np.log(len(alive) / population))
    chosen = np.concatenate([alive, random.choice(alive, population - len(alive))])
    points, misfit, line = points[chosen], misfit[chosen], line[chosen]
    accepted, sweeps = 0.0, 0
    while sweeps < (last if least <= tolerance else MOST) and (
        accepted < MOVED or least <= tolerance):
      accepted += _sweep(judge, points, misfit, least, random)
      sweeps, tried = sweeps + 1, tried + population
    tolerances.append(least)
    rates.append(accepted / sweeps)
    say(f"tolerance {least:.2f}, {rates[-1]:.0%} accepted, {tried:,} tried")
  return Sample(points, misfit, tolerances, rates, len(set(line.tolist())), evidence, tried)


def _sweep(judge: Judge, points: np.ndarray, misfit: np.ndarray, least: float,
           random: np.random.Generator) -> float:
  """Moves each half by differences within the other one, in place, so that proposals are
  symmetric (ter Braak 2006); returns the share accepted."""
  population, dimensions = points.shape
  order = random.permutation(population)
  taken = 0
  for mine, others in (np.split(order, 2), np.split(order, 2)[::-1]):
    a, b = points[random.choice(others, (2, len(mine)))]
    moved = random.random((len(mine), dimensions)) < random.choice([0.2, 0.5, 1.0], (len(mine), 1))
    scale = random.uniform(0.3, 0.9, (len(mine), 1)) * 2.38 / np.sqrt(
        2 * np.maximum(moved.sum(axis=1, keepdims=True), 1))
    step = scale * (a - b) + 0.01 * random.standard_normal((len(mine), dimensions))
    trial = points[mine] + np.where(moved, step, 0)
    inside = ((trial >= 0) & (trial <= 1)).all(axis=1)
    found = np.full(len(mine), np.inf)
    if inside.any():
      found[inside] = judge(trial[inside], least)
    good = found <= least
    points[mine[good]], misfit[mine[good]] = trial[good], found[good]
    taken += int(good.sum())
  return taken / population


class Simulated:
  """Misfits of worlds: the small sizes first, the others of those that may fit."""

  def __init__(self, steps: int, struck: tuple[float, float], batches: tuple[int, int],
               key: jax.Array):
    self.key, self.calls, self.batches = key, 0, batches
    self.sizes = (_FIRST, _REST)
    self.moments = [quick.simulator(steps, 1, struck, sizes) for sizes in self.sizes]

  def _run(self, stage: int, points: np.ndarray, key: jax.Array) -> np.ndarray:
    """[W, N, 2] means and CVs, so many at a time."""
    batch, found = self.batches[stage], []
    for start in range(0, len(points), batch):
      part = points[start:start + batch]
      full = np.concatenate([part, np.repeat(part[-1:], batch - len(part), axis=0)])
      found.append(np.stack(self.moments[stage](key, world_at(full)), axis=-1)[:len(part)])
    return np.concatenate(found)

  def __call__(self, points: np.ndarray, least: float) -> np.ndarray:
    self.calls += 1
    key = jax.random.fold_in(self.key, self.calls)
    some = self._run(0, points, key)
    misfit = calibrate.fits(some[..., 0], some[..., 1], self.sizes[0]).misfit
    may = misfit <= least
    if may.any():
      both = np.concatenate([some[may], self._run(1, points[may], key)], axis=1)
      misfit[may] = calibrate.fits(both[..., 0], both[..., 1], sum(self.sizes, ())).misfit
    return misfit


def world_at(points: np.ndarray) -> worlds.World:
  """[W, D] points of the unit cube -> worlds of the prior's box."""
  low, high = np.array([worlds.BOUNDS[name] for name in worlds.World._fields]).T
  return calibrate.stack(low + (high - low) * points, worlds.World._fields, {})


def gains(made: worlds.World, steps: int, struck: tuple[float, float], seed: int
          ) -> dict[str, dict[str, Any]]:
  """Figures of taking turns by size and arm, as `experiments.paper.turns` has them."""
  key, result = jax.random.key(turns.KEY + 100 + seed), {}
  for nodes in worlds.NODES:
    drawn = turns.drawer(nodes, steps, struck)(key, made)
    computed = np.asarray(drawn.ready[:, 0, :, -1])
    bare = turns.played(None, steps, turns.scene(drawn, turns.ARMS["both"], (False, False)),
                        turns.ARMS["both"].ear, ())
    result[str(nodes)] = {}
    for name in ARMS:
      arm = turns.ARMS[name]
      found = (bare._replace(step_time=turns.served(drawn, steps)) if arm.bound else
               turns.played(False, steps, turns.scene(drawn, arm, arm.obeys), arm.ear,
                            turns.states(False)))
      figures = turns.figures_of(found, bare, computed, arm)
      result[str(nodes)][name] = {field: figures[field] for field in ("gain", "cv")}
  return result


def run(args: Any) -> None:
  """Runs what is not on record yet, and writes the page."""
  struck = pauses(pathlib.Path(args.collections))
  setting = {"pauses": list(struck), "steps": args.steps, "played": args.played,
             "fields": list(worlds.World._fields),
             "bounds": {name: list(bound) for name, bound in worlds.BOUNDS.items()}}
  figures = measured.circumstances("experiments.paper.posterior") | setting
  out = pathlib.Path(args.out)
  before = json.loads(out.read_text()) if out.is_file() else {}
  same = all(before.get(name) == value for name, value in setting.items())
  figures["runs"] = before["runs"] if same else []
  done = {(entry["part"], entry["seed"]) for entry in figures["runs"]}
  for seed, population, tolerance in [(0, RUNS[0][1], None), *RUNS]:
    part = "posterior" if tolerance else "prior"
    if (part, seed) in done:
      continue
    print(f"  {part}, run {seed}", file=sys.stderr, flush=True)
    entry = {"part": part, "seed": seed, "population": population, "tolerance": tolerance}
    figures["runs"].append(entry | one(seed, population, tolerance, args, struck))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=1) + "\n")
  measured.write(figures, posterior_page.page(figures), out)


def one(seed: int, population: int, tolerance: float | None, args: Any,
        struck: tuple[float, float]) -> dict[str, Any]:
  """A sample of the posterior within a tolerance, or of the prior (None), and what turns gain in
  some of its worlds."""
  judge = Simulated(args.steps, struck, (population // 2, 64), jax.random.key(5000 + seed))
  random, dimensions = np.random.default_rng([seed, 0]), len(worlds.World._fields)
  entry: dict[str, Any] = {}
  if tolerance is None:
    points = random.random((population, dimensions))
    entry["misfit"] = judge(points, np.inf)
  else:
    found = sample(judge, dimensions, population, tolerance, random,
                   say=lambda said: print(f"    {said}", file=sys.stderr, flush=True))
    points = found.points
    entry |= {name: value for name, value in found._asdict().items() if name != "points"}
  made = world_at(points[random.permutation(population)[:args.played]])
  entry["worlds"] = np.stack([np.asarray(leaf, np.float64) for leaf in made], axis=1)
  entry["sizes"] = gains(made, args.steps, struck, seed)
  return {name: (np.round(value, 5).tolist() if isinstance(value, np.ndarray) else value)
          for name, value in entry.items()}


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_integer("played", 192, "Worlds of a run in which turns are taken.", lower_bound=1)
  flags.DEFINE_integer("steps", 400, "Of each simulation.", lower_bound=2 * worlds.WARMUP)
  flags.DEFINE_string("collections", str(COLLECTIONS), "Measured pauses.")
  flags.DEFINE_string("out", str(OUT), "Where the figures go.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  run(flags.FLAGS)


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  define_flags()
  app.run(main)
