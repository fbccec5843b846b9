"""Reads measured values out of their files: pacing, housekeeping, work that moves, simulation."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from typing import Any

from measured_values import FOLDER, Found, interval, percent


def null(figures: Any) -> Found:
  return Found(f"+{percent(figures['worst_ratio'] - 1, 3)} at worst", figures["within_target"])


def null_live(figures: Any) -> Found:
  words, verdicts = [], []
  for job, kinds in figures["jobs"].items():
    for kind, row in kinds.items():
      words.append(
          f"{job}, {kind}: {interval(row['on_percent'], '%', 2)} ({row['verdict_percent']})")
      verdicts.append(row["verdict_percent"])
  return Found("; ".join(words), None if any("inconclusive" in said for said in verdicts) else
               all(said == "met" for said in verdicts))


def polling(figures: Any) -> Found:
  arm = figures["cases"]["4 ranks that poll, pinned, two to a core"]["arms"]["cost 0.01"][
      "change_percent"]
  return Found(interval(arm, "%"), arm[2] <= -20)


def saved(figures: Any) -> Found:
  arm = figures["cases"]["2 ranks that poll, pinned (control: a core each)"]["arms"]["cost 0.01"]
  cpu, step = interval(arm["cpu_change_percent"], "%"), interval(arm["change_percent"], "%")
  return Found(f"{cpu} of the CPU time; step {step}", abs(arm["change_percent"][0]) < 2)


def two_jobs(figures: Any) -> Found:
  found = {name: here["summary"] for name, here in figures["by_congestion"].items()}
  words = [
      f"{name} {interval([100 * share for share in each['recovered']], '%', 0)}, "
      f"{each['repetitions']} starts"
      for name, each in found.items()]
  return Found("; ".join(words), all(summary["recovered"][1] >= 0.6 for summary in found.values()))


def steadiness(figures: Any) -> Found:
  summary = figures["by_congestion"]["cubic"]["summary"]
  ratio = summary["interleave_settled_cv"][0] / summary["none_settled_cv"][0]
  return Found(f"{ratio:.1f} times", ratio <= 1)


def scene(name: str, most: float) -> Callable[[Any], Found]:
  def read(figures: Any) -> Found:
    by_control = {cell["control"]: cell["mean"] for cell in figures["cells"]
                  if cell["scene"] == name}
    return Found(f"{by_control['interleave']:.3f}; without control {by_control['none']:.3f}",
                 by_control["interleave"] <= most)
  return read


def false_alarms(figures: Any) -> Found:
  share = figures["summary"]["false_alarms"]["share"]
  return Found(percent(share), share <= figures["target"]["false_alarms"])


def regret(steps: int) -> Callable[[Any], Found]:
  """The greater of what the seed that the settings were chosen on says, and a fresh one."""
  def read(figures: Any) -> Found:
    fresh = json.loads((FOLDER / "guard_simulated_seed1.json").read_text())
    row = max((each["summary"]["regret"][str(steps)] for each in (figures, fresh)),
              key=lambda each: each["p95"])
    return Found(f"{row['p95']:.0f} steps, the greater of two seeds", row["p95"] <= row["target"])
  return read


def shared_simulated(name: str, least: float) -> Callable[[Any], Found]:
  """Gains of a scenario at each number of ranks; `least` is that of the gain in percent."""
  def read(figures: Any) -> Found:
    found = figures["scenarios"][name]
    said = "; ".join(f"{ranks} ranks {interval(one['gain_percent'], '%', 2)}, "
                     f"{one['changes_in_1000_steps']:.1f} changes in 1,000 steps"
                     for ranks, one in found.items())
    return Found(said, all(one["gain_percent"][1] >= least for one in found.values()))
  return read


def shared_live(figures: Any) -> Found:
  # Less than 5 % to be had: a quotient of noise.
  found = {slow: each["recovered"]["shared"] for slow, each in figures["judged"].items()
           if "recovered" in each and each["percent"]["by_hand"][0] < -5}
  said = "; ".join(f"{slow} times slower {value:.0f} % [{low:.0f}, {high:.0f}]"
                   for slow, (value, low, high) in found.items())
  return Found(said, all(value >= 85 for value, _, _ in found.values()))


def documents(figures: Any) -> Found:
  change, again = figures["balanced_percent"], figures["again_percent"]
  return Found(f"{change[0]:+.1f} % [{change[1]:+.1f}, {change[2]:+.1f}], again {again[0]:+.1f} % "
               f"[{again[1]:+.1f}, {again[2]:+.1f}]; most over mean load "
               f"{figures['most_over_mean']['as drawn']:.2f} to "
               f"{figures['most_over_mean']['balanced']:.2f}", None)


def shared_in_table1(figures: Any) -> Found:
  found = [one for row in figures["worlds"] for one in row["by_micro_batches"].values()]
  gains = [one["gain_percent"][0] for one in found]
  return Found(f"{min(gains):.1f} to {max(gains):.1f} % by world and number of micro-batches; at "
               f"most {max(one['most_percent'] for one in found):.1f} % was to be had",
               min(gains) >= -0.5)


_PAPER = {"4": -0.006, "8": 0.008, "16": 0.033, "32": 0.078, "64": 0.11}


def table1(figures: Any) -> Found:
  most = {nodes: max(max(figures["sizes"][nodes][arm]["gain"]) for arm in ("all", "both"))
          for nodes in _PAPER}
  return Found(f"at most {', '.join(percent(gain) for gain in most.values())} over all such worlds",
               all(most[nodes] >= gain for nodes, gain in _PAPER.items()))


def turns(figures: Any) -> Found:
  """The middle of each group of worlds, by whether other traffic comes and goes: the baseline fits
  both."""
  record = json.loads((FOLDER / "table1_worlds.json").read_text())
  load = record["fields"].index("load")
  quiet = [world["values"][load] == 0 for search in record["searches"]
           for world in search["worlds"]]
  words = []
  for name, wanted in (("without other traffic", True), ("with it", False)):
    middle = [statistics.median(gain for gain, is_quiet in zip(
        figures["sizes"][nodes]["both"]["gain"], quiet, strict=True) if is_quiet == wanted)
              for nodes in _PAPER]
    words.append(f"worlds {name}, middle: {', '.join(percent(gain) for gain in middle)}")
  return Found("; ".join(words) + "; the baseline does not tell which", None)


def posterior(figures: Any) -> Found:
  """The prior, then the posterior within ever narrower tolerances."""
  runs: dict[str, list[dict[str, Any]]] = {}
  for run in sorted(figures["runs"], key=lambda run: -(run["tolerance"] or math.inf)):
    wide = run["tolerance"]
    name = f"within {wide:g} tolerance{'s' * (wide != 1)}" if wide else "prior"
    runs.setdefault(name, []).append(run)
  words = []
  for name, some in runs.items():
    gains = [gain for run in some for gain in run["sizes"]["64"]["both"]["gain"]]
    ends = statistics.quantiles(gains, n=20, method="inclusive")
    words.append(f"{name} {', '.join(percent(ends[at]) for at in (0, 9, 18))}"
                 + (f" ({' and '.join(str(run['ancestors']) for run in some)} of the first draws "
                    "are left)" if name != "prior" else ""))
  return Found("; ".join(words), None)


def emulated(figures: Any) -> Found:
  return Found(", ".join(
      f"{percent(run['arms']['housekeeping']['throughput'][0] - 1)} with {run['processes']}"
      for run in figures["runs"]), None)


def pauses(figures: Any) -> Found:
  frozen = [(run["processes"], run["stages"]["balanced"]["arms"]["frozen"]["ratio"])
            for run in figures["runs"]]
  return Found("; ".join(f"{processes} processes: {interval([100 * (r - 1) for r in ratio], '%')}"
                         for processes, ratio in frozen),
               all(high < 1 for _, (_, _, high) in frozen))


def accuracy(figures: Any) -> Found:
  errors = [abs(case["error"]) for case in figures["cases"] if "trunk" in case["group"]]
  return Found(
      f"{sum(error <= 0.01 for error in errors)} of {len(errors)} cases, at most "
      f"{percent(max(errors))}",
      max(errors) <= 0.01)


def simulated(figures: Any) -> Found:
  cases = {name: case for name, case in figures["cases"].items() if case["limit_s"]}
  slowest = max(cases, key=lambda name: max(cases[name]["run_s"]) / cases[name]["limit_s"])
  return Found(f"{sum(case['within'] for case in cases.values())} of {len(cases)} cases within; "
               f"nearest to its limit: {cases[slowest]['about']}, "
               f"{max(cases[slowest]['run_s']):.1f} of {cases[slowest]['limit_s']:g} s",
               all(case["within"] for case in cases.values()))


def policies(figures: Any) -> Found:
  ratios = [row["baseline"]["ratio"][-1] for row in figures["compounding"].values()]
  nulls = [row["null"]["ratio"][-1] for row in figures["compounding"].values()]
  return Found(f"{min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} sizes; with independent "
               f"jitter {min(nulls):.2f} to {max(nulls):.2f}", None)


def strategies(figures: Any) -> Found:
  return Found(f"{len(figures['rows'])} strategies and scenes, {figures['seeds']} seeds", None)
