"""What turns cost, and gain, where two jobs share a fabric of two tiers that loses nothing: what of
it is the trial, what is listening, how it goes on, and what the guard makes of it.

    python -m experiments.paper.trial_cost

Two minutes of a processor. The scenes are two fabrics of `experiments.paper.scenarios` at 64 nodes,
12 buckets, fitted to nothing. Two arms change what a user can't: listening that takes a tenth, and
a trial that is broken off after a quarter of its cost.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import measured
from experiments.paper import tables, turns
from experiments.paper import world as worlds
from experiments.paper.literal_table1 import recorded_worlds
from experiments.paper.scene import FABRICS, Sends, assemble, draws
from jaxpace.coordination import take_turns as rule
from jaxpace.core.types import Pacer
from jaxpace.simulation import turns as simulated

WORLDS = pathlib.Path("docs/measurements/table1_worlds.json")
OUT = pathlib.Path("docs/measurements/trial_cost.json")
KEY, NODES, DRAWN, EARLY = 2043, 64, 600, 300
"""Of the draws; nodes; steps drawn, after which they begin again; steps of the first part."""


class Arm(NamedTuple):
  """One way to run the scenes."""

  about: str
  by: str = "bucket"
  both: bool = True  # or this job alone
  guarded: bool = False
  listening: float = 1.0  # of what listening takes in the others
  bank: float | None = None  # collectives of a step, in the place of take_turns' own


ARMS = {
    "both": Arm("by bucket, both"),
    "one": Arm("by bucket, this job alone", both=False),
    "cheap": Arm("by bucket, both; listening takes a tenth", listening=0.1),
    "bank": Arm("by bucket, both; a trial ends at a quarter of its cost", bank=1.5),
    "both_guarded": Arm("by bucket, both, each under a guard of its own", guarded=True),
    "one_guarded": Arm("by bucket, this job alone, under the guard", both=False, guarded=True),
    "message": Arm("by message, both", "message"),
    "message_one": Arm("by message, this job alone", "message", both=False),
    "message_guarded": Arm("by message, both, each under a guard of its own", "message",
                           guarded=True),
    "message_one_guarded": Arm("by message, this job alone, under the guard", "message", both=False,
                               guarded=True),
}


@contextlib.contextmanager
def banked(collectives: float | None) -> Iterator[None]:
  """While the function that uses it is compiled, a trial may cost so much."""
  before = rule._BANK
  try:
    rule._BANK = before if collectives is None else np.float32(collectives)
    yield
  finally:
    rule._BANK = before


def make(key: int, arm: Arm) -> Pacer:
  """The pacer of a job."""
  pacer = jaxpace.take_turns(key=key, by=arm.by)
  return jaxpace.guard(pacer, block=turns.BLOCK, key=key, trust=True) if arm.guarded else pacer


@functools.cache
def _simulator(by: str | None, guarded: bool, bank: float | None, steps: int) -> Any:
  pacer = simulated.nothing() if by is None else make(0, Arm("", by, guarded=guarded))
  return jax.jit(simulated.simulator(pacer, steps))


def play(scenes: simulated.Drawn, arm: Arm | None, steps: int) -> simulated.Turns:
  """Runs the scenes; without a pacer if `arm` is None."""
  of = arm or ARMS["both"]
  obeys = (arm is not None, arm is not None and of.both)
  scenes = scenes._replace(obeys=jnp.broadcast_to(jnp.asarray(obeys), scenes.obeys.shape),
                           tiny=scenes.tiny * np.float32(of.listening))
  ear = simulated.Ear(*map(np.float32, simulated.Ear()))
  with banked(of.bank):
    states = () if arm is None else jax.tree.map(
        lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]),
        *[make(key, of).init(1) for key in (1, 2)])
    run = _simulator(arm and of.by, of.guarded, of.bank, steps)
    found = run(jax.random.key(turns.KEY + 2), scenes, ear, states)
  return jax.tree.map(np.asarray, found)


def scenes_of(about: str, made: worlds.World, pauses: tuple[float, float]) -> simulated.Drawn:
  """All worlds on a fabric."""
  scene = next(fabric for fabric in FABRICS if fabric.about == about)
  drawn = jax.jit(jax.vmap(draws(scene, NODES, DRAWN, pauses), in_axes=(None, 0)))(
      jax.random.key(KEY), made)
  sends = Sends(*(np.asarray(getattr(made, name), np.float32) for name in Sends._fields))
  return jax.vmap(functools.partial(assemble, scene, NODES))(drawn, sends)


def figures(found: simulated.Turns, bare: simulated.Turns, own: np.ndarray, listening: np.ndarray
            ) -> dict[str, list[float]]:
  """Of this job, lists over worlds.

  Args:
    found: step times and more [W, J, K], with turns.
    bare: without.
    own: [W] s, what this job sends in a step, on a quiet link.
    listening: [W] s, what listening takes once, on a quiet link.
  """
  ours, without = (np.asarray(each.step_time[:, 0], np.float64) for each in (found, bare))

  def gain(first: int, last: int | None) -> np.ndarray:
    return without[:, first:last].mean(axis=1) / ours[:, first:last].mean(axis=1) - 1

  values = {"gain": gain(worlds.WARMUP, None), "gain_early": gain(worlds.WARMUP, EARLY),
            "gain_later": gain(EARLY, None),
            "lost": (ours - without)[:, :EARLY].sum(axis=1) / own,
            "listened": found.listened[:, 0, :EARLY].sum(axis=1) * listening / own,
            "turns": found.info["turns"][:, 0, :EARLY].sum(axis=1)}
  return {name: [round(float(value), 5) for value in each] for name, each in values.items()}


def page(record: dict[str, Any]) -> list[str]:
  """Markdown lines."""
  return [*measured.introduction("What a trial of turns costs", record),
          f"Simulated: {record['worlds']} of the recorded worlds, {record['nodes']} nodes, "
          f"12 buckets, {record['steps']:,} steps, the first {worlds.WARMUP} not counted.", "",
          *table(record)]


def table(record: dict[str, Any]) -> list[str]:
  """One row for each arm on each fabric: lowest, middle, highest."""
  rows = []
  for about, arms in record["fabrics"].items():
    for name, of in arms.items():
      rows.append([about, record["arms"][name],
                   *(tables.percent(np.array(of[key]))
                     for key in ("gain_early", "gain_later", "gain")),
                   *(f"{np.median(of[key]):.1f}" for key in ("lost", "listened")),
                   f"{np.median(of['turns']):.0f}"])
  return measured.table(
      ["fabric", "turns", f"gain, to step {EARLY}", "gain, after it", "gain, all steps",
       "lost to that step, in collectives of a step", "of these, listening at least",
       "steps of turns to that step"], rows)


def run(args: Any) -> None:
  """Runs all, and writes the page."""
  made, struck = recorded_worlds(args.worlds)
  some = jax.tree.map(lambda leaf: leaf[1::args.apart], made)
  each = [scenes_of(about, some, struck) for about in args.fabrics]
  count = len(some.step)
  scenes = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *each)
  own = np.asarray(scenes.work[:, 0], np.float64).sum(axis=-1).mean(axis=1)
  record = measured.circumstances("experiments.paper.trial_cost") | {
      "worlds": count, "nodes": NODES, "steps": args.steps, "block": turns.BLOCK,
      "arms": {name: arm.about for name, arm in ARMS.items()},
      "fabrics": {about: {} for about in args.fabrics}}
  bare = play(scenes, None, args.steps)
  for name, arm in ARMS.items():
    if args.arms and name not in args.arms:
      continue
    print(f"  {arm.about}", file=sys.stderr, flush=True)
    found = play(scenes, arm, args.steps)
    made_of = figures(found, bare, own, np.asarray(scenes.tiny)[:, 0] * arm.listening)
    for place, about in enumerate(args.fabrics):
      record["fabrics"][about][name] = {
          key: values[place * count:(place + 1) * count] for key, values in made_of.items()}
    out = pathlib.Path(args.out)
    out.write_text(json.dumps(record, indent=1) + "\n")
  measured.write(record, page(record), pathlib.Path(args.out))


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_integer("steps", 2000, "Of each run.", lower_bound=2 * EARLY)
  flags.DEFINE_integer("apart", 16, "One recorded world in so many is taken.", lower_bound=1)
  flags.DEFINE_multi_string("fabrics", ["spread, 4:1", "spread, 8:1"], "Names of fabrics.")
  flags.DEFINE_list("arms", [], f"Of {', '.join(ARMS)}; all if none is named.")
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
