"""Draws the figures of docs/how_it_works.md from simulated jobs, as SVG, with the data beside them.

    python -m experiments.docs.concept_figures

Jobs come from `jaxpace.simulation`, shares and findings from `jaxpace.diagnose`, pacers are the
live ones; about a minute. `docs/figures/concepts.json` holds every number that is drawn;
`--only=one_step` makes one figure anew, `--redraw` draws them from that file.
"""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from absl import app, flags
from scipy import integrate, stats

from experiments.docs import concept_drawing
from jaxpace.cli import pacer_expression
from jaxpace.diagnose.accounting import account
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.step_times import busy
from jaxpace.runs.reader import read_run
from jaxpace.simulation import noise, settings
from jaxpace.simulation import scenario as scenarios
from jaxpace.simulation.job import Job, Shape, simulation
from jaxpace.simulation.jobs import several
from jaxpace.simulation.record import RunWriter

OUT = pathlib.Path("docs/figures")
FABRIC = {"per_node": 1, "card_rate": 25e9, "rack_latency": 8e-6}
JOB = {"forward": 5e-3, "backward": 10e-3, "update": 0.0, "gap": 1e-3, "gradient_bytes": 40e6,
       "overlap": False}

LATE = {"the same rank": {"normal": {"deviation": 0.02}, "slow": {"ranks": [5], "extra": 0.3}},
        "another rank each time": {"normal": {"deviation": 0.02}, "exponential": {"mean": 0.155}}}
"""Both wait about as long: 0.3 of one rank's work, or the largest of eight draws less their
mean."""

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SPREADS: dict[str, tuple[Any, Callable[[int], float]]] = {
    "normal, 5 %": (noise.Normal(np.float32(0.05)), lambda n: 1 + 0.05 * slowest_normal(n)),
    "exponential, 5 %": (noise.Exponential(np.float32(0.05)),
                         lambda n: 1 + 0.05 * float(np.sum(1 / np.arange(1, n + 1)))),
    "a pause of 30 ms in one step of 200": (noise.Pauses(np.float32(0.005), np.float32(30e-3)),
                                            lambda n: 1 + 2.0 * (1 - 0.995**n))}
"""By name: the noise of each rank, and the mean of the slowest of n over 15 ms of compute, in
closed form."""

EARLY, INTERLEAVE = "pace_early_ranks(cost=0.01)", "interleave_jobs(max_delay=0.1, key={key})"
PACED: dict[str, dict[str, Any]] = {
    "ranks late by turns": {"noise": {"exponential": {"mean": 0.1}}},
    "one rank late for good": {"noise": {"slow": {"ranks": [3], "extra": 0.3},
                                         "normal": {"deviation": 0.02}}},
    "… and those that wait poll\non its processors": {
        "noise": {"slow": {"ranks": [3], "extra": 0.3}, "normal": {"deviation": 0.02}},
        "polling": 0.3},
    "pauses of single ranks": {"noise": {"pauses": {"probability": 0.02, "seconds": 20e-3}}},
}
"""Jobs of four ranks on one node, bare and under `pace_early_ranks`."""


def simulate(config: Mapping[str, Any]) -> tuple[settings.Scenario, list[Any]]:
  """Plays a config as `jaxpace simulate` does; every job's steps, by rank."""
  scenario = settings.read(config, pacer_expression.make)
  parts: list[list[Any]] = [[] for _ in scenario.jobs]
  for job, steps in scenarios.run(scenario):
    parts[job].append(steps)
  return scenario, [_joined(each) for each in parts]


def one_step() -> dict[str, Any]:
  """One step of four ranks, ms: who is busy with what, who waits for whom, and what the step goes
  to on the mean."""
  components = {"normal": {"deviation": 0.25}, "pauses": {"probability": 0.05, "seconds": 4e-3}}
  _, [steps] = simulate({"seed": 3, "steps": 60, "fabric": {**FABRIC, "nodes": 4},
                         "jobs": {"a": {**JOB, "noise": components}}})
  paused = steps.gap > 2e-3
  last = steps.enter[:, :, 0].argmax(axis=1)
  each = np.arange(len(last))
  # One rank paused and was not the last: both kinds of time are in one picture.
  fit = (paused.sum(axis=1) == 1) & ~paused[each, last] & (steps.earliness > 3e-3)
  k = int(np.flatnonzero(fit)[0])
  enter, leave = steps.enter[k, :, 0], float(steps.exit[k, 0])
  ms = {"gap": steps.gap[k], "compute": steps.compute[k], "waiting": enter.max() - enter,
        "transfer": np.full(4, leave - enter.max())}
  ms = {name: (1e3 * np.asarray(values, np.float64)).round(3).tolist()
        for name, values in ms.items()}
  step = 1e3 * leave
  return {"step": k, "step_ms": round(step, 3), "last": int(last[k]), **ms,
          "mean": {name: round(float(np.mean(values)), 3) for name, values in ms.items()}}


def late() -> dict[str, Any]:
  """Eight ranks with one late for good, and with late ones intermittently: lateness, ms, and what
  the report says."""
  return {name: _late(components) for name, components in LATE.items()}


def growth() -> dict[str, Any]:
  """Mean step over the quiet one by number of ranks, simulated and in closed form; nothing but
  compute and waiting."""
  import jax
  found: dict[str, Any] = {"ranks": list(SIZES)}
  for name, (component, _) in SPREADS.items():
    job = Job(*(np.float32(seconds) for seconds in (5e-3, 10e-3, 0.0, 0.0)),
              np.zeros(1, np.float32), (component,))
    simulated = []
    for ranks in SIZES:
      (init, run), key = simulation(Shape(ranks, overlap=False)), jax.random.key(1)
      _, steps = jax.jit(run, static_argnums=3)(key, job, init(key, job), 4000)
      simulated.append(round(float(np.asarray(steps.step_time, np.float64).mean() / 15e-3), 4))
    found[name] = {"simulated": simulated,
                   "closed": [round(SPREADS[name][1](ranks), 4) for ranks in SIZES]}
  return found


