"""Sentences of README.md and docs/ that name measured values, with these left out: each is filled
in from its file.

A test fills them in and looks for the sentence on its page, so a page can't say other than the
record does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from measured_values import FOLDER


class Claim(NamedTuple):
  """A sentence, or part of one."""

  page: str  # below the root of the repository
  words: str  # with `{}` where values go
  file: str  # in docs/measurements
  values: Callable[[Any], list[str]]

  def filled(self) -> str:
    """The words with the values of the file.

    Raises:
      KeyError, IndexError, TypeError: the file no longer holds them.
    """
    return self.words.format(*self.values(json.loads((FOLDER / self.file).read_text())))


README, WHEN_NOT, TRACE = "README.md", "docs/when_not.md", "docs/trace.md"
_LAB = "fault_lab_seed4.json"
_BUSY = "fault_lab_seed7.json"
_LATEST, _LATEST_TOO = "fault_lab_seed5.json", "fault_lab_seed6.json"


def _round(value: float, digits: int = 0) -> str:
  return f"{abs(value):.{digits}f}"


def _three(triple: list[float], digits: int = 0) -> list[str]:
  return [f"{value:.{digits}f}" for value in triple]


def _f1(figures: Any, way: str, name: str = "macro_f1") -> str:
  return f"{figures['judged'][way][name]:.3f}"


def _enter(figures: Any) -> list[str]:
  judged = figures["judged"]["all"]
  return [str(judged["counted"] + judged["controls"]),
          str(judged["with_faults"] + judged["controls"])]


def _blamed(figures: Any, way: str) -> list[str]:
  blame = figures["judged"][way]["blame"]
  return [str(blame["right"]), str(blame["of"])]


def _latest(figures: Any, read: Callable[[Any], list[str]]) -> list[list[str]]:
  """What is read of both of the latest sets of runs, the first of which is given."""
  return [read(figures), read(json.loads((FOLDER / _LATEST_TOO).read_text()))]


def _latest_sums(figures: Any, read: Callable[[Any], list[str]]) -> list[str]:
  return [str(sum(map(int, values))) for values in zip(*_latest(figures, read), strict=True)]


def _latest_from_to(figures: Any, read: Callable[[Any], list[str]]) -> list[str]:
  return [found for values in zip(*_latest(figures, read), strict=True)
          for found in sorted(values)]


def _headline(figures: Any) -> list[str]:
  judged = figures["judged"]["all"]
  return [_f1(figures, "all"), _f1(figures, "all", "macro_f1_active"), *_blamed(figures, "all"),
          str(len(judged["controls_with_findings"])), str(judged["controls"]),
          str(len(judged["controls_falsely_blamed"]))]


def _idle_rules(figures: Any) -> list[str]:
  rules = figures["rows"][1:]
  idle = [row for row in rules
          if not any(one[how]["changed"] for one in row["seeds"] for how in one)]
  return [str(len(idle)), str(len(rules))]


def _observed_processes(figures: Any) -> list[str]:
  said = next(iter(figures["seeds"].values()))["summary"]
  return [str(said[name]) for name in ("right", "done", "named", "in_a_layer", "healthy")]


def _what_if(figures: Any) -> list[str]:
  errors = [figures["judged"][way]["what_if_error_percent"]["twin"]
            for way in ("all", "counters", "bare")]
  return [f"{error['p95_abs']:.1f}" for error in errors]


def _controls(figures: Any) -> list[str]:
  judged = figures["judged"]["all"]
  return [str(len(judged["controls_with_findings"])), str(judged["controls"])]


def _shared(figures: Any) -> list[str]:
  found = []
  for count, digits in (("2", 1), ("4", 1)):
    entry = figures["processes"][count]
    found += [*_three(entry["share_percent"]), f"{entry['bare_ms'][0]:.{digits}f}"]
  return found


def _where(figures: Any) -> list[str]:
  arms = [figures["where"][size]["arms"]["recorded"]["percent"][0] for size in ("20", "50")]
  return [f"{arms[0]:.0f}", f"{arms[1]:.1f}"]


def _frozen(figures: Any) -> list[str]:
  runs = [run["stages"]["balanced"] for run in figures["runs"]]
  again = [100 * (value - 1) for value in runs[-1]["arms"]["alone again"]["ratio"]]
  return [*(_round(100 * (run["arms"]["frozen"]["ratio"][0] - 1)) for run in runs),
          *(str(run["rounds"]) for run in runs), *_three(again, 1)]


def _auto(figures: Any) -> list[str]:
  return [_round(100 * (run["auto"]["ratio"][0] - 1), 1) for run in figures["runs"]]


def _profiled(figures: Any) -> list[str]:
  """By how much longer sampled steps take, and its 95 % interval, percent."""
  return [f"{100 * figures['slower']:.0f}", f"{196 * figures['error']:.0f}"]


def _median_and_worst(figures: Any) -> list[str]:
  error = figures["judged"]["all"]["what_if_error_percent"]["twin"]
  return [f"{error[name]:.1f}" for name in ("median_abs", "p95_abs")]


def _turns_by_job(figures: Any, ratio: str, arm: str) -> list[str]:
  """By how much less each job's steps took, percent."""
  found = figures["parts"][0]["by_ratio"][ratio]["summary"]["by_job"][arm]
  return [f"{-100 * change[0]:.1f}" for change in found]


