"""One process of `experiments.measure.balanced`: trains by even and uneven counts in turn, with
ranks slowed down."""

from __future__ import annotations

import contextlib
import json
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
from experiments.measure import balanced_slowing
from jaxpace.coordination.apportion import even

EVEN, AGAIN, SHARED, WITHOUT = "even", "even again", "shared by speed", "without the slow"
FIXED = ("fixed", "fixed, one more")
"""Counts chosen by hand: the best for the speeds as they are meant to be, and the last slow rank's
one more."""
SETTLE = 3
"""Steps at the beginning of each block that don't count: counts act two steps after they are
decided."""
_WIDTH, _ROWS = 256, 32


class Setup(NamedTuple):
  """One job."""

  kind: str  # "quota", "neighbour" or "sleep"
  micro_batches: int
  slow: tuple[tuple[float, ...], ...]  # stage by stage, how many times slower each rank is
  work: float  # s, a micro-batch of a healthy rank, about
  learn: int  # steps of sharing by speed at the beginning of each stage
  block: int  # steps of a block
  rounds: int  # of one block of each arm, in each stage


class Told(NamedTuple):
  """State of the balancer that is told what to do."""

  inner: Any
  mode: Any  # [] int32: 0 even, 1 by speed, 2 fixed
  fixed: Any  # [R] int32


def told(micro_batches: int, ranks: int) -> jaxpace.Balancer:
  """Speeds are followed whatever the mode is."""
  speed = jaxpace.share_by_speed(micro_batches, capacity=micro_batches)
  equal = even(micro_batches, ranks)

  def init(ranks: int) -> Told:
    return Told(speed.init(ranks), jnp.zeros((), jnp.int32), jnp.asarray(equal))

  def update(seen: Any, state: Told) -> tuple[Any, Told]:
    wanted, inner = speed.update(seen, state.inner)
    rest = jnp.where(state.mode == 2, state.fixed, jnp.asarray(equal))
    return jnp.where(state.mode == 1, wanted, rest), state._replace(inner=inner)

  return jaxpace.Balancer(init, update, micro_batches)


def quickest(seconds: np.ndarray, total: int, without: tuple[int, ...] = ()) -> np.ndarray:
  """The counts with which the last rank is done first; none for the ranks `without`."""
  counts = np.zeros(len(seconds), np.int32)
  each = np.where(np.isin(np.arange(len(seconds)), without), np.inf, seconds)
  for _ in range(total):
    counts[int(np.argmin((counts + 1) * each))] += 1
  return counts


def arms(slow: tuple[float, ...], total: int) -> dict[str, tuple[int, np.ndarray | None]]:
  """What takes turns in a stage: name -> (mode, counts). Fixed counts that are even already are
  left out."""
  speeds = np.asarray(slow)
  best = quickest(speeds, total)
  chosen: dict[str, tuple[int, np.ndarray | None]] = {EVEN: (0, None), AGAIN: (0, None),
                                                      SHARED: (1, None)}
  if (speeds == speeds[0]).all():
    return chosen
  last = int(np.flatnonzero(speeds > 1)[-1])
  seen = {tuple(even(total, len(slow)))}
  for name, more in zip(FIXED, (0, 1), strict=True):
    counts = best.copy()
    others = quickest(speeds, total - int(counts[last]) - more, (last,))
    others[last] = counts[last] + more
    if tuple(others) not in seen:
      seen.add(tuple(others))
      chosen[name] = (2, others)
  if max(slow) == 2 and total > 16:
    # What dropping the slow host comes to is the same whatever its speed.
    chosen[WITHOUT] = (2,
                       quickest(speeds, total, tuple(int(r) for r in np.flatnonzero(speeds > 1))))
  return chosen


