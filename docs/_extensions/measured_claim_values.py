"""Reads the values of sentences out of their files: see `measured_claims`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

from measured_values import FOLDER

from experiments.lib import paired
from experiments.measure.shared_steps import judge, rounds_of

LATEST_TOO = "fault_lab_seed6.json"
"""The second of the latest sets of runs."""


def record(name: str) -> Any:
  return json.loads((FOLDER / name).read_text())


def round(value: float, digits: int = 0) -> str:
  return f"{abs(value):.{digits}f}"


def three(triple: list[float], digits: int = 0) -> list[str]:
  return [f"{value:.{digits}f}" for value in triple]


def f1(figures: Any, way: str, name: str = "macro_f1") -> str:
  return f"{figures['judged'][way][name]:.3f}"


def blamed(figures: Any, way: str) -> list[str]:
  blame = figures["judged"][way]["blame"]
  return [str(blame["right"]), str(blame["of"])]


def latest_records(figures: Any) -> list[Any]:
  return [figures, record(LATEST_TOO)]


def latest(figures: Any, read: Callable[[Any], list[str]]) -> list[list[str]]:
  """What is read of both of the latest sets of runs, the first of which is given."""
  return [read(one) for one in latest_records(figures)]


def latest_sums(figures: Any, read: Callable[[Any], list[str]]) -> list[str]:
  return [str(sum(map(int, values))) for values in zip(*latest(figures, read), strict=True)]


def latest_from_to(figures: Any, read: Callable[[Any], list[str]]) -> list[str]:
  return [found for values in zip(*latest(figures, read), strict=True)
          for found in sorted(values)]


def sleeping(figures: Any) -> str:
  """Whether most faults that begin in a run are sleeps, in both of the latest sets."""
  def share(one: Any) -> float:
    kinds = {kind: len(steps)
             for kind, steps in one["judged"]["all"]["detection"]["by_kind"].items()}
    return sum(kinds[kind] for kind in ("straggler", "rotating", "misplaced", "loading")
               ) / sum(kinds.values())
  return "most" if min(share(one) for one in latest_records(figures)) > 0.5 else "some"


def headline(figures: Any) -> list[str]:
  judged = figures["judged"]["all"]
  return [f1(figures, "all"), f1(figures, "all", "macro_f1_active"), *blamed(figures, "all"),
          str(len(judged["controls_with_findings"])), str(judged["controls"]),
          str(len(judged["controls_falsely_blamed"]))]


def idle_rules(figures: Any) -> list[str]:
  rules = figures["rows"][1:]
  idle = [row for row in rules
          if not any(one[how]["changed"] for one in row["seeds"] for how in one)]
  return [str(len(idle)), str(len(rules))]


def observed_processes(figures: Any) -> list[str]:
  said = next(iter(figures["seeds"].values()))["summary"]
  return [str(said[name]) for name in ("right", "done", "named", "in_a_layer", "healthy")]


def what_if(figures: Any) -> list[str]:
  errors = [figures["judged"][way]["what_if_error_percent"]["twin"]
            for way in ("all", "counters", "bare")]
  return [f"{error['p95_abs']:.1f}" for error in errors]


def what_if_and_twins(figures: Any) -> list[str]:
  errors = figures["judged"]["all"]["what_if_error_percent"]
  return [f"{errors[name]['p95_abs']:.1f}" for name in ("twins", "twin", "same_run")]


def controls(figures: Any) -> list[str]:
  judged = figures["judged"]["all"]
  return [str(len(judged["controls_with_findings"])), str(judged["controls"])]


def shared(figures: Any) -> list[str]:
  found = []
  for count, digits in (("2", 1), ("4", 1)):
    entry = figures["processes"][count]
    found += [*three(entry["share_percent"]), f"{entry['bare_ms'][0]:.{digits}f}"]
  return found


def unshared(figures: Any) -> list[str]:
  """Of instrumented steps that share nothing, between 2 and 4 processes, percent."""
  return [value for count in ("2", "4")
          for value in three(figures["processes"][count]["share_none_percent"])]


def live_null(figures: Any) -> list[str]:
  kinds = figures["jobs"]["1 process, 2 devices"]
  return [f"{value:+.2f}".replace("+0.00", "0.00") if at else f"{value:.2f}"
          for kind in ("jitter", "straggler")
          for at, value in enumerate(kinds[kind]["on_mean_percent"])]


def failed_means(figures: Any) -> list[str]:
  """How many there are, all of which fail."""
  verdicts = [row["verdict_mean_percent"] for kinds in figures["jobs"].values()
              for row in kinds.values()]
  assert all("A/A fails" in verdict for verdict in verdicts)
  return [str(len(verdicts))]


def frozen(figures: Any, arm: str = "frozen") -> list[str]:
  runs = [run["stages"]["balanced"] for run in figures["runs"]]
  again = [100 * (value - 1) for value in runs[-1]["arms"]["alone again"]["ratio"]]
  return [*(round(100 * (run["arms"][arm]["ratio"][0] - 1)) for run in runs),
          *(str(run["rounds"]) for run in runs), *three(again, 1)]


def profiled(figures: Any) -> list[str]:
  """By how much longer sampled steps take, and its 95 % interval, percent."""
  return [f"{100 * figures['slower']:.0f}", f"{196 * figures['error']:.0f}"]


def ends(values: list[float], digits: int) -> list[str]:
  return [f"{end(values):.{digits}f}" for end in (min, max)]


def short_ends(values: list[float]) -> list[str]:
  return [f"{end(values):.2g}" for end in (min, max)]


def page_made(figures: Any) -> list[str]:
  return [f"{figures['wall_s']['median']:.0f}", f"{figures['peak_gib']['median']:.1f}"]


def both_seeds(figures: Any, read: Callable[[Any], float]) -> float:
  """The greater of what the guard's seed and a fresh one say."""
  fresh = record("guard_simulated_seed1.json")
  return max(read(figures), read(fresh))


