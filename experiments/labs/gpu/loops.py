"""Training loops of the transformer, bare and instrumented, that run a block of steps at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from experiments.labs.gpu import marks, transformer
from experiments.labs.gpu.bench import Bench
from experiments.labs.gpu.transformer import Size

PACERS: dict[str, Callable[[], Any]] = {
    "paced": lambda: jaxpace.pace_early_ranks(),
    "guarded": lambda: jaxpace.guard(jaxpace.pace_early_ranks())}
"""Arms with a pacer, by name; "stamped" has none, "bare" is not instrumented."""


MARKED = {"marked at 1 kernel": 1, "marked at 28 kernels": 28}
"""Arms with the timestamps of observed programs. One GPU leaves collectives out: they stand at its
start and end, and around so many kernels."""


def instrumented(bench: Bench) -> tuple[str, ...]:
  """The arms with timestamps; but one where the program itself is tried."""
  if bench.size == "tiny":
    return ("stamped",)
  return ("stamped", *PACERS)


def marked(bench: Bench) -> tuple[str, ...]:
  """The arms with the timestamps of observed programs."""
  return () if bench.platform == "cpu" or bench.size == "tiny" else tuple(MARKED)


class Program:
  """A step compiled once, for any number of loops."""

  def __init__(self, bench: Bench, size: Size, arm: str, clock: str | None = None):
    """Describes it; it is compiled with its first loop.

    Args:
      bench: where it runs.
      size: of model and batch.
      arm: "bare", "timestamped", or one of `PACERS`.
      clock: name of the clock; the one under test by default.
    """
    self.bench, self.size, self.arm = bench, size, arm
    self.mesh = bench.mesh()
    step = transformer.train_step(size)
    self.paced: Any = None
    self.step: Any
    if arm in ("bare", *MARKED):
      self.step = jax.jit(jax.shard_map(step, mesh=self.mesh, in_specs=(P(), P("data")),
                                        out_specs=P(), check_vma=False), donate_argnums=0)
      if arm in MARKED:
        self.step = marks.AtKernels(self.step, MARKED[arm])
      return
    self.paced = jaxpace.instrument(step, "data", PACERS[arm]() if arm in PACERS else None,
                                    clock=clock or bench.clock)
    spec = jaxpace.spec(self.mesh)
    self.step = jax.jit(jax.shard_map(self.paced, mesh=self.mesh, in_specs=(spec, P(), P("data")),
                                      out_specs=(spec, P()), check_vma=False),
                        donate_argnums=(0, 1))

  def arguments(self) -> tuple[Any, ...]:
    """What the step is called with, on the device."""
    everywhere, split = NamedSharding(self.mesh, P()), NamedSharding(self.mesh, P("data"))
    state = jax.tree.map(lambda leaf: jax.device_put(leaf, everywhere),
                         transformer.fresh(self.size))
    batch = jax.device_put(transformer.tokens(self.size), split)
    return (state, batch) if self.paced is None else (self.paced.init(self.mesh), state, batch)

  def compile(self) -> str:
    """Compiles it at once, and returns the compiled program's text."""
    self.step = self.step.lower(*self.arguments()).compile()
    text: str = self.step.as_text()
    return text


class Loop:
  """A training loop: holds its own state."""

  def __init__(self, program: Program, folder: str | None = None):
    """Compiles the program if it is not, and runs two steps.

    Args:
      program: whose step is run.
      folder: where a `jaxpace.Recorder` records; None records nothing.
    """
    self.program = program
    *pace, self.state, self.batch = program.arguments()
    self.pace = pace[0] if pace else None
    self.recorder: Any = None
    if folder is not None:
      self.recorder = jaxpace.Recorder(folder, program.paced, handle_sigterm=False)
      self.recorder.open()
    self.block(2)

  def call(self) -> jax.Array:
    """Dispatches one step and returns its loss."""
    if self.pace is None:
      self.state, value = self.program.step(self.state, self.batch)
    else:
      self.pace, (self.state, value) = self.program.step(self.pace, self.state, self.batch)
      if self.recorder is not None:
        self.recorder.record()
    result: jax.Array = value
    return result

  def block(self, steps: int) -> float:
    """Runs steps as a training loop does, without waiting in between; mean seconds of one."""
    start = time.perf_counter()
    for _ in range(steps):
      value = self.call()
    jax.block_until_ready(value)
    return (time.perf_counter() - start) / steps

  def bits(self) -> list[np.ndarray]:
    """Parameters, moments and count, as they are in memory."""
    return [np.asarray(leaf).view(np.uint32) if np.ndim(leaf) else np.asarray(leaf)
            for leaf in jax.tree.leaves(self.state)]

  def close(self) -> None:
    if self.recorder is not None:
      self.recorder.close()


def calibrated(bench: Bench, name: str) -> Size:
  """The size whose bare step takes about as long as its name says: its batch is chosen, by at most
  two tries."""
  if bench.size == "tiny":
    return transformer.SIZES["tiny"]
  size, aim = transformer.SIZES[name], float(name.removesuffix("ms")) * 1e-3
  for _ in range(2):
    loop = Loop(Program(bench, size, "bare"))
    took = min(loop.block(10) for _ in range(5))
    bench.say(f"batch {size.batch}: {took * 1e3:.2f} ms")
    if 0.75 < took / aim < 1.33:
      break
    size = size._replace(batch=max(1, min(1024, round(size.batch * aim / took))))
  return size
