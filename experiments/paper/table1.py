"""Table 1 of the paper: worlds whose baseline is the paper's, and what the live pacers do in them.

    python -m experiments.paper.table1 --calibrate --edge=15        looks for worlds that fit the baseline columns
    python -m experiments.paper.table1                               predicts the coordination columns in those on
    record

Some ten minutes of a processor each; what was interrupted goes on where it was.

Only the baseline columns are fitted, by Monte Carlo: throughput within 2 %, CV within the larger of
0.004 and 10 %, at all five sizes. How often pauses strike and how long they are comes from
docs/measurements/collections.json. Many worlds fit; each says something else about
coordination. The table shows the band over all that were found, the paper's columns beside it, and
the null: the same worlds with every coupling switched off.
"""  # noqa: E501

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.paper import calibrate, paced, predict, quick, tables
from experiments.paper import world as worlds

WORLDS, OUT = (pathlib.Path("docs/measurements/table1_worlds.json"),
               pathlib.Path("docs/measurements/table1.json"))
COLLECTIONS = pathlib.Path("docs/measurements/collections.json")
_APART, _ALONE = {"polling": 0.0}, {"load": 0.0, "begins": 0.1, "length": 1.0}
STARTS: dict[str, dict[str, float]] = {
    "all couplings": {}, "no polling": _APART, "no other traffic": _ALONE,
    "equal periods": {**_ALONE, "ratio": 1.03, "step": 1.1},
    "equal periods and other traffic": {"ratio": 1.03, "step": 1.1},
    "nothing lost in collisions": {"lost": 0.0}, "neither": {**_APART, "claim": 0.5, "lost": 0.0}}
"""Searches, and what is left out of each, or given. Equal periods: the neighbour's alone is about
this job's with its pauses, which are as long as the variation at 4 nodes allows; without other
traffic, and with it. Two jobs that claim half of the trunk each and lose nothing never meet."""
NEAR = {"jitter": 0.0056, "heavy": 0.0014, "common": 0.0075, "slow": 0.0057, "growth": 0.9,
        "power": 0.8, "ratio": 1.03, "mass": 0.6, "claim": 1.0, "lost": 0.4, "begins": 0.1,
        "length": 1.0, "load": 0.0, "polling": 0.1, "step": 1.1}
"""A world made by hand, whose neighbour has about this job's period, and what it is like at 64
nodes is about the paper's: three searches begin around it, without other traffic."""
KEY = 2026


