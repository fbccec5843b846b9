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
  return {"starts": len(starts), "load_averages": [start["load_average"] for start in starts],
          "cv_in_order": {arm: [round(float(row.mean()), 3) for row in column[arm, "cv"]]
                          for arm in arms},
          "loss": _interval(lambda use: loss("none", use), len(starts)),
          "recovered": {arm: recovered(arm) for arm in controlled},
          "in_order": {arm: [round(1 - loss(arm, [k]) / loss("none", [k]), 3)
                             for k in range(len(starts))] for arm in controlled},
          "cv": {arm: mean_of(arm, "cv") for arm in arms},
          "by_job": {arm: [_interval(lambda use, arm=arm, job=job: float(
              (column[arm, "mean_ms"][use, job] / column["none", "mean_ms"][use, job] - 1).mean()),
                                     len(starts))
              for job in range(alone_of.shape[1])] for arm in controlled},
          "held_ms": {arm: mean_of(arm, "held_ms") for arm in controlled},
          "cv_alone": {kind: _interval(lambda use, kind=kind: float(np.mean(
              [starts[k]["alone"][kind]["cv"][0] for k in np.arange(len(starts))[use]])),
                                       len(starts)) for kind in alone},
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
  # Asking costs a silent pacer some us a collective, more where processors are busy; listening once
  # to a free link some 0.5 ms.
  held = np.flatnonzero(after.delays > 1e-3)
  return {"silent_after": int(held[-1]) + 1 if len(held) else 0, "steps": len(after.steps),
          "listened": int((after.delays > 0.25e-3).sum()),
          "held_ms": round(1e3 * float(after.delays.sum()), 3)}


def of_guarded(lines: list[timeline.Timeline], columns: dict[str, dict[str, np.ndarray]],
               settle: int, parts: int = 4) -> dict[str, Any]:
  """A long run under the guard, in equal parts of its steps, and what the guards of the jobs that
  obey say in the end.

  Args:
    lines: of all jobs.
    columns: [K] a column of `jaxpace.guard` each, by job.
    settle: steps at the start that don't count.
    parts: how many.
  """
  common = [timeline.Timeline(*(values[settle:] for values in line))
            for line in timeline.together(lines)]
  edges = np.linspace(max(line.ends[0] for line in common),
                      min(line.ends[-1] for line in common), parts + 1)
  found = [of_run([timeline.cut(line, low, high) for line in common], 0)
           for low, high in zip(edges, edges[1:], strict=False)]
  said = {}
  for job, of_job in columns.items():
    on = of_job["guard_on"]
    said[job] = {"on": [round(float(np.nanmean(some)), 3) for some in np.array_split(on, parts)],
                 **_last({name: of_job[name]
                          for name in ("pairs", "effect", "effect_low", "effect_high")})}
  return {"parts": found, "guards": said}


def _last(columns: dict[str, np.ndarray]) -> dict[str, float | None]:
  """What they say in the last step of which an effect is known; its ends may not be, yet."""
  known = np.flatnonzero(np.isfinite(columns["effect"]))
  return {name: round(float(values[known[-1]]), 5)
          if len(known) and np.isfinite(values[known[-1]]) else None
          for name, values in columns.items()}


_KEPT = ("by_ratio",)


def part_like(figures: dict[str, Any], setting: dict[str, Any]) -> dict[str, Any]:
  """The part of the figures that was measured with such settings; a new one where there is none."""
  for part in figures["parts"]:
    if {name: value for name, value in part.items() if name not in _KEPT} == setting:
      found: dict[str, Any] = part
      return found
  figures["parts"].append(setting | {"by_ratio": {}})
  new: dict[str, Any] = figures["parts"][-1]
  return new


def at_ratio(part: dict[str, Any], ratio: str) -> dict[str, Any]:
  """What a part holds of jobs with such periods."""
  found: dict[str, Any] = part["by_ratio"].setdefault(
      ratio, {"starts": [], "leaves": [], "guarded": []})
  return found


def merge(figures: dict[str, Any], more: dict[str, Any]) -> None:
  """Adds what another file of figures holds, starts of the same settings behind one another."""
  figures["commands"] += more["commands"]
  for other in more["parts"]:
    part = part_like(figures, {name: value for name, value in other.items() if name not in _KEPT})
    for ratio, added in other["by_ratio"].items():
      here = at_ratio(part, ratio)
      for kind in ("starts", "leaves", "guarded"):
        here[kind] += added[kind]
      if here["starts"]:
        here["summary"] = summary(here["starts"])


def _some(values: list[float | None], share: bool = True) -> str:
  middle, low, high = values
  if middle is None:
    return "–"
  scale, digits = (100, 1) if share else (1, 3)
  ends = "" if low is None or high is None else (f" [{scale * low:.{digits}f}, "
                                                 f"{scale * high:.{digits}f}]")
  return f"{scale * middle:.{digits}f}{' %' if share else ''}{ends}"


def _recovered(guarded: dict[str, Any], part: dict[str, list[float]]) -> float:
  """Share of the loss that comes back in one part of a run under the guard."""
  alone = np.array(guarded["alone_of"])
  without = np.mean([np.array(run["mean_ms"]) / alone - 1 for run in guarded["none"]])
  return float(1 - (np.array(part["mean_ms"]) / alone - 1).mean() / without)


def _recorded(parts: list[dict[str, Any]]) -> str:
  every = {part.get("copied_steps") for part in parts}
  if every == {None}:
    return ("and written every second by each rank's process, which makes pauses; the rule is the "
            "one of then")
  return f"and written every {', '.join(map(str, sorted(filter(None, every))))} steps"


def page(figures: dict[str, Any]) -> list[str]:
  """The page, in Markdown."""
  lines = measured.introduction("Jobs that take turns, over real TCP", figures)
  lines += [f"- `{one['command']}`, {one['date']}, load average at the start "
            f"{one['load_average_at_start']:g}" for one in figures["commands"]]
  first = figures["parts"][0]
  lines += [
      "", f"Jobs of two hosts each on one trunk of {first['trunk_mbit']:g} Mbit/s "
      f"({first['priority']}):",
      f"{first['gradient_kb']:g} KB of gradient in {first['buckets']} buckets, one after the "
      "other, nothing overlapped; the first",
      "job's compute as the table says, 2 % jitter; "
      f"{first['steps']} steps of the slowest job, the first {first['settle']} not counted.",
      "Floors are given, as measured alone; `take_turns` with "
      f"learn={first['learn']} and trial={first['trial']}, so that so short a run gets",
      "to the turns. The loss is the mean of all jobs' periods against alone; its share that comes "
      "back, means over random",
      "starts with Student's 95 % intervals, and of each start, in order; *A/A* is the same "
      "without control, once more. A",
      "ratio of 1.13:1.3 is one of three jobs. What was stamped is copied",
      f"{_recorded(figures['parts'])}.", ""]
  cells = [(part["congestion"], part["compute_ms"], ratio, here)
           for part in figures["parts"] for ratio, here in part["by_ratio"].items()]
  with_starts = [(*cell[:3], cell[3]["summary"]) for cell in cells if "summary" in cell[3]]
  condition = ("TCP", "compute, ms", "period ratio")
  lines += measured.table(
      (*condition, "starts", "loss without", "what", "recovered", "of each start, %", "CV",
       "CV without", "period of each job, against without", "held a step, ms"),
      [(*where, s["starts"], _some(s["loss"]), _SHOWN[arm], _some(s["recovered"][arm]),
        ", ".join(f"{100 * value:.0f}" for value in s["in_order"][arm]),
        _some(s["cv"][arm], share=False), _some(s["cv"]["none"], share=False),
        "; ".join(map(_some, s["by_job"][arm])), _some(s["held_ms"][arm], share=False))
       for *where, s in with_starts for arm in _SHOWN if arm in s["recovered"]])
  lines += measured.table(
      (*condition, "load average at each start", "CV of each: without", "once more", "all obey"),
      [(*where, *(", ".join(f"{value:g}" for value in values) for values in (
          s["load_averages"], *(s["cv_in_order"].get(arm, ()) for arm in ("none", "again", "both"))
      ))) for *where, s in with_starts])
  lines += measured.table(
      (*condition, "starts", "cost of turns to a job alone", "CV alone", "CV alone, with turns"),
      [(*where, s["starts"], _some(s["cost_alone"]),
        *(_some(s["cv_alone"][kind], share=False) for kind in ("none", "turns")))
       for *where, s in with_starts])
  left = [(*where, *(one.get(name) for name in ("silent_after", "listened", "steps", "held_ms")))
          for *where, here in cells for one in here["leaves"]]
  if left:
    lines += ["All obeyed, and all but the first left: steps of it until none was held for more "
              "than a millisecond any more.", ""]
    lines += measured.table((*condition, "silent after", "steps with listening", "of", "held, ms"),
                            left)
  long = [(where, one) for *where, here in cells for one in here["guarded"]]
  if long:
    lines += ["Under the guard (block=64, trust=True), one long run between two of a quarter its "
              "length without control, in four",
              "parts; *on* is the share of steps in which the guard let turns through.", ""]
    lines += measured.table(
        (*condition, "who obeys", "steps", "load average", "recovered in each part, %", "CV",
         "CV without", "held a step of who obeys, ms", "on", "the guard's effect", "pairs"),
        [_guarded_row(where, one) for where, one in long])
  return lines


def _guarded_row(where: list[Any], one: dict[str, Any]) -> tuple[Any, ...]:
  parts, names = one["parts"], list(one["steps"])
  at = [names.index(job) for job in one["obey"]]

  def each(values: Any, digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)

  effects = [_some([guard[name] for name in ("effect", "effect_low", "effect_high")])
             for guard in one["guards"].values()]
  return (*where, " and ".join(one["obey"]), ", ".join(map(str, one["steps"].values())),
          one["load_average"], each((100 * _recovered(one, part) for part in parts), 0),
          each((np.mean(part["cv"]) for part in parts), 3),
          each((np.mean(run["cv"]) for run in one["none"]), 3),
          each((np.mean([part["held_ms"][k] for k in at]) for part in parts), 2),
          "; ".join(each(guard["on"], 2) for guard in one["guards"].values()),
          "; ".join(effects),
          "; ".join("–" if guard["pairs"] is None else f"{guard['pairs']:.0f}"
                    for guard in one["guards"].values()))
