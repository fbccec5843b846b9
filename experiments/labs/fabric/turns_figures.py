"""From the runs of two jobs that take turns to the figures that are published. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.labs.fabric import timeline
from experiments.lib import measured
from experiments.lib.paired import jackknifed

ARMS = {"none": ("none", "none"), "both": ("turns", "turns"), "one": ("turns", "none"),
        "again": ("none", "none")}
"""Pacers of the two jobs."""


def of_run(lines: list[timeline.Timeline], settle: int) -> dict[str, list[float]]:
  """Mean period, its CV and what was held of each job, in the steps in which all ran, settled: ms,
  and no unit."""
  common = timeline.together(lines)
  each = [1e3 * timeline.periods(line)[settle:] for line in common]
  if min(map(len, each)) < 10:
    raise ValueError("Too few settled steps are left: ask for more --steps, or a smaller --settle.")
  return {"mean_ms": [float(values.mean()) for values in each],
          "cv": [float(values.std() / values.mean()) for values in each],
          "held_ms": [float(1e3 * line.delays[settle:].mean()) for line in common]}


def summary(starts: list[dict[str, Any]]) -> dict[str, Any]:
  """Shares of the loss that come back, per job and of both, with Student's intervals over
  starts."""
  column = {(arm, name): np.array([start[arm][name] for start in starts])
            for arm in ("none", "again", "both", "one")
            for name in ("mean_ms", "cv", "held_ms")}
  alone = {kind: np.array([start["alone"][kind]["mean_ms"][0] for start in starts])
           for kind in ("none", "turns")}
  alone_of = np.array([start["alone_of"] for start in starts])

  def loss(arm: str, use: Any) -> float:
    return float((column[arm, "mean_ms"][use] / alone_of[use] - 1).mean())

  def recovered(arm: str) -> list[float | None]:
    return _interval(lambda use: 1 - loss(arm, use) / loss("none", use), len(starts))

  def mean_of(arm: str, name: str) -> list[float | None]:
    return _interval(lambda use: float(column[arm, name][use].mean()), len(starts))

  return {"starts": len(starts), "loss": _interval(lambda use: loss("none", use), len(starts)),
          "recovered": {arm: recovered(arm) for arm in ("both", "one", "again")},
          "cv": {arm: mean_of(arm, "cv") for arm in ("none", "again", "both", "one")},
          "by_job": {arm: [_interval(lambda use, arm=arm, job=job: float(
              (column[arm, "mean_ms"][use, job] / column["none", "mean_ms"][use, job] - 1).mean()),
                                     len(starts))
              for job in range(2)] for arm in ("again", "both", "one")},
          "held_ms": {arm: mean_of(arm, "held_ms") for arm in ("both", "one")},
          "cost_alone": _interval(
              lambda use: float((alone["turns"][use] / alone["none"][use] - 1).mean()),
              len(starts))}


def _interval(figure: Any, count: int) -> list[float | None]:
  found = jackknifed(figure, count)
  return [round(value, 5) if np.isfinite(value) else None
          for value in (found.value, found.low, found.high)]


def of_leave(stays: timeline.Timeline, left_at: float) -> dict[str, Any]:
  """Steps until the job that stays holds nothing more, and how long it held until then."""
  after = timeline.cut(stays, left_at)
  # Asking costs a silent pacer some us a collective, more where processors are busy.
  held = np.flatnonzero(after.delays > 1e-3)
  return {"silent_after": int(held[-1]) + 1 if len(held) else 0, "steps": len(after.steps),
          "held_ms": round(1e3 * float(after.delays.sum()), 3)}


def _some(values: list[float | None], share: bool = True) -> str:
  middle, low, high = values
  if middle is None:
    return "–"
  scale, digits = (100, 1) if share else (1, 3)
  ends = "" if low is None or high is None else (f" [{scale * low:.{digits}f}, "
                                                 f"{scale * high:.{digits}f}]")
  return f"{scale * middle:.{digits}f}{' %' if share else ''}{ends}"


def page(figures: dict[str, Any]) -> list[str]:
  """The page, in Markdown."""
  lines = measured.introduction("Jobs that take turns, over real TCP", figures)
  lines += [
      f"Two jobs of two hosts each on one trunk of {figures['trunk_mbit']:g} Mbit/s "
      f"({figures['congestion']};",
      f"{figures['priority']}): {figures['gradient_kb']:g} KB of gradient in {figures['buckets']} "
      "buckets, one",
      f"after the other, nothing overlapped; {figures['compute_ms']:g} ms of compute in the first "
      "job, 2 % jitter;",
      f"{figures['steps']} steps, the first {figures['settle']} not counted. `take_turns` with",
      f"learn={figures['learn']} and trial={figures['trial']}, so that so short a run gets to the "
      "turns. The loss is",
      "the mean of both jobs' periods against alone; its share that comes back, means over random "
      "starts with",
      "Student's 95 % intervals; *A/A* is the same without control, once more.", ""]
  rows, more = [], []
  for ratio, of_ratio in figures["by_ratio"].items():
    s = of_ratio["summary"]
    rows.append((ratio, s["starts"], _some(s["loss"]), _some(s["recovered"]["both"]),
                 _some(s["recovered"]["one"]), _some(s["recovered"]["again"]),
                 _some(s["cost_alone"])))
    more.append((ratio,
                 *(_some(s["cv"][arm], share=False) for arm in ("none", "again", "both", "one")),
                 "; ".join(map(_some, s["by_job"]["both"])),
                 "; ".join(map(_some, s["by_job"]["one"]))))
  lines += measured.table(("period ratio", "starts", "loss without", "recovered, both obey",
                           "recovered, the first alone", "recovered, A/A", "cost to a job alone"),
                          rows)
  lines += measured.table(("period ratio", "CV without", "CV, A/A", "CV, both", "CV, one",
                           "both: period of each job", "one: of the one that obeys; of the other"),
                          more)
  for ratio, of_ratio in figures["by_ratio"].items():
    lines += [f"At {ratio} one job left: the other held for {one['silent_after']} steps more, "
              f"{one['held_ms']:g} ms in all, of {one['steps']}." for one in of_ratio["leaves"]]
  return lines
