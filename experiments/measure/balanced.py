"""Ranks slower for real: what sharing work by speed recovers, beside even counts and counts chosen
by hand.

    python -m experiments.measure.balanced
    python -m experiments.measure.balanced --jobs=quota-32 --rounds=2 --learn=60       # to try it

Real processes over gloo, each a host with a share of a processor by a control group of its own
(`experiments.measure.balanced_slowing`). Some are slower: by a smaller quota, or by a neighbour
that never rests in the same group; as a third, micro-batches are sleeps, where there may be more
ranks than processors. In each stage counts first follow by themselves; then blocks with even
counts, with even counts again (A/A), shared by speed, and with counts chosen by hand take turns in
random order, in one run. Chosen are the best for the speeds that are meant, and those with one
micro-batch more for the slow rank: the better of them is what counts.

Writes docs/measurements/balanced.json and .md; what is not run keeps what the file has of it.
Nothing else should run meanwhile. The quota takes the right to make control groups; jobs that can't
be run are named in the file.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
from absl import app, flags
from scipy import stats

import jaxpace
from experiments.lib import measured
from experiments.lib.paired import estimate
from experiments.measure import balanced_worker
from experiments.measure.balanced_worker import AGAIN, EVEN, FIXED, SHARED, WITHOUT, Setup
from jaxpace.coordination.apportion import even
from jaxpace.coordination.balancer import share_by_speed
from jaxpace.simulation.shared_work import play

_FOUR = ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.2), (1.0, 1.0, 1.0, 1.5), (1.0, 1.0, 1.0, 2.0),
         (1.0, 1.0, 1.0, 3.0), (1.0, 2.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0))
"""Healthy; one rank slower and slower; another in its place; healthy again."""
_EIGHT = ((1.0,) * 8, (1.0,) * 5 + (1.5, 1.0, 2.0), (1.0, 3.0) + (1.0,) * 4 + (1.5, 1.0),
          (1.0,) * 8)
JOBS = {  # name: kind, processes, devices of each, micro-batches, seconds of one, stages
    "quota-16": ("quota", 4, 1, 16, 0.020, _FOUR),
    "quota-32": ("quota", 4, 1, 32, 0.010, _FOUR),
    "neighbour-16": ("neighbour", 4, 1, 16, 0.020, _FOUR),
    "neighbour-32": ("neighbour", 4, 1, 32, 0.010, _FOUR),
    "sleep-16": ("sleep", 4, 1, 16, 0.008, _FOUR),
    "sleep-32": ("sleep", 4, 1, 32, 0.004, _FOUR),
    "eight-64": ("sleep", 2, 4, 64, 0.004, _EIGHT),
}
_HANGS, _LONG, _LEARNT, _PLAYED = 30, 420, 120, 10
"""Played again: steps of a stretch, of a run, at its beginning that don't count; runs."""
_STRETCH = 50
"""Steps of a stretch, in which what is lost by counts that follow is averaged."""
RECOVERED = 0.85
"""Of what the best counts save, the part that counts as followed."""