def pauses(path: pathlib.Path) -> tuple[float, float]:
  """Of one in a step, and its seconds: the middle row of the measured heaps."""
  try:
    rows = json.loads(path.read_text())["rows"]
  except (OSError, ValueError, KeyError) as error:
    raise app.UsageError(f"{path} holds no measured collections: {error}.") from error
  row = rows[len(rows) // 2]
  return float(row["per_step"]), float(row["seconds_median"])


def find(args: Any) -> None:
  """Looks for worlds; each search is added to the file when it is done, and not done again."""
  path = pathlib.Path(args.worlds)
  struck = pauses(pathlib.Path(args.collections))
  setting = {"pauses": list(struck), "fields": list(worlds.World._fields)}

  def recorded() -> list[dict[str, Any]]:
    record = json.loads(path.read_text()) if path.is_file() else {}
    same = all(record.get(name) == value for name, value in setting.items())
    return list(record["searches"]) if same else []

  figures = measured.circumstances("experiments.paper.table1") | setting
  fitted = quick.simulator(args.steps, args.seeds, struck)
  longer = quick.simulator(3 * args.steps, args.seeds, struck)
  for number, start in enumerate(_starts(struck, args)):
    if (start.name in [search["start"] for search in recorded()]
        or (args.only and start.name not in args.only)):
      continue
    begin = (np.array([w["values"] for search in recorded() for w in search["worlds"]])
             if start.prefer else None)
    if start.near:
      spread = np.random.default_rng(args.seed + number).normal(
          1, 0.15, (args.population, len(worlds.World._fields)))
      begin = spread * [start.near[name] for name in worlds.World._fields]
    found = calibrate.search(
        fitted, start.fixed, population=args.population, rounds=start.rounds,
        seed=args.seed + number, key=jax.random.key(KEY),
        say=measured.progress(start.name, start.rounds), prefer=start.prefer, begin=begin)
    # Of those found the best, of the edge's the outermost.
    order = np.argsort(found.preferred if start.prefer else found.misfit)[: args.checked]
    misfit = calibrate.again(longer, found.values[order], jax.random.key(KEY + 2), args.population)
    order, misfit = order[misfit <= 1], misfit[misfit <= 1]
    chosen = (list(range(len(order)))[: args.keep] if start.prefer
              else _spread(found.values[order], args.keep))
    print(f"  {start.name}: {len(found.misfit)} of {found.tried:,} worlds tried are within "
          f"tolerance, least misfit {found.best:.2f}; on other draws {len(order)} of "
          f"{min(len(found.misfit), args.checked)} are",
          file=sys.stderr, flush=True)
    done = {"start": start.name, "fixed": start.fixed, "steps": args.steps, "seeds": args.seeds,
            "population": args.population, "rounds": start.rounds, "seed": args.seed + number,
            "bounds": [list(worlds.BOUNDS[name]) for name in worlds.World._fields],
            "tried": found.tried, "within": len(found.misfit), "least_misfit": found.best,
            "checked": min(len(found.misfit), args.checked), "within_again": len(order),
            "worlds": [{"values": [float(f"{v:.6g}") for v in found.values[order[k]]],
                        "misfit": round(float(found.misfit[order[k]]), 4),
                        "misfit_again": round(float(misfit[k]), 4)}
                       for k in chosen]}
    # Read again: several programs may be looking, each for another start.
    figures["searches"] = [*recorded(), done]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")


class Start(NamedTuple):
  """One search."""

  name: str
  fixed: dict[str, float]
  rounds: int
  prefer: calibrate.Prefer | None = None
  near: dict[str, float] | None = None  # a world around which it begins


def _starts(struck: tuple[float, float], args: Any) -> list[Start]:
  """All searches: with couplings left out, then for the upper edge of the band."""
  starts = [Start(name, fixed, args.rounds) for name, fixed in STARTS.items()]
  starts += [Start(f"near equal periods {k}", _ALONE, args.rounds, near=NEAR) for k in (1, 2, 3)]
  if not args.edge:
    return starts
  # Only a direction to go in: at two sizes, in short runs.
  sizes, short = (16, 64), max(args.steps // 2, 2 * worlds.WARMUP)
  moments = quick.simulator(short, 1, struck, sizes)
  simulators = [paced.simulator(n, short, 1, struck, predict.coordination(1)) for n in sizes]

  def gain(made: worlds.World) -> np.ndarray:
    key = jax.random.key(KEY)
    mean = np.stack(
        [np.asarray(simulate(key, made, jax.tree.map(jnp.float32, predict.ALIGNED)).mean)
         for simulate in simulators], axis=1)
    return np.mean(moments(key, made)[0] / mean - 1, axis=1)

  return [*starts, Start("largest gain", {}, args.edge, lambda made: -gain(made))]


def _spread(values: np.ndarray, most: int) -> list[int]:
  """Of the worlds found, `most` that lie far from each other: each next one is the farthest from
  those taken."""
  if len(values) <= most:
    return list(range(len(values)))
  low, high = np.array([worlds.BOUNDS[name] for name in worlds.World._fields]).T
  unit = (values - low) / (high - low)
  taken, far = [0], np.full(len(unit), np.inf)
  while len(taken) < most:
    far = np.minimum(far, ((unit - unit[taken[-1]])**2).sum(axis=1))
    taken.append(int(far.argmax()))
  return taken


def run(args: Any) -> None:
  """Predicts, in the worlds on record."""
  path = pathlib.Path(args.worlds)
  if not path.is_file():
    raise app.UsageError(f"There is no {path}: run with --calibrate first.")
  record = json.loads(path.read_text())
  starts = [search["start"] for search in record["searches"] for _ in search["worlds"]]
  values = np.array([w["values"] for search in record["searches"] for w in search["worlds"]])
  if not len(values):
    raise app.UsageError(f"{path} holds no world within tolerance.")
  struck = (float(record["pauses"][0]), float(record["pauses"][1]))
  setting = {"pauses": list(struck), "steps": args.steps, "seeds": args.seeds,
             "worlds": len(values), "starts": starts,
             "searches": [{**{name: search[name] for name in search if name != "worlds"},
                           "kept": len(search["worlds"])} for search in record["searches"]],
             # of the worlds, beyond 64 nodes
             "few": list(range(len(values)))[:: max(1, -(-len(values) // args.few))]}
  figures = measured.circumstances("experiments.paper.table1") | setting
  # Which sizes this program did says nothing: it goes on with what others have done.
  figures["command"] = " ".join(word for word in figures["command"].split()
                                if not word.startswith("--sizes"))
  out = pathlib.Path(args.out)

  def recorded() -> dict[str, Any]:
    before = json.loads(out.read_text()) if out.is_file() else {}
    return (dict(before["sizes"])
            if all(before.get(name) == value for name, value in setting.items()) else {})

  def say(what: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)

  for nodes in map(int, args.sizes):
    if str(nodes) in recorded():
      continue
    large = nodes > max(worlds.NODES)
    some = values[setting["few"]] if large else values
    made = worlds.World(*(jnp.asarray(column, jnp.float32) for column in some.T))
    # Other draws than those the worlds were fitted on and checked with.
    done = predict.predict(
        nodes, made, steps=max(args.steps // 3, 2 * worlds.WARMUP) if large else args.steps,
        seeds=1 if large else args.seeds, pauses=struck, key=jax.random.key(KEY + 1),
        arms=["all", "null"] if large else list(predict.ARMS), say=say)
    found = {name: {field: np.round(getattr(p, field), 6).tolist() for field in p._fields}
             for name, p in done.items()}
    # Read again: several programs may be at it, each with other sizes.
    figures["sizes"] = dict(sorted({**recorded(), str(nodes): found}.items(),
                                   key=lambda item: int(item[0])))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=1) + "\n")
  figures["sizes"] = recorded()
  if all(str(nodes) in figures["sizes"] for nodes in worlds.NODES):
    measured.write(figures, tables.page(figures), out)


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_bool("calibrate", False, "Look for worlds, and stop.")
  flags.DEFINE_integer("population", 64, "Worlds at a time.", lower_bound=8)
  flags.DEFINE_integer("rounds", 60, "Of each search.", lower_bound=1)
  flags.DEFINE_integer("edge", 0,
                       "Rounds of the search for the upper edge of the band; 0 for none.",
                       lower_bound=0)
  flags.DEFINE_list("only", [],
                    "Names of searches; none for all. Programs may share the work, each with some "
                    "of them.")
  flags.DEFINE_integer("checked", 256, "Worlds of each search that are run again on other draws.",
                       lower_bound=1)
  flags.DEFINE_integer("keep", 12, "Worlds kept of each search.", lower_bound=1)
  flags.DEFINE_integer("seed", 0, "Of the search.")
  flags.DEFINE_integer("steps", 400, "Of each run.", lower_bound=2 * worlds.WARMUP)
  flags.DEFINE_integer("seeds", 3, "Runs of each world.", lower_bound=1)
  flags.DEFINE_list("sizes", [str(n) for n in (*worlds.NODES, 256, 1024, 4096)],
                    "Numbers of nodes; those on record are not run again. Programs may share "
                    "the work.")
  flags.DEFINE_integer("few", 6, "Worlds run beyond the paper's sizes.", lower_bound=1)
  flags.DEFINE_string("collections", str(COLLECTIONS), "Measured pauses.")
  flags.DEFINE_string("worlds", str(WORLDS), "Worlds on record.")
  flags.DEFINE_string("out", str(OUT), "Where the figures go.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  find(flags.FLAGS) if flags.FLAGS.calibrate else run(flags.FLAGS)


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  define_flags()
  app.run(main)
