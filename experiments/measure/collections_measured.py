"""How often a full garbage collection strikes, and for how long, in a loop that keeps and drops
objects.

    python -m experiments.measure.collections_measured

One process, no JAX in the loop: what is measured is Python's own collector (thresholds as they
come) on heaps of several sizes. Each step makes container objects, keeps some of them for a while
(metrics, examples in a buffer), drops the rest. The two figures a simulation needs come from it:
full collections a step, and seconds of each.
"""

from __future__ import annotations

import collections
import gc
import pathlib
import statistics
import time
from typing import Any

from absl import app, flags

from experiments.lib import measured

OUT = pathlib.Path("docs/measurements/collections.json")


def run(heap: int, steps: int, made: int, kept: int, stay: int) -> dict[str, Any]:
  """One heap.

  Args:
    heap: container objects that live throughout.
    steps: of the loop.
    made: objects made in each step, of which `kept` stay for `stay` steps.
    kept: see `made`.
    stay: see `made`.
  """
  gc.collect()
  gc.freeze()  # what the program holds anyway is not part of the heap
  # Lists: the collector does not track dicts and tuples that hold numbers only.
  still = [[k] for k in range(heap)]
  buffer: collections.deque[list[Any]] = collections.deque(maxlen=stay)
  pauses: list[float] = []
  begin = 0.0

  def watch(phase: str, info: dict[str, int]) -> None:
    nonlocal begin
    if info["generation"] == 2:
      if phase == "start":
        begin = time.perf_counter()
      else:
        pauses.append(time.perf_counter() - begin)

  gc.collect()
  gc.callbacks.append(watch)
  try:
    for step in range(steps):
      objects = [[step, k] for k in range(made)]
      buffer.append(objects[:kept])
  finally:
    gc.callbacks.remove(watch)
    gc.unfreeze()
  live = len(still) + sum(map(len, buffer))
  return {"heap": heap, "live": live, "steps": steps, "collections": len(pauses),
          "per_step": len(pauses) / steps, "seconds_median": statistics.median(pauses) if pauses
          else None, "seconds_longest": max(pauses, default=None)}


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  args = flags.FLAGS
  figures = measured.circumstances("experiments.measure.collections_measured")
  rows = []
  for heap in map(int, args.heaps):
    rows.append(run(heap, args.steps, args.made, args.kept, args.stay))
    print(f"  heap of {heap:,}: {rows[-1]['collections']} full collections in {args.steps:,} "
          f"steps, median {1e3 * (rows[-1]['seconds_median'] or 0):.1f} ms", flush=True)
  figures["rows"] = rows
  lines = measured.introduction("Full garbage collections in a training-like loop", figures)
  header = ["objects alive", "steps", "full collections", "of one in a step", "median, ms",
            "longest, ms"]
  lines += measured.table(header, [
      [r["live"], r["steps"], r["collections"], r["per_step"],
       *(None if r[name] is None else 1e3 * r[name]
         for name in ("seconds_median", "seconds_longest"))] for r in rows])
  measured.write(figures, lines, pathlib.Path(args.out))


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_list("heaps", ["100000", "400000", "1600000"], "Objects that live throughout.")
  flags.DEFINE_integer("steps", 4000, "Steps of each loop.", lower_bound=10)
  flags.DEFINE_integer("made", 2000, "Container objects made in a step.", lower_bound=1)
  flags.DEFINE_integer("kept", 400, "Of those, kept for a while.", lower_bound=0)
  flags.DEFINE_integer("stay", 1000, "Steps they are kept.", lower_bound=1)
  flags.DEFINE_string("out", str(OUT), "Where the figures go.")


if __name__ == "__main__":
  define_flags()
  app.run(main)