def regret(figures: Any, steps: str) -> str:
  return f"{both_seeds(figures, lambda f: f['summary']['regret'][steps]['p95']):.0f}"


def to_show(figures: Any) -> list[str]:
  """Steps until a gain of 3 % is shown: median, 90th percentile."""
  def steps(which: str) -> Callable[[Any], float]:
    return lambda f: next(row["steps_to_decide"][which] for row in f["effects"]
                          if (row["effect"], row["cv"], row["noise"], row["guard"])
                          == (-0.03, 0.15, "correlated", "default"))
  return [f"{both_seeds(figures, steps(which)):,}" for which in ("median", "p90")]


def record_behind(figures: Any) -> list[str]:
  """What `record()` takes behind steps, µs."""
  return ends([row["calls_us"]["`record()`"][0] for row in figures["rows"]], 0)


def layers_of_four(figures: Any) -> list[str]:
  faults = next(job["faults"] for job in figures["jobs"] if job["processes"] == 4)
  return [str(sum(fault["layer_right"] for fault in faults)), str(len(faults))]


def healthy_observed(figures: Any) -> list[str]:
  runs = [run for run in figures["runs"] if run["fault"] == "healthy"]
  return [str(len(runs)), str(sum(bool(run["modes"]) for run in runs))]


def control(figures: Any, processes: int) -> list[str]:
  """Rounds and A/A of a row of the housekeeper's."""
  stage = next(run["stages"]["balanced"] for run in figures["runs"]
               if run["processes"] == processes)
  ratio = stage["arms"]["alone again"]["ratio"]
  return [str(stage["rounds"]), *(f"{100 * (value - 1):+.1f}".replace("-", "−") for value in ratio)]


def median_and_worst(figures: Any) -> list[str]:
  error = figures["judged"]["all"]["what_if_error_percent"]["twin"]
  return [f"{error[name]:.1f}" for name in ("median_abs", "p95_abs")]


def turns_by_job(figures: Any, ratio: str, arm: str) -> list[str]:
  """By how much less each job's steps took, percent."""
  found = figures["parts"][0]["by_ratio"][ratio]["summary"]["by_job"][arm]
  return [f"{-100 * change[0]:.1f}" for change in found]


def polling(figures: Any) -> list[str]:
  arms = figures["cases"]["4 ranks that poll, pinned, two to a core"]["arms"]
  return [round(arms["cost 0.001"]["change_percent"][0], 1),
          round(arms["cost 0.01"]["change_percent"][0], 1),
          round(arms["cost 0.01"]["cpu_change_percent"][0])]


def jobs(figures: Any) -> list[str]:
  found = figures["by_congestion"]
  cubic = found["cubic"]["summary"]
  return [round(100 * cubic["recovered"][0]), str(cubic["repetitions"]),
          *(round(100 * found[name]["summary"]["recovered"][0]) for name in ("bbr", "reno")),
          str(found["bbr"]["summary"]["repetitions"]),
          f"{cubic['interleave_settled_cv'][0] / cubic['none_settled_cv'][0]:.1f}"]


