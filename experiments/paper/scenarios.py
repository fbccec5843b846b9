"""Table 1 in scenes with more of the paper in them: more buckets, incast, several neighbours, a
fabric of two tiers, swept; jobs that take turns in them.

    python -m experiments.paper.scenarios

Some fifteen minutes of a processor; what was interrupted goes on where it was. Each kind of scene
(`experiments.paper.scene`) takes what the ranks compute from every eighth recorded world, and what
is sent, and lost, is fitted to the paper's *baseline* columns again, by random search; those that
still fit on other draws are kept. Fabrics are fitted to nothing: only their placement,
oversubscription and slowest path change. The coordination columns are used nowhere.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.paper import calibrate, scenarios_page, turns
from experiments.paper import world as worlds
from experiments.paper.literal_table1 import recorded_worlds
from experiments.paper.scene import (
  FABRICS,
  SCENES,
  Draws,
  Scene,
  Sends,
  assemble,
  draws,
)
from jaxpace.simulation import turns as simulated

WORLDS = pathlib.Path("docs/measurements/table1_worlds.json")
OUT = pathlib.Path("docs/measurements/table1_scenarios.json")
KEY, WITHIN = 2040, 1.5
"""Of the draws; tolerances of Table 1's fit within which a scene is kept, on draws that the search
did not see."""
_NARROWS = 0.75
_SPREAD = Sends(growth=0.3, power=0.15, ratio=0.05, mass=0.3, claim=0.08, lost=0.08, load=0.08)
"""How far the first round of the search goes; growth and mass by a factor."""


def all_draws(scene: Scene, made: worlds.World, steps: int, pauses: tuple[float, float],
              key: int) -> list[Draws]:
  """Of all worlds, by size: leaves [W, ...]."""
  result = []
  for nodes in worlds.NODES:
    one = jax.jit(jax.vmap(draws(scene, nodes, steps, pauses), in_axes=(None, 0)))
    result.append(one(jax.random.key(key), made))
  return result


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
  """Looks, for each world, for what is sent that makes its baseline the paper's.

  Returns:
    [W] each, and [W] their misfits, in tolerances, on these draws.
  """
  random = np.random.default_rng(KEY)
  moments = bare(scene, steps)
  names = Sends._fields
  best = np.stack([np.asarray(getattr(made, name), np.float64) for name in names], axis=1)
  low, high = np.array([worlds.BOUNDS[name] for name in names]).T
  spread = np.array([getattr(_SPREAD, name) for name in names])
  factor = np.array([name in ("growth", "mass") for name in names])
  scores, misfits = np.full(len(best), np.inf), np.full(len(best), np.inf)
  for done in range(rounds):
    step = random.standard_normal((len(best), candidates, len(names))) * spread
    step[:, 0] = 0
    tried = np.where(factor, best[:, None] * np.exp(step), best[:, None] + step).clip(low, high)
    mean, cv = moments(drawn, Sends(*np.moveaxis(tried, -1, 0).astype(np.float32)))
    flat = [np.asarray(values, np.float64).reshape(-1, len(worlds.NODES)) for values in (mean, cv)]
    found = calibrate.sum_of_misfits(*flat).reshape(len(best), candidates)
    exact = calibrate.fits(*flat).misfit.reshape(found.shape)
    place = found.argmin(axis=1)
    at = np.arange(len(best)), place
    better = found[at] < scores
    best = np.where(better[:, None], tried[at], best)
    scores, misfits = (np.where(better, new[at], old)
                       for new, old in ((found, scores), (exact, misfits)))
    spread = spread * _NARROWS
    print(f"    round {done + 1}: misfit {np.median(misfits):.2f} in the middle, "
          f"{np.mean(misfits <= 1):.0%} within", file=sys.stderr, flush=True)
  return Sends(*best.T.astype(np.float32)), misfits


def run_scene(scene: Scene, sends: Sends, drawn: list[Draws], steps: int) -> dict[str, Any]:
  """Figures of a scene by size: both jobs, this job alone, nobody else, first come first served."""
  scenes = [jax.vmap(functools.partial(assemble, scene, nodes))(own, sends)
            for nodes, own in zip(worlds.NODES, drawn, strict=True)]
  whole = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *scenes)
  jobs = whole.start.shape[1]
  def play(guarded: bool | None, states: Any, obeys: tuple[bool, ...], alone: bool = False) -> Any:
    these = whole._replace(obeys=jnp.broadcast_to(jnp.asarray(obeys), whole.obeys.shape))
    if alone:
      these = these._replace(start=these.start.at[:, 1:].set(np.float32(1e9)))
    return turns.played(guarded, steps, these, simulated.Ear(), states)

  states = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]),
                        *[turns.make(key).init(1) for key in range(1, jobs + 1)])
  nobody, everyone = (False,) * jobs, (True,) * jobs
  without, lonely = play(None, (), nobody), play(None, (), nobody, True)
  found = {"both": (play(False, states, everyone), without),
           "one": (play(False, states, (True, *nobody[1:])), without),
           "alone": (play(False, states, everyone, True), lonely)}
  bound = turns.served(whole, steps)
  computed = np.asarray(whole.ready[:, 0, :, -1], np.float64)
  result: dict[str, dict[str, Any]] = {}
  count = len(sends.growth)
  for place, nodes in enumerate(worlds.NODES):
    part = slice(place * count, (place + 1) * count)
    of = {name: figures(with_turns.step_time[part], bare_steps.step_time[part], computed[part],
                        name == "alone")
          for name, (with_turns, bare_steps) in found.items()}
    of["first_come"] = figures(bound[part], without.step_time[part], computed[part], True)
    result[str(nodes)] = of
  return result


def figures(with_it: np.ndarray, without: np.ndarray, computed: np.ndarray,
            alone: bool) -> dict[str, list[float]]:
  """Lists over worlds, from step times [W, J, K] and the ends of this job's compute [W, K]."""
  kept = slice(worlds.WARMUP, None)
  ours, theirs = (each[:, 0, kept].astype(np.float64) for each in (with_it, without))
  mean, bare_mean = ours.mean(axis=1), theirs.mean(axis=1)
  busy = computed[:, kept]
  values = {"gain": bare_mean / mean - 1, "cv": ours.std(axis=1) / mean,
            "bare_cv": theirs.std(axis=1) / bare_mean, "bare_mean": bare_mean,
            "exposed": (ours - busy).mean(axis=1) / mean,
            "bare_exposed": (theirs - busy).mean(axis=1) / bare_mean}
  if not alone:
    others = [each[:, 1:, kept].astype(np.float64) for each in (without, with_it)]
    means = [np.nanmean(each, axis=2) for each in others]
    values["neighbour_gain"] = (means[0] / means[1] - 1).min(axis=1)
  return {name: [round(float(v), 6) for v in each] for name, each in values.items()}


