"""The figures of the table of measurements: what was aimed at, and where in the files the measured
value stands.

No measured number is written here: each is read from its JSON file when the pages are built.
"""

from __future__ import annotations

import json
import pathlib
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).parents[1] / "measurements"


class Found(NamedTuple):
  """What a file holds: in words, and whether that was aimed at (None: nothing was, or it can't be
  told)."""

  words: str
  met: bool | None


class Figure(NamedTuple):
  """One row: what is measured, what was aimed at, in which file the value is, and how it is read
  out."""

  what: str
  aim: str
  file: str
  read: Callable[[Any], Found]


def percent(value: float, digits: int = 1) -> str:
  return f"{100 * value:.{digits}f} %"


def interval(triple: list[float], unit: str, digits: int = 1) -> str:
  estimate, low, high = (f"{number:.{digits}f}" for number in triple)
  return f"{estimate} {unit} [{low}, {high}]"


def _overhead(step: str) -> Callable[[Any], Found]:
  def read(figures: Any) -> Found:
    here = figures["where"][step]
    cost, null = (here["arms"][arm]["percent"] for arm in ("recorded", "bare again"))
    return Found(
        f"{interval(cost, '%')} of {here['bare_ms'][0]:.1f} ms; null {interval(null, '%')}",
        cost[2] <= 0.5)
  return read


def _starts(figures: Any) -> Found:
  found = [(here["arms"]["recorded"]["percent"], here["bare_ms"][0])
           for here in figures["sizes"].values()]
  return Found("; ".join(f"{interval(cost, '%')} of {bare:.1f} ms" for cost, bare in found),
               all(cost[2] <= 0.5 for cost, _ in found))


def _observed_healthy(figures: Any) -> Found:
  return Found(f"{figures['healthy_blaming_nobody']} of {figures['healthy']}",
               figures["healthy_blaming_nobody"] == figures["healthy"])


def _observed_blame(figures: Any) -> Found:
  return Found(f"{figures['right']} of {figures['faulty']}; the layer in {figures['layer_named']} "
               f"of {figures['layer_to_name']}", figures["right_share"] >= 0.95)


def _observed_lab(figures: Any) -> Found:
  return Found(f"{figures['right']} of {figures['done']}; {figures['healthy_blamed']} of "
               f"{figures['healthy']} healthy ones blamed; not held out",
               figures["right"] >= 0.95 * figures["done"] and not figures["healthy_blamed"])


def _observed_processes(figures: Any) -> Found:
  seed, one = next(iter(figures["seeds"].items()))
  said = one["summary"]
  return Found(f"{said['right']} of {said['done']}; {said['healthy_blamed']} of {said['healthy']} "
               f"healthy ones blamed; the layer in {said['named']} of {said['in_a_layer']}; seed "
               f"{seed}, held out",
               said["right"] >= 0.95 * said["done"] and not said["healthy_blamed"])


def _gpu(figures: Any) -> Found:
  steps = [step for step in figures["steps"] if not step["step"].endswith("bare")]
  return Found(f"{sum(step['to_the_host'] + step['branches'] for step in steps)} in {len(steps)} "
               f"steps, {sum(len(step['problems']) for step in steps)} out of order; none ran",
               not any(step["to_the_host"] or step["branches"] or step["problems"]
                       for step in steps))


def _stamp(name: str, most: float) -> Callable[[Any], Found]:
  def read(figures: Any) -> Found:
    took = figures["alone"][f"stamp_and_hold_{name}_us"]
    return Found(interval(took, "µs", 2), took[2] <= most)
  return read


def _truth(figures: Any) -> Found:
  words, good = [], True
  for job in figures["processes"]:
    right = sum(block["agrees_with_entries"] for block in job["blocks"])
    good &= right == len(job["blocks"])
    words.append(f"{right} of {len(job['blocks'])} with {job['processes']} processes"
                 f"{', arrivals shared' if job['shared'] else ''}")
  return Found("; ".join(words), good)


