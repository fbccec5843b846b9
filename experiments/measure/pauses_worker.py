"""One process of `experiments.measure.pauses`: a loop with a real heap, with and without a
housekeeper.

Blocks of steps of both kinds take turns.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import json
import pathlib
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxpace

SETTLE = 2  # steps at the beginning of each block that don't count
_BATCH = 100  # objects made at once: the collector counts objects made less objects freed
OFF, ALONE, AGAIN = "never in full", "alone", "alone again"

STAGES = {
    "balanced": (OFF, ALONE, AGAIN, "aligned", "frozen"),
    "no heap": (ALONE, AGAIN, "aligned", "frozen"),
}
"""Arms of each stage, all of them once a round."""


class Setup(NamedTuple):
  """One run."""

  heap: int  # container objects alive in each process
  churn: int  # of those, replaced each step on average
  every: int  # steps between aligned collections
  work_ms: float
  compute: bool  # whether work is computing; else sleeping
  block_seconds: float  # for all blocks


class Heap:
  """Objects that live for a while and are replaced in bursts, as examples in a shuffle buffer
  are."""

  def __init__(self, size: int, churn: int, seed: int):
    self._draw = random.Random(seed)
    self._churn = churn
    self._alive: collections.deque[list[list[int]]] = collections.deque(
        self._make() for _ in range(size // (_BATCH + 1)))
    self._least = len(self._alive)

  def replace(self) -> None:
    """One step's worth: a random number of new objects, and as many old ones gone."""
    count = round(self._draw.uniform(0.5, 1.5) * self._churn / (_BATCH + 1))
    self._alive.extend(self._make() for _ in range(count))
    for _ in range(min(count, len(self._alive) - self._least)):
      self._alive.popleft()

  def shift(self) -> None:
    """Moves the interpreter's next collection to a random step: a block before may have brought all
    into one step."""
    for _ in range(self._draw.randrange(20)):
      self.replace()

  def _make(self) -> list[list[int]]:
    return [[k] for k in range(_BATCH)]


class Fulls:
  """Counts the interpreter's full collections and their time."""

  def __init__(self) -> None:
    self.count, self.seconds, self._start = 0, 0.0, 0.0
    gc.callbacks.append(self._see)

  def _see(self, phase: str, info: dict[str, Any]) -> None:
    if info["generation"] == 2:
      if phase == "start":
        self._start = time.perf_counter()
      else:
        self.count += 1
        self.seconds += time.perf_counter() - self._start


class Loop:
  """The step of this process: work, the heap, and a sum over all processes that it waits for."""

  def __init__(self, setup: Setup):
    self._setup = setup
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    spec = jaxpace.spec(mesh)
    self._paced = jaxpace.instrument(lambda x: jax.lax.pmean(x, "data"), "data", share=True)
    self._step = jax.jit(jax.shard_map(self._paced, mesh=mesh, in_specs=(spec, jax.P()),
                                       out_specs=(spec, jax.P()), check_vma=False),
                         donate_argnums=0)
    self.pace = self._paced.init(mesh)
    self._x: Any = jnp.ones((256,), jnp.float32)
    self._matrix = np.ones((64, 64), np.float32)
    self.heap: Heap | None = None
    self.fulls = Fulls()

  def step(self) -> None:
    self._work(1e-3 * self._setup.work_ms)
    if self.heap is not None:
      self.heap.replace()
    self.pace, self._x = self._step(self.pace, self._x)
    jax.block_until_ready(self._x)

  def _work(self, seconds: float) -> None:
    if not self._setup.compute:
      time.sleep(seconds)
      return
    end = time.thread_time() + seconds
    while time.thread_time() < end:
      self._matrix @ self._matrix

  def block(self, arm: str, steps: int) -> dict[str, Any]:
    """Runs one block; returns seconds a step, and this process's full collections in it."""
    if self.heap is not None:
      self.heap.shift()
    every = self._setup.every
    with self._kept(arm, every) as keeper:
      for number in range(SETTLE + steps):
        if number == SETTLE:
          count, seconds, start = self.fulls.count, self.fulls.seconds, time.perf_counter()
        self.step()
        if keeper is not None:
          keeper.step()
      took = time.perf_counter() - start
    return {"arm": arm, "step": took / steps, "fulls": self.fulls.count - count,
            "full_seconds": self.fulls.seconds - seconds, "steps": steps}

  @contextlib.contextmanager
  def _kept(self, arm: str, every: int) -> Iterator[Any]:
    if arm == OFF:
      thresholds = gc.get_threshold()
      gc.set_threshold(*thresholds[:2], 1 << 30)  # young objects are
      try:
        yield None
      finally:
        gc.set_threshold(*thresholds)
    elif arm in (ALONE, AGAIN):
      yield None
    else:
      # Collections fall on the last step of each period that is timed.
      with jaxpace.Housekeeper(every, arm, warmup=1, start=every - SETTLE) as keeper:
        yield keeper


def work(root: pathlib.Path, setup: Setup) -> None:
  """Runs all stages, and writes this process's figures into `root`."""
  me, count = jaxpace.distributed.process_index(), jaxpace.distributed.process_count()
  loop = Loop(setup)
  for _ in range(10):
    loop.step()
  found: dict[str, Any] = {"blocks": []}
  steps = 2 * setup.every
  for stage, arms in STAGES.items():
    # Different means, so that the processes' collections don't stay in step by themselves.
    loop.heap = Heap(setup.heap if stage != "no heap" else 0,
                     round(setup.churn * (0.9 + 0.2 * me / count)), me)
    if stage == "no heap":
      gc.collect()
      gc.freeze()
    loop.block(ALONE, steps)
    pilot = loop.block(ALONE, setup.every)["step"]
    rounds = _agree(f"rounds {stage}", round(
        setup.block_seconds / len(STAGES) / (len(arms) * (steps + SETTLE) * pilot)), 3)
    draw = random.Random(stage)
    for turn in range(rounds):
      for arm in draw.sample(arms, len(arms)):
        found["blocks"].append({"stage": stage, "round": turn, **loop.block(arm, steps)})
    if me == 0:
      print(f"{count} processes, {stage}: {rounds} rounds, {1e3 * pilot:.1f} ms a step", flush=True)
    loop.heap = None
  gc.unfreeze()
  (root / f"{me}.json").write_text(json.dumps(found))


def _agree(name: str, value: int, least: int) -> int:
  """Process 0's number, on all of them."""
  return int(jaxpace.distributed.share_string(f"pauses/{name}", str(max(least, value)), 120) or 0)