def run(args: Any) -> None:
  """Runs what is not on record yet, and writes the page."""
  made, struck = recorded_worlds(args.worlds)
  some = jax.tree.map(lambda leaf: leaf[1::args.apart], made)
  setting = {"steps": args.steps, "apart": args.apart, "rounds": args.rounds,
             "candidates": args.candidates, "within": WITHIN, "worlds": len(some.step),
             "ear": {name: float(value) for name, value in simulated.Ear()._asdict().items()}}
  record = measured.circumstances("experiments.paper.scenarios") | setting
  out = pathlib.Path(args.out)
  before = json.loads(out.read_text()) if out.is_file() else {}
  same = all(before.get(name) == value for name, value in setting.items())
  record["scenes"], record["fabrics"] = ((before["scenes"], before["fabrics"]) if same
                                         else ({}, {}))

  def keep() -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")

  for name in [name for name in SCENES if not args.only or name in args.only]:
    if name in record["scenes"]:
      continue
    scene = SCENES[name]
    print(f"  {scene.about}", file=sys.stderr, flush=True)
    seen = all_draws(scene, some, args.steps, struck, KEY)
    sends, _ = fit(scene, some, seen, args.steps, args.rounds, args.candidates)
    fresh = all_draws(scene, some, args.steps, struck, KEY + 1)
    one = Sends(*(np.asarray(leaf)[:, None] for leaf in sends))
    mean, cv = (np.asarray(v)[:, 0] for v in bare(scene, args.steps)(fresh, one))
    fits = calibrate.fits(mean.astype(np.float64), cv.astype(np.float64))
    kept = fits.misfit <= WITHIN
    entry: dict[str, Any] = {"about": scene.about, "tried": len(kept), "kept": int(kept.sum()),
                             "misfit": [round(float(v), 3) for v in fits.misfit]}
    if kept.any():
      few = [Draws(*(leaf[kept] for leaf in own)) for own in fresh]
      theirs = Sends(*(np.asarray(leaf)[kept] for leaf in sends))
      entry["sends"] = {field: [round(float(v), 5) for v in values]
                        for field, values in theirs._asdict().items()}
      entry["throughput"] = np.round(fits.throughput[kept], 5).tolist()
      entry["sizes"] = run_scene(scene, theirs, few, args.steps)
    record["scenes"][name] = entry
    keep()
  few_worlds = jax.tree.map(lambda leaf: leaf[::2], some)
  own = Sends(*(np.asarray(getattr(few_worlds, name), np.float32) for name in Sends._fields))
  seen = None
  for scene in FABRICS if not args.only or "fabrics" in args.only else []:
    if scene.about in record["fabrics"]:
      continue
    print(f"  {scene.about}", file=sys.stderr, flush=True)
    if seen is None:
      seen = all_draws(scene, few_worlds, args.steps, struck, KEY + 3)
    record["fabrics"][scene.about] = run_scene(scene, own, seen, args.steps)
    keep()
  measured.write(record, scenarios_page.page(record), out)


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_integer("steps", 300, "Of each run.", lower_bound=2 * worlds.WARMUP)
  flags.DEFINE_integer("apart", 8, "One recorded world in so many is taken.", lower_bound=1)
  flags.DEFINE_integer("rounds", 8, "Of the search.", lower_bound=1)
  flags.DEFINE_integer("candidates", 12, "Of each world and round.", lower_bound=2)
  flags.DEFINE_list("only", [], f"Of {', '.join(SCENES)}, fabrics; all if none is named.")
  flags.DEFINE_string("worlds", str(WORLDS), "Worlds on record.")
  flags.DEFINE_string("out", str(OUT), "Where the figures go.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  run(flags.FLAGS)


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  define_flags()
  app.run(main)
