"""One process of `experiments.paper.emulated`: compute that is slept, real collectives, the
collector's pauses."""

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

SETTLE = 2
"""Steps at the beginning of each block that don't count."""
WARM_UP = 96
"""Steps of the pacers before anything is measured."""
OFF, AGAIN, PACERS, HOUSEKEEPING, BOTH = ARMS = ("neither", "neither again", "pacers",
                                                 "housekeeping", "both")
_BATCH = 100  # objects made at once: the collector counts objects made less objects freed
_MOST = 400
"""Rounds whose order is drawn; more are not run."""


class Setup(NamedTuple):
  """One number of processes."""

  work_ms: float  # a step's compute, slept
  jitter: float  # its normal deviation on each process
  late: float  # by which the last process is slower, throughout
  pause_ms: float  # a full collection, slept
  every: int  # steps between aligned collections; the interpreter's own come about as often
  churn: int  # container objects replaced in a step, which brings those about
  seconds: float  # for all blocks


def order() -> list[str]:
  """The arm of each block, the same on all processes: every arm once a round, in random order."""
  draw = random.Random("emulated")
  return [arm for _ in range(_MOST) for arm in draw.sample(ARMS, len(ARMS))]


def gated(pacer: jaxpace.Pacer, every: int) -> jaxpace.Pacer:
  """Obeys a pacer in the blocks of its arms only; it observes all along."""
  on = jnp.asarray(np.array([arm in (PACERS, BOTH) for arm in order()]))

  def update(observation: jaxpace.Observation, state: Any) -> tuple[jaxpace.Decision, Any]:
    decision, state = pacer.update(observation, state)
    # The delay is applied in the next step.
    block = (observation.step + np.int32(1) - np.int32(WARM_UP)) // np.int32(every + SETTLE)
    obeyed = (block >= 0) & on[jnp.clip(block, 0, len(on) - 1)]
    return decision._replace(delay=jnp.where(obeyed, decision.delay, np.float32(0))), state

  return jaxpace.Pacer(pacer.init, update)


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
  """The step of this process."""

  def __init__(self, setup: Setup):
    self._setup = setup
    self.me, count = jaxpace.distributed.process_index(), jaxpace.distributed.process_count()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    spec = jaxpace.spec(mesh)
    pacer = gated(jaxpace.chain(jaxpace.pace_early_ranks(), jaxpace.interleave_jobs(key=7)),
                  setup.every)
    paced = jaxpace.instrument(lambda x: jax.lax.pmean(x, "data"), "data", pacer, share=True)
    self._step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, jax.P()),
                                       out_specs=(spec, jax.P()), check_vma=False),
                         donate_argnums=0)
    self.pace = paced.init(mesh)
    self._x: Any = jnp.ones((1024,), jnp.float32)
    self._draw = np.random.default_rng(self.me)
    self._slower = 1 + setup.late * (self.me == count - 1)
    self._heap = Heap(5000, round(setup.churn * (0.9 + 0.2 * self.me / count)), self.me)
    self.fulls = Fulls()

  def step(self) -> None:
    work = (1e-3 * self._setup.work_ms
            * (self._slower + self._setup.jitter * self._draw.standard_normal()))
    time.sleep(max(work, 0.0))
    self._heap.replace()
    self.pace, self._x = self._step(self.pace, self._x)
    jax.block_until_ready(self._x)

  def block(self, arm: str) -> dict[str, Any]:
    """Runs one block; returns the seconds of each step that counts, and this process's collections
    in them."""
    self._heap.shift()
    times = []
    with self._kept(arm) as keeper:
      for number in range(SETTLE + self._setup.every):
        if number == SETTLE:
          fulls, last = self.fulls.count, time.perf_counter()
        self.step()
        if keeper is not None:
          keeper.step()
        if number >= SETTLE:
          now = time.perf_counter()
          times.append(round(now - last, 6))
          last = now
    return {"arm": arm, "times": times, "fulls": self.fulls.count - fulls}

  @contextlib.contextmanager
  def _kept(self, arm: str) -> Iterator[Any]:
    if arm not in (HOUSEKEEPING, BOTH):
      yield None
      return
    # The collection falls within the steps that are timed.
    with jaxpace.Housekeeper(self._setup.every, "aligned", warmup=1,
                             start=self._setup.every // 2) as keeper:
      yield keeper


def pausing(seconds: float) -> Any:
  """Makes each full collection last that much longer, asleep: a large heap's pause, but on no
  processor."""

  def sleep(phase: str, info: dict[str, Any]) -> None:
    if phase == "start" and info["generation"] == 2:
      time.sleep(seconds)

  return sleep


def work(root: pathlib.Path, setup: Setup) -> None:
  """Runs all blocks, and writes this process's figures into `root`."""
  loop = Loop(setup)
  loop.step()
  gc.collect()
  gc.freeze()
  gc.collect()
  sleep = pausing(1e-3 * setup.pause_ms)
  gc.callbacks.append(sleep)
  try:
    for _ in range(WARM_UP // 2 - 1):
      loop.step()
    begin = time.perf_counter()
    for _ in range(WARM_UP - WARM_UP // 2):
      loop.step()
    pilot = (time.perf_counter() - begin) / (WARM_UP - WARM_UP // 2)
    fits = round(setup.seconds / (len(ARMS) * (setup.every + SETTLE) * pilot))
    rounds = int(jaxpace.distributed.share_string("emulated rounds", str(min(max(fits, 3), _MOST)),
                                                  120) or 0)
    if loop.me == 0:
      print(f"{jax.process_count()} processes: {rounds} rounds, {1e3 * pilot:.1f} ms a step",
            flush=True)
    blocks = [{"round": k // len(ARMS), **loop.block(arm)}
              for k, arm in enumerate(order()[: rounds * len(ARMS)])]
  finally:
    gc.callbacks.remove(sleep)
    gc.unfreeze()
  if loop.me != 0:
    for block in blocks:
      del block["times"]
  (root / f"{loop.me}.json").write_text(json.dumps(blocks))
