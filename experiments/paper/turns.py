"""Table 1 of the paper with `jaxpace.take_turns`: worlds on record, jobs that listen before they
send.

    python -m experiments.paper.turns

Some twenty minutes of a processor; what was interrupted goes on where it was. Arms that are long
run in some of the worlds and sizes (`--apart`, `LONG_SIZES`), but for those that say what may be
lost.

The worlds are those of `experiments.paper.table1`, fitted to the baseline columns alone, as they
are on record. Draws are of the same laws. The constants of `take_turns` were chosen by trying them
in every other world (the first, third, ...) on other draws; the page tells the worlds that it was
not tried in apart. What listening hears is a model: see `on_one_link.Ear`.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import measured
from experiments.paper import first_come, quick, turns_page
from experiments.paper import on_one_link as turns
from experiments.paper import world as worlds
from experiments.paper.literal_table1 import recorded_worlds
from jaxpace.core.types import Pacer
from jaxpace.simulation.job import Shape

WORLDS = pathlib.Path("docs/measurements/table1_worlds.json")
OUT = pathlib.Path("docs/measurements/table1_turns.json")
KEY, TINY, BLOCK = 2028, 0.01, 64
"""Of the draws; what listening takes, as a share of this job's mean bucket; steps of a block of the
guard."""
LONG_SIZES = (16, 32, 64)
"""Numbers of nodes at which long arms run, but for those that run everywhere."""
_NEVER = 1e9


class Arm(NamedTuple):
  """One way to run the worlds."""

  about: str
  obeys: tuple[bool, bool] = (True, True)  # this job, its neighbour
  ear: turns.Ear = turns.Ear()
  alone: bool = False  # the neighbour never begins
  harmless: bool = False  # the neighbour is heard, and takes nothing
  guarded: bool = False  # both jobs' pacers are under the guard
  long: bool = False  # longer runs, of some worlds
  everywhere: bool = False  # but of all worlds, at all sizes
  bound: bool = False  # first come, first served: no pacer at all


ARMS = {
    "both": Arm("both take turns"),
    "both_5": Arm("both, 5 % of the readings wrong", ear=turns.Ear(wrong=0.05)),
    "one": Arm("this job alone takes turns", (True, False)),
    "alone": Arm("null: no neighbour, other traffic as it is", alone=True),
    "harmless": Arm("null: a neighbour that is heard and takes nothing", (True, False),
                    harmless=True),
    "first_come": Arm("first come, first served, bucket by bucket", bound=True),
    "alone_long": Arm("null: no neighbour, other traffic as it is", alone=True, long=True,
                      everywhere=True),
    "one_long": Arm("this job alone takes turns", (True, False), long=True),
    "one_guarded": Arm("this job alone, under the guard", (True, False), guarded=True, long=True,
                       everywhere=True),
    "both_long": Arm("both take turns", long=True),
    "both_guarded": Arm("both, each under a guard of its own", guarded=True, long=True),
}


def make(key: int, guarded: bool = False) -> Pacer:
  """The pacer of a job."""
  pacer = jaxpace.take_turns(key=key)
  return jaxpace.guard(pacer, block=BLOCK, key=key, trust=True) if guarded else pacer


def states(guarded: bool) -> Any:
  """Both jobs' states before the first step, stacked."""
  return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]),
                      *[make(key, guarded).init(1) for key in (1, 2)])


def drawer(nodes: int, steps: int, pauses: tuple[float, float]) -> Callable[..., turns.Drawn]:
  """Makes a function (key, worlds [W]) -> what both jobs do, by themselves."""

  def one(key: jax.Array, world: worlds.World) -> turns.Drawn:
    first, second = jax.random.split(key)
    keys = jax.random.split(first, 2)
    ours = quick.drafts(Shape(nodes * worlds.PER_NODE, worlds.PER_NODE), steps, keys[0],
                        worlds.job(world, nodes, pauses, worlds.ON))
    theirs = quick.drafts(Shape(1, overlap=False), steps, keys[1], worlds.neighbour(world, nodes))
    start = jax.random.uniform(second) * worlds.alone(world, nodes)
    speeds = jnp.stack([jnp.float32(1), worlds.together(world, worlds.ON)])
    tiny = jnp.full((2,), np.float32(TINY)) * jnp.mean(ours.transfers)
    return turns.Drawn(jnp.stack([ours.ready, theirs.ready]),
                       jnp.stack([ours.transfers, theirs.transfers]),
                       jnp.stack([jnp.float32(0), start]), speeds, tiny, jnp.ones((2,), bool))

  return jax.jit(jax.vmap(one, in_axes=(None, 0)))


