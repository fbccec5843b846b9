"""Recorded runs made in memory, for tests."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from jaxpace.costs.fabric_file import KINDS, RING, Cost, Estimate, Level, MeasuredFabric
from jaxpace.runs.run import MISSING, CollectiveTimes, Process, Run


def make_run(enter, leave, *, gap=None, delay=None, attempt=None, steps=None, processes=None,
             hosts=None, window=(None, None), phases=None, bytes_of=None) -> Run:
  """Makes a run from [C, R, K] entries and exits in ns; gap and delay are [R, K] ns, NaN for
  null."""
  enter, leave = np.asarray(enter, np.int64), np.asarray(leave, np.int64)
  slots, ranks, size = enter.shape
  if attempt is None:
    attempt = np.where((enter != MISSING).any(axis=0), 0, -1)
  attempt = np.asarray(attempt, np.int16)
  durations = {name: (np.asarray(values, np.float64) * 1e-9).astype(np.float32)
               for name, values in {"gap": gap, "delay_applied": delay, **(phases or {})}.items()
               if values is not None}
  of_rank = (np.arange(ranks, dtype=np.int32) if processes is None
             else np.asarray(processes, np.int32))
  return Run(
      path=pathlib.Path("run"), id="made-up", info={"run": "made-up"},
      processes=tuple(Process(int(p), {"hostname": hosts[int(p)] if hosts else f"host{p}",
                                       "ranks": np.flatnonzero(of_rank == p).tolist()})
                      for p in np.unique(of_rank)),
      steps=np.arange(size) if steps is None else np.asarray(steps, np.int64), attempt=attempt,
      end_ns=None, durations=durations,
      collectives=tuple(CollectiveTimes(c, f"psum{c}", bytes_of, enter[c], leave[c], attempt)
                        for c in range(slots)),
      process_of_rank=of_rank, duplicates=0, problems=(), window=window)


def barrier(busy, transfer, offset=0) -> tuple[np.ndarray, np.ndarray]:
  """Entries and exits [1, R, K] in ns of ranks busy for [R, K] ns before a collective that takes
  `transfer` ns.

  Everyone starts at 0 and leaves `offset` [R] ns after the collective is through.
  """
  busy = np.asarray(busy, np.int64)
  ranks, size = busy.shape
  offset = np.broadcast_to(np.asarray(offset, np.int64), (ranks,))
  transfer = np.broadcast_to(np.asarray(transfer, np.int64), (size,))
  out, enter, leave = offset.copy(), np.empty_like(busy), np.empty_like(busy)
  for k in range(size):
    enter[:, k] = out + busy[:, k]
    out = enter[:, k].max() + transfer[k] + offset
    leave[:, k] = out
  return enter[None], leave[None]


def with_bytes(run: Run, size: int) -> Run:
  """The run, whose collectives are sums of this many bytes."""
  return dataclasses.replace(run, collectives=tuple(
      dataclasses.replace(c, name="psum", bytes=size) for c in run.collectives))


def known(alpha=0.0, beta=0.0, ranks=None) -> MeasuredFabric:
  """A fabric that is alike for up to so many ranks, s a message and s a byte."""
  costs = {kind: Cost(Estimate(alpha, alpha, alpha), Estimate(beta, beta, beta), RING)
           for kind in KINDS}
  return MeasuredFabric((Level(costs, "made up", ranks),), "made up")