def _bitwise(figures: Any) -> Found:
  every = [row for part in ("one", "processes", "no_fma", "rows") for row in figures.get(part, ())]
  # the bare step again, or with a gradient
  nulls = [row for row in every if row["way"].startswith("not at all")]
  rows = [row for row in every if row not in nulls]
  bits, collectives = (sum(not row["bits_equal"] for row in rows),
                       sum(not row["hlo_equal"] for row in rows))
  return Found(f"{len(rows)} comparisons: {bits} differ in bits, {collectives} in collectives; of "
               f"the nulls {sum(not row['bits_equal'] for row in nulls)} of {len(nulls)}",
               bits + collectives == 0)


def _speed(figures: Any) -> Found:
  wall, memory, target = figures["wall_s"], figures["peak_gib"], figures["target"]
  return Found(f"{wall['median']:.1f} s, {memory['median']:.2f} GiB",
               wall["worst"] <= target["seconds"] and memory["worst"] <= target["gibibytes"])


def _page(figures: Any) -> Found:
  made, size, paint = (figures[name] for name in ("wall_s", "megabytes", "first_paint_s"))
  return Found(
      f"{made['median']:.1f} s, {size['median']:.1f} MB, first paint {paint['median']:.2f} s",
      figures["within_target"])


def _modes(figures: Any) -> Found:
  judged = figures["judged"]
  return Found(f"{judged['all']['macro_f1']:.2f} with all that is known, "
               f"{judged['counters']['macro_f1']:.2f} with the hosts' counters, "
               f"{judged['bare']['macro_f1']:.2f} by the stamps alone "
               f"({judged['all']['runs']} runs)",
               min(judged[name]["macro_f1"] for name in ("all", "counters")) >= 0.97)


def _blame(figures: Any) -> Found:
  judged = figures["judged"]["all"]
  return Found(f"{judged['blame']['right']} of {judged['blame']['of']}",
               judged["blame"]["accuracy"] >= 0.97)


def _false_blame(figures: Any) -> Found:
  judged = figures["judged"]["all"]
  blamed = len(judged["controls_falsely_blamed"])
  return Found(f"{blamed} of {judged['controls']}", blamed == 0)


def _coverage(figures: Any) -> Found:
  found = figures["all"]
  return Found(f"{percent(found['coverage'], 0)} of {found['forecasts']} forecasts; worst error "
               f"{percent(found['worst_error'])}",
               found["coverage"] >= 0.85 and found["worst_error"] <= 0.1)


def _compare(figures: Any) -> Found:
  return Found(f"{percent(figures['false_alarms_above_3_percent'])}, at worst "
               f"{percent(figures['worst_above_3_percent'])}", None)


def _alarms(figures: Any) -> Found:
  late = [row for row in figures["delays"] if row["fault"] == "late_rank"]
  alarms, steps = (sum(row[name] for row in figures["healthy"]) for name in ("alarms", "steps"))
  return Found(f"{sum(row['within_30'] for row in late)} of {sum(row['jobs'] for row in late)} "
               f"late ranks; {alarms} false alarms in {steps:,} healthy steps",
               all(row["within_30"] == row["jobs"] for row in late))


def _watchdog(figures: Any) -> Found:
  hangs = [row for row in figures["rows"] if row["late_by"] is not None]
  quiet = [row for row in figures["rows"] if row["late_by"] is None]
  return Found(f"{sum(row['named'] for row in hangs)} of {len(hangs)} hangs, at most "
               f"{max(row['late_by'] for row in hangs):.2f} s after the time-out; silent in "
               f"{sum(row['named'] for row in quiet)} of {len(quiet)} healthy runs",
               all(row["named"] and (row["late_by"] or 0) <= 2 for row in figures["rows"]))


def _null(figures: Any) -> Found:
  return Found(f"+{percent(figures['worst_ratio'] - 1, 3)} at worst", figures["within_target"])


