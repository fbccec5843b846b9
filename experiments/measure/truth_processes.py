"""Lateness in several processes: what was recorded, against entries on the one clock that all of a
machine share.

Nobody but this experiment compares the clocks of two processes: they run on one machine here.
"""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

import jaxpace
from experiments.lib import lateness_found
from experiments.lib.injection import PLACES, LateJob, fault
from jaxpace.trace.reader import read_run
from jaxpace.trace.run import MISSING

_WARM_UP = 10  # steps at the beginning of each block that don't count


_WHERE = ("forward", "update", "host")
"""In the compiled step, or on the host: there the process sleeps before it dispatches the step."""


class Block(NamedTuple):
  """Steps with the same late rank and delay."""

  where: str  # one of `_WHERE`
  rank: int
  delay_ms: float


def blocks(ranks: int, delays: list[float]) -> list[Block]:
  """Every delay once in every place, on random ranks, in random order among blocks without a delay.

  The same on every process.
  """
  draw = random.Random(ranks)
  chosen = [Block(where, draw.randrange(ranks), delay) for where in _WHERE for delay in delays]
  chosen += [Block(where, 0, 0.0) for where in _WHERE for _ in range(2)]
  draw.shuffle(chosen)
  return chosen


def launch(processes: int, share: bool, delays: list[float], steps: int,
           module: str) -> dict[str, Any]:
  """Runs `module` as workers in several processes and judges what they recorded."""
  with tempfile.TemporaryDirectory() as root:
    command = [sys.executable, "-m", "jaxpace.cli", "launch", "--nproc", str(processes), "--logs",
               os.path.join(root, "logs"), "--", sys.executable, "-m", module, f"--worker={root}",
               f"--delays_ms={','.join(f'{d:g}' for d in delays)}", f"--block={steps}",
               f"--worker_share={str(share).lower()}"]
    subprocess.run(command, check=True)
    return judge(pathlib.Path(root), processes, share, delays, steps)


def work(root: pathlib.Path, delays: list[float], steps: int, share: bool) -> None:
  """One process of several: runs all blocks, recorded."""
  ranks = jax.device_count()
  mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,))
  me = jax.process_index()
  todo = blocks(ranks, delays)
  job = LateJob(mesh, clock="auto", rows=128, share=share or None)
  slept: list[Any] = []
  on_host: list[float] = []
  seen: list[Any] = []
  with jaxpace.Recorder(root / "run", job.paced) as recorder:
    for number, block in enumerate(todo):
      if me == 0:
        print(
            f"block {number + 1} of {len(todo)}: {block.delay_ms:g} ms on rank {block.rank}, "
            f"{block.where}",
            flush=True)
      late_here = block.where == "host" and block.rank == me and block.delay_ms > 0
      in_step = (fault(block.where, block.rank, block.delay_ms * 1e-3) if block.where in PLACES
                 else fault())
      for step in range(_WARM_UP + steps):
        start = time.monotonic_ns()
        if late_here:
          time.sleep(block.delay_ms * 1e-3)
        on_host.append((time.monotonic_ns() - start) * 1e-6 if late_here else 0.0)
        slept.append(job.run(in_step))
        seen.append(job.pace.arrivals + 0)  # the state itself is donated
        recorder.record(job.pace)
        if block.where == "host" or step % 10 == 9:
          jax.block_until_ready(slept[-1])
      jax.block_until_ready(job.pace)
  plan = job.paced.plan
  assert plan is not None
  np.savez(root / f"{me}.npz", on_host=np.asarray(on_host),
           in_step=np.stack([_own(value)[0].sum() for value in slept]) * 1e3,
           seen=np.stack([_own(value)[0] for value in seen]) * 1e3, shared=plan.share)


def _own(value: jax.Array) -> np.ndarray:
  return np.asarray(value.addressable_data(0))


