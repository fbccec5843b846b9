"""From the runs of two jobs that take turns to the figures that are published. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.labs.fabric import timeline
from experiments.lib import measured
from experiments.lib.paired import jackknifed

ARMS = {"none": ("none", "none"), "again": ("none", "none"), "both": ("turns", "turns"),
        "one": ("turns", "none"), "bucket": ("turns:bucket", "turns:bucket"),
        "interleave": ("interleave", "interleave")}
"""Pacers of the first job, and of each other one: turns by message, but where said."""
_SHOWN = {"both": "by message, all obey", "one": "by message, the first alone",
          "bucket": "by bucket, all obey", "interleave": "`interleave_jobs`", "again": "A/A"}


def pacers(arm: str, jobs: int) -> list[str]:
  """Pacers of so many jobs in one arm."""
  first, others = ARMS[arm]
  return [first, *[others] * (jobs - 1)]


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
  """Shares of the loss that come back, per job and of all, with Student's intervals over starts."""
  arms = [arm for arm in ARMS if all(arm in start for start in starts)]
  column = {(arm, name): np.array([start[arm][name] for start in starts])
            for arm in arms for name in ("mean_ms", "cv", "held_ms")}
  alone = {kind: np.array([start["alone"][kind]["mean_ms"][0] for start in starts])
           for kind in ("none", "turns")}
  alone_of = np.array([start["alone_of"] for start in starts])

  def loss(arm: str, use: Any) -> float:
    return float((column[arm, "mean_ms"][use] / alone_of[use] - 1).mean())

  def recovered(arm: str) -> list[float | None]:
    return _interval(lambda use: 1 - loss(arm, use) / loss("none", use), len(starts))

  def mean_of(arm: str, name: str) -> list[float | None]:
    return _interval(lambda use: float(column[arm, name][use].mean()), len(starts))

  controlled = [arm for arm in arms if arm != "none"]
  return {"starts": len(starts), "loss": _interval(lambda use: loss("none", use), len(starts)),
          "recovered": {arm: recovered(arm) for arm in controlled},
          "in_order": {arm: [round(1 - loss(arm, [k]) / loss("none", [k]), 3)
                             for k in range(len(starts))] for arm in controlled},
          "cv": {arm: mean_of(arm, "cv") for arm in arms},
          "by_job": {arm: [_interval(lambda use, arm=arm, job=job: float(
              (column[arm, "mean_ms"][use, job] / column["none", "mean_ms"][use, job] - 1).mean()),
                                     len(starts))
              for job in range(alone_of.shape[1])] for arm in controlled},
          "held_ms": {arm: mean_of(arm, "held_ms") for arm in controlled},
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
      f"Jobs of two hosts each on one trunk of {figures['trunk_mbit']:g} Mbit/s "
      f"({figures['congestion']};",
      f"{figures['priority']}): {figures['gradient_kb']:g} KB of gradient in {figures['buckets']} "
      "buckets, one",
      f"after the other, nothing overlapped; {figures['compute_ms']:g} ms of compute in the first "
      "job, 2 % jitter;",
      f"{figures['steps']} steps of the slowest job, the first {figures['settle']} not counted. "
      "Floors are given, as measured alone; `take_turns` with",
      f"learn={figures['learn']} and trial={figures['trial']}, so that so short a run gets to the "
      "turns. The loss is",
      "the mean of all jobs' periods against alone; its share that comes back, means over random "
      "starts with",
      "Student's 95 % intervals, and of each start, in order; *A/A* is the same without control, "
      "once more. A ratio of",
      "1.13:1.3 is one of three jobs.", ""]
  summaries = {ratio: of_ratio["summary"] for ratio, of_ratio in figures["by_ratio"].items()}
  lines += measured.table(
      ("period ratio", "starts", "loss without", "what", "recovered", "of each start, %", "CV",
       "CV without", "period of each job, against without", "held a step, ms"),
      [(ratio, s["starts"], _some(s["loss"]), _SHOWN[arm], _some(s["recovered"][arm]),
        ", ".join(f"{100 * value:.0f}" for value in s["in_order"][arm]),
        _some(s["cv"][arm], share=False), _some(s["cv"]["none"], share=False),
        "; ".join(map(_some, s["by_job"][arm])), _some(s["held_ms"][arm], share=False))
       for ratio, s in summaries.items() for arm in _SHOWN if arm in s["recovered"]])
  lines += measured.table(("period ratio", "starts", "cost of turns to a job alone"),
                          [(ratio, s["starts"], _some(s["cost_alone"]))
                           for ratio, s in summaries.items()])
  for ratio, of_ratio in figures["by_ratio"].items():
    lines += [f"At {ratio} one job left: the other held for {one['silent_after']} steps more, "
              f"{one['held_ms']:g} ms in all, of {one['steps']}." for one in of_ratio["leaves"]]
  return lines
