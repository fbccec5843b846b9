"""Thousands of accelerators for days: does jitter compound, do restarts amplify, where is the knee,
what control does.

    python -m experiments.stability.run

Steps come from `jaxpace.simulation` (groups that share a model, barriers, drift, pauses); failures,
checkpoints and restarts are played on them. "Compounds" and "amplifies" are hypotheses: each has a
null and a test. The scenario, with the source of each number or the word assumed, is
configs/stability.py.
"""

from __future__ import annotations

import math
import os
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.stability import job as stability
from experiments.stability import projection
from experiments.stability import tables as stability_tables
from experiments.stability.diagnosis import growth, knee, recorded
from experiments.stability.job import Machine, Policy, Series
from experiments.stability.projection import Trouble
from experiments.stability.survival import Lived, Power, live, ratios
from jaxpace.diagnosis.diagnose import diagnose
from jaxpace.simulation.job import Shape, simulation
from jaxpace.simulation.record import JobRecord, RunWriter
from jaxpace.trace.reader import read_run

OUT = pathlib.Path("docs/measurements/stability.json")
RECORDED_GROUPS, RECORDED_STEPS = 32, 1200
"""Of the run that is recorded and given to the report."""


def still(machine: Machine) -> Machine:
  """The i.i.d. null: as much jitter, as many pauses and barriers; nothing that lasts from one step
  to the next."""
  return machine._replace(drift=0.0, wander=0.0)


def policies(config: Any) -> dict[str, Policy]:
  """What is simulated everywhere, by name."""
  usual, local = float(config.interval), int(config.local)
  return {"baseline": Policy(usual), "young_daly": Policy(0.0), "aligned": Policy(usual, True),
          "local_steps": Policy(usual, False, local)}


def candidates(config: Any, local: bool) -> list[Policy]:
  """What control may choose from; with `local`, also what changes the training."""
  return [Policy(interval, aligned, every) for interval in (float(config.interval), 0.0)
          for aligned in (False, True)
          for every in ((1, int(config.local)) if local else (1,))]


def simulated(config: Any, machine: Machine, groups: int) -> dict[tuple[bool, int] | str, Series]:
  """Cold starts of every kind that a policy may need, by (aligned, H), and of the null."""
  steps, seed = int(config.steps), int(config.seed) * 1000 + groups
  made: dict[tuple[bool, int] | str, Series] = {}
  for aligned in (False, True):
    for every in (1, int(config.local)):
      own = steps // every * every
      made[aligned, every] = stability.series(machine, groups, Policy(1.0, aligned, every), own,
                                              config.runs, seed)
  made["null"] = stability.series(still(machine), groups, Policy(1.0), steps, config.runs, seed)
  return made


