"""What sharing work by speed does in the worlds that fit Table 1 of the paper, at 64 nodes, alone
and beside pacing.

    python -m experiments.measure.balanced_table1

Ranks' compute times are drawn as `experiments.paper.world` has them, with the library's own noise:
jitter, a heavy tail, and one rank in 32 that is slower for good. The library's own
`share_work(share_by_speed(...))` plays over them, with 8 and with 32 micro-batches a rank;
transfers stay as they are. Collisions with other jobs, which are most of what the paper takes back,
no count of micro-batches can touch.

Then the whole worlds, other jobs, traffic and pauses included: Table 1's pacers, work shared by
speed, and both in one chain, on the same draws as the bare job (`experiments.paper.paced`). Writes
docs/measurements/balanced_table1.json and .md.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.lib.paired import estimate
from experiments.paper import paced, predict, table1
from experiments.paper import world as worlds
from jaxpace.coordination import combinators
from jaxpace.coordination.balancer import share_by_speed
from jaxpace.coordination.share_work import share_work
from jaxpace.simulation import noise
from jaxpace.simulation.shared_work import best, play

WORLDS = pathlib.Path("docs/measurements/table1_worlds.json")
NODES, EACH, STEPS, FROM = 64, (8, 32), 600, 200
ARMS = ("pacing", "shared", "both")


def computes(world: worlds.World, nodes: int, seed: int) -> np.ndarray:
  """[STEPS, ranks] compute of every rank and step, 1 being that of a healthy one where nothing
  varies."""
  ranks = nodes * worlds.PER_NODE
  late = np.where(np.arange(ranks) % 32 == 3, world.slow, 0.0).astype(np.float32)
  parts = (noise.Normal(world.jitter), noise.Heavy(world.heavy, np.float32(3)), noise.Slow(late))

  def step(key: Any, number: Any) -> Any:
    keys = jax.random.split(jax.random.fold_in(key, number), len(parts))
    return sum(part.sample(one, number, part.init(one, ranks), ranks)[0]
               for part, one in zip(parts, keys, strict=True))

  extra = jax.vmap(lambda number: step(jax.random.key(seed), number))(
      np.arange(STEPS, dtype=np.int32))
  return np.maximum(1 + np.asarray(extra, np.float64), 0.1)


def measure(world: worlds.World, each: int, rounds: int) -> dict[str, Any]:
  """Gain of the mean step in one world, in percent; and the most that whole counts could gain were
  there no jitter."""
  ranks = NODES * worlds.PER_NODE
  exposed = float(worlds.alone(world, NODES)) - 1
  balancer, gains, changes = share_by_speed(each * ranks, 2 * each), [], []
  for seed in range(rounds):
    played = play(balancer, computes(world, NODES, seed) / each, transfer=exposed)
    gains.append(100 * (1 - played.seconds[FROM:].mean() / played.even[FROM:].mean()))
    changes.append(played.changes / STEPS * 1000)
  true = np.where(np.arange(ranks) % 32 == 3, 1 + world.slow, 1.0)
  most = 100 * (1 - (best(true / each, each * ranks, 2 * each) + exposed) / (true.max() + exposed))
  return {"gain_percent": estimate(np.array(gains)).to_json(), "most_percent": float(f"{most:.4g}"),
          "changes_in_1000_steps": float(np.mean(changes))}


def together(made: list[worlds.World], each: int, rounds: int,
             pauses: tuple[float, float]) -> list[dict[str, Any]]:
  """Throughput over the bare job's, in percent, and CV of the step, of every world and arm."""
  balancer = share_by_speed(each * NODES * worlds.PER_NODE, 2 * each)
  arms = {"bare": (None, predict.ON), "pacing": (predict.coordination(1), predict.ALIGNED),
          "shared": (share_work(balancer), predict.ON),
          "both": (combinators.chain(predict.coordination(1), share_work(balancer)),
                   predict.ALIGNED)}
  stacked = worlds.World(*(np.array(values, np.float32) for values in zip(*made, strict=True)))
  outcomes: dict[str, list[Any]] = {name: [] for name in arms}
  for name, (pacer, couplings) in arms.items():
    print(f"  beside pacing: {name}", file=sys.stderr, flush=True)
    simulate = paced.simulator(NODES, STEPS, 1, pauses, pacer)
    for seed in range(rounds):
      outcomes[name].append(jax.tree.map(np.asarray, simulate(
          jax.random.key(table1.KEY + seed), stacked, jax.tree.map(jnp.float32, couplings))))
  mean = {name: np.stack([one.mean for one in found]) for name, found in outcomes.items()}
  cv = {name: np.stack([one.cv for one in found]).mean(axis=0) for name, found in outcomes.items()}
  return [{"gain_percent": {name: estimate(100 * (mean["bare"] / mean[name] - 1)[:, k]).to_json()
                            for name in ARMS},
           "cv": {name: float(f"{values[k]:.4g}") for name, values in cv.items()}}
          for k in range(len(made))]


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("Work shared by speed in the worlds of Table 1, simulated", figures)
  page += [f"{NODES} nodes, {NODES * worlds.PER_NODE} ranks; the best world of each search of "
           f"`{WORLDS}`. Slow: how much slower one rank in 32 is for good. Gain: of the mean step "
           "with even counts; most: what whole counts could gain were there no jitter. Other jobs "
           "are left out: work that moves does nothing about collisions, which are what [pacing is "
           "for](table1.md). "
           + measured.about_intervals(figures.get("intervals"), f"{figures['rounds']} runs"), ""]
  rows = [[row["world"], f"{row['slow_percent']:.1f}", each,
           *(f"{value:.2f}" for value in found["gain_percent"]), f"{found['most_percent']:.2f}",
           f"{found['changes_in_1000_steps']:.1f}"]
          for row in figures["worlds"] for each, found in row["by_micro_batches"].items()]
  page += measured.table(["world", "slow, %", "micro-batches a rank", "gain, %", "low", "high",
                          "most, %", "changes in 1,000 steps"], rows)
  page += ["", "## Beside pacing", "",
           "The same worlds as they are: another job on the trunk, other traffic, pauses. Gain: of "
           f"throughput, over the bare job on the same draws, {figures['rounds']} runs of {STEPS} "
           f"steps, of which the first {worlds.WARMUP} don't count. Pacing: early ranks paced, "
           "phase shifted, pauses aligned, as [Table 1](table1.md) has it; shared: "
           f"{EACH[-1]} micro-batches a rank, shared by speed; both: in one chain. CV: of the "
           "step, bare, paced, shared, both.", ""]
  rows = [[row["world"], *(_interval(row["beside"]["gain_percent"][name]) for name in ARMS),
           *(f"{value:.3f}" for value in row["beside"]["cv"].values())]
          for row in figures["worlds"] if "beside" in row]
  return page + measured.table(["world", "pacing, %", "shared, %", "both, %", "CV", "paced",
                                "shared", "both"], rows)


