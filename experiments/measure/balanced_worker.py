"""One process of `experiments.measure.balanced`: trains by even and uneven counts in turn, with a rank slowed down."""

from __future__ import annotations

import json
import os
import pathlib
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.coordination.apportion import even
from jaxpace.coordination.share_work import found

EVEN, AGAIN, SHARED, CHOSEN, WITHOUT = "even", "even again", "shared by speed", "best fixed counts", "without the slow"
ARMS = (EVEN, AGAIN, SHARED, CHOSEN, WITHOUT)
SETTLE = 3
"""Steps at the beginning of each block that don't count: counts act two steps after they are decided."""
_MODES = {EVEN: 0, AGAIN: 0, SHARED: 1, CHOSEN: 2, WITHOUT: 2}
_PERIOD = 10_000  # us of a CPU quota
_ROWS, _WIDTH = 64, 256
_SLEEP = 2e-3  # s a micro-batch, where work is sleeping


class Setup(NamedTuple):
  """One job."""

  kind: str  # "quota", "neighbour" or "sleep"
  micro_batches: int
  slow: tuple[float, ...]  # how many times slower the last rank is, stage after stage
  learn: int  # steps of sharing by speed at the beginning of each stage
  block: int  # steps of a block
  rounds: int  # of one block of each arm, in each stage


class Chosen(NamedTuple):
  """State of the balancer that is told what to do."""

  inner: Any
  mode: Any  # [] int32: 0 even, 1 by speed, 2 fixed
  fixed: Any  # [R] int32


def told(setup: Setup, ranks: int) -> jaxpace.Balancer:
  """Speeds are followed whatever the mode is."""
  total = setup.micro_batches
  speed = jaxpace.share_by_speed(total, capacity=total)

  def init(ranks: int) -> Chosen:
    return Chosen(speed.init(ranks), jnp.zeros((), jnp.int32), jnp.asarray(even(total, ranks)))

  def update(seen: Any, state: Chosen) -> tuple[Any, Chosen]:
    wanted, inner = speed.update(seen, state.inner)
    rest = jnp.where(state.mode == 2, state.fixed, jnp.asarray(even(total, ranks)))
    return jnp.where(state.mode == 1, wanted, rest), state._replace(inner=inner)

  return jaxpace.Balancer(init, update, total)


def quickest(seconds: np.ndarray, total: int, without: int | None = None) -> np.ndarray:
  """The counts with which the last rank is done first; none for the rank `without`."""
  counts = np.zeros(len(seconds), np.int32)
  each = np.where(np.arange(len(seconds)) == without, np.inf, seconds)
  for _ in range(total):
    counts[int(np.argmin((counts + 1) * each))] += 1
  return counts