def _null_unshared(figures: Any) -> Found:
  return Found(f"+{percent(figures['worst_within'], 2)} within the declared ceiling of transfers, "
               f"+{percent(figures['worst_beyond'], 2)} beyond", figures["worst_beyond"] <= 0.001)


def _null_live(figures: Any) -> Found:
  words, verdicts = [], []
  for job, kinds in figures["jobs"].items():
    for kind, row in kinds.items():
      words.append(
          f"{job}, {kind}: {interval(row['on_percent'], '%', 2)} ({row['verdict_percent']})")
      verdicts.append(row["verdict_percent"])
  return Found("; ".join(words), None if any("inconclusive" in said for said in verdicts) else
               all(said == "met" for said in verdicts))


def _polling(figures: Any) -> Found:
  arm = figures["cases"]["4 ranks that poll, pinned, two to a core"]["arms"]["cost 0.01"][
      "change_percent"]
  return Found(interval(arm, "%"), arm[2] <= -20)


def _saved(figures: Any) -> Found:
  arm = figures["cases"]["2 ranks that poll, pinned (null: a core each)"]["arms"]["cost 0.01"]
  cpu, step = interval(arm["cpu_change_percent"], "%"), interval(arm["change_percent"], "%")
  return Found(f"{cpu} of the CPU time; step {step}", abs(arm["change_percent"][0]) < 2)


def _two_jobs(figures: Any) -> Found:
  found = {name: here["summary"] for name, here in figures["by_congestion"].items()}
  words = [
      f"{name} {interval([100 * share for share in each['recovered']], '%', 0)}, "
      f"{each['repetitions']} starts"
      for name, each in found.items()]
  return Found("; ".join(words), all(summary["recovered"][1] >= 0.6 for summary in found.values()))


def _steadiness(figures: Any) -> Found:
  summary = figures["by_congestion"]["cubic"]["summary"]
  ratio = summary["interleave_settled_cv"][0] / summary["none_settled_cv"][0]
  return Found(f"{ratio:.1f} times", ratio <= 1)


def _scene(name: str, most: float) -> Callable[[Any], Found]:
  def read(figures: Any) -> Found:
    by_control = {cell["control"]: cell["mean"] for cell in figures["cells"]
                  if cell["scene"] == name}
    return Found(f"{by_control['interleave']:.3f}; without control {by_control['none']:.3f}",
                 by_control["interleave"] <= most)
  return read


def _false_alarms(figures: Any) -> Found:
  share = figures["summary"]["false_alarms"]["share"]
  return Found(percent(share), share <= figures["target"]["false_alarms"])


def _regret(steps: int) -> Callable[[Any], Found]:
  def read(figures: Any) -> Found:
    row = figures["summary"]["regret"][str(steps)]
    return Found(f"{row['p95']:.0f} steps", row["p95"] <= row["target"])
  return read


def _shared_simulated(name: str, least: float) -> Callable[[Any], Found]:
  """Gains of a scenario at each number of ranks; `least` is that of the gain in percent."""
  def read(figures: Any) -> Found:
    found = figures["scenarios"][name]
    said = "; ".join(f"{ranks} ranks {interval(one['gain_percent'], '%', 2)}, "
                     f"{one['changes_in_1000_steps']:.1f} changes in 1,000 steps"
                     for ranks, one in found.items())
    return Found(said, all(one["gain_percent"][1] >= least for one in found.values()))
  return read


def _shared_live(figures: Any) -> Found:
  stages = [(name, stage) for name, job in figures["jobs"].items()
            for stage in job.get("stages", ())
            if stage.get("recovered_percent") and stage["recovered_percent"][0] is not None
            # Less than 5 % to be had: a quotient of noise.
            and stage["change_percent"][stage["best"]][0] < -5]
  said = "; ".join(
      f"{name}, {'/'.join(f'{slow:g}' for slow in stage['slow'])}: "
      f"{stage['recovered_percent'][0]:.0f} %"
      for name, stage in stages)
  failed = [name for name, job in figures["jobs"].items() if "failed" in job]
  return Found(said + (f"; not run: {', '.join(failed)}" if failed else ""),
               bool(stages) and not failed
               and all(stage["recovered_percent"][0] >= 85 for _, stage in stages))