def loss_fn(w: Any, micro_batch: Any) -> tuple[Any, Any]:
  x, seconds, turns = micro_batch
  h = jaxpace.delay(x, seconds)
  # One layer again and again: work enough, and little to send.
  h = jax.lax.fori_loop(0, turns, lambda _, h: jnp.tanh(h @ jax.lax.stop_gradient(w)), h)
  return jnp.sum(jnp.square(jnp.tanh(h @ w))), jnp.float32(x.shape[0])


def train_step(w: Any, batch: Any, counts: Any) -> tuple[Any, Any]:
  loss, grads = jaxpace.accumulate(loss_fn, w, (batch["x"], batch["seconds"], batch["turns"]),
                                   counts)
  return w - jnp.float32(1e-3) * grads, loss


def work(out: pathlib.Path, setup: Setup) -> None:
  """Runs all stages; process 0 writes what it found to `out`."""
  mine = jax.process_index()
  real = setup.kind != "sleep"
  with contextlib.ExitStack() as stack:
    host = None
    if real:
      balanced_slowing.pinned(mine)
      host = stack.enter_context(balanced_slowing.Host())
    turns = _turns(setup.work * balanced_slowing.SHARE) if real else 0
    job, stages = Training(setup, turns), []
    # Compiled before anyone is slow.
    job.block(2, settle=1)
    for number, slow in enumerate(setup.slow):
      if host and setup.kind == "quota":
        host.slower(slow[mine])
      elif host:
        host.slower(1.0)
        host.beside(slow[mine])
      stages.append(job.stage(slow, number))
      if mine == 0:
        out.write_text(json.dumps(stages))
        print(
            f"  {setup.kind}, {setup.micro_batches} micro-batches: stage {number + 1} of "
            f"{len(setup.slow)}",
            flush=True)


def _turns(seconds: float) -> int:
  """How many layers take that long on a processor of its own: the same on all processes, by process
  0."""
  x, w = jnp.ones((_ROWS, _WIDTH), jnp.float32), jnp.ones((_WIDTH, _WIDTH), jnp.float32)
  run = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, h: jnp.tanh(h @ w), x))
  run(x, 10).block_until_ready()
  took = []
  for _ in range(30):
    start = time.process_time()
    run(x, 20).block_until_ready()
    took.append((time.process_time() - start) / 20)
  from jax.experimental import multihost_utils
  one = multihost_utils.broadcast_one_to_all(np.float32(np.median(took)))
  return max(1, int(seconds / max(float(one), 1e-6)))