def _polling(figures: Any) -> list[str]:
  arms = figures["cases"]["4 ranks that poll, pinned, two to a core"]["arms"]
  return [_round(arms["cost 0.001"]["change_percent"][0], 1),
          _round(arms["cost 0.01"]["change_percent"][0], 1),
          _round(arms["cost 0.01"]["cpu_change_percent"][0])]


def _jobs(figures: Any) -> list[str]:
  found = figures["by_congestion"]
  cubic = found["cubic"]["summary"]
  return [_round(100 * cubic["recovered"][0]), str(cubic["repetitions"]),
          *(_round(100 * found[name]["summary"]["recovered"][0]) for name in ("bbr", "reno")),
          str(found["bbr"]["summary"]["repetitions"]),
          f"{cubic['interleave_settled_cv'][0] / cubic['none_settled_cv'][0]:.1f}"]


def _job_steps(figures: Any) -> list[str]:
  cubic = figures["by_congestion"]["cubic"]["summary"]
  return [f"{cubic[name][0]:.1f}"
          for name in ("none_mean_ms", "interleave_mean_ms", "alone_none_mean_ms")]


def _starts(figures: Any) -> list[str]:
  found = []
  for size in figures["sizes"].values():
    found += [*_three(size["arms"]["recorded"]["percent"], 1), f"{size['bare_ms'][0]:.1f}"]
  return [*found, str(len(figures["sizes"]["5"]["starts"]["bare"]))]


def _observed(figures: Any) -> list[str]:
  found = []
  for case in ("data parallel", "FSDP"):
    for target in (5, 20):
      row = next(row for row in figures["rows"]
                 if row["case"].startswith(case) and row["target_ms"] == target)
      mean, low, high = row["percent"]["recorded"]
      found.append(f"{mean:.1f} % [{low:.1f}, {high:.1f}] of {row['bare_ms'][0]:.1f} ms")
  return found


def _shared_live(figures: Any, slow: float) -> list[str]:
  """What a step took less, with the last rank slower: shared by speed, by hand, percent."""
  stage = next(stage for stage in figures["jobs"]["quota-32"]["stages"]
               if stage["slow"][-1] == slow)
  return [f"{-mean:.0f} % [{-high:.0f}, {-low:.0f}]"
          for mean, low, high in (stage["change_percent"][name]
                                  for name in ("shared by speed", stage["best"]))]


def _turns(figures: Any, ratio: str, *arms: str) -> list[str]:
  """Of jobs that take turns over cubic: starts, loss, and what comes back of it, per cent."""
  found = figures["parts"][0]["by_ratio"][ratio]["summary"]
  values = [value for arm in arms for value in _three([100 * each
                                                       for each in found["recovered"][arm]])]
  return [str(found["starts"]), f"{100 * found['loss'][0]:.1f}",
          *(value.replace("-", "−") for value in values)]


def _turns_guarded(figures: Any, ratio: str) -> list[str]:
  """Of two jobs, one of which takes turns under the guard: what comes back in each part."""
  (run,) = figures["parts"][0]["by_ratio"][ratio]["guarded"]

  def loss(means: list[float]) -> float:
    return sum(mean / alone - 1 for mean, alone in zip(means, run["alone_of"], strict=True))

  without = sum(loss(none["mean_ms"]) for none in run["none"]) / len(run["none"])
  return [f"{100 * (1 - loss(part['mean_ms']) / without):.0f}" for part in run["parts"]]