class Quota:
  """The share of a processor that this process may use, by its control group."""

  def __init__(self) -> None:
    name = f"jaxpace-balanced-{os.getpid()}"
    old = pathlib.Path("/sys/fs/cgroup/cpu")
    self.folder = (old if old.is_dir() else pathlib.Path("/sys/fs/cgroup")) / name
    self.old = old.is_dir()
    self.folder.mkdir()
    (self.folder / "cgroup.procs").write_text(str(os.getpid()))

  def slower(self, times: float) -> None:
    """Lets it have 1 / `times` of a processor; all of it for 1."""
    quota = int(_PERIOD / times)
    if self.old:
      (self.folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
      (self.folder / "cpu.cfs_quota_us").write_text(str(quota if times > 1 else -1))
    else:
      (self.folder / "cpu.max").write_text(f"{quota if times > 1 else 'max'} {_PERIOD}")

  def close(self) -> None:
    """Leaves the group and removes it."""
    (self.folder.parent / "cgroup.procs").write_text(str(os.getpid()))
    self.folder.rmdir()


def loss_fn(w: Any, micro_batch: Any) -> tuple[Any, Any]:
  x, seconds = micro_batch
  h = jaxpace.delay(x, seconds)
  for layer in w:
    h = jnp.tanh(h @ layer)
  return jnp.sum(jnp.square(h)), jnp.float32(x.shape[0])


def train_step(w: Any, batch: Any, counts: Any) -> tuple[Any, Any]:
  loss, grads = jaxpace.accumulate(loss_fn, w, (batch["x"], batch["seconds"]), counts)
  return jax.tree.map(lambda a, g: a - jnp.float32(1e-3) * g, w, grads), loss


def _group_of(pid: int) -> set[int]:
  """A process's threads."""
  return {int(name) for name in os.listdir(f"/proc/{pid}/task")}


def work(out: pathlib.Path, setup: Setup) -> None:
  """Runs all stages; process 0 writes what it found to `out`."""
  mine, last = jax.process_index(), jax.process_count() - 1
  real = setup.kind != "sleep"
  cores = sorted(os.sched_getaffinity(0))
  if real:
    # XLA's threads too: each process has a core to itself.
    for thread in _group_of(os.getpid()):
      os.sched_setaffinity(thread, [cores[mine % len(cores)]])
  quota = Quota() if setup.kind == "quota" and mine == last else None
  stages: list[dict[str, Any]] = []
  try:
    job = _Job(setup, real)
    for stage, slow in enumerate(setup.slow):
      neighbour = 0
      if quota:
        quota.slower(slow)
      elif setup.kind == "neighbour" and mine == last and slow > 1:
        neighbour = _busy(cores[mine % len(cores)])
      try:
        stages.append(job.stage(slow, stage))
      finally:
        if neighbour:
          os.kill(neighbour, 9)
          os.waitpid(neighbour, 0)
      if mine == 0:
        out.write_text(json.dumps(stages))
        print(f"  {setup.kind}, {setup.micro_batches} micro-batches: stage {stage + 1} of {len(setup.slow)}",
              flush=True)
  finally:
    if quota:
      quota.close()


def _busy(core: int) -> int:
  """Starts a neighbour that never rests on this core; returns its process id."""
  command = ["python", "-c", f"import os\nos.sched_setaffinity(0, [{core}])\nwhile os.getppid() != 1: pass"]
  return os.posix_spawnp(command[0], command, dict(os.environ))


class _Job:
  """The training, which goes on from stage to stage."""

  def __init__(self, setup: Setup, real: bool):
    self.setup, self.real = setup, real
    self.ranks, self.total = jax.device_count(), setup.micro_batches
    self.mesh = jax.make_mesh((self.ranks,), ("data",), axis_types=(AxisType.Auto,))
    self.paced = jaxpace.instrument(train_step, "data", jaxpace.share_work(told(setup, self.ranks)), share=True)
    spec = jaxpace.spec(self.mesh)
    self.run = jax.jit(jax.shard_map(
        self.paced, mesh=self.mesh, in_specs=(spec, P(), {"x": P("data"), "seconds": P("data")}, P()),
        out_specs=(spec, P())), donate_argnums=(0, 1))
    self.pace = self.paced.init(self.mesh)
    width, layers = (_WIDTH, 2) if real else (16, 1)
    rng = np.random.default_rng(0)
    self.examples = rng.normal(size=(256, 1 if not real else _ROWS, width)).astype(np.float32)
    w = [(rng.normal(size=(width, width)) / width**0.5).astype(np.float32) for _ in range(layers)]
    self.w = jax.device_put(w, NamedSharding(self.mesh, P()))
    self.feed = jaxpace.shares(self.mesh, examples=len(self.examples), size=1, micro_batches=self.total,
                               capacity=self.total)
    self.slow = 1.0

  def steps(self, number: int) -> Iterator[np.ndarray]:
    """Runs steps; yields the counts of each, when it has been dispatched."""
    for _ in range(number):
      share = self.feed.next(self.pace)
      rows = share.take(self.examples)
      each = np.zeros((len(share.ranks), self.total), np.float32)
      if not self.real:
        each[:] = _SLEEP
        each[[rank == self.ranks - 1 for rank in share.ranks]] *= self.slow
      batch = share.put({"x": rows.reshape(-1, *rows.shape[2:]), "seconds": each.reshape(-1)})
      self.pace, (self.w, _) = self.run(self.pace, self.w, batch, share.counts)
      yield share.counts

  def switch(self, mode: int, fixed: np.ndarray | None = None) -> None:
    """Tells the balancer what to do from the step after next on."""
    jax.block_until_ready(self.pace)
    state = self.paced.pacer_state(self.pace)
    chosen: Chosen = state.inner
    after = np.full((self.ranks,), mode, np.int32)
    some = even(self.total, self.ranks) if fixed is None else fixed
    chosen = chosen._replace(mode=after, fixed=np.broadcast_to(some, (self.ranks, self.ranks)).astype(np.int32))
    self.pace = self.paced.with_pacer_state(self.pace, state._replace(inner=chosen))

  def block(self, number: int) -> tuple[float, np.ndarray]:
    """Runs a block; returns seconds a step and the median arrivals, [R]."""
    arrivals, start = [], 0.0
    for done, _ in enumerate(self.steps(number), start=1):
      if done == SETTLE:
        jax.block_until_ready(self.pace)
        start = time.perf_counter()
      if done > SETTLE:
        arrivals.append(self.pace.arrivals.addressable_shards[0].data + jnp.float32(0))
    jax.block_until_ready(self.pace)
    seconds = (time.perf_counter() - start) / (number - SETTLE)
    return seconds, np.median([np.asarray(row).reshape(-1) for row in arrivals], axis=0)

  def stage(self, slow: float, number: int) -> dict[str, Any]:
    """Slows the last rank down, lets the counts follow, and then measures the arms in turn."""
    self.slow = slow
    self.switch(1)
    history = [counts.tolist() for counts in self.steps(self.setup.learn)]
    self.switch(0)
    # Two rounds of even counts: what a person would measure before choosing counts by hand.
    _, arrivals = self.block(20)
    each = arrivals / even(self.total, self.ranks)
    chosen, without = quickest(each, self.total), quickest(each, self.total, self.ranks - 1)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    draw = random.Random(f"{self.setup.kind} {self.total} {number}")
    counts = history[-1]
    for _ in range(self.setup.rounds):
      for arm in draw.sample(ARMS, len(ARMS)):
        self.switch(_MODES[arm], chosen if arm == CHOSEN else without if arm == WITHOUT else None)
        took, _ = self.block(self.setup.block)
        seconds[arm].append(took)
        if arm == SHARED:
          counts = np.asarray(found(self.paced.pacer_state(self.pace)).counts.addressable_shards[0].data)
          counts = counts.reshape(2, self.ranks)[1].tolist()
    return {"slow": slow, "each": each.tolist(), "chosen": chosen.tolist(), "without": without.tolist(),
            "history": history, "counts": counts, "seconds": seconds}