class Training:
  """The training, which goes on from stage to stage."""

  def __init__(self, setup: Setup, turns: int, pacer: jaxpace.Pacer | None = None):
    self.setup, self.turns = setup, turns
    self.ranks, self.total = jax.device_count(), setup.micro_batches
    self.mesh = jax.make_mesh((self.ranks,), ("data",), axis_types=(AxisType.Auto,))
    pacer = pacer or jaxpace.share_work(told(self.total, self.ranks))
    self.paced = jaxpace.instrument(train_step, "data", pacer, share=True)
    spec, split = jaxpace.spec(self.mesh), P("data")
    self.run = jax.jit(jax.shard_map(
        self.paced, mesh=self.mesh,
        in_specs=(spec, P(), {"x": split, "seconds": split, "turns": split}, P()),
        out_specs=(spec, P())), donate_argnums=(0, 1))
    self.pace = self.paced.init(self.mesh)
    rng = np.random.default_rng(0)
    self.width = _WIDTH if turns else 16
    self.examples = rng.normal(size=(256, _ROWS if turns else 1, self.width)).astype(np.float32)
    w = (rng.normal(size=(self.width, self.width)) / self.width**0.5).astype(np.float32)
    self.w = jax.device_put(w, NamedSharding(self.mesh, P()))
    self.feed = jaxpace.shares(self.mesh, examples=len(self.examples), size=1,
                               total_micro_batches=self.total, capacity=self.total)
    self.slow: tuple[float, ...] = setup.slow[0]
    # Of all steps so far: arrivals, known one step later, and counts.
    self.arrivals: list[list[float]] = []
    self.ran: list[list[int]] = []

  def steps(self, number: int) -> Iterator[np.ndarray]:
    """Runs steps; yields the counts of each, when it has been dispatched."""
    for _ in range(number):
      share = self.feed.next(self.pace)
      rows = share.take(self.examples)
      each = np.zeros((len(share.ranks), self.total), np.float32)
      if not self.turns:
        each[:] = self.setup.work * np.asarray(self.slow)[list(share.ranks), None]
      turns = np.full(each.size, self.turns, np.int32)
      batch = share.put({"x": rows.reshape(-1, *rows.shape[2:]), "seconds": each.reshape(-1),
                         "turns": turns})
      self.pace, (self.w, _) = self.run(self.pace, self.w, batch, share.counts)
      yield share.counts

  def switch(self, mode: int, fixed: np.ndarray | None = None) -> None:
    """Tells the balancer what to do from the step after next on."""
    jax.block_until_ready(self.pace)
    state = self.paced.pacer_state(self.pace)
    now: Told = state.inner
    some = even(self.total, self.ranks) if fixed is None else fixed
    after = now._replace(mode=np.full(np.shape(now.mode), mode, np.int32),
                         fixed=np.broadcast_to(some, np.shape(now.fixed)).astype(np.int32))
    self.pace = self.paced.with_pacer_state(self.pace, state._replace(inner=after))

  def block(self, number: int, settle: int = SETTLE) -> tuple[float, np.ndarray, list[list[int]]]:
    """Runs a block; returns seconds a step, arrivals [steps, R] and counts of what counts."""
    rows, counts, start = [], [], 0.0
    for done, ran in enumerate(self.steps(number), start=1):
      if done == settle:
        jax.block_until_ready(self.pace)
        start = time.perf_counter()
      # Those of the step before: the ranks know them one step later.
      rows.append(self.pace.arrivals.addressable_shards[0].data + jnp.float32(0))
      counts.append(ran.tolist())
    jax.block_until_ready(self.pace)
    seconds = (time.perf_counter() - start) / (number - settle)
    arrivals = np.stack([np.asarray(row).reshape(-1) for row in rows])
    self.arrivals += arrivals.tolist()
    self.ran += counts
    return seconds, arrivals[settle:], counts[settle:]

  def stage(self, slow: tuple[float, ...], number: int) -> dict[str, Any]:
    """Slows ranks down, lets the counts follow, and then measures the arms in turn."""
    self.slow = slow
    self.arrivals, self.ran = [], []
    self.switch(1)
    history = self.block(self.setup.learn, settle=1)[2]
    ways = arms(slow, self.total)
    seconds: dict[str, list[float]] = {arm: [] for arm in ways}
    busy, by_speed, used, order = [], [], [], []
    draw = random.Random(f"{self.setup.kind} {self.total} {number}")
    for _ in range(self.setup.rounds):
      for arm in draw.sample(list(ways), len(ways)):
        self.switch(*ways[arm])
        order.append(arm)
        spent, began = time.process_time(), time.perf_counter()
        took, arrivals, counts = self.block(self.setup.block)
        seconds[arm].append(took)
        if arm in (EVEN, AGAIN):
          busy.append(arrivals)
          used.append((time.process_time() - spent) / (time.perf_counter() - began))
        if arm == SHARED:
          by_speed += counts
    return {"slow": slow, "seconds": seconds, "history": history, "by_speed": by_speed,
            "each": (np.concatenate(busy).mean(axis=0) / even(self.total, self.ranks)).tolist(),
            "spread":
            (np.concatenate(busy).std(axis=0) / np.concatenate(busy).mean(axis=0)).tolist(),
            "fixed": {arm: counts.tolist() for arm, (mode, counts) in ways.items()
                      if counts is not None},
            "arrivals": self.arrivals, "ran": self.ran, "order": order,
            "processor": float(np.mean(used))}