def compounding(config: Any, machine: Machine, of: Series) -> dict[str, Any]:
  """Var(sum)/K of the warm steps of every run."""
  first = min(of.times.shape[1] // 2, math.ceil(5 * machine.warm / stability.ideal(machine)))
  found = [growth.grow(times[first:], seed) for seed, times in enumerate(of.times)]
  known = [g for g in found if g is not None]
  if not known:
    return {"windows": [], "ratio": [], "rises": 0, "runs": 0, "waiting": None}
  warm = of.times[:, first:]
  return {"windows": known[0].windows.tolist(),
          "ratio": np.mean([g.ratio for g in known], axis=0).tolist(),
          "rises": int(sum(g.rises for g in known)), "runs": len(known),
          "least_p": min(g.p for g in known),
          "waiting": float((warm - of.busy[:, first:]).mean() / warm.mean())}


def played(config: Any, machine: Machine, groups: int, of: Series, policy: Policy,
           trouble: Trouble | None, every: int | None = None) -> list[Lived]:
  """Long runs under a policy; without trouble, without failures and checkpoints."""
  step = stability.ideal(machine)
  steps = max(1, round(config.days * 86400 / step))
  rate = projection.failure_rate(machine, groups, trouble) if trouble else 0.0
  if every is None:
    each = float(of.times[:, of.times.shape[1] // 2:].mean())
    every = max(1, round(policy.interval / each / policy.local)) * policy.local
  return [live(of, policy.local, steps, rate, every if trouble else steps + 1,
               trouble.checkpoint if trouble else 0.0, trouble.restart if trouble else 0.0,
               Power(**config.power), seed) for seed in range(config.plays)]


def summary(config: Any, machine: Machine, runs: list[Lived]) -> dict[str, Any]:
  """Each ratio: mean over runs and its standard error."""
  found = [ratios(run, stability.ideal(machine), Power(**config.power), int(config.window))
           for run in runs]
  result: dict[str, Any] = {"failures": float(np.mean([run.failures for run in runs])),
                            "cost_each": []}
  for name in found[0]._fields:
    values = np.array([getattr(r, name) for r in found])
    result[name] = [float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))]
  result["cost_each"] = [r.cost for r in found]
  return result


def amplification(config: Any, machine: Machine, groups: int, made: dict[Any, Series],
                  trouble: Trouble
                  ) -> dict[str, Any]:
  """Whether failures and varying steps cost more together than each by itself, and what restarts do
  to steps.

  The four corners have the same checkpoints, counted in steps, and the same draws of failures, run
  by run.
  """
  policy, of = Policy(float(config.interval)), made[False, 1]
  quiet = stability.ideal(machine) + stability.transfer(machine, groups)
  even = Series(np.full_like(of.times, quiet), np.full_like(of.times, machine.compute))
  every = max(1, round(policy.interval / quiet))
  corners = {(noisy, failing): played(config, machine, groups, of if noisy else even, policy,
                                      trouble if failing else None, every)
             for noisy in (False, True) for failing in (False, True)}
  ends = {key: np.array([run.done[-1] for run in runs]) for key, runs in corners.items()}
  together = np.log(ends[True, True] * ends[False, False] / (ends[True, False] * ends[False, True]))
  half = 2.0 * together.std(ddof=1) / math.sqrt(len(together))
  # As slow as the varying steps, and even: what is left between the two is the variation's own.
  slow = Series(np.full_like(of.times,
                             (ends[True, False] / len(corners[True, False][0].done)).mean()),
                of.busy)
  level = np.array([run.done[-1]
                    for run in played(config, machine, groups, slow, policy, trouble, every)])
  own = np.log(ends[True, True] / level)
  margin = 2.0 * own.std(ddof=1) / math.sqrt(len(own))
  spread = {key:
            float(np.mean([ratios(run, quiet, Power(**config.power), int(config.window)).variance
                           for run in runs])) for key, runs in corners.items()}
  # Useful steps soon after a start against those long after.
  warm = machine.warm / stability.ideal(machine)
  early, late = [], []
  for run in corners[True, True]:
    took = np.diff(run.done, prepend=0.0)
    normal = took < 3 * quiet  # a step behind which a checkpoint or a restart lies is none
    early.append(took[normal & (run.fresh < warm)].mean() if (normal & (run.fresh < warm)).any()
                 else np.nan)
    late.append(took[normal & (run.fresh > 5 * warm)].mean())
  windows = {"failures": corners[False, True], "both": corners[True, True]}
  return {
      "interaction": math.exp(float(together.mean())),
      "interval": [math.exp(float(together.mean() - half)),
                   math.exp(float(together.mean() + half))],
      "variation": math.exp(float(own.mean())),
      "variation_interval": [math.exp(float(own.mean() - margin)),
                             math.exp(float(own.mean() + margin))],
      "variance_failures": spread[False, True], "variance_variation": spread[True, False],
      "variance_both": spread[True, True],
      "after_restart": float(np.nanmean(early) / np.nanmean(late)),
      "memory": {name: _memory(config, runs) for name, runs in windows.items()}}


def _memory(config: Any, runs: list[Lived]) -> dict[str, Any]:
  """The growth test on what equal amounts of work took, run by run."""
  width = int(config.window)
  found = [growth.grow(np.diff(run.done[width - 1::width], prepend=0.0), seed, 199)
           for seed, run in enumerate(runs[:4])]
  known = [g for g in found if g is not None]
  return {"rises": sum(g.rises for g in known), "runs": len(known),
          "ratio": float(np.mean([g.ratio[-1] for g in known])) if known else None,
          "windows": int(known[0].windows[-1]) if known else None}


def controlled(config: Any, machine: Machine, groups: int, made: dict[Any, Series], trouble: Trouble
               ) -> dict[str, Any]:
  """Every policy, and the two that the projection chose: projected and simulated."""
  wanted = {name: projection.project(machine, groups, policy, trouble, config.draws)
            for name, policy in policies(config).items()}
  wanted["chosen"] = projection.choose(machine, groups, candidates(config, False), trouble,
                                       config.draws)
  wanted["chosen_local"] = projection.choose(machine, groups, candidates(config, True), trouble,
                                             config.draws)
  rows = {}
  for name, projected in wanted.items():
    policy = projected.policy
    runs = played(config, machine, groups, made[policy.aligned, policy.local], policy, trouble)
    rows[name] = {"policy": policy._asdict(), "projected": projected.cost,
                  **summary(config, machine, runs)}
  return rows


def knees(sizes: list[int], rows: dict[str, dict[str, Any]],
          null: dict[str, Any]) -> dict[str, Any]:
  """The scalability law, fitted to every policy's throughput over the sizes, and to the null's."""
  sweep = {name: [rows[str(n)][name]["cost_each"] for n in sizes] for name in rows[str(sizes[0])]}
  sweep["null"] = [null[str(n)]["cost_each"] for n in sizes]
  result = {}
  for name, costs in sweep.items():
    scaled = np.asarray(sizes, np.float64)[:, None] / np.asarray(costs)
    own = knee.fit(np.asarray(sizes, np.float64), scaled)._asdict()
    mean = scaled.mean(axis=1)
    result[name] = {**own, "highest_at": int(sizes[int(mean.argmax())]),
                    "efficiency": (mean / np.asarray(sizes)).tolist()}
  return result


def diagnosed(config: Any, machine: Machine) -> dict[str, Any]:
  """Records a run of the scenario, a small one, and gives it to the report, as a user would."""
  groups, steps = RECORDED_GROUPS, RECORDED_STEPS
  made = stability.job(machine, groups, Policy(1.0))
  plan = simulation(Shape(groups), by_rank=True)
  key = jax.random.key(int(config.seed))
  _, done = jax.jit(plan.run, static_argnums=3)(key, made, plan.init(key, made), steps)
  recording = JobRecord("stability", [f"node{r}" for r in range(groups)], groups,
                        [int(machine.gradient)], 0.0, machine.compute, 0.0, 0.25, "", {})
  with tempfile.TemporaryDirectory() as folder:
    writer = RunWriter(folder, recording, int(config.seed))
    writer.write(done)
    writer.close()
    found = diagnose(read_run(folder))
  said = recorded.to_json(recorded.recorded(found))
  return {"groups": groups, "steps": steps, "verdict": found.verdict, "decision": said["decision"],
          "findings": [f"{f.mode} {f.share:.3f}" for f in found.findings], "stability": said}


def measure(config: Any) -> dict[str, Any]:
  """All figures of the scenario."""
  machine = Machine(**config.machine)
  sizes = [int(n) for n in config.sizes]
  troubles = {name: Trouble(mtbf=float(mtbf), **config.trouble)
              for name, mtbf in config.mtbf.items()}
  compound: dict[str, Any] = {}
  null: dict[str, Any] = {}
  rows: dict[str, dict[str, Any]] = {name: {} for name in troubles}
  amplified: dict[str, dict[str, Any]] = {name: {} for name in troubles}
  say = measured.progress("sizes", len(sizes))
  for place, size in enumerate(sizes):
    groups = size // machine.group
    made = simulated(config, machine, groups)
    compound[str(size)] = {"null": compounding(config, machine, made["null"]),
                           "baseline": compounding(config, machine, made[False, 1])}
    null[str(size)] = summary(config, machine,
                              played(config, machine, groups, made["null"], Policy(1.0), None))
    for name, trouble in troubles.items():
      rows[name][str(size)] = controlled(config, machine, groups, made, trouble)
      amplified[name][str(size)] = amplification(config, machine, groups, made, trouble)
    say(place + 1)
  return {"config": config.to_dict(), "sizes": sizes, "alpha": growth.ALPHA,
          "compounding": compound, "null": null, "policies": rows, "amplification": amplified,
          "knees": {name: knees(sizes, rows[name], null) for name in troubles},
          "recorded": diagnosed(config, machine)}


def rounded(value: Any) -> Any:
  """With five digits, and null for what is not a number."""
  if isinstance(value, dict):
    return {key: rounded(entry) for key, entry in value.items() if key != "cost_each"}
  if isinstance(value, list | tuple):
    return [rounded(entry) for entry in value]
  if isinstance(value, float):
    return float(f"{value:.5g}") if math.isfinite(value) else None
  return value


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  figures = {**measured.circumstances("experiments.stability.run"),
             **rounded(measure(flags.FLAGS.config))}
  measured.write(figures, stability_tables.page(figures), pathlib.Path(flags.FLAGS.out))


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from ml_collections import config_flags

  config_flags.DEFINE_config_file("config", "configs/stability.py", "The scenario.",
                                  lock_config=True)
  flags.DEFINE_string("out", str(OUT), "Where the figures go.")
  app.run(main)
