"""Work shared by speed under its guard: how long it takes to keep a gain and to end a harm.

    python -m experiments.measure.balanced_guarded
    chrt -r 5 python -m experiments.measure.balanced_guarded --live

`share_work(..., guarded=True)` puts blocks of even and of shared counts in a random order and
decides by an interval that holds under peeking. *Simulated*: four ranks, 32 micro-batches, noise of
every rank and step, over blocks of several lengths; one rank slower, healthy ranks, and counts that
are wrong on purpose. *Live*: real processes over gloo whose micro-batches are sleeps, one rank
slower, and the wrong counts. Writes docs/measurements/balanced_guarded.json and .md; what is not
run keeps what the file has of it.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import measured
from experiments.measure import balanced_worker
from jaxpace.coordination import plain, trial
from jaxpace.coordination.apportion import even
from jaxpace.coordination.share_work import found
from jaxpace.simulation.shared_work import best, play

RANKS, TOTAL, REST = 4, 32, 1.0
STEPS, RUNS = 6000, 6
BLOCKS = (16, 32, 64)
WRONG = (9, 8, 8, 7)
"""Counts that make healthy ranks 12.5 % slower."""
CASES: dict[str, tuple[tuple[float, ...], bool]] = {  # speeds, and whether the counts are wrong
    "one rank 1.2 times slower": ((1, 1, 1, 1.2), False),
    "one rank 1.5 times slower": ((1, 1, 1, 1.5), False),
    "one rank 3 times slower": ((1, 1, 1, 3), False),
    "healthy": ((1, 1, 1, 1), False), "wrong counts": ((1, 1, 1, 1), True)}
NOISES = {"5 %": (0.05, 0.0), "15 %": (0.15, 0.0), "15 %, hangs together": (0.15, 0.8)}
"""Deviation of a rank's step, and its autocorrelation from step to step."""
LIVE = {"one rank 1.5 times slower": (1.0, 1.0, 1.0, 1.5), "wrong counts": (1.0,) * 4}
WORK = 0.004  # s, a micro-batch of the live job


def pacer(wrong: bool, block: int) -> jaxpace.Pacer:
  """Work shared by speed, or wrongly on purpose, under the guard."""
  balancer = jaxpace.share_by_speed(TOTAL, TOTAL)
  if wrong:
    counts = jnp.asarray(WRONG, jnp.int32)
    balancer = jaxpace.Balancer(lambda ranks: (), lambda seen, state: (counts, state), TOTAL)
  return jaxpace.share_work(balancer, guarded=True, block=block)


@functools.lru_cache
def _kept(wrong: bool, block: int) -> jaxpace.Pacer:
  return pacer(wrong, block)


def noise(cv: float, hangs: float, seed: int) -> np.ndarray:
  """[STEPS, RANKS], mean about 1."""
  rng = np.random.default_rng(seed)
  drawn = rng.standard_normal((STEPS, RANKS))
  for k in range(1, STEPS if hangs else 0):
    drawn[k] = hangs * drawn[k - 1] + np.sqrt(1 - hangs * hangs) * drawn[k]
  return np.exp(cv * drawn - cv * cv / 2)