def _interval(value: list[float]) -> str:
  return "{:+.2f} [{:+.2f}, {:+.2f}]".format(*value)


def main(_: list[str]) -> None:
  kept = json.loads(WORLDS.read_text())
  figures: dict[str, Any] = measured.circumstances("experiments.measure.balanced_table1") | {
      "rounds": flags.FLAGS.rounds, "worlds": []}
  made = []
  for search in kept["searches"]:
    if not search["worlds"]:
      continue
    first = min(search["worlds"], key=lambda one: one["misfit"])
    world = worlds.World(**{name: np.float32(value)
                            for name, value in zip(kept["fields"], first["values"],
                                                   strict=True)})
    made.append(world)
    print(f"  {search['start']}", file=sys.stderr, flush=True)
    figures["worlds"].append({"world": search["start"], "slow_percent": float(100 * world.slow),
                              "by_micro_batches": {
                                  str(each): measure(world, each, flags.FLAGS.rounds)
                                  for each in EACH}})
  beside = together(made, EACH[-1], flags.FLAGS.rounds, table1.pauses(table1.COLLECTIONS))
  for row, found in zip(figures["worlds"], beside, strict=True):
    row["beside"] = found
  measured.write(figures, lines(figures), pathlib.Path(flags.FLAGS.out))


if __name__ == "__main__":
  measured.define_flags("balanced_table1", 3, "Runs of each world, with other noise.")
  app.run(main)