def job_steps(figures: Any) -> list[str]:
  cubic = figures["by_congestion"]["cubic"]["summary"]
  return [f"{cubic[name][0]:.1f}"
          for name in ("none_mean_ms", "interleave_mean_ms", "alone_none_mean_ms")]


def recording(figures: Any, case: str, target: int) -> Any:
  return next(row for row in figures["rows"]
              if row["case"].startswith(case) and row["target_ms"] == target)


def costs(figures: Any, arm: str,
          cases: tuple[str, ...] = ("data parallel", "FSDP"),
          targets: tuple[int, ...] = (5, 20)) -> list[tuple[str, str]]:
  """What an arm adds to steps of about 5 and 20 ms, and what these take bare."""
  rows = [recording(figures, case, target) for case in cases for target in targets]
  return [("{:.1f} % [{:.1f}, {:.1f}]".format(*row["percent"][arm]), f"{row['bare_ms'][0]:.1f} ms")
          for row in rows]


def dearest(figures: Any, arm: str, targets: tuple[int, ...] = (5, 20)) -> tuple[str, str]:
  """The largest of `costs`."""
  return max(costs(figures, arm, targets=targets), key=lambda found: float(found[0].split()[0]))


def within_aims(figures: Any) -> str:
  """How many of four unchanged steps keep to 2 % of 5 ms and 1 % of 20 ms, in words."""
  kept = sum([recording(figures, case, target)["percent"]["unchanged"][2] <= aim
              for case in ("data parallel", "FSDP") for target, aim in ((5, 2), (20, 1))])
  return ("none", "one", "two", "three", "all")[kept]


def regret_of_shares(figures: Any, case: str, noise: str, block: int) -> str:
  """Steps lost by shares under a guard, mean over runs."""
  (found,) = (one["regret"] for one in figures["cases"]
              if (one["case"], one["noise"], one["block"]) == (case, noise, block))
  return f"{sum(found) / len(found):.0f}"


def turns(figures: Any, ratio: str, *arms: str, tcp: str = "cubic") -> list[str]:
  """Of jobs that take turns: starts, loss, and what comes back of it, per cent."""
  found = next(part for part in figures["parts"]
               if part["congestion"] == tcp)["by_ratio"][ratio]["summary"]
  values = [value for arm in arms for value in three([100 * each
                                                       for each in found["recovered"][arm]])]
  return [str(found["starts"]), f"{100 * found['loss'][0]:.1f}",
          *("0" if value == "-0" else value.replace("-", "−") for value in values)]


def lost(figures: Any, ratio: str, arm: str) -> str:
  """What turns over cubic lose of the loss besides, percent.

  Raises:
    ValueError: they recover some of it.
  """
  recovered = turns(figures, ratio, arm)[2]
  if not recovered.startswith("−"):
    raise ValueError(f"{arm} at {ratio} recovers {recovered} %")
  return recovered.removeprefix("−")


def bounds(figures: Any) -> list[str]:
  """At 1.13 and 1.3: the least loss of any order, and what comes back of the model's loss and of
  that measured over TCP, percent."""
  measured = record("turns_tcp.json")["parts"][0]["by_ratio"]
  cells = [next(cell for cell in figures["cells"] if cell["ratio"] == ratio)
           for ratio in (1.13, 1.3)]
  over_tcp = [measured[str(cell["ratio"])]["summary"]["loss"][0] for cell in cells]
  return [*(f"{100 * cell['best']:.1f}" for cell in cells),
          *(f"{100 * (1 - cell['best'] / cell['shared']):.0f}" for cell in cells),
          *(f"{100 * (1 - cell['best'] / loss):.0f}"
            for cell, loss in zip(cells, over_tcp, strict=True))]


def measured_and_modelled(figures: Any) -> list[str]:
  """What colliding costs at 1.13: over TCP, and on a link that is shared without loss, percent."""
  measured = record("turns_tcp.json")["parts"][0]["by_ratio"]
  (cell,) = (cell for cell in figures["cells"] if cell["ratio"] == 1.13)
  return [f"{100 * measured['1.13']['summary']['loss'][0]:.1f}", f"{100 * cell['shared']:.1f}"]