def _documents(figures: Any) -> Found:
  change, again = figures["balanced_percent"], figures["again_percent"]
  return Found(f"{change[0]:+.1f} % [{change[1]:+.1f}, {change[2]:+.1f}], again {again[0]:+.1f} % "
               f"[{again[1]:+.1f}, {again[2]:+.1f}]; most over mean load "
               f"{figures['most_over_mean']['as drawn']:.2f} to "
               f"{figures['most_over_mean']['balanced']:.2f}", None)


def _shared_in_table1(figures: Any) -> Found:
  found = [one for row in figures["worlds"] for one in row["by_micro_batches"].values()]
  gains = [one["gain_percent"][0] for one in found]
  return Found(f"{min(gains):.1f} to {max(gains):.1f} % by world and number of micro-batches; at "
               f"most {max(one['most_percent'] for one in found):.1f} % was to be had",
               min(gains) >= -0.5)


def _update(figures: Any) -> Found:
  costs = figures["ranks"]["1024"]
  least, most = (min(costs, key=lambda name: costs[name][0]),
                 max(costs, key=lambda name: costs[name][0]))
  return Found(f"{costs[least][0]:.1f} µs ({least}) to {costs[most][0]:.1f} µs ({most})",
               all(cost[0] <= 10 for cost in costs.values()))


def _watch(figures: Any) -> Found:
  runs = figures["runs"]
  return Found("; ".join(f"{percent(run['core_share'])} with {run['processes']} processes"
                         for run in runs),
               all(run["core_share"] <= figures["target_core_share"] for run in runs))


def _timeline(figures: Any) -> Found:
  rows = figures["rows"]
  return Found(", ".join(f"`{name}` {rows[name]['median_s']:.1f} s"
                         for name in ("--perfetto", "--chrome")),
               figures["within_target"])


def _stream(figures: Any) -> Found:
  found = figures["seeds"]["4"]
  right, of = found["within_30"], found["faults"]
  return Found(f"{right} of {of}", right >= 0.95 * of)


def _stream_healthy(figures: Any) -> Found:
  found = figures["seeds"]["4"]
  alarms, steps = found["false_alarms_in_controls"], found["steps_of_controls"]
  return Found(f"{alarms} in {steps:,} steps", alarms <= 1e-4 * steps)


_PAPER = {"4": -0.006, "8": 0.008, "16": 0.033, "32": 0.078, "64": 0.11}


def _table1(figures: Any) -> Found:
  most = {nodes: max(max(figures["sizes"][nodes][arm]["gain"]) for arm in ("all", "both"))
          for nodes in _PAPER}
  return Found(f"at most {', '.join(percent(gain) for gain in most.values())} over all such worlds",
               all(most[nodes] >= gain for nodes, gain in _PAPER.items()))


