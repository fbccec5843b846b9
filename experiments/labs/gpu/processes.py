"""Observed steps of several processes over NCCL: bits, overhead, who is late. Where there are fewer
GPUs than processes they share one: each says that it is a host of its own, so that NCCL, which
refuses two ranks of one host on one GPU, goes through sockets."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.labs.gpu.bench import Bench
from experiments.lib.paired import estimate
from jaxpace.hosts.launch import environment

ROOT = pathlib.Path(__file__).resolve().parents[3]
CASES = {"data parallel": False, "FSDP, scan, remat": True}
"""Steps by name, and whether parameters are sharded and layers scanned."""
LATE_MS, LATE_STEPS = 20.0, 80
_LIMIT_S = 150.0


def run(bench: Bench) -> None:
  """Section processes."""
  if bench.platform == "cpu":
    bench.note("These processes are for GPUs.")
    return
  import jax
  gpus = len(jax.local_devices())
  count = gpus if gpus > 1 else 2
  with tempfile.TemporaryDirectory() as folder, _served(gpus < count) as served:
    bench.figure("processes", count)
    bench.figure("GPUs", gpus)
    bench.figure("processes share a GPU by NVIDIA's MPS", served)
    for name in CASES:
      _case(bench, name, count, gpus, pathlib.Path(folder))


def _case(bench: Bench, name: str, count: int, gpus: int, folder: pathlib.Path) -> None:
  out = folder / name.replace(" ", "_").replace(",", "")
  out.mkdir()
  failed = _started(name, count, gpus, bench.times(60, 30, 2), out)
  bench.holds(f"{name}: the processes end well", not failed, failed or "yes")
  if failed:
    return
  told = json.loads((out / "process0.json").read_text())
  bench.figure(f"{name}: collectives", told["collectives"])
  bench.figure(f"{name}: timestamps a step and device", told["marks"])
  bench.holds(f"{name}: the same bits after 20 steps",
              told["digests"]["observed"] == told["digests"]["bare"])
  bench.figure(f"{name}: bare twice gives the same bits",
               told["digests"]["bare again"] == told["digests"]["bare"])
  bench.figure(f"{name}: compiling", told["bare_compile_s"], "s")
  bench.figure(f"{name}: adding timestamps", told["stamped_compile_s"], "s")
  seconds = {arm: np.asarray(values) for arm, values in told["seconds_a_step"].items()}
  bench.raw[name] = told["seconds_a_step"]
  bench.figure(f"{name}: bare step", estimate(seconds["bare"] * 1e3), "ms")
  for arm in ("bare again", "observed"):
    ratio = (seconds[arm] / seconds["bare"] - 1) * 100
    bench.figure(f"{name}: {arm}, above bare", estimate(ratio), "%")
    bench.figure(f"{name}: {arm}, above bare, median of rounds", float(np.median(ratio)), "%")
  late, by = _late_rank(out / "run")
  bench.holds(f"{name}: the rank whose process sleeps for {LATE_MS:g} ms a step is named",
              late == count - 1, f"rank {late}")
  # A process sleeps for longer than it asks, never for less.
  bench.holds(f"{name}: it is late by that, and at most a quarter more",
              0.99 * LATE_MS <= by * 1e3 <= 1.25 * LATE_MS, f"{by * 1e3:.4g} ms")


def _late_rank(run: pathlib.Path) -> tuple[int, float]:
  """Rank that the report of a run names first, and seconds that it is late."""
  done = subprocess.run([sys.executable, "-m", "jaxpace", "report", str(run), "--json", "-"],
                        capture_output=True, text=True, cwd=ROOT, timeout=120, check=True)
  first = max(json.loads(done.stdout)["per_rank"], key=lambda one: float(one["lateness"]))
  return int(first["rank"]), float(first["lateness"])


@contextlib.contextmanager
def _served(wanted: bool) -> Iterator[bool]:
  """NVIDIA's server for processes that share a GPU, in this process's environment; without it they
  take turns."""
  control = shutil.which("nvidia-cuda-mps-control") if wanted else None
  if control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
    yield control is not None
    return
  with tempfile.TemporaryDirectory() as folder:
    for kind in ("PIPE", "LOG"):
      os.environ[f"CUDA_MPS_{kind}_DIRECTORY"] = folder
    began = subprocess.run([control, "-d"], timeout=30).returncode == 0
    try:
      yield began
    finally:
      if began:
        subprocess.run([control], input="quit\n", text=True, timeout=30)
      for kind in ("PIPE", "LOG"):
        del os.environ[f"CUDA_MPS_{kind}_DIRECTORY"]


def _started(name: str, count: int, gpus: int, rounds: int, out: pathlib.Path) -> str:
  """Runs the processes; returns what went wrong, empty where nothing did."""
  with socket.socket() as held:
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
  processes = []
  for place in range(count):
    own = {} if gpus >= count else environment.own_host(f"host{place}")
    command = [sys.executable, "-m", "experiments.labs.gpu.processes", f"--case={name}",
               f"--place={place}", f"--count={count}", f"--device={place % gpus}",
               f"--coordinator=127.0.0.1:{port}", f"--rounds={rounds}", f"--out={out}"]
    log = (out / f"process{place}.log").open("w")
    processes.append(subprocess.Popen(
        command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **own}))
  deadline, failed = time.monotonic() + _LIMIT_S, ""
  for place, process in enumerate(processes):
    try:
      status = process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
      process.kill()
      status = process.wait()
    if status and not failed:
      lines = (out / f"process{place}.log").read_text().strip().splitlines()
      failed = f"process {place} ended with {status}: {' | '.join(lines[-3:])}"[:600]
  return failed


# One process.


def child(given: argparse.Namespace) -> None:
  """Trains with and without timestamps, in turns, and then with a late rank, recorded."""
  import jax
  from jax.sharding import AxisType

  jax.distributed.initialize(given.coordinator, given.count, given.place,
                             local_device_ids=[given.device])
  import jaxpace
  from experiments.labs.gpu import observed_steps

  fsdp = CASES[given.case]
  mesh = jax.make_mesh((given.count,), ("data",), (AxisType.Auto,))
  step = observed_steps.transformer(mesh, 4, 256, fsdp=fsdp, scan=fsdp)

  def made(leaf: Any, seed: int, low: float, high: float) -> jax.Array:
    whole = np.random.default_rng(seed).uniform(low, high, leaf.shape).astype(leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda part: whole[part])

  def fresh() -> Any:
    params, moments = step.state
    seeds = iter(range(10_000))
    return (jax.tree.map(lambda leaf: made(leaf, next(seeds), -0.03, 0.03), params),
            jax.tree.map(lambda leaf: made(leaf, 0, 0, 0), moments))

  def jitted() -> Any:
    def train_step(state: Any, batch: Any) -> Any:
      return step.function(state, batch)
    return jax.jit(train_step, donate_argnums=0, out_shardings=step.out_shardings)

  tokens = made(step.batch, 1, 0, observed_steps.VOCABULARY)
  observed = jaxpace.observe(jitted())
  calls = {"bare": jitted(), "bare again": jitted(), "observed": observed}
  states, digests = {}, {}
  for arm, call in calls.items():
    states[arm] = fresh()
    for _ in range(20):
      states[arm], value = call(states[arm], tokens)
    digests[arm] = hashlib.sha256(b"".join(
        np.asarray(leaf.addressable_shards[0].data).tobytes()
        for leaf in jax.tree.leaves(states[arm]))).hexdigest()
  seconds: dict[str, list[float]] = {arm: [] for arm in calls}
  names = list(calls)
  for turn in range(given.rounds):
    # The same order in all processes.
    for arm in (*names[turn % 3:], *names[:turn % 3]):
      begun = time.perf_counter()
      for _ in range(5):
        states[arm], value = calls[arm](states[arm], tokens)
      value.block_until_ready()
      seconds[arm].append((time.perf_counter() - begun) / 5)
  [program] = [one for one in observed.plan.programs if one.name == "train_step"]
  with jaxpace.recorded(given.out / "run", observed.jitted) as recorded:
    state = states["observed"]
    for _ in range(LATE_STEPS):
      if given.place == given.count - 1:
        time.sleep(LATE_MS * 1e-3)
      state, value = recorded(state, tokens)
      value.block_until_ready()
  (given.out / f"process{given.place}.json").write_text(json.dumps({
      "digests": digests, "seconds_a_step": seconds, "marks": program.marks,
      "collectives": len(program.collectives), "bare_compile_s": program.bare_compile_s,
      "stamped_compile_s": program.stamped_compile_s}))


def main() -> None:
  """Runs one process."""
  parser = argparse.ArgumentParser(description="One process of the section processes.")
  parser.add_argument("--case", required=True, choices=CASES)
  for name in ("place", "count", "device", "rounds"):
    parser.add_argument(f"--{name}", type=int, required=True)
  parser.add_argument("--coordinator", required=True)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  child(parser.parse_args())


if __name__ == "__main__":
  main()