CLAIMS = (
    *(Claim("docs/how_to/slow_host.md", f"| {slow:g} times | {{}} | {{}} |", "balanced.json",
            lambda f, slow=slow: _shared_live(f, slow))
      for slow in (1.2, 1.5, 2, 3)),
    Claim(README, "1.5 or 3 times slower, by CPU quotas, steps took {} or {} less", "balanced.json",
          lambda f: [_shared_live(f, slow)[0] for slow in (1.5, 3)]),
    Claim(TRACE, "A mark takes {} ns by itself, and adds {} ns to a turn of a compiled loop. "
                 "`recorder.record()` takes {} µs.", "marks_cost.json",
          lambda f: [f"{f['alone']['file'][0]:.0f}", f"{f['in_a_program']['mark'][0]:.0f}",
                     f"{f['record']['median'][0]:.1f}"]),
    Claim(TRACE, "A step of 200 collectives leaves {} bytes in `steps`, and {} in `collectives` "
                 "where it is written in full", "marks_cost.json",
          lambda f: [f"{f['rows'][-1][name]:.0f}"
                     for name in ("steps_bytes", "collectives_bytes")]),
    Claim(README,
          "it blamed the right rank or host in {} of {} cases that cost 5 % or more and had somebody "
          "to blame; {} of {} healthy runs had a finding, which blamed {}.", _LATEST,
          lambda f: [*_latest_sums(f, lambda one: _blamed(one, "all")),
                     *_latest_sums(f, _controls),
                     *("nobody" if found == "0" else found
                       for found in _latest_sums(f, lambda one: _headline(one)[-1:]))]),
    Claim(README, "By the timestamps alone it is {} of {}.", _LATEST,
          lambda f: _latest_sums(f, lambda one: _blamed(one, "bare"))),
    Claim(WHEN_NOT, "it is {} to {}, and {} to {}; the right rank or host was blamed in {} of {} "
                    "cases, and {} of {} healthy runs had a finding", _LATEST,
          lambda f: [*_latest_from_to(f, lambda one: [_f1(one, "counters"), _f1(one, "all")]),
                     *_latest_sums(f, lambda one: _blamed(one, "all")),
                     *_latest_sums(f, _controls)]),
    Claim(WHEN_NOT, "in the two later sets by {} and {} %", _LATEST,
          lambda f: [values[0] for values in _latest(f, _what_if)]),
    Claim(README, "a data-parallel step takes {} and {} longer, one with FSDP, scan and remat {} "
                  "and {}", "observed_overhead.json", _observed),
    Claim(README,
          "a recorded step of 20 ms takes {} % longer with the native clock and one of 50 ms {} %",
          "overhead.json", lambda f: _where(f)),
    Claim(README, "a step of {} ms on 2 processes takes {} % [{}, {}] longer than the bare one and "
                  "one of {} ms on 4 processes {} % [{}, {}]", "overhead.json",
          lambda f: [_shared(f)[at] for at in (3, 0, 1, 2, 7, 4, 5, 6)]),
    Claim(README, "[Sampled profiles](docs/profiler.md) cost {} ± {} %.", "profiled_cost.json",
          _profiled),
    Claim(README, "got back {} % of what they cost each other, at {} times the variation",
          "two_jobs.json", lambda f: [_jobs(f)[0], _jobs(f)[-1]]),
    Claim(README, "one taking turns got back {} % of {} %: its own steps took {} % less, the other "
                  "job's {} %.", "turns_tcp.json",
          lambda f: [_turns(f, "1.13", "one")[2], _turns(f, "1.13", "one")[1],
                     *_turns_by_job(f, "1.13", "one")]),
    Claim(README, "At 30 % turns of both lost {} % more.", "turns_tcp.json",
          lambda f: [_turns(f, "1.3", "both")[2].removeprefix("−")]),
    Claim(README, "What a job would gain was off by {} and {} % in the median, by {} and {} % at the "
                  "95th percentile", _LATEST,
          lambda f: [value for values in zip(*_latest(f, _median_and_worst), strict=True)
                     for value in values]),
    Claim(README, "by {} and {} %.", _BUSY, _median_and_worst),
    Claim("docs/what_if.md", "in two later sets of runs {} and {} % at the 95th percentile",
          _LATEST, lambda f: [values[0] for values in _latest(f, _what_if)]),
    Claim(WHEN_NOT, "macro-F1 of {} (with the hosts' counters) and {} (with a link probe", _LAB,
          lambda f: [_f1(f, "counters"), _f1(f, "all")]),
    Claim(WHEN_NOT, "({} of {} runs enter); {} and {} for faults of 5 % while they last. The right "
                    "rank or host was blamed in {} of {} cases, and nobody in {} healthy runs; by "
                    "stamps alone it was {}", _LAB,
          lambda f: [*_enter(f), _f1(f, "counters", "macro_f1_active"),
                     _f1(f, "all", "macro_f1_active"), *_blamed(f, "all"), _controls(f)[1],
                     _f1(f, "bare")]),
    Claim(WHEN_NOT, "On a busy machine it was {} and {}", "fault_lab_seed3.json",
          lambda f: [_f1(f, "counters"), _f1(f, "all")]),
    Claim(WHEN_NOT, "had a finding in {} of [{}]", "fault_lab.json", _controls),
    Claim(WHEN_NOT, "in {} of [{}](measurements/fault_lab_seed2.md) healthy runs",
          "fault_lab_seed2.json", _controls),
    *(Claim("docs/fault_lab.md", f"| [{seed}](measurements/fault_lab_seed{seed}.md) | {made} | "
            + "{} | {} | {} of {} | {} of {} | {} |", f"fault_lab_seed{seed}.json", _headline)
      for seed, made in ((3, "on a busy machine"), (4, "with real-time priority"),
                         (5, "the same, hogs later"), (6, "the same, hogs later"))),
    Claim("docs/fault_lab.md", "| [7](measurements/fault_lab_seed7.md), a third of it | beside "
          "many other programs, without priority | {} | {} | {} of {} | {} of {} | {} |",
          "fault_lab_seed7.json", _headline),
    Claim("docs/fault_lab.md", "{} of {} move nothing in these runs", "ablation.json", _idle_rules),
    Claim("docs/observed.md",
          "{} of {} runs are right, the layer is named in {} of {} and none of the {} healthy ones",
          "observed_processes.json", _observed_processes),
    Claim("docs/what_if.md", "{} % at the 95th percentile ({} % with the hosts' counters only, {} "
                             "% by the stamps alone)", _LAB, _what_if),
    Claim("docs/interleaving.md", "**{} % [{}, {}]** |", "two_jobs.json",
          lambda f: _three([100 * value
                            for value in f["by_congestion"]["cubic"]["summary"]["recovered"]])),
    Claim("docs/interleaving.md", "| **1.0, {} starts** | {} % | **{} % [{}, {}]**; "
                                  "`interleave_jobs` {} % [{}, {}] | {} % [{}, {}] |",
          "turns_tcp.json", lambda f: _turns(f, "1.0", "both", "interleave", "one")),
    Claim("docs/interleaving.md", "| **1.13, {} starts** | {} % | **{} % [{}, {}]** | "
                                  "**{} % [{}, {}]** |",
          "turns_tcp.json", lambda f: _turns(f, "1.13", "both", "one")),
    Claim("docs/interleaving.md", "| 1.3, {} starts | {} % | {} % [{}, {}] | {} % [{}, {}] |",
          "turns_tcp.json", lambda f: _turns(f, "1.3", "both", "one")),
    Claim("docs/interleaving.md", "**{}, {}, {} and {} %** of the loss came back",
          "turns_tcp_before.json", lambda f: _turns_guarded(f, "1.13")),
    Claim("docs/housekeeping.md", "which leaves the changes of mode out, gives −{}, −{} and −{} %",
          "pauses.json", lambda f: [_round(100 * (run["auto"]["paired"]["ratio"][0] - 1))
                                    for run in f["runs"]]),
    Claim("docs/pacing.md", "frozen -{}, -{}, -{} % of the step", "pauses.json",
          lambda f: _frozen(f)[:3]),
    Claim("docs/pacing.md", "`auto` with its trial -{}, -{}, -{} %", "pauses.json", _auto),
    Claim("docs/pacing.md", "as it comes (`cost=0.001`) step -{} % [", "polling_pinned.json",
          lambda f: _polling(f)[:1]),
    Claim("docs/pacing.md", "with ten times that, `cost=0.01`, **step -{} % [",
          "polling_pinned.json", lambda f: _polling(f)[1:2]),
    Claim("docs/pacing.md", "{} to {} ms a step, alone {}: ", "two_jobs.json", _job_steps),
    Claim("docs/pacing.md", "bbr {}, reno {} % ({} starts each", "two_jobs.json",
          lambda f: _jobs(f)[2:5]),
    Claim("docs/pacing.md", "**CV {} times that without control", "two_jobs.json",
          lambda f: _jobs(f)[-1:]),
    Claim("docs/pacing.md", "longer by {} % [{}, {}] on 2 processes", "overhead.json",
          lambda f: _three(f["processes"]["2"]["share_percent"])),
    Claim(WHEN_NOT,
          "off by {} % at the 95th percentile ({} % with the counters only, {} % by stamps alone)",
          _LAB, _what_if),
    Claim(WHEN_NOT, "it is {} % [{}, {}] of {} ms and {} % [{}, {}] of {} ms, of {} "
          "rounds", "overhead_starts.json", _starts),
    Claim(WHEN_NOT,
          "adds {} % [{}, {}] to a step of {} ms on 2 gloo processes and {} % [{}, {}] to one of "
          "{} ms on 4", "overhead.json", _shared),
    Claim(WHEN_NOT, "a recorded step of 20 ms takes {} % longer and one of 50 ms {} %",
          "overhead.json", lambda f: _where(f)),
)