def scene(drawn: turns.Drawn, arm: Arm, obeys: tuple[bool, bool]) -> turns.Drawn:
  """What an arm makes of it."""
  drawn = drawn._replace(obeys=jnp.broadcast_to(jnp.asarray(obeys), drawn.obeys.shape))
  if arm.alone:
    drawn = drawn._replace(start=drawn.start.at[:, 1].set(np.float32(_NEVER)))
  return drawn._replace(speeds=jnp.ones_like(drawn.speeds)) if arm.harmless else drawn


class _Runner:
  """Runs arms, all sizes side by side, and bare runs once for each scene."""

  def __init__(self, made: worlds.World, struck: tuple[float, float], args: Any):
    self.sizes, self.made, self.struck, self.args = [int(n) for n in args.sizes], made, struck, args
    self.bare: dict[Any, turns.Turns] = {}
    self._drawn: dict[Any, turns.Drawn] = {}

  def sizes_of(self, arm: Arm) -> Sequence[int]:
    """Numbers of nodes at which an arm runs."""
    return LONG_SIZES if arm.long and not arm.everywhere else self.sizes

  def drawn(self, arm: Arm) -> turns.Drawn:
    """Of all worlds, or of some of those it was not tried in: scenes of the first size first."""
    kind = (arm.long, arm.everywhere)
    if kind not in self._drawn:
      steps, key = (self.args.drawn, KEY + 1) if arm.long else (self.args.steps, KEY)
      made = (self.made if arm.everywhere or not arm.long
              else jax.tree.map(lambda leaf: leaf[1::self.args.apart], self.made))
      each = [drawer(nodes, steps, self.struck)(jax.random.key(key), made)
              for nodes in self.sizes_of(arm)]
      self._drawn[kind] = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *each)
    return self._drawn[kind]

  def run(self, arm: Arm) -> dict[int, dict[str, Any]]:
    """Figures of an arm by size: lists over its worlds."""
    sizes, drawn = self.sizes_of(arm), self.drawn(arm)
    steps = self.args.long if arm.long else self.args.steps
    kind = (arm.alone, arm.harmless, arm.long, arm.everywhere)
    if kind not in self.bare:
      self.bare[kind] = played(None, steps, scene(drawn, arm, (False, False)), arm.ear, ())
    if arm.bound:
      found = self.bare[kind]._replace(step_time=served(drawn, steps))
    else:
      found = played(arm.guarded, steps, scene(drawn, arm, arm.obeys), arm.ear, states(arm.guarded))
    figures = figures_of(found, self.bare[kind], np.asarray(drawn.ready[:, 0, :, -1]), arm)
    count = len(figures["gain"]) // len(sizes)
    return {nodes: {name: values[place * count:(place + 1) * count]
                    for name, values in figures.items()}
            for place, nodes in enumerate(sizes)}


@functools.cache
def simulator(guarded: bool | None, steps: int) -> Callable[..., turns.Turns]:
  """Compiled once for all sizes: without a pacer (None), with it, with it under the guard."""
  return jax.jit(turns.simulator(turns.nothing() if guarded is None else make(0, guarded), steps))


def played(guarded: bool | None, steps: int, drawn: turns.Drawn, ear: turns.Ear,
           began: Any) -> turns.Turns:
  """Runs scenes: without a pacer (None), with it, with it under the guard."""
  ear = turns.Ear(*map(np.float32, ear))
  return jax.tree.map(np.asarray,
                      simulator(guarded, steps)(jax.random.key(KEY + 2), drawn, ear, began))


@functools.cache
def _server(steps: int) -> Callable[..., jax.Array]:
  return jax.jit(jax.vmap(functools.partial(first_come.play, steps=steps)))


def served(drawn: turns.Drawn, steps: int) -> np.ndarray:
  """[W, 1, K] s: this job's steps, first come, first served."""
  return np.asarray(_server(steps)(drawn.ready, drawn.work, drawn.start))[:, None]