def judge(root: pathlib.Path, ranks: int, share: bool, delays: list[float],
          steps: int) -> dict[str, Any]:
  """Compares, block by block, the recorded arrivals with the entries on the shared clock and with
  what was slept."""
  run = read_run(root / "run")
  if run.ranks != ranks:
    raise RuntimeError(
        f"{ranks} processes recorded {run.ranks} ranks: each must have one device. Is "
        "XLA_FLAGS set?")
  collective = run.collectives[0]
  workers = [np.load(root / f"{rank}.npz") for rank in range(ranks)]
  asked = blocks(ranks, delays)
  total = len(asked) * (_WARM_UP + steps)
  origin = collective.enter_ns[collective.enter_ns != MISSING].min()
  enter, leave = (_dense(values, run.steps, total, origin)
                  for values in (collective.enter_ns, collective.exit_ns))
  arrivals = np.full(enter.shape, np.nan)
  arrivals[:, 1:] = enter[:, 1:] - leave[:, :-1]
  slept = np.stack([worker["on_host"] + worker["in_step"] for worker in workers])
  judged = []
  for number, block in enumerate(asked):
    first = number * (_WARM_UP + steps) + _WARM_UP
    use = np.arange(first, first + steps)
    use = use[np.isfinite(enter[:, use]).all(axis=0) & np.isfinite(arrivals[:, use]).all(axis=0)]
    if not len(use):
      continue
    late = range(ranks) if block.delay_ms == 0 else (block.rank,)
    judged += [{"where": block.where, "rank": rank, "delay_ms": block.delay_ms,
                **lateness_found.per_block(enter[:, use], arrivals[:, use], slept[rank, use], rank)}
               for rank in late]
  return {"processes": ranks, "share": share, "shared": bool(workers[0]["shared"]),
          "clock": run.plan.get("clock"), "problems": list(run.problems),
          "blocks": [_against(entry, judged) for entry in judged if entry["delay_ms"]],
          "quiet": [entry for entry in judged if not entry["delay_ms"]], **_seen(workers, arrivals)}


def _dense(values: np.ndarray, steps: np.ndarray, total: int, origin: int) -> np.ndarray:
  """[R, total] ms since `origin`, NaN where not recorded."""
  dense = np.full((len(values), total), np.nan)
  known = values != MISSING
  for rank, row in enumerate(values):
    here = known[rank] & (steps >= 0) & (steps < total)
    dense[rank, steps[here]] = (row[here] - origin) * 1e-6
  return dense


def _against(entry: dict[str, Any], judged: list[dict[str, Any]]) -> dict[str, Any]:
  """Adds the verdicts: found against true, and what both gained over the same rank's quiet blocks
  against the sleep."""
  quiet = [e for e in judged if not e["delay_ms"] and e["rank"] == entry["rank"]
           and e["where"] == entry["where"]]
  base = {name: float(np.mean([e[name] for e in quiet])) if quiet else 0.0
          for name in ("found_ms", "true_ms")}
  gained = {name: entry[name] - base[name] for name in base}
  return {**entry, "found_gained_ms": gained["found_ms"], "true_gained_ms": gained["true_ms"],
          "agrees_with_entries": lateness_found.agrees(entry["found_ms"], entry["true_ms"]),
          "agrees_with_sleep": lateness_found.agrees(gained["found_ms"], entry["slept_ms"])}


def _seen(workers: list[Any], arrivals: np.ndarray) -> dict[str, Any]:
  """How far what each rank was told of the others' arrivals is from their own stamps."""
  differences, unknown = [], 0
  for rank, worker in enumerate(workers):
    seen = worker["seen"].T  # [R, K]
    others = np.arange(len(seen)) != rank
    known = np.isfinite(seen) & np.isfinite(arrivals)
    unknown += int((np.isfinite(arrivals) & ~np.isfinite(seen))[others].sum())
    # float32 seconds: a part in 10^7 of the value, or some ns.
    differences.append(np.abs(seen - arrivals)[known & others[:, None]]
                       / np.maximum(np.abs(arrivals), 1.0)[
                           known & others[:, None]])
  joined = np.concatenate(differences)
  return {"others_arrivals_seen": len(joined), "others_arrivals_unknown": unknown,
          "largest_relative_difference": float(joined.max()) if len(joined) else None}
