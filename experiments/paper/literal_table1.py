"""Table 1 of the paper with one reading of the pacer of its section 5.3, and what that costs.

    python -m experiments.paper.literal_table1

Some ten minutes of a processor; what was interrupted goes on where it was. The worlds are those of
`experiments.paper.table1`, fitted to the baseline columns alone, as they are on record. The pacer,
`experiments.paper.literal`, runs on every rank of the job by that rank's own waits, as the paper
has it; the neighbour does as it likes.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.paper import literal, paced, quick, tables
from experiments.paper import world as worlds

WORLDS = pathlib.Path("docs/measurements/table1_worlds.json")
OUT = pathlib.Path("docs/measurements/table1_literal.json")
KEY = 2030
MAX_DELAY = 0.5
"""Of the draws; units of compute, the bound of a delay."""
SHARES = (0.1, 0.25, 0.5, 1.0)
"""Of a rank's earliness, its delay: the paper leaves it open. The first table takes
`literal.SHARE`; the others are tried at the largest size."""


def recorded_worlds(path: str | pathlib.Path) -> tuple[worlds.World, tuple[float, float]]:
  """Returns worlds on record, [W] each, and their pauses: one in a step, and its seconds."""
  record = json.loads(pathlib.Path(path).read_text())
  values = np.array([w["values"] for search in record["searches"] for w in search["worlds"]],
                    np.float32)
  chance, seconds = record["pauses"]
  return worlds.World(*(jnp.asarray(column) for column in values.T)), (float(chance),
                                                                        float(seconds))


def outcome(nodes: int, made: worlds.World, struck: tuple[float, float], steps: int, share: float,
            couplings: worlds.Couplings) -> dict[str, list[float]]:
  """Figures of all worlds at one size: gain in throughput, CV with and without, mean delay and
  its direct cost as shares of the step."""
  key = jax.random.key(KEY)
  mean, cv = quick.simulator(steps, 1, struck, [nodes])(key, made, couplings)
  pacer = literal.pacer(MAX_DELAY, share=share)
  found = paced.simulator(nodes, steps, 1, struck, pacer)(key, made,
                                                          jax.tree.map(jnp.float32, couplings))
  plain = {"gain": mean[:, 0] / np.asarray(found.mean, np.float64) - 1, "cv": found.cv,
           "bare_cv": cv[:, 0], "delay": found.delay, "cost": found.cost}
  return {name: [round(float(v), 6) for v in np.asarray(values)] for name, values in plain.items()}


def run(args: Any) -> None:
  """Runs what is not on record yet, and writes the page."""
  made, struck = recorded_worlds(args.worlds)
  setting = {"steps": args.steps, "worlds": len(made.step), "window": literal.WINDOW,
             "threshold": literal.THRESHOLD, "share": literal.SHARE, "max_delay": MAX_DELAY}
  figures = measured.circumstances("experiments.paper.literal_table1") | setting
  out = pathlib.Path(args.out)
  before = json.loads(out.read_text()) if out.is_file() else {}
  same = all(before.get(name) == value for name, value in setting.items())
  found: dict[str, Any] = before["sizes"] if same else {}
  sizes = [int(n) for n in args.sizes]
  runs = [(n, name, literal.SHARE, couplings) for n in sizes
          for name, couplings in (("literal", worlds.ON), ("null", worlds.OFF))]
  runs += [(max(sizes), f"share {share:g}", share, worlds.ON) for share in SHARES
           if share != literal.SHARE]
  for nodes, name, share, couplings in runs:
    of = found.setdefault(str(nodes), {})
    if name in of:
      continue
    print(f"  {nodes} nodes, {name}", file=sys.stderr, flush=True)
    of[name] = outcome(nodes, made, struck, args.steps, share, couplings)
    figures["sizes"] = dict(sorted(found.items(), key=lambda item: int(item[0])))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=1) + "\n")
  figures["sizes"] = found
  measured.write(figures, page(figures), out)


def page(figures: dict[str, Any]) -> list[str]:
  """Markdown lines."""
  lines = measured.introduction("Table 1 of the paper, with its own pacer", figures)
  lines += textwrap.wrap(
      f"Simulated: the {figures['worlds']} worlds of [Table 1](table1.md), as they are on record, "
      f"{figures['steps']} steps, the first {worlds.WARMUP} not counted. One reading of section "
      f"5.3 (`experiments/paper/literal.py`): a rolling window of {figures['window']} of each "
      "rank's own waits; while their deviation is above "
      f"{100 * figures['threshold']:g} % of their mean "
      f"a rank is delayed before its next iteration by {figures['share']:g} of what its wait was "
      f"beyond the least of the window, at most {figures['max_delay']:g} of a node's compute. How "
      "long the delay is, the paper leaves open. Throughput against the same world without; lowest "
      ".. middle .. highest over the worlds. *Delay*: mean over ranks. *Cost*: by how much the "
      "last rank of a step came later for its own delay, the part of the loss that is direct.",
      116)
  return [*lines, "", *table(figures), "Other delays, as shares of a rank's earliness; gain, and "
          "middle CV:", "", *shares(figures)]


def table(figures: dict[str, Any]) -> list[str]:
  """The paper's columns beside its own pacer's, with cost and null."""
  rows = []
  for k, nodes in enumerate(worlds.NODES):
    if (sizes := figures["sizes"].get(str(nodes))) is None:
      continue
    of = {name: np.array(values) for name, values in sizes["literal"].items()}
    rows.append([nodes, f"{100 * tables.PAPER[nodes]:+.1f} %", tables.percent(of["gain"]),
                 worlds.CV["coordination"][k], tables.plain(of["cv"]), tables.plain(of["bare_cv"]),
                 tables.percent(of["delay"]), tables.percent(of["cost"]),
                 tables.percent(np.array(sizes["null"]["gain"]))])
  return measured.table(
      ["nodes", "paper's gain", "gain", "paper's CV", "CV", "CV without", "delay, of the step",
       "cost, of the step", "null: couplings off, gain"], rows)


def shares(figures: dict[str, Any]) -> list[str]:
  """What other delays do."""
  rows = []
  for nodes, sizes in sorted(figures["sizes"].items(), key=lambda item: int(item[0])):
    if f"share {SHARES[0]:g}" not in sizes:
      continue
    row = [nodes]
    for share in SHARES:
      of = sizes.get("literal" if share == figures["share"] else f"share {share:g}")
      row.append(None if of is None else f"{tables.percent(np.array(of['gain']))}; "
                 f"{np.median(of['cv']):.3f}")
    rows.append(row)
  return measured.table(["nodes", *(f"{share:g}" for share in SHARES)], rows)


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_integer("steps", 400, "Of each run.", lower_bound=2 * worlds.WARMUP)
  flags.DEFINE_list("sizes", [str(n) for n in reversed(worlds.NODES)], "Numbers of nodes.")
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