def _turns(figures: Any) -> Found:
  middle = {nodes: sorted(figures["sizes"][nodes]["both"]["gain"])[figures["worlds"] // 2]
            for nodes in _PAPER}
  return Found(f"{', '.join(percent(gain) for gain in middle.values())} in the middle one",
               all(middle[nodes] >= gain for nodes, gain in _PAPER.items()))


def _emulated(figures: Any) -> Found:
  return Found(", ".join(
      f"{percent(run['arms']['housekeeping']['throughput'][0] - 1)} with {run['processes']}"
      for run in figures["runs"]), None)


def _forecast_real(figures: Any) -> Found:
  errors = {forecast["ranks"]: forecast["error"] for forecast in figures["forecasts"]}
  return Found(", ".join(f"{percent(error)} at {ranks} ranks" for ranks, error in errors.items()),
               all(abs(error) <= 0.1 for error in errors.values()))


def _probe(figures: Any) -> Found:
  by_ratio: dict[float, list[bool]] = {}
  for row in figures["rows"]:
    by_ratio.setdefault(row["ratio"], []).append(row["right"])
  words = [f"{sum(right)} of {len(right)} {'healthy' if ratio == 1 else f'{ratio:g} times as slow'}"
           for ratio, right in sorted(by_ratio.items())]
  return Found("; ".join(words), all(map(all, by_ratio.values())))


def _exporters(figures: Any) -> Found:
  mean, error = figures["mean"], figures["standard_error"]
  return Found(f"{mean:.1f} µs, standard error {error:.1f}", mean + 2 * error <= 20)


def _layers(figures: Any) -> Found:
  faults = [fault for job in figures["jobs"] for fault in job["faults"]]
  within = sum(fault["within"] for fault in faults)
  layers = ", ".join(f"{sum(fault['layer_right'] for fault in job['faults'])} of "
                     f"{len(job['faults'])} with {job['processes']} "
                     f"process{'es' * (job['processes'] > 1)}" for job in figures["jobs"])
  return Found(f"{within} of {len(faults)}; the largest of its step, layer and rank: {layers}",
               within == len(faults))


def _observed(figures: Any) -> Found:
  rows = [row for row in figures["rows"] if row["target_ms"] == 20]
  words = "; ".join(f"{row['case']}: {interval(row['percent']['recorded'], '%')} of "
                    f"{row['bare_ms'][0]:.1f} ms, null "
                    f"{interval(row['percent']['bare again'], '%')}" for row in rows)
  return Found(words, all(row["percent"]["recorded"][2] <= 1 for row in rows))


def _marks(figures: Any) -> Found:
  alone, loop, record = (figures["alone"]["file"], figures["in_a_program"]["mark"],
                         figures["record"]["median"])
  return Found(f"{interval(alone, 'ns', 0)} alone, {interval(loop, 'ns', 0)} in a compiled loop; "
               f"`record()` {interval(record, 'µs')}", loop[2] <= 1000)


def _mark_rows(figures: Any) -> Found:
  row = figures["rows"][-1]
  return Found(f"{row['steps_bytes']:.0f} B of sums; {row['collectives_bytes']:.0f} B in full, "
               f"{row['writer_us']:.0f} µs of the writer's thread", None)


def _pauses(figures: Any) -> Found:
  runs = [(run["processes"], run["auto"]) for run in figures["runs"] if "auto" in run]
  return Found(
      "; ".join(f"{processes} processes: {interval([100 * (r - 1) for r in auto['ratio']], '%')}"
                for processes, auto in runs), all(auto["shown_within_limit"] for _, auto in runs))


def _intervals(figures: Any) -> Found:
  rows = [row for row in figures["means"] if row["rounds"] <= 12
          and not row["rounds_are"].startswith("pauses")]
  own, old = ([row["coverage"][kind] for row in rows] for kind in ("Student", "percentile, mean"))
  return Found(f"{percent(min(own), 0)} to {percent(max(own), 0)}; a percentile bootstrap's of "
               f"means {percent(min(old), 0)} to {percent(max(old), 0)}", min(own) >= 0.93)


def _accuracy(figures: Any) -> Found:
  errors = [abs(case["error"]) for case in figures["cases"] if "trunk" in case["group"]]
  return Found(
      f"{sum(error <= 0.01 for error in errors)} of {len(errors)} cases, at most "
      f"{percent(max(errors))}",
      max(errors) <= 0.01)


def _simulated(figures: Any) -> Found:
  cases = {name: case for name, case in figures["cases"].items() if case["limit_s"]}
  slowest = max(cases, key=lambda name: max(cases[name]["run_s"]) / cases[name]["limit_s"])
  return Found(f"{sum(case['within'] for case in cases.values())} of {len(cases)} cases within; "
               f"nearest to its limit: {cases[slowest]['about']}, "
               f"{max(cases[slowest]['run_s']):.1f} of {cases[slowest]['limit_s']:g} s",
               all(case["within"] for case in cases.values()))


def _policies(figures: Any) -> Found:
  ratios = [row["baseline"]["ratio"][-1] for row in figures["compounding"].values()]
  nulls = [row["null"]["ratio"][-1] for row in figures["compounding"].values()]
  return Found(f"{min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} sizes; null "
               f"{min(nulls):.2f} to {max(nulls):.2f}", None)


def _mutations(figures: Any) -> Found:
  return Found(f"{figures['noticed']} of {figures['mistakes']}",
               figures["noticed"] == figures["mistakes"])


def _strategies(figures: Any) -> Found:
  return Found(f"{len(figures['rows'])} strategies and scenes, {figures['seeds']} seeds", None)


FIGURES = (
    Figure("Overhead of a recorded step of 20 ms, native clock, one process", "at most 0.5 %",
           "overhead.json", _overhead("20")),
    Figure("… of a step of 50 ms", "at most 0.5 %", "overhead.json", _overhead("50")),
    Figure("… one loop a process", "at most 0.5 %", "overhead_starts.json", _starts),
    Figure("Compiled for GPUs: what goes to the host or makes it wait", "nothing",
           "gpu_compiled.json", _gpu),
    Figure("One native stamp with its gate", "at most 3 µs", "overhead.json",
           _stamp("native", 3.0)),
    Figure("One callback stamp with its gate", "at most 120 µs", "overhead.json",
           _stamp("callback", 120.0)),
    Figure("Known delays of 1 to 200 ms come back within 5 % or 0.3 ms", "all", "truth.json",
           _truth),
    Figure(
        "Intervals of 95 % over 3 to 12 rounds, normal and heavy-tailed: how often they hold "
        "the truth",
        "93 % or more", "intervals.json", _intervals),
    Figure("Mistakes put into the central formulas that the tests of `make test` notice", "all",
           "mutations.json", _mutations),
    Figure("Bits of the parameters after 200 steps, instrumented against bare", "no bit differs",
           "bitwise.json", _bitwise),
    Figure("… under every pacer, guard and housekeeper", "no bit differs", "bitwise_pacers.json",
           _bitwise),
    Figure("`jaxpace report` on 64 ranks × 100,000 steps", "at most 15 s and 2 GiB",
           "report_speed.json", _speed),
    Figure("… on 1,024 ranks × 10,000 steps", "at most 15 s and 2 GiB", "report_speed_1024.json",
           _speed),
    Figure("… `--html`: made, size, first paint in Chromium", "at most 20 s, 5 MB, 2 s",
           "html_speed.json", _page),
    Figure("Timeline of 64 ranks × 200 steps", "at most 5 s", "timeline_speed.json", _timeline),
    Figure("Failure modes told apart (macro-F1), faults of 5 % or more, held-out runs", "0.97",
           "fault_lab_seed4.json", _modes),
    Figure("… on two more seeds, by the diagnosis that knows groups: 5", "0.97",
           "fault_lab_seed5.json", _modes),
    Figure("… and 6", "0.97", "fault_lab_seed6.json", _modes),
    Figure("The right rank or host blamed", "97 %", "fault_lab_seed4.json", _blame),
    Figure("… seed 5", "97 %", "fault_lab_seed5.json", _blame),
    Figure("… seed 6", "97 %", "fault_lab_seed6.json", _blame),
    Figure("Healthy controls in which somebody is blamed", "none", "fault_lab_seed4.json",
           _false_blame),
    Figure("Forecast intervals of 90 % that hold, 8 ranks to 32 and 64, simulated",
           "85 %, errors of 10 % at most", "forecast_simulated.json", _coverage),
    Figure("… 8 devices of a process to 32 and 64, error of the step", "at most 10 %",
           "forecast_real.json", _forecast_real),
    Figure("… the same, steps four times as long", "at most 10 %", "forecast_real_longer.json",
           _forecast_real),
    Figure("`jaxpace compare --fail-above 3%` fails on equal runs", "rare",
           "compare_false_alarms.json", _compare),
    Figure("Onsets told by the stream within 30 steps, runs of the lab it was not fitted on",
           "95 %", "stream_lab_seed4.json", _stream),
    Figure("… what it tells of healthy ones", "at most once in 10,000 steps",
           "stream_lab_seed4.json", _stream_healthy),
    Figure("Observed steps: healthy made-up jobs that blame nobody", "all", "observed_blame.json",
           _observed_healthy),
    Figure("… and with a fault: right mode and ranks", "at least 95 %", "observed_blame.json",
           _observed_blame),
    Figure("… and real runs of one process under plain jit, four kinds",
           "at least 95 %, nobody blamed", "observed_lab.json", _observed_lab),
    Figure("… and of 2 and 4 processes, five modes", "at least 95 %, nobody blamed",
           "observed_processes.json", _observed_processes),
    Figure("`jaxpace report` on 1,024 ranks × 10,000 steps × 202 collectives",
           "at most 60 s and 4 GiB", "observed_speed.json", _speed),
    Figure("A late rank is told within 30 steps, made-up jobs", "all", "stream_alarms.json",
           _alarms),
    Figure("The watchdog names the late process", "all, within 2 s", "watchdog.json", _watchdog),
    Figure("The link probe names the slow host or link, lab of four hosts", "all",
           "link_probe.json", _probe),
    Figure("Exporters, of the training thread a step", "at most 20 µs", "exporter_cost.json",
           _exporters),
    Figure("A device 1 to 50 ms late in one layer of a plain-`jit` step: its arrival there",
           "all within 5 % or 0.3 ms", "observed_truth.json", _layers),
    Figure("An observed and recorded step of about 20 ms, two devices", "at most +1 %",
           "observed_overhead.json", _observed),
    Figure("A mark of an observed step", "at most 1 µs", "marks_cost.json", _marks),
    Figure("… a step of 200 collectives and one rank, on disk", "", "marks_cost.json", _mark_rows),
    Figure("`jaxpace watch`, 64 ranks, a look a second", "at most 2 % of a core", "watch_cost.json",
           _watch),
    Figure("Pacing where it can't gain: longer steps, simulated, 4 to 1,024 ranks", "at most 0.1 %",
           "null_pacing.json", _null),
    Figure("… where arrivals are not shared", "at most 0.1 %", "null_unshared.json",
           _null_unshared),
    Figure("… live, two devices in one process", "at most +0.5 %", "null_live_one.json",
           _null_live),
    Figure("… live, also between gloo processes", "at most +0.5 %", "null_live.json", _null_live),
    Figure("Four polling ranks on two cores, pinned, paced", "-20 % of the step",
           "polling_pinned.json", _polling),
    Figure("Two polling ranks on two cores, pinned, paced", "step within 2 %, CPU time saved",
           "polling_pinned.json", _saved),
    Figure("Housekeeper's mode `auto` against doing nothing, real collections",
           "never worse by more than 0.5 %", "pauses.json", _pauses),
    Figure("Two jobs on one trunk of real TCP: share of the loss recovered", "60 %, better 80 %",
           "two_jobs.json", _two_jobs),
    Figure("… variation of the step against no control", "no higher", "two_jobs.json", _steadiness),
    Figure("Two jobs on a link, fluid model, jitter 2 %: period over alone", "at most 1.02",
           "two_jobs_simulated.json", _scene("two", 1.02)),
    Figure("Four jobs", "at most 1.03", "two_jobs_simulated.json", _scene("four", 1.03)),
    Figure("The paper's Table 1: gains in worlds that fit its baseline, 4 to 64 nodes",
           "the paper's: -0.6 to +11 %", "table1.json", _table1),
    Figure("… with both jobs taking turns, simulated only", "the paper's: -0.6 to +11 %",
           "table1_turns.json", _turns),
    Figure("… on real processes: aligned housekeeping over nothing, 2 to 16 of them", "",
           "emulated.json", _emulated),
    Figure("Guard: false alarms in 10,000 steps looked at one by one", "at most 5 %",
           "guard_simulated.json", _false_alarms),
    Figure("Guard: regret after 1,000 steps, 95th percentile", "at most 100 steps",
           "guard_simulated.json", _regret(1000)),
    Figure("Guard: regret after 10,000 steps", "at most 100 steps", "guard_simulated.json",
           _regret(10000)),
    Figure("Guard: regret after 50,000 steps", "at most 500 steps", "guard_simulated.json",
           _regret(50000)),
    Figure("Work shared by speed, healthy ranks with 5 % jitter, simulated (null): gain",
           "at least -0.5 %", "balanced_simulated.json",
           _shared_simulated("healthy, 5 % jitter (null)", -0.5)),
    Figure("… one rank 1.5 times slower: gain; 24 % would be the best without jitter", "",
           "balanced_simulated.json",
           _shared_simulated("one rank 1.5 times slower, 5 % jitter", 0)),
    Figure("… all ranks drift: gain", "", "balanced_simulated.json",
           _shared_simulated("all ranks drift, 5 % jitter", 0)),
    Figure("Documents of different length, balanced against as drawn, two processes: step", "",
           "documents.json", _documents),
    Figure("… in the worlds of Table 1 at 64 nodes, without other jobs: gain", "",
           "balanced_table1.json", _shared_in_table1),
    Figure(
        "Work shared by speed on real processes: recovered of what the best fixed counts save, if "
        "5 % or more",
        "at least 85 %", "balanced.json", _shared_live),
    Figure("One `update` of a pacer at 1,024 ranks", "at most 10 µs", "update_cost.json", _update),
    Figure("Speed of the simulator", "5 to 30 s by case", "simulation_speed.json", _simulated),
    Figure("Simulated steps against every message played: jobs on a trunk", "within 1 %",
           "simulation_accuracy.json", _accuracy),
    Figure("Structural stability: growth of variance over many barriers, simulated", "",
           "stability.json", _policies),
    Figure("Synchronisation strategies: time simulated, training real", "", "strategies.json",
           _strategies),
)


def command(figures: Any) -> str:
  """The command that made a file, without its note; of files with several parts, the first
  one's."""
  if "command" in figures:
    return shlex.join(part for part in shlex.split(figures["command"])
                      if not part.startswith("--note="))
  for value in figures.values():
    if isinstance(value, dict):
      found = command(value)
      if found:
        return found
  return ""


def rows() -> list[tuple[str, str, str, str]]:
  """The table: what, aim, measured, met; in Markdown.

  Raises:
    KeyError: a file no longer holds the figure.
  """
  table = []
  for figure in FIGURES:
    path = FOLDER / figure.file
    if not path.exists():
      table.append((figure.what, figure.aim or "–", "not measured yet", "–"))
      continue
    figures = json.loads(path.read_text())
    try:
      found = figure.read(figures)
    except (KeyError, IndexError, TypeError, ValueError) as error:
      said = f"{figure.file} no longer holds what measured_figures.py reads of it: {error!r}"
      raise KeyError(said) from error
    page = path.with_suffix(".md")
    name = (f"[{figure.what}]({page.name})" if page.exists()
            else f"{figure.what} ([raw]({path.name}))")
    met = "–" if found.met is None or not figure.aim else "yes" if found.met else "**no**"
    table.append((name, figure.aim or "–", found.words, met))
  return table


def commands() -> list[str]:
  """One item a file: what made it, when, and how busy the machine was; in Markdown."""
  items = []
  for path in sorted(FOLDER.glob("*.json")):
    figures = json.loads(path.read_text())
    made = (figures if "date" in figures
            else next((v for v in figures.get("by_congestion", {}).values()), figures))
    load = made.get("load_average_at_start", made.get("load_at_start"))
    when = [made.get("date"), None if load is None else f"load average {load:.1f}"]
    said = ", ".join(text for text in when if text)
    page = path.with_suffix(".md")
    shown = f"[{path.stem}]({page.name if page.exists() else path.name})"
    items.append(f"- {shown}: `{command(figures)}`" + (f" ({said})" if said else ""))
  return items
