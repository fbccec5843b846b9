"""Ranks of `experiments.measure.polling`: processes that meet at a barrier in shared memory,
polling or blocking.

No JAX collective is involved. The ranks' arrivals and delays travel through the shared memory, as
they do inside the all-reduce of an instrumented step, and each process runs the library's own
`Pacer.update` on them.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import random
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_PATIENCE = 120.0  # s at a barrier before a rank gives up: another one has died
_SPIN = 64  # polls between two looks at the clock
_FIELDS = 3  # of each rank in the shared memory: arrival, delay, step time of the step before


class Setup(NamedTuple):
  """One run."""

  ranks: int
  cores: int  # processors all of them share
  polling: bool  # ranks that wait poll; else they block
  work_ms: float  # processor time each rank computes a step
  late_ms: float  # that of rank `ranks - 1`
  costs: tuple[float, ...]  # one paced arm each, `pace_early_ranks(cost=...)`
  warm_up: int  # steps of each paced arm before anything is measured
  block: int  # steps
  rounds: int  # of one block of each arm
  # every rank to one core, as many on each; else the scheduler puts them where it likes
  pinned: bool = False


ARMS_OFF = ("off", "off again")


def arms(setup: Setup) -> list[str]:
  """Names of the arms: two without pacing, and one for each cost."""
  return [*ARMS_OFF, *(f"cost {cost:g}" for cost in setup.costs)]


def order(setup: Setup) -> list[str]:
  """Arm of each block, the same on all ranks: every arm once a round, in random order."""
  draw = random.Random(f"{setup.ranks} {setup.polling}")
  return [arm for _ in range(setup.rounds) for arm in draw.sample(arms(setup), len(arms(setup)))]


class Barrier:
  """A barrier that also carries a few numbers of every rank. Flags and numbers take turns by the
  parity of the step."""

  def __init__(self, rank: int, ranks: int, polling: bool, flags: Any, numbers: Any, blocking: Any):
    self.rank, self.ranks, self.polling = rank, ranks, polling
    self.flags = np.frombuffer(flags, np.int64)  # [ranks] steps each one has arrived at
    self.numbers = np.frombuffer(numbers, np.float32).reshape(2, ranks, _FIELDS)
    self.blocking = blocking
    self.step = self.polls = 0

  def wait(self, numbers: Sequence[Any]) -> np.ndarray:
    """Meets the others; returns what all brought, [ranks, 3] float32. Counts its polls.

    Raises:
      TimeoutError: another rank does not come.
    """
    board = self.numbers[self.step % 2]
    board[self.rank] = numbers
    self.step += 1
    self.flags[self.rank] = self.step  # after the numbers: x86 keeps the order of stores
    if self.polling:
      self._poll()
    else:
      self.blocking.wait(_PATIENCE)
    return board.copy()

  def _poll(self) -> None:
    flags: Any = self.flags
    others = [memoryview(flags)[r:r + 1] for r in range(self.ranks) if r != self.rank]
    until = time.monotonic() + _PATIENCE
    for flag in others:
      while flag[0] < self.step:
        self.polls += 1
        if self.polls % _SPIN == 0 and time.monotonic() > until:
          raise TimeoutError(f"Rank {self.rank}: another rank did not reach step {self.step}.")


def compute(turns: int) -> int:
  """Real work for a processor; `turns` of it are calibrated by `turns_per_ms`."""
  value = 1
  for _ in range(turns):
    value = (value * 1103515245 + 12345) & 0x7FFFFFFF
  return value


def turns_per_ms() -> float:
  """Turns of `compute` in a millisecond of processor time, the best of some."""
  best = 0.0
  for _ in range(10):
    start = time.thread_time()
    compute(100_000)
    best = max(best, 100_000 / ((time.thread_time() - start) * 1e3))
  return best


def launch(setup: Setup) -> list[dict[str, np.ndarray]]:
  """Runs all ranks; returns of each, by name, [blocks] seconds, processor seconds, polls and mean
  delays."""
  context = mp.get_context("spawn")
  flags, numbers = (context.RawArray("q", setup.ranks),
                    context.RawArray("f", 2 * setup.ranks * _FIELDS))
  blocking, queue, rate = context.Barrier(setup.ranks), context.Queue(), turns_per_ms()
  processes = [context.Process(target=_main,
                               args=(rank, setup, rate, flags, numbers, blocking, queue))
               for rank in range(setup.ranks)]
  for process in processes:
    process.start()
  try:
    found = dict(queue.get() for _ in processes)
  finally:
    for process in processes:
      process.join(10)
      if process.is_alive():
        process.terminate()
  failed = [text for text in found.values() if isinstance(text, str)]
  if failed:
    raise RuntimeError("A rank failed:\n" + failed[0])
  return [found[rank] for rank in range(setup.ranks)]


def _main(rank: int, setup: Setup, rate: float, flags: Any, numbers: Any, blocking: Any,
          queue: Any) -> None:
  try:
    if hasattr(os, "sched_setaffinity"):
      cores = sorted(os.sched_getaffinity(0))[:setup.cores]
      os.sched_setaffinity(0, [cores[rank % len(cores)]] if setup.pinned else cores)
    barrier = Barrier(rank, setup.ranks, setup.polling, flags, numbers, blocking)
    queue.put((rank, _Rank(rank, setup, rate, barrier).run()))
  except BaseException:
    blocking.abort()
    queue.put((rank, traceback.format_exc()))


class _Rank:
  """One process: its training loop, a block of one arm at a time."""

  def __init__(self, rank: int, setup: Setup, rate: float, barrier: Barrier):
    import jax  # after the process was held to its cores: threads inherit that

    from jaxpace.coordination import pace_early_ranks
    from jaxpace.core.types import Observation

    jax.config.update("jax_platforms", "cpu")
    self.rank, self.setup, self.barrier, self.observation = rank, setup, barrier, Observation
    self.turns = int(rate * (setup.late_ms if rank == setup.ranks - 1 else setup.work_ms))
    self.updates, self.states = {}, {}
    pacers = {f"cost {cost:g}": pace_early_ranks(cost=cost) for cost in setup.costs}
    # Without pacing the same update runs, and is not obeyed: the arms differ by their delays only.
    for arm, pacer in (pacers | dict.fromkeys(ARMS_OFF, next(iter(pacers.values())))).items():
      self.updates[arm], self.states[arm] = (jax.jit(pacer.update),
                                             jax.tree.map(np.asarray, pacer.init(setup.ranks)))
    self.delays = dict.fromkeys(self.states, 0.0)
    self.last_exit, self.step, self.step_time = time.perf_counter_ns(), 0, np.float32(np.nan)
    for arm in self.updates:  # compiles
      self.updates[arm](self._observe(np.zeros((setup.ranks, _FIELDS), np.float32), 0.0, np.nan),
                        self.states[arm])
    gc.collect()
    gc.disable()

  def run(self) -> dict[str, np.ndarray]:
    for arm in arms(self.setup):
      self.block(arm, self.setup.warm_up if arm not in ARMS_OFF else 10)
    rows = [self.block(arm, self.setup.block) for arm in order(self.setup)]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}

  def block(self, arm: str, steps: int) -> dict[str, float]:
    """Runs `steps` steps of an arm, from the state its last block left."""
    polls, spent, asked = self.barrier.polls, time.process_time(), 0.0
    self._turn(arm)  # not counted: the switch
    begin = self.last_exit
    for _ in range(steps - 1):
      asked += self.delays[arm]
      self._turn(arm)
    return {"step": (self.last_exit - begin) * 1e-9 / (steps - 1),
            "polls": (self.barrier.polls - polls) / steps,
            "cpu": (time.process_time() - spent) / steps, "delay": asked / (steps - 1)}

  def _turn(self, arm: str) -> None:
    start, applied = self.last_exit, 0.0
    if self.delays[arm] > 0:
      before = time.perf_counter_ns()
      time.sleep(self.delays[arm])
      applied = (time.perf_counter_ns() - before) * 1e-9
    compute(self.turns)
    enter = time.perf_counter_ns()
    everyone = self.barrier.wait(((enter - start) * 1e-9 - applied, applied, self.step_time))
    self.last_exit = time.perf_counter_ns()
    self.step_time = np.float32((self.last_exit - start) * 1e-9)
    seen = self._observe(everyone, (self.last_exit - enter) * 1e-9, self.step_time)
    decision, self.states[arm] = self.updates[arm](seen, self.states[arm])
    self.delays[arm] = 0.0 if arm in ARMS_OFF else float(decision.delay)
    self.step += 1

  def _observe(self, everyone: np.ndarray, wait: float, step_time: Any) -> Any:
    make: Any = self.observation  # of numpy values: jit takes them
    return make(
        step=np.int32(self.step), rank=np.int32(self.rank), arrivals=everyone[:, 0].copy(),
        delays=everyone[:, 1].copy(), waits=np.full(1, wait, np.float32),
        step_time=np.float32(step_time), job_step_time=everyone[0, 2],
        job_transfers=np.full(1, np.nan, np.float32))