def launch(name: str, learn: int, block: int, rounds: int,
           stages: list[int]) -> tuple[list[dict[str, Any]], str]:
  """Runs some stages of a job; returns those that it came through, and what was said where it
  failed."""
  kind, processes, devices, total, each, slow = JOBS[name]
  setup = Setup(kind, total, tuple(slow[k] for k in stages), each, learn, block, rounds)
  with tempfile.TemporaryDirectory() as root:
    out = pathlib.Path(root) / "stages.json"
    command = [sys.executable, "-m", "jaxpace.cli", "launch", "--nproc", str(processes), "--logs",
               f"{root}/logs", "--", sys.executable, "-m", "experiments.measure.balanced",
               f"--worker={out}", f"--setup={json.dumps(setup._asdict())}"]
    for_xla = [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_multi_thread_eigen=false"]
    if devices > 1:
      for_xla.append(f"--xla_force_host_platform_device_count={devices}")
    said = pathlib.Path(root) / "said"
    with said.open("wb") as errors:
      running = subprocess.Popen(
          command, env=os.environ | {"XLA_FLAGS": " ".join(for_xla).strip(),
                                     "JAX_PLATFORMS": "cpu"},
          stdout=sys.stderr, stderr=errors)
      # What is stopped has its stages so far.
      signal.signal(signal.SIGTERM, lambda *_: running.terminate())
      code = running.wait()
    end = measured.portable(said.read_text(errors="replace")[-2000:]).strip()
    failed = (end or "no reason was given") if code else ""
    return json.loads(out.read_text()) if out.exists() else [], failed


def judge(stage: dict[str, Any]) -> dict[str, Any]:
  """What a stage has shown."""
  seconds = {arm: np.asarray(values) for arm, values in stage["seconds"].items()}
  slow, each = np.asarray(stage["slow"]), np.asarray(stage["each"])
  total, ranks = int(np.sum(stage["history"][0])), len(slow)
  base = (seconds[EVEN] + seconds[AGAIN]) / 2
  change = {arm: estimate((values / (seconds[EVEN] if arm == AGAIN else base) - 1) * 100).to_json()
            for arm, values in seconds.items() if arm != EVEN}
  healthy = float(np.mean(each[slow == 1]))
  result: dict[str, Any] = {
      "slow": stage["slow"], "rounds": len(base), "step_ms": {
          arm: estimate(values * 1e3).to_json() for arm, values in seconds.items()},
      "change_percent": change,
      "measured_slow": [float(f"{value / healthy:.3g}") for value in each],
      "spread_percent": [float(f"{100 * value:.3g}") for value in stage["spread"]],
      "fixed": stage["fixed"], "counts": stage["by_speed"][-1],
      "processor_percent": float(f"{100 * stage['processor']:.3g}"),
      "followed_after": followed(stage["history"], slow, even(total, ranks))}
  if (slow == slow[0]).all() and "arrivals" in stage:
    # Once they have followed, if others were slower before; the first step is not in the history.
    begin, end = 1 + (result["followed_after"] or 0), 1 + len(stage["history"])
    result |= lost(np.asarray(stage["arrivals"])[begin:end], np.asarray(stage["ran"])[begin:end])
  if "arrivals" in stage:
    result |= played_again(np.asarray(stage["arrivals"]), np.asarray(stage["ran"]), slow)
  by_hand = [arm for arm in FIXED if arm in seconds]
  if by_hand:
    best = min(by_hand, key=lambda arm: float(seconds[arm].mean()))
    saved, got = base - seconds[best], base - seconds[SHARED]
    result["best"] = best
    # A quotient of means, and its interval by the differences in each round (Fieller's, where what
    # is saved is sure).
    result["recovered_percent"] = _quotient(got, saved)
  if "order" in stage:
    last = lasts(stage)
    base = (last[EVEN] + last[AGAIN]) / 2
    result["last_ms"] = estimate(1e3 * base).to_json()
    result["last_change_percent"] = {
        arm: estimate((values / (last[EVEN] if arm == AGAIN else base) - 1) * 100).to_json()
        for arm, values in last.items() if arm != EVEN}
    if by_hand:
      best = min(by_hand, key=lambda arm: float(last[arm].mean()))
      result["last_best"] = best
      result["last_recovered_percent"] = _quotient(base - last[SHARED], base - last[best])
  return result


def lasts(stage: dict[str, Any]) -> dict[str, np.ndarray]:
  """Seconds after which the last rank reached the all-reduce, mean of each block: [rounds] of each
  arm.

  Of the rows that count; a row is of the step before it.
  """
  # The first step of all is not in the history.
  rows, order = np.asarray(stage["arrivals"])[len(stage["history"]) + 1:], stage["order"]
  found: dict[str, list[float]] = {arm: [] for arm in stage["seconds"]}
  for arm, block in zip(order, np.split(rows, len(order)), strict=True):
    found[arm].append(float(block[balanced_worker.SETTLE:].max(axis=1).mean()))
  return {arm: np.array(values) for arm, values in found.items()}


def lost(arrivals: np.ndarray, ran: np.ndarray) -> dict[str, Any]:
  """What counts that follow by themselves cost where nobody is slower, by the very steps that ran.

  With n of the micro-batches a rank took A; with even counts e it had taken A e / n. So both are
  known of the same step, and the machine's noise is the same in both.

  Args:
    arrivals: [K, R] s, of each step's step before: the ranks know them one step later.
    ran: [K, R], the counts of each step.
  """
  seconds, counts = arrivals[1:], ran[:-1]
  equal = even(int(counts[0].sum()), counts.shape[1])
  took, alike = seconds.max(axis=1), (seconds * equal / counts).max(axis=1)
  if len(took) < 2:
    return {}
  # What is near in time hangs together: stretches of steps are what is averaged.
  parts = np.array_split(np.arange(len(took)), max(2, len(took) // _STRETCH))
  cost = np.array([took[part].sum() / alike[part].sum() - 1 for part in parts])
  return {"uneven_percent": 100 * float((counts != equal).any(axis=1).mean()),
          "lost_percent": estimate(100 * cost).to_json(), "lost_steps": len(took)}


def played_again(arrivals: np.ndarray, ran: np.ndarray, slow: np.ndarray) -> dict[str, Any]:
  """What the library's own counts do with the noise that was recorded, beside even counts and the
  best fixed ones on the very same steps.

  Each rank's time for a micro-batch, step by step, in stretches that stay together and are put in
  random order; played from even counts on, the first `_LEARNT` steps left out.

  Args:
    arrivals: [K, R] s, of each step's step before.
    ran: [K, R], the counts of each step; steps in which a rank ran nothing are left out.
    slow: [R], how many times slower they were meant to be.
  """
  known = (ran[:-1] > 0).all(axis=1)
  each = arrivals[1:][known] / ran[:-1][known]
  # Between blocks the host waits: that is no speed.
  usual = np.median(each, axis=1)
  each = each[usual < 1.6 * np.median(usual)]
  total, ranks = int(ran[0].sum()), ran.shape[1]
  if len(each) <= 2 * _HANGS:
    return {}
  balancer, rng, rows, uneven = share_by_speed(total, total), np.random.default_rng(0), [], []
  fixed = [balanced_worker.quickest(speeds, total) for speeds in (slow, np.median(each, axis=0))]
  for _ in range(_PLAYED):
    starts = rng.integers(0, len(each) - _HANGS, -(-_LONG // _HANGS))
    steps = np.concatenate([each[start:start + _HANGS] for start in starts])
    counts = play(balancer, steps).counts[_LEARNT:]
    steps = steps[_LEARNT:]
    rows.append([(counts * steps).max(axis=1).mean(),
                 (even(total, ranks) * steps).max(axis=1).mean(),
                 min((best * steps).max(axis=1).mean() for best in fixed)])
    uneven.append(float((counts != even(total, ranks)).any(axis=1).mean()))
  got, alike, best = np.array(rows).T
  found: dict[str, Any] = {"played_percent": estimate(100 * (got / alike - 1)).to_json(),
                           "played_uneven_percent": 100 * float(np.mean(uneven)),
                           "played_from_steps": len(each)}
  if (slow != slow[0]).any():
    found["played_recovered_percent"] = _quotient(alike - got, alike - best)
  return found


def _quotient(got: np.ndarray, saved: np.ndarray) -> list[float | None]:
  """100 mean(got) / mean(saved) and its 95 % interval (Fieller 1954), which there is where what is
  saved is sure."""
  if saved.mean() <= 0:
    return [None, None, None]
  spread = float(stats.t.ppf(0.975, len(got) - 1)) ** 2 * np.cov(got, saved) / len(got)
  a = saved.mean() ** 2 - spread[1, 1]
  b = got.mean() * saved.mean() - spread[0, 1]
  root = max(b * b - a * (got.mean() ** 2 - spread[0, 0]), 0.0) ** 0.5
  ends = ((b - root) / a, (b + root) / a) if a > 0 else (None, None)
  return [None if end is None else float(f"{100 * end:.4g}")
          for end in (got.mean() / saved.mean(), *ends)]


def followed(history: list[list[int]], slow: np.ndarray, equal: np.ndarray) -> int | None:
  """Steps until the counts are good for good, by the speeds as they are meant; None where they
  never are.

  Good is to have taken away 85 % of what is lost against the best counts: by even counts, or by
  those at the beginning of the stage where these lose more. Counts are bound to be whole: where
  nothing can be saved, all is good at once.
  """
  def ends(counts: Any) -> float:
    return float((np.asarray(counts) * slow).max())

  best = ends(balanced_worker.quickest(slow, int(equal.sum())))
  lost = max(ends(equal), ends(history[0])) - best
  wrong = [k for k, counts in enumerate(history) if ends(counts) - best > (1 - RECOVERED) * lost
           + 1e-9]
  return None if wrong and wrong[-1] == len(history) - 1 else (wrong[-1] + 1 if wrong else 0)


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("Ranks slower for real: work shared by speed", figures)
  page += ["Step: mean of a block, process 0. Change: against even counts in the same round (mean "
           "of both blocks; even again: against the other). Best by hand: the quicker of two "
           "counts chosen for the speeds that were meant. Recovered: of what it saves. Followed: "
           f"steps after which the counts, by the speeds meant, save {100 * RECOVERED:.0f} % of "
           "what is lost at the beginning of the stage, for good. Last rank: the same of the time "
           "after which the last rank reached the all-reduce, which is what counts change; the "
           "all-reduce of processes under a quota, which is in the step too, varies by more than "
           "that. Slower, measured: busy time a "
           "micro-batch with even counts, against the healthy ranks' mean. "
           + measured.about_intervals(figures.get("intervals"), "as many rounds as the table says"),
           ""]
  page += ["Lost: of steps in which counts followed by themselves and nobody was slower, what they "
           "took longer than with even counts, by each rank's time for a micro-batch in that very "
           f"step; the interval is over stretches of {_STRETCH} steps. Played again: the library's "
           "counts on each rank's recorded times for a micro-batch, against even counts on the "
           "same steps, and recovered of what the best fixed counts save there; "
           f"{_PLAYED} runs of {_LONG} steps, the first {_LEARNT} left out, put together of "
           f"stretches of {_HANGS} steps, intervals over runs. So the machine's noise is in both "
           "alike. Processes that compute are each in a control group of their own with 256 times "
           "the weight of anything else on the machine; those that sleep run at the priority that "
           "the table's line says.", ""]
  for name, job in figures["jobs"].items():
    kind, processes, devices, total, each, _ = JOBS[name]
    ranks = f"{processes} processes" + (f" of {devices} ranks" if devices > 1 else "")
    page += [f"## {kind}: {ranks}, {total} micro-batches of about {1e3 * each:g} ms", ""]
    if "failed" in job:
      page += [f"Could not be run to the end: {job['failed'].strip().splitlines()[-1][:300]}", ""]
    for stage in {stage["command"]: stage for stage in job["stages"]}.values():
      page += [f"`{stage['command']}`{stage.get('circumstances', '')}", ""]
    rows = []
    for stage in job["stages"]:
      change = [stage["change_percent"].get(arm)
                for arm in (AGAIN, SHARED, stage.get("best"), WITHOUT)]
      by_hand = stage["fixed"][stage["best"]] if "best" in stage else None
      rows.append([
          stage["rounds"], _slower(stage["slow"]), _slower(stage["measured_slow"]),
          _interval(stage["step_ms"][EVEN]), *(_interval(one) for one in change),
          _interval(stage.get("recovered_percent")),
          *(_interval(stage.get("last_change_percent", {}).get(arm))
            for arm in (AGAIN, SHARED, stage.get("last_best"))),
          _interval(stage.get("last_recovered_percent")), stage["followed_after"], _lost(stage),
          _interval(stage.get("played_percent")),
          _interval(stage.get("played_recovered_percent")),
          "/".join(map(str, stage["counts"])), "/".join(map(str, by_hand)) if by_hand else None])
    page += measured.table(["rounds", "slower", "measured", "even, ms", "even again, %",
                            "shared by speed, %", "best by hand, %", "dropped, %", "recovered, %",
                            "last rank: again, %", "by speed, %", "by hand, %", "recovered, %",
                            "followed", "lost, %", "played again, %",
                            "recovered, %", "counts", "by hand"], rows)
  return page


def _lost(stage: dict[str, Any]) -> str | None:
  if "lost_percent" not in stage:
    return None
  return ("{:.2f} [{:.2f}, {:.2f}]".format(*stage["lost_percent"])
          + f" of {stage['lost_steps']} steps, {stage['uneven_percent']:.1f} % of them uneven")


def _slower(values: list[float]) -> str:
  return "/".join(f"{value:.3g}" for value in values)


def _interval(value: list[Any] | None) -> str | None:
  if value is None or value[0] is None:
    return None
  return (f"{value[0]:.1f} [{value[1]:.1f}, {value[2]:.1f}]" if value[1] is not None
          else f"{value[0]:.1f}")


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the
  same names."""
  flags.DEFINE_list("jobs", list(JOBS), f"Which of {', '.join(JOBS)}.")
  flags.DEFINE_integer("rounds", 5, "Rounds of one block of each arm, in each stage.",
                       lower_bound=2)
  flags.DEFINE_integer("block", 9, "Steps of a block.", lower_bound=6)
  flags.DEFINE_integer("learn", 100, "Steps of sharing by speed at the beginning of each stage.",
                       lower_bound=1)
  flags.DEFINE_list("stages", [], "Which stages of the job, by number from 0; all by default.")
  flags.DEFINE_string("out", "docs/measurements/balanced.json", "File the figures are written to.")
  flags.DEFINE_string("steps", "", "File that every step's arrivals and counts are written to.")
  flags.DEFINE_string("worker", "", "Of the program's own processes: the file to write to.")
  flags.DEFINE_string("setup", "", "Of the program's own processes.")


def main(_: list[str]) -> None:
  its = flags.FLAGS
  if its.worker:
    jaxpace.distributed.initialize()
    given = json.loads(its.setup)
    balanced_worker.work(pathlib.Path(its.worker),
                         Setup(**given | {"slow": tuple(map(tuple, given["slow"]))}))
    return
  if unknown := [name for name in its.jobs if name not in JOBS]:
    raise app.UsageError(f"--jobs={','.join(unknown)}: there are {', '.join(JOBS)}.")
  out = pathlib.Path(its.out)
  before = json.loads(out.read_text()).get("jobs", {}) if out.exists() else {}
  now = measured.circumstances("experiments.measure.balanced")
  for name in its.jobs:
    wanted = [int(k) for k in its.stages] or list(range(len(JOBS[name][-1])))
    found, failed = launch(name, its.learn, its.block, its.rounds, wanted)
    if its.steps:
      # Every step's arrivals and counts, to look at or to play again.
      pathlib.Path(its.steps).write_text(json.dumps({name: found}))
    stages = {stage["number"]: stage for stage in before.get(name, {}).get("stages", ())
              if "number" in stage}
    real_time = measured.has_priority()
    one = {"command": now["command"], "load_average_at_start": now["load_average_at_start"],
           "circumstances": f", {now['date']}, load average {now['load_average_at_start']:.1f}"
           + (", real-time priority" if real_time else "")}
    stages |= {k: {"number": k} | one | judge(stage)
               for k, stage in zip(wanted, found, strict=False)}
    before[name] = ({"stages": [stages[k] for k in sorted(stages)]}
                    | ({"failed": failed} if failed else {}))
  figures: dict[str, Any] = now | {"jobs": {name: before[name] for name in JOBS if name in before}}
  measured.write(figures, lines(figures), out)


if __name__ == "__main__":
  define_flags()
  app.run(main)
