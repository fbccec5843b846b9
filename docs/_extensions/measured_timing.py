"""Reads measured values out of their files: overhead, stamps, bits, speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from measured_values import Found, interval, percent


def overhead(step: str) -> Callable[[Any], Found]:
  def read(figures: Any) -> Found:
    here = figures["where"][step]
    cost, null = (here["arms"][arm]["percent"] for arm in ("recorded", "bare again"))
    return Found(
        f"{interval(cost, '%')} of {here['bare_ms'][0]:.1f} ms; A/A {interval(null, '%')}",
        cost[2] <= 0.5)
  return read


def starts(figures: Any) -> Found:
  found = [(here["arms"]["recorded"]["percent"], here["bare_ms"][0])
           for here in figures["sizes"].values()]
  return Found("; ".join(f"{interval(cost, '%')} of {bare:.1f} ms" for cost, bare in found),
               all(cost[2] <= 0.5 for cost, _ in found))


def gpu(figures: Any) -> Found:
  whole, instrumented = figures["observed"], figures["instrumented"]
  steps = [*whole, *instrumented]
  wrong = sum(bool(step["problems"]) for step in steps)
  jaxes = ", ".join(dict.fromkeys(step["jax"] for step in steps))
  return Found(f"{len(whole)} steps jitted as a whole, {len(instrumented)} instrumented, of jax "
               f"{jaxes}: {wrong} not as they should be; none ran", not wrong)


def timestamp(name: str, most: float) -> Callable[[Any], Found]:
  def read(figures: Any) -> Found:
    took = figures["alone"][f"stamp_and_hold_{name}_us"]
    return Found(interval(took, "µs", 2), took[2] <= most)
  return read


def truth(figures: Any) -> Found:
  words, good = [], True
  for job in figures["processes"]:
    right = sum(block["agrees_with_entries"] for block in job["blocks"])
    good &= right == len(job["blocks"])
    words.append(f"{right} of {len(job['blocks'])} with {job['processes']} processes"
                 f"{', arrivals shared' if job['shared'] else ''}")
  return Found("; ".join(words), good)


def bitwise(figures: Any) -> Found:
  every = [row for part in ("one", "processes", "no_fma", "rows") for row in figures.get(part, ())]
  # the bare step again, or with a gradient
  nulls = [row for row in every if row["way"].startswith("not at all")]
  rows = [row for row in every if row not in nulls]
  bits, collectives = (sum(not row["bits_equal"] for row in rows),
                       sum(not row["hlo_equal"] for row in rows))
  return Found(f"{len(rows)} comparisons: {bits} differ in bits, {collectives} in collectives; of "
               f"the controls {sum(not row['bits_equal'] for row in nulls)} of {len(nulls)}",
               bits + collectives == 0)


def speed(figures: Any) -> Found:
  wall, memory, target = figures["wall_s"], figures["peak_gib"], figures["target"]
  return Found(f"{wall['median']:.1f} s, {memory['median']:.2f} GiB",
               wall["worst"] <= target["seconds"] and memory["worst"] <= target["gibibytes"])


def page(figures: Any) -> Found:
  made, size, paint = (figures[name] for name in ("wall_s", "megabytes", "first_paint_s"))
  return Found(
      f"{made['median']:.1f} s, {figures['peak_gib']['median']:.1f} GiB, {size['median']:.1f} MB, "
      f"first paint {paint['median']:.2f} s",
      figures["within_target"])


def profiled(figures: Any) -> Found:
  return Found(f"+{percent(figures['slower'], 0)} ± {percent(1.96 * figures['error'], 0)}, "
               f"{figures['steps']} steps in {figures['every']}", None)


def update(figures: Any) -> Found:
  costs = {name: cost for name, cost in figures["ranks"]["1024"].items() if "hold" not in name}
  least, most = (min(costs, key=lambda name: costs[name][0]),
                 max(costs, key=lambda name: costs[name][0]))
  return Found(f"{costs[least][0]:.1f} µs ({least}) to {costs[most][0]:.1f} µs ({most})",
               all(cost[0] <= 10 for cost in costs.values()))


def watch(figures: Any) -> Found:
  runs = figures["runs"]
  return Found("; ".join(f"{percent(run['core_share'])} with {run['processes']} processes"
                         for run in runs),
               all(run["core_share"] <= figures["target_core_share"] for run in runs))


def timeline(figures: Any) -> Found:
  rows = figures["rows"]
  return Found(", ".join(f"`{name}` {rows[name]['median_s']:.1f} s"
                         for name in ("--chrome",)),
               figures["within_target"])


def exporters(figures: Any) -> Found:
  mean, error = figures["mean"], figures["standard_error"]
  return Found(f"{mean:.1f} µs, standard error {error:.1f}", mean + 2 * error <= 20)


def layers(figures: Any) -> Found:
  faults = [fault for job in figures["jobs"] for fault in job["faults"]]
  within = sum(fault["within"] for fault in faults)
  layers = ", ".join(f"{sum(fault['layer_right'] for fault in job['faults'])} of "
                     f"{len(job['faults'])} with {job['processes']} "
                     f"process{'es' * (job['processes'] > 1)}" for job in figures["jobs"])
  return Found(f"{within} of {len(faults)}; the largest of its step, layer and rank: {layers}",
               within == len(faults))


def observed(figures: Any) -> Found:
  rows = [row for row in figures["rows"] if row["target_ms"] == 20]
  words = "; ".join(f"{row['case']}: {interval(row['percent']['recorded'], '%')} of "
                    f"{row['bare_ms'][0]:.1f} ms, A/A "
                    f"{interval(row['percent']['bare again'], '%')}" for row in rows)
  return Found(words, all(row["percent"]["recorded"][2] <= 1 for row in rows))


def marks(figures: Any) -> Found:
  alone, loop, record = (figures["alone"], figures["in_a_program"]["mark"],
                         figures["record"]["median"])
  return Found(f"{interval(alone, 'ns', 0)} alone, {interval(loop, 'ns', 0)} in a compiled loop; "
               f"`record()` {interval(record, 'µs')}", loop[2] <= 1000)


def mark_rows(figures: Any) -> Found:
  row = figures["rows"][-1]
  return Found(f"{row['steps_bytes']:.0f} B of sums; {row['collectives_bytes']:.0f} B in full, "
               f"{row['writer_us']:.0f} µs of the writer's thread", None)


def intervals(figures: Any) -> Found:
  rows = [row for row in figures["means"] if row["rounds"] <= 12
          and not row["rounds_are"].startswith("pauses")]
  own, old = ([row["coverage"][kind] for row in rows] for kind in ("Student", "percentile, mean"))
  return Found(f"{percent(min(own), 0)} to {percent(max(own), 0)}; a percentile bootstrap's of "
               f"means {percent(min(old), 0)} to {percent(max(old), 0)}", min(own) >= 0.93)


def mutations(figures: Any) -> Found:
  return Found(f"{figures['noticed']} of {figures['mistakes']}",
               figures["noticed"] == figures["mistakes"])
