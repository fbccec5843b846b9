"""The figures of `experiments.measure.truth` as tables, and in sentences what falls short."""

from __future__ import annotations

from typing import Any

from experiments.lib import lateness_found, measured

_RULE = f"{lateness_found.SHARE:.0%} or {lateness_found.LEAST_MS:g} ms, whichever is larger"


def markdown(figures: dict[str, Any]) -> list[str]:
  """Lines of the report."""
  lines = measured.introduction("Truth: known delays against what was recorded", figures)
  lines += [f"Tolerance: {_RULE}.", ""]
  short: list[str] = []
  if "steps" in figures:
    lines += ["## One process, step by step", "",
              "The delay sleeps in the forward pass of rank 1, in random order among steps "
              "without. Truth is the time between the delay's own clock readings. Arrival *against "
              "others*: less the median arrival of the other ranks in the same step; *own*: by "
              "itself; both less their median without a delay. p95 is of the absolute error.", "",
              *_per_step(figures["steps"], short)]
  if "places" in figures:
    lines += ["## Where in the step", "",
              "2 ranks. The share of the sleep that each column of the late rank gained (median "
              "over the larger half of the delays), and whether the arrival shows it: that of the "
              "step, or, after an update, of the next. Baseline *own* for an update, for then all "
              "ranks of a process wait: XLA starts a step with collectives there when the one "
              "before it is over everywhere.", "", *_places(figures["places"], short)]
  if "exit" in figures:
    lines += ["## A heavy update, and the exit stamp", "",
              "Adam on 2 ranks of one process; medians with 95 % intervals, ms. Alone: compiled by "
              "itself, run in turns with the step, less a program that does nothing. Held: the "
              "same step, whose update waits for a clock reading of its own after the all-reduce. "
              "The exit stamp holds back scalars only: what the update column lacks, the sync "
              "column has.", "", *_exit(figures["exit"], short)]
  if "processes" in figures:
    lines += ["## Several processes, medians of blocks", "",
              "One device a process. Found: arrival against the other ranks' median, each on its "
              "own clock from its own exit. Entries: entry against the other ranks' median on the "
              "machine's CLOCK_MONOTONIC. Gained: found less the same rank's found without delay. "
              "`update`: after the all-reduce, so part of the next step's arrival. `host`: the "
              "process sleeps before it dispatches the step.",
              "", *_processes(figures["processes"], short)]
  return [*lines, "## What falls short", "",
          *(f"- {sentence}" for sentence in short or ["Nothing in this run."]), ""]


def _per_step(runs: list[dict[str, Any]], short: list[str]) -> list[str]:
  rows = []
  for run in runs:
    name = f"{run['ranks']} ranks, {run['clock']}"
    for delay, entry in run["delays"].items():
      others, own = entry["others"], entry["own"]
      rows.append([run["ranks"], run["clock"], delay, entry["slept_ms"], others["steps"],
                   _percent(others["within"]), others["median_error_ms"],
                   others["p95_abs_error_ms"], _percent(own["within"]), own["median_error_ms"],
                   own["p95_abs_error_ms"]])
      if others["within"] < 1:
        short.append(f"{name}, {delay} ms: {_percent(others['within'])} of the steps within "
                     f"(against others), median error {others['median_error_ms']:+.3f} ms; without "
                     "any delay the same figure strays by "
                     f"{run['p95_without_delay_ms']['others']:.3f} ms (p95).")
  return measured.table(["ranks", "clock", "asked ms", "slept ms", "steps",
                         "within, against others", "median error", "p95", "within, own",
                         "median error", "p95"], rows)


