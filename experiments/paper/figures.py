"""Draws the paper's figures 1, 2, 4 and 5 as SVG, with the data beside them, and renews the tables
of docs/paper.md.

    python -m experiments.paper.figures

Figures 1 and 5 from `docs/measurements/table1.json` (`python -m experiments.paper.table1`) and
the records beside it, figure 2 from a step simulated here: eight ranks on two nodes, one of them
slow, one pausing, another job on the trunk, early ranks waiting.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
from absl import app, flags

from experiments.paper import document, drawing, mechanisms
from jaxpace.simulation import noise
from jaxpace.simulation.job import Job, Shape
from jaxpace.simulation.jobs import LinkShares, several

OUT, TABLE = pathlib.Path("docs/figures"), pathlib.Path("docs/measurements/table1.json")
PAGE = pathlib.Path("docs/paper.md")
RANKS, SLOW, STEPS = 8, 5, 60


def one_step() -> dict[str, Any]:
  """Simulates until a step in which everything happens at once: the step's times by rank, ms."""
  slow = np.zeros(RANKS, np.float32)
  slow[SLOW] = 0.25
  shapes = [Shape(RANKS, 4, overlap=False), Shape(1, overlap=False)]
  plan = several(shapes, [None, None], buckets=[2, 1], steps=STEPS, by_rank=True)
  job = Job(np.float32(8e-3), np.float32(16e-3), np.float32(0.5e-3), np.float32(0.5e-3),
            np.full(2, 4e-3, np.float32), noise=(noise.Normal(np.float32(0.03)), noise.Slow(slow),
                                                 noise.Pauses(np.float32(0.05), np.float32(5e-3))))
  other = Job(np.float32(17e-3), np.float32(0), np.float32(0), np.float32(0),
              np.full(1, 9e-3, np.float32))
  histories = jax.jit(plan)(
      jax.random.key(4), [job, other],
      LinkShares(*(np.ones(shape, np.float32) for shape in ((2, 1, 1), (2, 1), (2, 1)))),
      np.zeros(2, np.float32), np.full(2, 2**30, np.int32))
  steps: Any = jax.tree.map(lambda leaf: 1e3 * np.asarray(leaf, np.float64), histories[0])
  paused = steps.gap.max(axis=1) > 2
  contended = (steps.transfers - 4).sum(axis=1)
  early = np.where(paused & (steps.gap.argmax(axis=1) != SLOW), contended, -1.0)
  k = int(early.argmax())
  return {"step": k, "quiet": 4.0, "update": 0.5, "usual_gap": 0.5,
          **{name: getattr(steps, name)[k].tolist()
             for name in ("gap", "compute", "enter", "exit", "transfers")}}


def spans(step: dict[str,
                     Any]) -> tuple[list[tuple[int, str, float, float]],
                                    list[tuple[float, float, str]]]:
  """The bars and the marks of figure 2, from one step's times."""
  bars: list[tuple[int, str, float, float]] = []
  enter, leave = np.array(step["enter"]), np.array(step["exit"])
  arrived = enter.max(axis=0)
  for rank in range(len(enter)):
    begin = step["update"]
    gap = step["gap"][rank]
    if gap > 2 * step["usual_gap"]:
      bars.append((rank, "pause", begin, begin + gap))
    begin += gap
    forward = begin + step["compute"][rank] / 3
    bars.append((rank, "forward", begin, forward))
    backward_ends = begin + step["compute"][rank]
    bars.append((rank, "backward", forward, backward_ends))
    for b in range(len(leave)):
      waits_from = (max(enter[rank, b], backward_ends) if b == 0
                    else max(enter[rank, b], leave[b - 1], backward_ends))
      if arrived[b] > waits_from:
        bars.append((rank, "waiting", waits_from, arrived[b]))
      if leave[b] > max(arrived[b], backward_ends):
        # What it takes on a quiet trunk first, what it takes beyond that behind it: when each was
        # is not known.
        begins = max(arrived[b], waits_from)
        quiet = min(begins + step["quiet"], leave[b])
        bars.append((rank, "transfer", begins, quiet))
        if leave[b] > quiet:
          bars.append((rank, "contention", quiet, leave[b]))
  paused = int(np.argmax(step["gap"]))
  contended = float(sum(step["transfers"]) - len(leave) * step["quiet"])
  last = int(enter[:, 0].argmax())
  marks = [(step["update"] + step["gap"][paused] / 2, paused,
            f"pause of {step['gap'][paused]:.1f} ms"),
           (step["update"] + step["gap"][SLOW] + step["compute"][SLOW] / 2, SLOW, "slow rank"),
           (float(enter[last, 0]), last, "the last to arrive: all wait for it"),
           (float(leave[0]), 0, f"{contended:.1f} ms of contention")]
  return bars, marks


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  out = pathlib.Path(flags.FLAGS.out)
  step = one_step()
  bars, marks = spans(step)
  written = [drawing.save(drawing.timeline(bars, marks, RANKS), out / "figure2")]
  written.append(drawing.save(mechanisms.architecture(), out / "figure4"))
  (out / "figure2.json").write_text(json.dumps(step, indent=1) + "\n")
  table = pathlib.Path(flags.FLAGS.table)
  if table.is_file():
    figures = json.loads(table.read_text())
    written.append(drawing.save(drawing.scaling(figures), out / "figure1"))
    written.append(drawing.save(mechanisms.comparison(document.records(table)), out / "figure5"))
    for name, data in document.data(document.records(table)).items():
      (out / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
  else:
    print(
        f"{table} is not there, so figures 1 and 5 are left out: python -m "
        "experiments.paper.table1 makes it.")
  page = pathlib.Path(flags.FLAGS.page)
  if page.is_file():
    page.write_text(document.filled(page.read_text(), table))
    written.append(page)
  print("Written: " + ", ".join(map(str, written)))


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_string("out", str(OUT), "Where the figures go.")
  flags.DEFINE_string("table", str(TABLE), "Figures of Table 1.")
  flags.DEFINE_string("page", str(PAGE), "The page whose tables are made from them.")


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  define_flags()
  app.run(main)
