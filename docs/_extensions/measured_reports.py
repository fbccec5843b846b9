"""Reads measured values out of their files: how often reports, forecasts and alarms are right."""

from __future__ import annotations

from typing import Any

from measured_values import Found, percent


def observed_healthy(figures: Any) -> Found:
  return Found(f"{figures['healthy_blaming_nobody']} of {figures['healthy']}",
               figures["healthy_blaming_nobody"] == figures["healthy"])


def observed_blame(figures: Any) -> Found:
  return Found(f"{figures['right']} of {figures['faulty']}; the layer in {figures['layer_named']} "
               f"of {figures['layer_to_name']}", figures["right_share"] >= 0.95)


def observed_lab(figures: Any) -> Found:
  return Found(f"{figures['right']} of {figures['done']}; {figures['healthy_blamed']} of "
               f"{figures['healthy']} healthy ones blamed; not held out",
               figures["right"] >= 0.95 * figures["done"] and not figures["healthy_blamed"])


def observed_processes(figures: Any) -> Found:
  seed, one = next(iter(figures["seeds"].items()))
  said = one["summary"]
  return Found(f"{said['right']} of {said['done']}; {said['healthy_blamed']} of {said['healthy']} "
               f"healthy ones blamed; the layer in {said['named']} of {said['in_a_layer']}; seed "
               f"{seed}, held out",
               said["right"] >= 0.95 * said["done"] and not said["healthy_blamed"])


def modes(figures: Any) -> Found:
  judged = figures["judged"]
  return Found(f"{judged['all']['macro_f1']:.2f} with all that is known, "
               f"{judged['counters']['macro_f1']:.2f} with the hosts' counters, "
               f"{judged['bare']['macro_f1']:.2f} by the stamps alone "
               f"({judged['all']['runs']} runs)",
               min(judged[name]["macro_f1"] for name in ("all", "counters")) >= 0.97)


def blame(figures: Any) -> Found:
  judged = figures["judged"]["all"]
  return Found(f"{judged['blame']['right']} of {judged['blame']['of']}",
               judged["blame"]["accuracy"] >= 0.97)


def false_blame(figures: Any) -> Found:
  judged = figures["judged"]["all"]
  blamed = len(judged["controls_falsely_blamed"])
  return Found(f"{blamed} of {judged['controls']}", blamed == 0)


def coverage(figures: Any) -> Found:
  found = figures["all"]
  return Found(f"{percent(found['coverage'], 0)} of {found['forecasts']} forecasts; worst error "
               f"{percent(found['worst_error'])}",
               found["coverage"] >= 0.85 and found["worst_error"] <= 0.1)


def compare(figures: Any) -> Found:
  return Found(f"{percent(figures['false_alarms_above_3_percent'])}, at worst "
               f"{percent(figures['worst_above_3_percent'])}", None)


def alarms(figures: Any) -> Found:
  late = [row for row in figures["delays"] if row["fault"] == "late_rank"]
  alarms, steps = (sum(row[name] for row in figures["healthy"]) for name in ("alarms", "steps"))
  return Found(f"{sum(row['within_30'] for row in late)} of {sum(row['jobs'] for row in late)} "
               f"late ranks; {alarms} false alarms in {steps:,} healthy steps",
               all(row["within_30"] == row["jobs"] for row in late))


def watchdog(figures: Any) -> Found:
  hangs = [row for row in figures["rows"] if row["late_by"] is not None]
  quiet = [row for row in figures["rows"] if row["late_by"] is None]
  return Found(f"{sum(row['named'] for row in hangs)} of {len(hangs)} hangs, at most "
               f"{max(row['late_by'] for row in hangs):.2f} s after the time-out; silent in "
               f"{sum(row['named'] for row in quiet)} of {len(quiet)} healthy runs",
               all(row["named"] and (row["late_by"] or 0) <= 2 for row in figures["rows"]))


def stream(figures: Any) -> Found:
  found = figures["seeds"]["4"]
  right, of = found["within_30"], found["faults"]
  return Found(f"{right} of {of}", right >= 0.95 * of)


def stream_healthy(figures: Any) -> Found:
  found = figures["seeds"]["4"]
  alarms, steps = found["false_alarms_in_controls"], found["steps_of_controls"]
  return Found(f"{alarms} in {steps:,} steps", alarms <= 1e-4 * steps)


def forecast_real(figures: Any) -> Found:
  errors = {forecast["ranks"]: forecast["error"] for forecast in figures["forecasts"]}
  return Found(", ".join(f"{percent(error)} at {ranks} ranks" for ranks, error in errors.items()),
               all(abs(error) <= 0.1 for error in errors.values()))


def probe(figures: Any) -> Found:
  by_ratio: dict[float, list[bool]] = {}
  for row in figures["rows"]:
    by_ratio.setdefault(row["ratio"], []).append(row["right"])
  words = [f"{sum(right)} of {len(right)} {'healthy' if ratio == 1 else f'{ratio:g} times as slow'}"
           for ratio, right in sorted(by_ratio.items())]
  return Found("; ".join(words), all(map(all, by_ratio.values())))