def _places(runs: list[dict[str, Any]], short: list[str]) -> list[str]:
  columns = list(dict.fromkeys(name for run in runs for name in run["shows_in"]))
  rows = []
  for run in runs:
    baseline = "own" if run["place"] == "update" else "others"
    entries = [entry[baseline] for entry in run["delays"].values()]
    within = sum(e["within"] * e["steps"] for e in entries) / sum(e["steps"] for e in entries)
    rows.append([run["place"], run["clock"], *(run["shows_in"].get(name) for name in columns),
                 run["counted_in"], baseline, _percent(within),
                 max((e["median_error_ms"] for e in entries), key=abs)])
    shown = run["shows_in"].get(run["place"])
    if shown is None or abs(shown - 1) > lateness_found.SHARE:
      short.append(f"A delay in the {run['place']}, {run['clock']} clock: its column shows "
                   f"{'nothing' if shown is None else _percent(shown)} of it.")
  return measured.table(["delay in", "clock", *columns, "arrival of", "baseline", "steps within",
                         "worst median error ms"], rows)


def _exit(runs: list[dict[str, Any]], short: list[str]) -> list[str]:
  names = ["step_ms", "sync_column_ms", "sync_held_ms", "all_reduce_alone_ms", "update_column_ms",
           "update_held_ms", "update_alone_ms", "missing_from_update_ms"]
  for run in runs:
    missing, held = run["missing_from_update_ms"], run["update_held_ms"]
    sure = missing[1] > 0 or missing[2] < 0
    if sure and abs(missing[0]) > max(lateness_found.LEAST_MS, lateness_found.SHARE * held[0]):
      side = "shorter" if missing[0] > 0 else "longer"
      short.append(f"Update of {run['parameters']:,} parameters in {run['leaves']} leaves: the "
                   f"column is {abs(missing[0]):.2f} ms {side} than that of the held update "
                   f"({held[0]:.2f} ms).")
  return measured.table(["leaves", "parameters",
                         *(name.removesuffix("_ms").replace("_", " ") for name in names)],
                        [[run["leaves"], run["parameters"],
                          *(_interval(run[name]) for name in names)] for run in runs])


def _processes(runs: list[dict[str, Any]], short: list[str]) -> list[str]:
  lines = []
  for run in runs:
    shared = "arrivals shared" if run["shared"] else "share=None"
    name = f"{run['processes']} processes, {shared}"
    rows = []
    for e in sorted(run["blocks"], key=lambda e: (e["where"], e["delay_ms"])):
      rows.append([e["where"], e["delay_ms"], e["rank"], e["steps"], e["slept_ms"], e["found_ms"],
                   e["true_ms"], e["agrees_with_entries"], e["found_gained_ms"],
                   e["true_gained_ms"], e["agrees_with_sleep"]])
      what = f"{name}, {e['delay_ms']:g} ms on rank {e['rank']} ({e['where']})"
      if not e["agrees_with_entries"]:
        short.append(f"{what}: found {e['found_ms']:.2f} ms, entries say {e['true_ms']:.2f} ms.")
      if not e["agrees_with_sleep"]:
        short.append(f"{what}: gained {e['found_gained_ms']:.2f} ms of {e['slept_ms']:.2f} slept; "
                     f"the entries gained {e['true_gained_ms']:.2f} ms.")
    lines += [f"### {name}, {run['clock']} clock", "",
              *measured.table(["where", "asked ms", "rank", "steps", "slept ms", "found ms",
                               "entries ms", "agrees", "found gained", "entries gained",
                               "agrees with sleep"], rows)]
    difference = run["largest_relative_difference"]
    if run["shared"]:
      lines += [f"Every rank saw {run['others_arrivals_seen']} arrivals of others; the largest "
                f"difference from those ranks' own stamps is {difference:.2g} of the value (of 1 "
                "ms, where it is less).", ""]
      if difference > 1e-5 or run["others_arrivals_unknown"]:
        short.append(f"{name}: shared arrivals differ by up to {difference:.2g}; "
                     f"{run['others_arrivals_unknown']} were unknown.")
    lines += [f"- {problem}" for problem in run["problems"]] + ([""] if run["problems"] else [])
  return lines


def _percent(share: float) -> str:
  return f"{100 * share:.1f} %"


def _interval(value: list[float]) -> str:
  return f"{value[0]:.3g} [{value[1]:.3g}, {value[2]:.3g}]"