def by_message(figures: Any) -> list[str]:
  """What first come, first served by message recovers, and loses, at 1.13 and 1.3, percent."""
  cells = {cell["ratio"]: cell for cell in figures["cells"]}
  return [f"{abs(100 * (1 - cells[ratio]['message'] / cells[ratio]['shared'])):.0f}"
          for ratio in (1.13, 1.3)]


def by_congestion(figures: Any, name: str, factor: float = 1) -> list[str]:
  return [f"{factor * figures['by_congestion'][tcp]['summary'][name][0]:.1f}"
          for tcp in ("cubic", "bbr", "reno")]


def recovered(figures: Any) -> list[str]:
  shares = {tcp: [f"{100 * value:.0f}" for value in found["summary"]["recovered"]]
            for tcp, found in figures["by_congestion"].items()}
  return [*shares["cubic"], shares["bbr"][0], shares["reno"][0]]


def fluid(figures: Any, scene: str) -> list[str]:
  """Steps over those alone, under four controls."""
  cells = {cell["control"]: cell["mean"] for cell in figures["cells"] if cell["scene"] == scene}
  return [f"{cells[control]:.3f}"
          for control in ("none", "interleave", "turns_message", "turns_bucket")]


def alone_with_turns(figures: Any) -> list[str]:
  cost = figures["parts"][0]["by_ratio"]["1.0"]["summary"]["cost_alone"]
  return [f"{100 * value:.1f}" for value in cost]


def couplings_gone(figures: Any) -> list[str]:
  """Gain at 64 nodes without neighbour and polling, over the worlds, percent."""
  with_them, without = (figures["sizes"]["64"][arm]["bare_mean"] for arm in ("all", "null"))
  gains = [100 * (a / b - 1) for a, b in zip(with_them, without, strict=True)]
  return [f"{end(gains):.0f}" for end in (min, max)]


def by_message_in_scenes(figures: Any) -> list[str]:
  sizes = figures["scenes"]["buckets"]["sizes"]
  return [f"{100 * sizes[nodes]['message']['gain'][0]:.0f}" for nodes in ("32", "64")]


def guarded_loss(figures: Any) -> list[str]:
  """The most that this job alone loses under the guard, percent; the number of worlds."""
  gains = [gain for of in figures["sizes"].values() for gain in of["one_guarded"]["gain"]]
  return [f"{-100 * min(gains):.1f}", str(figures["worlds"])]


def turns_guarded(figures: Any, ratio: str) -> list[str]:
  """Of two jobs, one of which takes turns under the guard: what comes back in each part."""
  (run,) = figures["parts"][0]["by_ratio"][ratio]["guarded"]

  def loss(means: list[float]) -> float:
    return sum(mean / alone - 1 for mean, alone in zip(means, run["alone_of"], strict=True))

  without = sum(loss(none["mean_ms"]) for none in run["none"]) / len(run["none"])
  return [f"{100 * (1 - loss(part['mean_ms']) / without):.0f}" for part in run["parts"]]


def times_bare(figures: Any, start: str) -> str:
  """What the first call of a recorded program takes beside a bare one's: the median of rounds."""
  of = {row["arm"]: row["seconds"] for row in figures["rows"] if row["start"] == start}
  ratios = [two / one for one, two in zip(of["bare"], of["unchanged"], strict=True)]
  return f"{statistics.median(ratios):.2f}"


def only(found: set[Any]) -> Any:
  """The one value that all have."""
  [value] = found
  return value


def work_recovered(figures: Any, slow: str, arm: str = "shared") -> str:
  """What shares by speed give back of what the best counts save, with its interval."""
  value, low, high = figures["judged"][slow]["recovered"][arm]
  return f"{value:.0f} % [{low:.0f}, {high:.0f}]"


def with_counts_by_hand(starts: list[Any], slow: str) -> list[str]:
  """Of starts that ended with the best counts: their number, what they give back, and the change of
  their steps against those by hand."""
  same = [start for start in starts if start[slow]["counts"]["shared"] == start[slow]["by_hand"]]
  shared, by_hand = (rounds_of(same, slow, arm) for arm in ("shared", "by_hand"))
  against = paired.ratio_of_means(shared, by_hand)
  return [str(len(same)), work_recovered({"judged": judge(same)}, slow),
          changed([100 * (x - 1) for x in (against.value, against.low, against.high)])]


def changed(percent: list[float]) -> str:
  """A change with its sign, and its interval."""
  value, low, high = percent
  return f"{value:+.1f} % [{low:.1f}, {high:.1f}]"
