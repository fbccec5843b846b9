"""The figures of the table of measurements: what was aimed at, and where in the files the measured
value stands.

No measured number is written here: each is read from its JSON file when the pages are built.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import measured_pacing as pacing
import measured_reports as reports
import measured_timing as timing
from measured_values import FOLDER, Figure

FIGURES = (
    Figure("Overhead of a recorded step of 20 ms, native clock, one device", "at most 0.5 %",
           "overhead.json", timing.overhead("20")),
    Figure("… of a step of 50 ms", "at most 0.5 %", "overhead.json", timing.overhead("50")),
    Figure("… one loop a process", "at most 0.5 %", "overhead_starts.json", timing.starts),
    Figure("Compiled for GPUs: timestamps in their places, all else as it was", "all",
           "gpu_compiled.json", timing.gpu),
    Figure("One native stamp with its gate", "at most 3 µs", "overhead.json",
           timing.timestamp("native", 3.0)),
    Figure("One callback stamp with its gate", "at most 120 µs", "overhead.json",
           timing.timestamp("callback", 120.0)),
    Figure("Known delays of 1 to 200 ms come back within 5 % or 0.3 ms", "all", "truth.json",
           timing.truth),
    Figure(
        "Intervals of 95 % over 3 to 12 rounds, normal and heavy-tailed: how often they hold "
        "the truth",
        "93 % or more", "intervals.json", timing.intervals),
    Figure("Mistakes put into the central formulas that the tests of `make test` notice", "all",
           "mutations.json", timing.mutations),
    Figure("Bits of the parameters after 200 steps, instrumented against bare", "no bit differs",
           "bitwise.json", timing.bitwise),
    Figure("… under every pacer, guard and housekeeper", "no bit differs", "bitwise_pacers.json",
           timing.bitwise),
    Figure("`jaxpace report` on 64 ranks × 100,000 steps", "at most 15 s and 2 GiB",
           "report_speed.json", timing.speed),
    Figure("… on 1,024 ranks × 10,000 steps", "at most 15 s and 2 GiB", "report_speed_1024.json",
           timing.speed),
    Figure("… `--html` of 64 ranks × 100,000 steps: made, memory, size, first paint in Chromium",
           "at most 20 s, 5 MB, 2 s", "html_speed.json", timing.page),
    Figure("… of 1,024 ranks × 100,000 steps", "at most 20 s, 5 MB, 2 s", "html_1024.json",
           timing.page),
    Figure("Sampled profiles: longer steps", "", "profiled_cost.json", timing.profiled),
    Figure("Timeline of 64 ranks × 200 steps", "at most 5 s", "timeline_speed.json",
           timing.timeline),
    Figure("Failure modes told apart (macro-F1), faults of 5 % or more, held-out runs", "0.97",
           "fault_lab_seed4.json", reports.modes),
    Figure("… on two more seeds, by the diagnosis that knows groups: 5", "0.97",
           "fault_lab_seed5.json", reports.modes),
    Figure("… and 6", "0.97", "fault_lab_seed6.json", reports.modes),
    Figure("The right rank or host blamed, faults of 5 % or more with somebody to blame", "97 %",
    "fault_lab_seed4.json", reports.blame),
    Figure("… seed 5", "97 %", "fault_lab_seed5.json", reports.blame),
    Figure("… seed 6", "97 %", "fault_lab_seed6.json", reports.blame),
    Figure("Healthy controls in which somebody is blamed", "none", "fault_lab_seed4.json",
           reports.false_blame),
    Figure("Forecast intervals of 90 % that hold, 8 ranks to 32 and 64, simulated",
           "85 %, errors of 10 % at most", "forecast_simulated.json", reports.coverage),
    Figure("… 8 devices of a process to 32 and 64, error of the step", "at most 10 %",
           "forecast_real.json", reports.forecast_real),
    Figure("… the same, steps four times as long", "at most 10 %", "forecast_real_longer.json",
           reports.forecast_real),
    Figure("`jaxpace compare --fail-above 3%` fails on equal runs", "rare",
           "compare_false_alarms.json", reports.compare),
    Figure("Onsets told by the stream within 30 steps, runs of the lab it was not fitted on",
           "95 %", "stream_lab_seed4.json", reports.stream),
    Figure("… what it tells of healthy ones", "at most once in 10,000 steps",
           "stream_lab_seed4.json", reports.stream_healthy),
    Figure("Observed steps: healthy made-up jobs that blame nobody", "all", "observed_blame.json",
           reports.observed_healthy),
    Figure("… and with a fault: right mode and ranks", "at least 95 %", "observed_blame.json",
           reports.observed_blame),
    Figure("… and real runs of one process under plain jit, four kinds",
           "at least 95 %, nobody blamed", "observed_lab.json", reports.observed_lab),
    Figure("… and of 2 and 4 processes, five modes", "at least 95 %, nobody blamed",
           "observed_processes.json", reports.observed_processes),
    Figure("`jaxpace report` on 1,024 ranks × 10,000 steps × 202 collectives",
           "at most 60 s and 4 GiB", "observed_speed.json", timing.speed),
    Figure("A late rank is told within 30 steps, made-up jobs", "all", "stream_alarms.json",
           reports.alarms),
    Figure("The watchdog names the late process", "all, within 2 s", "watchdog.json",
           reports.watchdog),
    Figure("The link probe names the slow host or link, lab of four hosts", "all",
           "link_probe.json", reports.probe),
    Figure("Exporters, of the training thread a step", "at most 20 µs", "exporter_cost.json",
           timing.exporters),
    Figure("A device 1 to 50 ms late in one layer of a plain-`jit` step: its arrival there",
           "all within 5 % or 0.3 ms", "observed_truth.json", timing.layers),
    Figure("An observed and recorded step of about 20 ms, two forced devices of a process",
    "at most +1 %",
           "observed_overhead.json", timing.observed),
    Figure("A mark of an observed step", "at most 1 µs", "marks_cost.json", timing.marks),
    Figure("… a step of 200 collectives and one rank, on disk", "", "marks_cost.json",
           timing.mark_rows),
    Figure("`jaxpace watch`, 64 ranks, a look a second", "at most 2 % of a core", "watch_cost.json",
           timing.watch),
    Figure("Pacing where it can't gain: longer steps, simulated, 4 to 1,024 ranks", "at most 0.1 %",
           "null_pacing.json", pacing.null),
    Figure("… live, two devices in one process", "at most +0.5 %", "null_live_one.json",
           pacing.null_live),
    Figure("… live, also between gloo processes", "at most +0.5 %", "null_live.json",
           pacing.null_live),
    Figure("Four polling ranks on two cores, a barrier in shared memory, paced",
    "-20 % of the step",
           "polling_pinned.json", pacing.polling),
    Figure("Two polling ranks on two cores, a core each, likewise",
    "step within 2 %, CPU time saved",
           "polling_pinned.json", pacing.saved),
    Figure("Garbage frozen against collected as ever, in a step that is mostly pauses", "faster",
           "pauses.json", pacing.pauses),
    Figure("Two jobs on one trunk of real TCP: share of the loss recovered", "60 %, better 80 %",
           "two_jobs.json", pacing.two_jobs),
    Figure("… variation of the step against no control", "no higher", "two_jobs.json",
           pacing.steadiness),
    Figure("Two jobs on a link, fluid model, jitter 2 %: period over alone", "at most 1.02",
           "two_jobs_simulated.json", pacing.scene("two", 1.02)),
    Figure("Four jobs", "at most 1.03", "two_jobs_simulated.json", pacing.scene("four", 1.03)),
    Figure("The paper's Table 1: gains in worlds that fit its baseline, 4 to 64 nodes",
           "the paper's: -0.6 to +11 %", "table1.json", pacing.table1),
    Figure("… with both jobs taking turns, simulated only", "the paper's: -0.6 to +11 %",
           "table1_turns.json", pacing.turns),
    Figure("… at 64 nodes, a uniform prior over all couplings: 5th percentile, median, 95th",
           "", "table1_posterior.json", pacing.posterior),
    Figure("… on real processes: aligned housekeeping over nothing, 2 to 16 of them", "",
           "emulated.json", pacing.emulated),
    Figure("Guard: false alarms in 10,000 steps looked at one by one", "at most 5 %",
           "guard_simulated.json", pacing.false_alarms),
    Figure("Guard: regret after 1,000 steps, 95th percentile", "at most 100 steps",
           "guard_simulated.json", pacing.regret(1000)),
    Figure("Guard: regret after 10,000 steps", "at most 100 steps", "guard_simulated.json",
           pacing.regret(10000)),
    Figure("Guard: regret after 50,000 steps", "at most 500 steps", "guard_simulated.json",
           pacing.regret(50000)),
    Figure("Work shared by speed, healthy ranks with 5 % jitter, simulated (null): gain",
           "at least -0.5 %", "balanced_simulated.json",
           pacing.shared_simulated("healthy, 5 % jitter (null)", -0.5)),
    Figure("… one rank 1.5 times slower: gain; 24 % would be the best without jitter", "",
           "balanced_simulated.json",
           pacing.shared_simulated("one rank 1.5 times slower, 5 % jitter", 0)),
    Figure("… all ranks drift: gain", "", "balanced_simulated.json",
           pacing.shared_simulated("all ranks drift, 5 % jitter", 0)),
    Figure("Documents of different length, balanced against as drawn, two processes: step", "",
           "documents.json", pacing.documents),
    Figure("… in the worlds of Table 1 at 64 nodes, without other jobs: gain", "",
           "balanced_table1.json", pacing.shared_in_table1),
    *(Figure(f"Work shared by speed on real processes{which}: recovered of what the best fixed "
             "counts save, net, if 5 % or more", "at least 85 %", f"{name}.json",
             pacing.shared_live)
      for which, name in ((", one start of sleeps", "shared_steps"), (", quotas", "shared_quota"),
                          (", another rank", "shared_quota_other"),
                          (", two of eight beside a busy neighbour", "shared_quota_eight"))),
    Figure("One `update` of a pacer at 1,024 ranks", "at most 10 µs", "update_cost.json",
           timing.update),
    Figure("Speed of the simulator", "5 to 30 s by case", "simulation_speed.json",
           pacing.simulated),
    Figure("Simulated steps against every message played: jobs on a trunk", "within 1 %",
           "simulation_accuracy.json", pacing.accuracy),
    Figure("Structural stability: growth of variance over many barriers, simulated", "",
           "stability.json", pacing.policies),
    Figure("Synchronisation strategies: time simulated, training real", "", "strategies.json",
           pacing.strategies),
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
    when = [made.get("date"), None if load is None else f"load average {load:.1f}",
            f"the program is in commit {figures['commit']}" if "commit" in figures else None]
    said = ", ".join(text for text in when if text)
    page = path.with_suffix(".md")
    shown = f"[{path.stem}]({page.name if page.exists() else path.name})"
    items.append(f"- {shown}: `{command(figures)}`" + (f" ({said})" if said else ""))
  return items
