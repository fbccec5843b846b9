"""Table 1 in scenes with more of the paper in them: more buckets, incast, several neighbours, a
fabric of two tiers, swept; jobs that take turns in them.

    python -m experiments.paper.scenarios

Some twenty minutes of a processor; what was interrupted goes on where it was. Each kind of scene
(`experiments.paper.scene`) takes what the ranks compute from every eighth recorded world, and what
is sent, and lost, is fitted to the paper's *baseline* columns again, by differential evolution
(`experiments.paper.scene_fit`); those that still fit on other draws are kept. Fabrics are fitted to
nothing: only their placement, oversubscription and slowest path change. The coordination columns
are used nowhere. Arms under the guard are longer, and run at 32 and 64 nodes.

`docs/measurements/table1_scenarios.json` is what this program found when it looked at random and
had turns by bucket alone.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import measured
from experiments.paper import calibrate, scenarios_page, turns
from experiments.paper import on_one_link as simulated
from experiments.paper import world as worlds
from experiments.paper.literal_table1 import recorded_worlds
from experiments.paper.scene import FABRICS, SCENES, Draws, Scene, Sends, assemble
from experiments.paper.scene_fit import KEY, all_draws, bare, fit
from jaxpace.core.types import Pacer

WORLDS = pathlib.Path("docs/measurements/table1_worlds.json")
OUT = pathlib.Path("docs/measurements/table1_scenarios_fitted.json")
WITHIN = 1.5
"""Tolerances of Table 1's fit within which a scene is kept, on draws that the search did not
see."""
SHARING = ("spread, 4:1", "spread, 8:1")
"""Fabrics whose long runs under the guard are made."""


class Arm(NamedTuple):
  """One way to run the scenes."""

  by: str = "bucket"
  everyone: bool = True  # or this job alone
  alone: bool = False  # no neighbour begins
  guarded: bool = False  # longer, all pacers under a guard of their own
  bound: bool = False  # first come, first served: no pacer at all


ARMS = {
    "both": Arm(), "one": Arm(everyone=False), "alone": Arm(alone=True),
    "message": Arm("message"), "message_one": Arm("message", everyone=False),
    "message_alone": Arm("message", alone=True), "first_come": Arm(bound=True),
    "both_guarded": Arm(guarded=True), "one_guarded": Arm(everyone=False, guarded=True),
    "message_guarded": Arm("message", guarded=True),
    "message_one_guarded": Arm("message", everyone=False, guarded=True)}


@functools.cache
def simulator(by: str | None, guarded: bool, steps: int) -> Any:
  """Compiled once for all scenes of a shape: without a pacer (None), or turns by that."""
  pacer = simulated.nothing() if by is None else make(0, by, guarded)
  return jax.jit(simulated.simulator(pacer, steps))


def make(key: int, by: str, guarded: bool) -> Pacer:
  """The pacer of a job."""
  pacer = jaxpace.take_turns(key=key, by=by)
  return jaxpace.guard(pacer, block=turns.BLOCK, key=key, trust=True) if guarded else pacer


def play(scenes: simulated.Drawn, arm: Arm, steps: int, bare_run: bool = False) -> np.ndarray:
  """[W, J, K] s, the steps of an arm; without a pacer if `bare_run`."""
  jobs = scenes.start.shape[1]
  obeys = jnp.arange(jobs) < (0 if bare_run else jobs if arm.everyone else 1)
  scenes = scenes._replace(obeys=jnp.broadcast_to(obeys, scenes.obeys.shape))
  if arm.alone:
    scenes = scenes._replace(start=scenes.start.at[:, 1:].set(np.float32(1e9)))
  states = () if bare_run else jax.tree.map(
      lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]),
      *[make(key, arm.by, arm.guarded).init(1) for key in range(1, jobs + 1)])
  run = simulator(None if bare_run else arm.by, arm.guarded and not bare_run, steps)
  ear = simulated.Ear(*map(np.float32, simulated.Ear()))
  return np.asarray(run(jax.random.key(turns.KEY + 2), scenes, ear, states).step_time)


def run_scene(scene: Scene, sends: Sends, drawn: list[Draws], steps: int, long: int
              ) -> dict[str, Any]:
  """Figures of a scene by size and arm; arms under the guard at the largest sizes, if `long`."""
  scenes = [jax.vmap(functools.partial(assemble, scene, nodes))(own, sends)
            for nodes, own in zip(worlds.NODES, drawn, strict=True)]
  result: dict[str, dict[str, Any]] = {str(nodes): {} for nodes in worlds.NODES}
  bare_runs: dict[Any, np.ndarray] = {}
  for name, arm in ARMS.items():
    if arm.guarded and not long:
      continue
    sizes = worlds.NODES[-2:] if arm.guarded else worlds.NODES
    some = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *scenes[-len(sizes):])
    count, kind = long if arm.guarded else steps, (arm.guarded, arm.alone)
    if kind not in bare_runs:
      bare_runs[kind] = play(some, arm, count, True)
    found = turns.served(some, count) if arm.bound else play(some, arm, count)
    # The draws begin again where they are over.
    at = np.arange(count) % some.ready.shape[2]
    computed = np.asarray(some.ready[:, 0, :, -1], np.float64)[:, at]
    for place, nodes in enumerate(sizes):
      part = slice(place * len(sends.growth), (place + 1) * len(sends.growth))
      result[str(nodes)][name] = figures(found[part], bare_runs[kind][part], computed[part],
                                         arm.alone or arm.bound)
    print(f"    {name}", file=sys.stderr, flush=True)
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
  if ours.shape[1] > 1000:
    half = ours.shape[1] // 2
    values["gain_later"] = theirs[:, half:].mean(axis=1) / ours[:, half:].mean(axis=1) - 1
  if not alone:
    others = [each[:, 1:, kept].astype(np.float64) for each in (without, with_it)]
    means = [np.nanmean(each, axis=2) for each in others]
    values["neighbour_gain"] = (means[0] / means[1] - 1).min(axis=1)
  return {name: [round(float(v), 6) for v in each] for name, each in values.items()}


def run(args: Any) -> None:
  """Runs what is not on record yet, and writes the page."""
  made, struck = recorded_worlds(args.worlds)
  some = jax.tree.map(lambda leaf: leaf[1::args.apart], made)
  setting = {"steps": args.steps, "long": args.long, "block": turns.BLOCK, "apart": args.apart,
             "rounds": args.rounds, "candidates": args.candidates, "drawn": args.drawn,
             "within": WITHIN, "worlds": len(some.step),
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
    seen = all_draws(scene, some, args.drawn, struck, KEY)
    sends, _ = fit(scene, some, seen, args.drawn, args.rounds, args.candidates)
    fresh = all_draws(scene, some, args.drawn, struck, KEY + 1)
    one = Sends(*(np.asarray(leaf)[:, None] for leaf in sends))
    mean, cv = (np.asarray(v)[:, 0] for v in bare(scene, args.drawn)(fresh, one))
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
      entry["sizes"] = run_scene(scene, theirs, few, args.steps, args.long)
    record["scenes"][name] = entry
    keep()
  few_worlds = jax.tree.map(lambda leaf: leaf[::2], some)
  own = Sends(*(np.asarray(getattr(few_worlds, name), np.float32) for name in Sends._fields))
  seen = None
  fabrics = sorted(FABRICS, key=lambda fabric: fabric.about not in SHARING)
  for scene in fabrics if not args.only or "fabrics" in args.only else []:
    if scene.about in record["fabrics"]:
      continue
    print(f"  {scene.about}", file=sys.stderr, flush=True)
    if seen is None:
      seen = all_draws(scene, few_worlds, args.drawn, struck, KEY + 3)
    record["fabrics"][scene.about] = run_scene(scene, own, seen, args.steps,
                                               args.long if scene.about in SHARING else 0)
    keep()
  measured.write(record, scenarios_page.page(record), out)


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_integer("steps", 300, "Of each run.", lower_bound=2 * worlds.WARMUP)
  flags.DEFINE_integer("long", 2000, "Of each run under the guard.",
                       lower_bound=2 * worlds.WARMUP)
  flags.DEFINE_integer("drawn", 600, "Steps drawn, and fitted; long runs begin them again.",
                       lower_bound=100)
  flags.DEFINE_integer("apart", 8, "One recorded world in so many is taken.", lower_bound=1)
  flags.DEFINE_integer("rounds", 30, "Of the search.", lower_bound=1)
  flags.DEFINE_integer("candidates", 12, "Of each world and round.", lower_bound=4)
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
