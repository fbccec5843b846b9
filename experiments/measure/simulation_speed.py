"""Measures how long simulations take once compiled, what memory they need, and whether the same
seed gives the same.

    python -m experiments.measure.simulation_speed

Each case runs twice, in processes of their own: compiled, then played `--repeats` times. What was
simulated is hashed and must be the same every time and in both. The last case is the command, with
its files, from start to end.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import child, measured
from jaxpace.cli import pacer_expression
from jaxpace.core.types import Pacer
from jaxpace.simulation import noise, scenario, settings
from jaxpace.simulation.job import Job, Shape, Steps, simulation
from jaxpace.simulation.jobs import several

OUT = pathlib.Path("docs/measurements/simulation_speed.json")
MEMORY = 2.0
"""GiB that a case may take at most."""
STARTS = 2

_REPEATS = flags.DEFINE_integer("repeats", 5, "Times each case is played once it is compiled.",
                                lower_bound=1)
_CORES = flags.DEFINE_integer("cores", 2, "Cores a case may use.", lower_bound=1)
_CASES = flags.DEFINE_multi_string("case", [], "Cases to measure; all if none is named.")
_SHORTER = flags.DEFINE_integer("shorter", 1,
                                "Divides the steps of every case, to try the program.",
                                lower_bound=1)
_INSIDE = flags.DEFINE_bool("inside", False,
                            "Used by this program itself: measures one case in this process.")
_OUT = flags.DEFINE_string("out", str(OUT), "JSON file; a page is written beside it.")


class Case(NamedTuple):
  """Something to be timed."""

  about: str
  steps: int
  limit: float  # s that it may take once compiled
  make: Callable[[int], tuple[Any, tuple[Any, ...]]]
  """steps -> a jitted function and what it is called with."""


def job() -> Job:
  """A step of 60 ms: jitter, heavy tails, speeds that wander, pauses; 4 buckets."""
  parts = (noise.Normal(np.float32(0.02)), noise.Heavy(np.float32(0.02), np.float32(3)),
           noise.Wandering(np.float32(0.01), np.float32(50)),
           noise.Pauses(np.float32(1e-3), np.float32(30e-3)))
  return Job(forward=np.float32(20e-3), backward=np.float32(40e-3), update=np.float32(1e-3),
             gap=np.float32(0.5e-3), transfers=np.full(4, 3e-3, np.float32), noise=parts,
             traffic=noise.Traffic(np.float32(0.01), np.float32(20), np.float32(0.5)),
             polling=np.float32(0.02))


def one(ranks: int, pacer: Pacer | None, seeds: int = 1,
        by_rank: bool = False) -> Callable[[int], Any]:
  """One job by itself, or as many as there are seeds, side by side."""

  def make(steps: int) -> tuple[Any, tuple[Any, ...]]:
    plan = simulation(Shape(ranks, per_node=8), pacer, buckets=4, by_rank=by_rank)

    def run(key: jax.Array, made: Job) -> Steps:
      return plan.run(key, made, plan.init(key, made), steps)[1]

    if seeds == 1:
      return jax.jit(run), (jax.random.key(0), job())
    return (jax.jit(jax.vmap(run, in_axes=(0, None))),
            (jax.random.split(jax.random.key(0), seeds), job()))

  return make


def four(pacer: str) -> Callable[[int], Any]:
  """Four jobs of 64 ranks, each in both racks of a fabric whose spine is oversubscribed 4 to 1;
  kept rank by rank."""

  def make(steps: int) -> tuple[Any, tuple[Any, ...]]:
    config = {
        "steps": steps, "fabric": {"nodes": 32, "per_node": 8, "cards": 8, "card_rate": 25e9,
                                   "rack": 16, "uplinks": 16, "uplink_rate": 50e9},
        "jobs": {name: {
            "nodes": [*range(4 * j, 4 * j + 4), *range(16 + 4 * j, 20 + 4 * j)], "forward": 20e-3,
            "backward": 40e-3 + j * 1e-3, "gradient_bytes": 2e9, "buckets": 4, "algorithm": "ring",
            "start": 7e-3 * j, "pacer": pacer,
            "noise": {"normal": {"deviation": 0.02},
                      "pauses": {"probability": 1e-3, "seconds": 30e-3}}}
                 for j, name in enumerate("abcd")}}
    made = settings.read(config, pacer_expression.make)
    jobs = list(made.jobs)
    plan = several([j.shape for j in jobs], [j.pacer for j in jobs],
                   buckets=[j.buckets for j in jobs], steps=steps, by_rank=True)
    return jax.jit(plan.run), (jax.random.key(0), [j.job for j in jobs], scenario.shares(jobs),
                               np.asarray([j.start for j in jobs], np.float32),
                               np.full(4, 2**30, np.int32))

  return make


CASES = {
    "one_bare": Case("4,096 ranks x 1,000 steps of one job", 1000, 5.0, one(4096, None)),
    "one_paced": Case("the same, paced by `pace_early_ranks()`", 1000, 5.0,
                      one(4096, jaxpace.pace_early_ranks())),
    "one_kept": Case("the same, paced, every rank's times kept", 1000, 5.0,
                     one(4096, jaxpace.pace_early_ranks(), by_rank=True)),
    "seeds_bare": Case("64 seeds x 64 ranks x 10,000 steps", 10_000, 30.0, one(64, None, seeds=64)),
    "seeds_paced": Case("the same, paced by `pace_early_ranks()`", 10_000, 30.0,
                        one(64, jaxpace.pace_early_ranks(), seeds=64)),
    "four_bare":
    Case(
        "four jobs of 64 ranks on a shared two-tier fabric, 10,000 steps each, every rank's "
        "times kept",
        10_000, 10.0, four("")),
    "four_paced": Case("the same, each paced by `interleave_jobs()`", 10_000, 10.0,
                       four("interleave_jobs()")),
}
COMMAND = "command"
CONFIG = {
    "steps": 1000, "fabric": {"nodes": 512, "per_node": 8, "cards": 8, "rack": 32, "uplinks": 64,
                              "uplink_rate": 50e9},
    "jobs": {"a": {"gradient_bytes": 500e6, "algorithm": "hierarchical",
                   "pacer": "pace_early_ranks()",
                   "noise": {"normal": {"deviation": 0.02},
                             "pauses": {"probability": 1e-3, "seconds": 30e-3}}}}}
"""Of the command: 4,096 ranks, paced."""


def inside(case: Case, repeats: int, shorter: int) -> dict[str, Any]:
  """Times a case in this process.

  Returns:
    Seconds of compilation, wall and processor seconds of each time it was played, peak resident
    GiB, and the hashes of what was simulated.
  """
  function, given = case.make(max(2, case.steps // shorter))
  begin = time.perf_counter()
  compiled = function.lower(*given).compile()
  took: dict[str, Any] = {"compile_s": time.perf_counter() - begin, "run_s": [], "cpu_s": []}
  hashes = set()
  for _ in range(repeats):
    begin, worked = time.perf_counter(), time.process_time()
    done = jax.block_until_ready(compiled(*given))
    took["run_s"].append(time.perf_counter() - begin)
    took["cpu_s"].append(time.process_time() - worked)
    hashes.add(hashed(done))
    del done
  return {**took, "hashes": sorted(hashes),
          "peak_gib": child.gibibytes(resource.getrusage(resource.RUSAGE_SELF))}


def hashed(done: Any) -> str:
  """Of all bytes of a tree of arrays."""
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(done):
    digest.update(np.ascontiguousarray(leaf).data)
  return digest.hexdigest()[:16]


def commanded(cores: int, shorter: int) -> dict[str, Any]:
  """Runs `jaxpace simulate` twice: start to end, files included; and hashes every file, by its
  path."""
  with tempfile.TemporaryDirectory(prefix="simulation-speed-") as folder:
    config = pathlib.Path(folder) / "config.json"
    config.write_text(json.dumps({**CONFIG, "steps": max(2, CONFIG["steps"] // shorter)}))
    runs: list[float] = []
    peaks: list[float] = []
    hashes, size = set(), 0
    for turn in range(STARTS):
      output = pathlib.Path(folder) / str(turn)
      ended = child.run([sys.executable, "-m", "jaxpace", "simulate", str(config), "--output",
                         str(output)], cores)
      digest, size = hashlib.sha256(), 0
      for file in sorted(path for path in output.rglob("*") if path.is_file()):
        digest.update(str(file.relative_to(output)).encode() + file.read_bytes())
        size += file.stat().st_size
      hashes.add(digest.hexdigest()[:16])
      runs.append(ended.wall)
      peaks.append(ended.peak)
  return {"about":
          "`jaxpace simulate` of 4,096 paced ranks x 1,000 steps, from start to end, files written",
          "limit_s": None, "run_s": runs, "peak_gib": max(peaks), "same_bytes": len(hashes) == 1,
          "hash": sorted(hashes)[0], "written_mib": size / 2**20}


def measure(names: list[str], repeats: int, cores: int, shorter: int) -> dict[str, Any]:
  """Measures cases, each in processes of its own."""
  found: dict[str, Any] = {}
  for name in names:
    if name == COMMAND:
      found[name] = commanded(cores, shorter)
    else:
      case = CASES[name]
      command = [sys.executable, "-m", "experiments.measure.simulation_speed", "--inside",
                 f"--case={name}", f"--repeats={repeats}", f"--shorter={shorter}"]
      parts = [json.loads(child.run(command, cores).said.splitlines()[-1]) for _ in range(STARTS)]
      hashes = {h for part in parts for h in part["hashes"]}
      found[name] = {
          "about": case.about, "limit_s": case.limit,
          "compile_s": [part["compile_s"] for part in parts],
          **{column: [seconds for part in parts for seconds in part[column]]
             for column in ("run_s", "cpu_s")}, "peak_gib": max(part["peak_gib"] for part in parts),
          "same_bytes": len(hashes) == 1, "hash": sorted(hashes)[0]}
    found[name]["within"] = within(found[name])
    print(f"  {name}: {max(found[name]['run_s']):.2f} s at most, {found[name]['peak_gib']:.2f} GiB",
          file=sys.stderr, flush=True)
  return {"cores": cores, "shorter": shorter, "cases": found}


def within(case: dict[str, Any]) -> bool:
  """Whether even the longest run was quick enough, in little enough memory, and always the same."""
  quick = case["limit_s"] is None or max(case["run_s"]) <= case["limit_s"]
  return bool(quick and case["peak_gib"] <= MEMORY and case["same_bytes"])


def page(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  lines = measured.introduction("How long simulations take", figures)
  lines += [
      f"On {figures['cores']} cores. Seconds once compiled: median and longest of {STARTS} "
      "processes, and the",
      f"median of processor time, of all cores; memory of the whole process, {MEMORY:g} GiB "
      "at most;",
      "whether all runs gave the same bytes; whether the longest run, the memory and the "
      "bytes are all as they should be.", ""]
  if figures["shorter"] > 1:
    lines += [f"**Of every case only 1/{figures['shorter']} of the steps were run.**", ""]
  return lines + measured.table(
      ["case", "compiled in, s", "median, s", "longest, s", "processor, s", "at most, s", "GiB",
       "same bytes", "within"],
      [[case["about"], max(case["compile_s"]) if "compile_s" in case else None,
        float(np.median(case["run_s"])), max(case["run_s"]),
        float(np.median(case["cpu_s"])) if "cpu_s" in case else None, case["limit_s"],
        case["peak_gib"], case["same_bytes"], case["within"]]
       for case in figures["cases"].values()])


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  names = _CASES.value or [*CASES, COMMAND]
  unknown = [name for name in names if name not in (*CASES, COMMAND)]
  if unknown:
    raise app.UsageError(f"--case={unknown[0]} must be one of {', '.join((*CASES, COMMAND))}.")
  if _INSIDE.value:
    print(json.dumps(inside(CASES[names[0]], _REPEATS.value, _SHORTER.value)))
    return
  figures = {**measured.circumstances("experiments.measure.simulation_speed"),
             **measure(names, _REPEATS.value, _CORES.value, _SHORTER.value)}
  measured.write(figures, page(figures), pathlib.Path(_OUT.value))


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  app.run(main)