def figures_of(found: turns.Turns, bare: turns.Turns, computed: np.ndarray, arm: Arm
               ) -> dict[str, Any]:
  """Lists over worlds, from runs with and without the pacer and the ends of compute [W, K]."""
  kept = slice(worlds.WARMUP, None)
  ours, without = (np.asarray(each.step_time[:, 0, kept], np.float64) for each in (found, bare))
  steps = np.arange(found.step_time.shape[2])[kept] % computed.shape[1]
  busy = computed[:, steps].astype(np.float64)
  mean, bare_mean = ours.mean(axis=1), without.mean(axis=1)
  result = {"gain": bare_mean / mean - 1, "cv": ours.std(axis=1) / mean,
            "bare_cv": without.std(axis=1) / bare_mean, "mean": mean,
            "exposed": (ours - busy).mean(axis=1) / mean,
            "bare_exposed": (without - busy).mean(axis=1) / bare_mean}
  if arm.bound:
    return {name: _plain(values) for name, values in result.items()}
  result |= {"listened": found.listened[:, 0, kept].mean(axis=1),
             "turns": found.info["turns"][:, 0, kept].mean(axis=1),
             "hidden": _hidden(found, ours - busy), "bare_hidden": _hidden(bare, without - busy)}
  if not arm.alone:
    theirs, others = (np.asarray(each.step_time[:, 1, kept], np.float64) for each in (found, bare))
    result["neighbour_gain"] = np.nanmean(others, axis=1) / np.nanmean(theirs, axis=1) - 1
  if arm.long:
    half = ours.shape[1] // 2
    result["gain_later"] = without[:, half:].mean(axis=1) / ours[:, half:].mean(axis=1) - 1
    result["cv_later"] = ours[:, half:].std(axis=1) / ours[:, half:].mean(axis=1)
  return {name: _plain(values) for name, values in result.items()}


def _hidden(found: turns.Turns, exposed: np.ndarray) -> np.ndarray:
  """[W] share of the time from each bucket's beginning to its end in which this job still
  computes."""
  sent = np.asarray(found.sent[:, 0, worlds.WARMUP:], np.float64)
  held = np.asarray(found.held[:, 0, worlds.WARMUP:], np.float64)
  return np.maximum(sent + held - exposed, 0).sum(axis=1) / (sent + held).sum(axis=1)


def _plain(values: Any) -> list[float]:
  return [round(float(value), 6) for value in np.asarray(values)]


def run(args: Any) -> None:
  """Runs what is not on record yet, and writes the page."""
  made, struck = recorded_worlds(args.worlds)
  setting = {"steps": args.steps, "long": args.long, "drawn": args.drawn, "apart": args.apart,
             "block": BLOCK, "worlds": len(made.step), "listening": TINY,
             "ear": {name: float(value) for name, value in turns.Ear()._asdict().items()},
             "arms": {name: arm.about for name, arm in ARMS.items()}}
  figures = measured.circumstances("experiments.paper.turns") | setting
  out = pathlib.Path(args.out)

  def recorded() -> dict[str, Any]:
    before = json.loads(out.read_text()) if out.is_file() else {}
    return (dict(before["sizes"])
            if all(before.get(name) == value for name, value in setting.items()) else {})

  def keep(nodes: int, name: str, found: dict[str, Any]) -> None:
    sizes = recorded()
    sizes[str(nodes)] = {**sizes.get(str(nodes), {}), name: found}
    figures["sizes"] = dict(sorted(sizes.items(), key=lambda item: int(item[0])))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=1) + "\n")

  runner = _Runner(made, struck, args)
  for name, arm in ARMS.items():
    missing = [nodes for nodes in runner.sizes_of(arm)
               if name not in recorded().get(str(nodes), {})]
    if not missing or (args.arms and name not in args.arms):
      continue
    print(f"  {name}", file=sys.stderr, flush=True)
    for nodes, found in runner.run(arm).items():
      keep(nodes, name, found)
  figures["sizes"] = recorded()
  measured.write(figures, turns_page.page(figures), out)


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_integer("steps", 400, "Of each run.", lower_bound=2 * worlds.WARMUP)
  flags.DEFINE_integer("long", 10_000, "Of each long run.",
                       lower_bound=2 * worlds.WARMUP)
  flags.DEFINE_integer("drawn", 1_000, "Steps drawn for those; after that they begin again.",
                       lower_bound=100)
  flags.DEFINE_integer("apart", 4, "For those, one world in so many is taken.", lower_bound=1)
  flags.DEFINE_list("sizes", [str(n) for n in reversed(worlds.NODES)], "Numbers of nodes.")
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