def slowest_normal(ranks: int) -> float:
  """E[max of N] of standard normals."""
  density = lambda x: x * ranks * stats.norm.pdf(x) * stats.norm.cdf(x) ** (ranks - 1)  # noqa: E731
  return float(integrate.quad(density, -8, 8)[0])


def paced(seeds: int = 3, steps: int = 3000) -> dict[str, Any]:
  """Change of the mean step by pacing, in situations where it can and where it can't gain, for each
  seed."""
  found = {}
  for name, job in PACED.items():
    found[name] = _change({"steps": steps, "fabric": {**FABRIC, "nodes": 1, "per_node": 4},
                           "jobs": {"a": {**JOB, **job}}}, {"a": EARLY}, seeds)
  # Two racks of two nodes; each job has a node in both, so that all its traffic crosses the
  # uplinks.
  fabric = {"nodes": 4, "per_node": 1, "rack": 2, "card_rate": 25e9, "uplink_rate": 25e9}
  job = {**JOB, "forward": 12e-3, "backward": 24e-3, "gradient_bytes": 600e6, "buckets": 4,
         "noise": {"normal": {"deviation": 0.02}}}
  pacers = {name: INTERLEAVE.format(key=key) for key, name in enumerate("ab", 1)}
  for name, shared in (("two jobs, each with its own link", False), ("two jobs on one link", True)):
    found[name] = _change({"steps": steps // 2, "fabric": fabric, "shared_fabric": shared, "jobs": {
        "a": {**job, "nodes": [0, 2]}, "b": {**job, "nodes": [1, 3]}}}, pacers, seeds)
  return found


def _late(components: Mapping[str, Any]) -> dict[str, Any]:
  config = {"seed": 2, "steps": 400, "fabric": {**FABRIC, "nodes": 8},
            "jobs": {"a": {**JOB, "noise": components}}}
  scenario, [steps] = simulate(config)
  with tempfile.TemporaryDirectory() as folder:
    writer = RunWriter(pathlib.Path(folder) / "run", scenario.jobs[0], scenario, config)
    writer.write(steps)
    writer.close()
    run = read_run(pathlib.Path(folder) / "run")
    said = diagnose(run)
    split = account(busy(run, slice(100, 200)))
  assert said.shares is not None and said.step_time is not None
  arrival = np.asarray(split.compute, np.float64) + split.runtime
  lateness = arrival - np.median(arrival, axis=0)
  return {"lateness_ms": (1e3 * lateness).round(2).tolist(),
          "step_ms": round(1e3 * said.step_time.mean, 2), "skew": round(said.shares["skew"], 4),
          "findings": [{"mode": f.mode, "share": round(f.share, 4), "ranks": list(f.ranks)}
                       for f in said.findings]}


def _change(config: dict[str, Any], pacers: Mapping[str, str], seeds: int) -> list[float]:
  """(with - without) / without of the mean step, mean over jobs, from the same draws; one value a
  seed."""
  bare = _mean_steps(config, seeds)
  for name, pacer in pacers.items():
    config["jobs"][name]["pacer"] = pacer
  return [round(float(change), 5)
          for change in (_mean_steps(config, seeds) / bare - 1).mean(axis=1)]


def _mean_steps(config: Mapping[str, Any], seeds: int) -> np.ndarray:
  """[seeds, jobs] seconds, all seeds in one program; a job starts within the first 10 ms, as its
  seed draws."""
  import jax
  scenario = settings.read(config, pacer_expression.make)
  jobs = scenario.jobs
  links = scenarios.shares(list(jobs))
  if not scenario.shared:
    links = links._replace(usage=np.zeros_like(links.usage))
  plan = several([j.shape for j in jobs], [j.pacer for j in jobs],
                 buckets=[j.buckets for j in jobs], steps=scenario.steps,
                 max_delay=scenario.max_delay)

  def play(key: jax.Array) -> list[jax.Array]:
    starts = jax.random.uniform(jax.random.fold_in(key, 1), (len(jobs),), maxval=10e-3)
    histories = plan(key, [j.job for j in jobs], links, starts,
                         np.full(len(jobs), 2**30, np.int32))
    return [history.step_time for history in histories]

  times = jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(0), seeds))
  return np.stack([np.asarray(each, np.float64).mean(axis=1) for each in times], axis=1)


def _joined(parts: list[Any]) -> Any:
  import jax
  return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


FIGURES = {"one_step": one_step, "late": late, "growth": growth, "paced": paced}


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  out = pathlib.Path(flags.FLAGS.out)
  store = out / "concepts.json"
  data = json.loads(store.read_text()) if store.is_file() else {}
  for name in flags.FLAGS.only or FIGURES:
    if not flags.FLAGS.redraw:
      data[name] = FIGURES[name]()
    print(
        f"{name}: "
        f"{concept_drawing.save(getattr(concept_drawing, name)(data[name]), out / f'{name}.svg')}")
  out.mkdir(parents=True, exist_ok=True)
  store.write_text(json.dumps({name: data[name] for name in FIGURES if name in data}, indent=1)
                   + "\n")


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_string("out", str(OUT), "Where the figures go.")
  flags.DEFINE_bool("redraw", False, "Draw what concepts.json holds, without simulating anew.")
  flags.DEFINE_multi_enum("only", [], list(FIGURES), "Draw these alone.")


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  define_flags()
  app.run(main)