def simulate(case: str, cv: float, hangs: float, block: int) -> dict[str, Any]:
  """Plays some runs of a case."""
  speeds, wrong = CASES[case]
  slow = np.asarray(speeds, np.float64)
  equal = even(TOTAL, RANKS)
  base = (equal * slow).max() + REST
  most = base - best(slow, TOTAL, TOTAL) - REST
  decided, regret, right, took = [], [], [], []
  for seed in range(RUNS):
    played = play(_kept(wrong, block), slow * noise(cv, hangs, seed), rest=REST,
                  micro_batches=TOTAL)
    on = played.columns["work_on"].astype(bool)
    uneven = (played.counts != equal).any(axis=1)
    # Whether the last decision that lasts longer than blocks do is the right one.
    right.append(float((on if most > 0 else ~uneven)[-STEPS // 4:].mean()))
    last = int(np.flatnonzero(on != on[-1])[-1]) if (on != on[-1]).any() else 0
    decided.append(last)
    took.append(float(played.seconds.mean() / played.even.mean() - 1))
    ends = (played.counts * slow).max(axis=1) + REST
    regret.append(float((ends - (base - max(most, 0))).sum() / (base - max(most, 0))))
  return {"right_percent": 100 * float(np.mean(right)), "step_percent": 100 * float(np.mean(took)),
          "best_percent": float(-100 * max(most, 0) / base), "regret_steps": float(np.mean(regret)),
          "regret_most": float(np.max(regret)), "last_switch": float(np.median(decided))}


def work(out: pathlib.Path, case: str, steps: int, block: int) -> None:
  """One process of the live job; process 0 writes what it found."""
  speeds = LIVE[case]
  setup = balanced_worker.Setup("sleep", TOTAL, (speeds,), WORK, 0, 0, 0)
  job = balanced_worker.Training(setup, 0, pacer("wrong" in case, block))
  counts, at = [], []
  judged: list[Any] = []
  for step, ran in enumerate(job.steps(steps)):
    counts.append(ran.tolist())
    at.append(time.perf_counter())
    if step % 50 == 49:
      state: Any = jax.tree.map(_here, found(job.paced.pacer_state(job.pace)).trial)
      judged.append([step + 1, *map(float, trial.effect(state, plain)), state.pairs, state.mode])
      if jax.process_index() == 0:
        print(f"  {case}: {step + 1} of {steps} steps", file=sys.stderr, flush=True)
  jax.block_until_ready(job.pace)
  if jax.process_index() == 0:
    out.write_text(json.dumps({"counts": counts, "at": at, "judged": judged}))


def _here(leaf: Any) -> Any:
  """This process's own copy of what is the same on all ranks, as a Python number."""
  part = leaf.addressable_shards[0].data if isinstance(leaf, jax.Array) else leaf
  return np.ravel(np.asarray(part))[0].item()


def live(case: str, steps: int, block: int) -> dict[str, Any]:
  """Runs a live job, and says what it has shown."""
  with tempfile.TemporaryDirectory() as root:
    out = pathlib.Path(root) / "found.json"
    subprocess.run(
        [sys.executable, "-m", "jaxpace.cli", "launch", "--nproc", str(RANKS), "--logs",
         f"{root}/logs", "--", sys.executable, "-m", "experiments.measure.balanced_guarded",
         f"--worker={out}", f"--case={case}", f"--steps={steps}", f"--block={block}"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=sys.stderr, check=True)
    kept = json.loads(out.read_text())
  uneven = (np.asarray(kept["counts"]) != even(TOTAL, RANKS)).any(axis=1)
  seconds, judged = np.diff(kept["at"]), kept["judged"]
  helps = next((row[0] for row in judged if row[5] == trial.KEPT), None)
  fails = next((row[0] for row in judged if row[5] == trial.DROPPED and row[4] > 0), None)
  tail = slice(-steps // 4, None)
  known = [row for row in judged if np.isfinite(row[1:4]).all()]
  return {"steps": steps, "block": block, "kept_after": helps, "ended_after": fails,
          "uneven_at_the_end_percent": 100 * float(uneven[tail].mean()),
          "effect_percent": [100 * value for value in known[-1][1:4]] if known else None,
          "pairs": int(known[-1][4]) if known else 0,
          "step_ms": {
              "even": 1e3 * float(np.median(seconds[~uneven[1:]])),
              "uneven": 1e3 * float(np.median(seconds[uneven[1:]])) if uneven.any() else None},
          "real_time": measured.has_priority()}


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("Work shared by speed under its guard", figures)
  page += ["Guarded: blocks of even and of shared counts in random order, an interval that holds "
           "under peeking, off where it does not pay (`jaxpace.share_work(..., guarded=True)`; 16 "
           "steps a block by default).", ""]
  if "simulated" in figures:
    page += ["## Simulated", "",
             f"{RANKS} ranks, {TOTAL} micro-batches, other work worth {REST:g} of one; {RUNS} runs "
             f"of {STEPS:,} steps. Noise: deviation of a rank's step from step to step; what hangs "
             "together has autocorrelation 0.8. Right: share of the last quarter in which counts "
             "were what they should be (shared where a rank is slower, else even). Step: mean over "
             f"all {STEPS:,}, against even counts on the same noise; best: with the best counts "
             "from the first step on, were there no noise. Regret: steps' worth of time lost "
             f"against that in {STEPS:,} steps, mean and greatest. Wrong counts: "
             f"{'/'.join(map(str, WRONG))} on healthy ranks, 12.5 % slower.", ""]
    rows = [[case, label, block, f"{one['right_percent']:.0f}", f"{one['step_percent']:+.1f}",
             f"{one['best_percent']:.1f}", f"{one['regret_steps']:.0f}",
             f"{one['regret_most']:.0f}"]
            for case, by_noise in figures["simulated"].items()
            for label, by_block in by_noise.items() for block, one in by_block.items()]
    page += measured.table(["ranks", "noise", "block", "right, %", "step, %", "best, %",
                            "regret, steps", "most"], rows)
  if "live" in figures:
    page += ["", "## Live", "",
             f"{RANKS} gloo processes, {TOTAL} micro-batches that are sleeps of {1e3 * WORK:g} ms. "
             "Kept, ended: steps after which the guard had decided (looked at every 50). Effect: "
             "of the pairs of the last trial, with its anytime-valid interval. Even, uneven: "
             "medians over the steps with such counts.", ""]
    rows = [[case, one["steps"], one["block"], f"{one['step_ms']['even']:.1f}",
             "{:.1f}".format(one["step_ms"]["uneven"]) if one["step_ms"]["uneven"] else None,
             "{:+.1f} [{:+.1f}, {:+.1f}]".format(*one["effect_percent"])
             if one["effect_percent"] else None,
             one["pairs"], one["kept_after"], one["ended_after"],
             f"{one['uneven_at_the_end_percent']:.0f}", "yes" if one["real_time"] else "no"]
            for case, one in figures["live"].items()]
    page += measured.table(["ranks", "steps", "block", "even, ms", "uneven, ms", "effect, %",
                            "pairs", "kept after", "ended after", "uneven in the last quarter, %",
                            "real-time priority"], rows)
    page += ["", f"`{figures['live_command']}`"]
  return page


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the
  same names."""
  flags.DEFINE_bool("live", False, "Run the live jobs, not the simulation.")
  flags.DEFINE_integer("steps", 1500, "Steps of a live job.", lower_bound=200)
  flags.DEFINE_integer("block", trial.BLOCK, "Steps of a block of a live job.", lower_bound=4)
  flags.DEFINE_string("out", "docs/measurements/balanced_guarded.json",
                      "File the figures are written to.")
  flags.DEFINE_string("worker", "", "Of the program's own processes: the file to write to.")
  flags.DEFINE_string("case", "", "Of the program's own processes.")


def main(_: list[str]) -> None:
  its = flags.FLAGS
  if its.worker:
    jaxpace.distributed.initialize()
    work(pathlib.Path(its.worker), its.case, its.steps, its.block)
    return
  out = pathlib.Path(its.out)
  before = json.loads(out.read_text()) if out.exists() else {}
  now = measured.circumstances("experiments.measure.balanced_guarded")
  if its.live:
    figures = (before or now) | {"live": {}, "live_command": now["command"]}
    for case in LIVE:
      figures["live"][case] = live(case, its.steps, its.block)
  else:
    figures = now | {name: before[name] for name in ("live", "live_command") if name in before}
    figures["simulated"] = {}
    for case in CASES:
      figures["simulated"][case] = {}
      for label, (cv, hangs) in NOISES.items():
        print(f"  {case}, {label}", file=sys.stderr, flush=True)
        figures["simulated"][case][label] = {
            str(block): simulate(case, cv, hangs, block) for block in BLOCKS}
  measured.write(figures, lines(figures), out)


if __name__ == "__main__":
  define_flags()
  app.run(main)
