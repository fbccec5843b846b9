"""docs/measurements/two_jobs.md, from the figures."""

from __future__ import annotations

from typing import Any

from experiments.lib import measured

_RULES = {"interleave": "interleave_jobs", "random": "whoever is contended moves at random"}


def markdown(figures: dict[str, Any]) -> list[str]:
  """The page's lines."""
  lines = ["# Two jobs on a shared trunk", "",
           "Real TCP between real JAX processes: two jobs of two ranks each, on two racks in "
           "network namespaces of",
           "one machine; every all-reduce crosses the one shaped trunk. How it is built: "
           "[fabric.md](../fabric.md).",
           "Figures with Student's 95 % intervals over repetitions (jackknife for what is no "
           "mean): of 2 repetitions they",
           "are very wide, and rightly so; of one there is none. Raw figures are in the JSON file "
           "beside this.", ""]
  for name, here in figures.get("by_congestion", {}).items():
    lines += _one(name, here)
  return lines


def _one(name: str, here: dict[str, Any]) -> list[str]:
  config, trunk, summary = here["config"], here["trunk"], here["summary"]
  machine = here["machine"]
  title = name if name == here["congestion"] else f"{name} ({here['congestion']})"
  floors = ", ".join(f"{1e3 * floor:.2f}" for floor in here["floor"] or ())
  lines = [f"## TCP congestion control: {title}", "",
           f"`{here['command']}`, {here['date']}, {machine['cores']} cores, {machine['platform']}, "
           f"jax {machine['jax']}, load average at the start {here['load_average_at_start']:g}.",
           "", f"Trunk shaped to {config['trunk_mbit']:g} Mbit/s ({config['shaper']}, queue "
               f"{config['trunk_queue_kb']:g} KB); measured {trunk['mbit']:.1f} Mbit/s, round trip "
               f"{trunk['rtt_ms']:.3f} ms idle, {trunk['loaded_rtt_ms']:.1f} ms loaded. A step: "
               f"{config['compute_ms']:g} ms of compute, jitter {config['jitter']:.0%}, "
               f"{config['gradient_kb']:g} KB of gradient in {config['buckets']} buckets. "
               f"{summary['repetitions']} repetitions of {here['steps']} steps "
               f"({here['alone_steps']} alone), start offsets drawn over a period; settled: after "
               f"{here['settle']} steps. Floors of the buckets, ms: "
               f"{floors + ', measured alone' if floors else 'learned by the pacer'}.", ""]
  rule = _RULES[here.get("rule", "interleave")]
  kinds = {"alone_none": "alone, no control", "alone_interleave": f"alone, {rule}",
           "none": "both, no control", "interleave": f"both, {rule}"}
  rows = [(label, *(_with_interval(summary[f"{kind}_{what}"], 2 if what.endswith("ms") else 3)
                    for what in ("mean_ms", "settled_ms", "settled_cv", "delay_ms")))
          for kind, label in kinds.items()]
  lines += measured.table(("", "mean period, ms", "settled, ms", "CV, settled", "delay a step, ms"),
                          rows)
  lines += measured.table(("", "measured", "wanted"), [
      ("gap: no control over alone", _percent(summary["gap"]), "–"),
      ("share of the gap recovered, all steps", _percent(summary["recovered"]),
       "60 %, better 80 %"),
      ("share of the gap recovered, settled", _percent(summary["recovered_settled"]),
       "60 %, better 80 %"),
      ("CV settled, interleaved over no control",
       f"{summary['interleave_settled_cv'][0] / summary['none_settled_cv'][0]:.2f}", "at most 1"),
      ("cost of the pacer to a job alone", _percent(summary["cost_alone"]), "0 %"),
      ("steps until delays end after the other job leaves",
       ", ".join(str(leave["disengaged_after"]) for leave in here["leaves"]) or "–", "at most 50")])
  alone = {"none": "no control", "interleave": rule}
  lines += measured.table(
      ("offset, ms", "alone, ms", *(f"{label}, ms" for label in alone.values()), "recovered",
       "load average"),
      [(r["offset_ms"], r["alone_none"]["mean_ms"], r["none"]["mean_ms"],
        r["interleave"]["mean_ms"], _recovered(r), r["load_average"]) for r in here["repetitions"]])
  return lines


def _recovered(repetition: dict[str, Any]) -> str | None:
  alone, none = repetition["alone_none"]["mean_ms"], repetition["none"]["mean_ms"]
  if none < 1.02 * alone:
    return None  # no gap worth the name
  return f"{(none - repetition['interleave']['mean_ms']) / (none - alone):.0%}"


def _with_interval(estimate: list[float | None], digits: int) -> str:
  if None in estimate:
    return "–" if estimate[0] is None else f"{estimate[0]:.{digits}f}"
  value, low, high = (f"{number:.{digits}f}" for number in estimate)
  return f"{value} ({low} to {high})"


def _percent(estimate: list[float | None]) -> str:
  if None in estimate:
    return "–" if estimate[0] is None else f"{100 * estimate[0]:.1f} %"
  value, low, high = (f"{100 * number:.1f}" for number in estimate)
  return f"{value} % ({low} to {high})"
