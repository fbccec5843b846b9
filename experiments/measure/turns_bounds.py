"""What any order of sending could give back to two jobs on one link that lose nothing by sharing.

    python -m experiments.measure.turns_bounds                                # some seconds

Two jobs compute and then send messages of equal length; no jitter, no cost of listening. *Shared*:
both at half speed while both send. *First come, by bucket*: whole buckets, in the order in which
they were ready. *By message*: whole messages, likewise. *Best*: whoever knows all that is to come
decides at every instant who sends, with the least mean loss of both jobs: dynamic programming
(finite horizon) over where both are in their steps. Writes docs/measurements/turns_bounds.json and
.md.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured

RATIOS = (1.0, 1.06, 1.13, 1.2, 1.3, 1.5)
_TICK = 0.6
"""ms, of the dynamic programming: messages and periods at all of `RATIOS` are whole multiples."""


def best(compute: float, message: float, ratio: float, horizon: int = 40_000) -> float:
  """The least mean loss of both jobs, as a share of their periods alone.

  A tick in which a job computes or sends is progress; while both could send only one does. The most
  progress in `horizon` ticks, from each pair of places in the two steps, is found backwards; the
  rate is that of the second half.
  """
  times = np.array([compute, message, ratio * (compute + message)]) / _TICK
  if np.abs(times - times.round()).max() > 1e-6:
    raise ValueError(f"compute, message and periods are no whole ticks of {_TICK} ms: {times}")
  sending = round(message / _TICK)
  lengths = [round((compute + message) / _TICK), round(ratio * (compute + message) / _TICK)]
  one, other = (np.arange(length) for length in lengths)
  both = (one >= lengths[0] - sending)[:, None] & (other >= lengths[1] - sending)[None]
  value, halfway = np.zeros(lengths), 0.0
  for tick in range(horizon):
    if tick == horizon // 2:
      halfway = float(value.max())
    first, second = np.roll(value, -1, axis=0), np.roll(value, -1, axis=1)
    value = np.where(both, np.maximum(first, second) + 1, np.roll(first, -1, axis=1) + 2)
  speed = (float(value.max()) - halfway) / (horizon // 2) / 2
  return 1 / speed - 1


def played(compute: float, message: float, ratio: float, buckets: int, way: str, start: float,
           steps: int = 200) -> list[float]:
  """Loss of each job where the link is shared, or serves who came first.

  Args:
    compute: ms, of the first job.
    message: ms, of both.
    ratio: of the periods.
    buckets: of a message.
    way: "shared", "bucket" or "message".
    start: ms, when the second job begins.
    steps: of the slower job; the first quarter is not counted.
  """
  periods = [compute + message, ratio * (compute + message)]
  pieces = 1 if way == "message" else buckets
  # Per job: whether it sends (or waits to), what is left of it, since when, pieces left, ends.
  sends, since, todo, now = [False, False], [0.0, 0.0], [0, 0], 0.0
  left = [periods[0] - message, start + periods[1] - message]
  ends: tuple[list[float], list[float]] = ([], [])
  while min(map(len, ends)) < steps:
    busy = [job for job in (0, 1) if sends[job]]
    if way != "shared" and len(busy) == 2:
      # Who is under way goes on; else who came first.
      under_way = [job for job in busy if left[job] < message / pieces - 1e-9]
      busy = (under_way or sorted(busy, key=lambda job: since[job]))[:1]
    speed = [1 / len(busy) if job in busy else float(not sends[job]) for job in (0, 1)]
    step = min(left[job] / speed[job] for job in (0, 1) if speed[job] > 0)
    now += step
    for job in (0, 1):
      left[job] -= step * speed[job]
      if speed[job] == 0 or left[job] > 1e-9:
        continue
      if not sends[job]:
        sends[job], left[job], since[job], todo[job] = True, message / pieces, now, pieces
      elif todo[job] > 1:
        left[job], since[job], todo[job] = message / pieces, now, todo[job] - 1
      else:
        sends[job], left[job] = False, periods[job] - message
        ends[job].append(now)
  return [float(np.diff(ends[job][len(ends[job]) // 4:]).mean() / periods[job] - 1)
          for job in (0, 1)]


def measure() -> dict[str, Any]:
  compute, message, cells = float(flags.FLAGS.compute_ms), float(flags.FLAGS.message_ms), []
  starts = np.linspace(0, compute + message, 16, endpoint=False) + 0.37
  say = measured.progress("ratios", len(RATIOS))
  for done, ratio in enumerate(RATIOS):
    cell: dict[str, Any] = {"ratio": ratio, "best": best(compute, message, ratio)}
    for way in ("shared", "bucket", "message"):
      losses = np.array([played(compute, message, ratio, flags.FLAGS.buckets, way, start)
                         for start in starts])
      cell[way], cell[f"{way}_by_job"] = float(losses.mean()), losses.mean(axis=0).tolist()
    cells.append(cell)
    say(done + 1)
  return {"compute_ms": compute, "message_ms": message, "buckets": flags.FLAGS.buckets,
          "tick_ms": _TICK, "starts": len(starts), "cells": cells}


def page(figures: dict[str, Any]) -> list[str]:
  lines = measured.introduction("What any order of sending could give back", figures)
  lines += [
      f"Two jobs on one link that lose nothing by sharing it: {figures['compute_ms']:g} ms of "
      "compute in the first one,",
      f"messages of {figures['message_ms']:g} ms in {figures['buckets']} buckets in both, no "
      "jitter, nothing spent on listening. Loss: mean of",
      "both jobs' periods over their periods alone, less one; *best*: by whoever knows all that is "
      f"to come (in ticks of {figures['tick_ms']} ms).",
      f"The other columns are means over {figures['starts']} start offsets. *Recovered*: of the "
      "loss while shared.", ""]
  return lines + measured.table(
      ("period ratio", "shared", "first come, by bucket", "by message", "each job, by message",
       "best", "recovered by message", "recovered at best"),
      [(cell["ratio"], *[f"{100 * cell[way]:.1f} %" for way in ("shared", "bucket", "message")],
        ", ".join(f"{100 * loss:.1f} %" for loss in cell["message_by_job"]),
        f"{100 * cell['best']:.1f} %",
        *[f"{100 * (1 - cell[way] / cell['shared']):.0f} %" if cell["shared"] > 1e-3 else "–"
          for way in ("message", "best")]) for cell in figures["cells"]])


def main(argv: list[str]) -> None:
  figures = {**measured.circumstances("experiments.measure.turns_bounds"), **measure()}
  measured.write(figures, page(figures), pathlib.Path(flags.FLAGS.out))


if __name__ == "__main__":
  flags.DEFINE_integer("compute_ms", 36, "Of the first job.", lower_bound=2)
  flags.DEFINE_integer("message_ms", 24, "Of both jobs.", lower_bound=2)
  flags.DEFINE_integer("buckets", 8, "Of a message.", lower_bound=1)
  flags.DEFINE_string("out", "docs/measurements/turns_bounds.json",
                      "File the figures are written to.")
  app.run(main)
