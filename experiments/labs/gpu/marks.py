"""Timestamps of observed programs on a GPU: whether they arrive, what they cost, whether they tell
the truth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpace
from experiments.labs.gpu import kernels as known
from experiments.labs.gpu import observed_steps
from experiments.labs.gpu.bench import Bench
from experiments.labs.gpu.stamps import seconds_a_call
from experiments.lib.paired import estimate, interleave
from jaxpace.core.observed import TAG_BITS
from jaxpace.observation.clocks import host_ring, kernels

WANTED_US = 3.0
_PROGRAM = 4000
_OWN = (1 << TAG_BITS) - 1


def launched(values: Sequence[jax.Array], tag: int, program: int = _PROGRAM) -> list[jax.Array]:
  """A timestamp as programs have it: hands the first values on; the last is the device's block."""
  count = len(values)
  kernel = kernels.mark(program, tag, count - 1, 2 * count)
  one = dict.fromkeys(("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"), np.int32(1))
  call = jax.ffi.ffi_call(kernels.TARGET,
                          [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values],
                          vmap_method="sequential",
                          input_output_aliases={at: at for at in range(count)})
  return list(call(*values, name=kernel.name, kernel_type="ptx", kernel_data=kernel.text,
                   shared_mem_bytes=np.int32(0), **one))


def lane() -> jax.Array:
  """This device's block."""
  words: jax.Array = jax.ffi.ffi_call(kernels.DEVICE_BUFFER,
                                      jax.ShapeDtypeStruct((kernels.BLOCK_WORDS,), jnp.uint32))()
  return words


def chain(count: int) -> Callable[[jax.Array], jax.Array]:
  """A program of `count` timestamps, one after the other, between a start timestamp and an end
  timestamp."""

  def marked(x: jax.Array) -> jax.Array:
    x, block = launched([x, lane()], 0)
    for place in range(count):
      x, block = launched([x, block], 2 + place)
    return launched([x, block], 1)[0]

  return marked


class Reader:
  """Events of one lane as they come."""

  def __init__(self, place: int = 0):
    self._place = place
    self._at = int(host_ring.current().heads()[place])

  def new(self) -> np.ndarray:
    """[n] events of the programs made here since the last call: (ns, tag), starts' numbers left
    out."""
    ring = host_ring.current()
    head = int(ring.heads()[self._place])
    events = ring.events[self._place][np.arange(self._at, head) % ring.layout.capacity]
    self._at = head
    own = events["tag"] & _OWN
    return np.stack([events["ns"], own.astype(np.int64)], axis=1)[own < 0xFFFFE]


def run(bench: Bench) -> None:
  """Section timestamps."""
  if bench.platform == "cpu":
    bench.note("These marks are for GPUs.")
    return
  began = time.perf_counter()
  reason = host_ring.unavailable("stream")
  bench.holds("the GPU writes to a ring in the host's memory, and its clock was told", not reason,
              reason or "yes")
  if reason:
    return
  bench.figure("making and trying the rings", time.perf_counter() - began, "s")
  source: Any = host_ring._source
  bench.figure("the two clocks are told apart to", max(source.uncertain_ns) * 1e-3, "us")
  device = bench.device()
  x = jax.device_put(jnp.zeros((256,), jnp.float32), device)
  _arrive(bench, x)
  _cost(bench, x)
  _truth(bench, x)
  _meanwhile(bench, x)


def _arrive(bench: Bench, x: jax.Array) -> None:
  count = 64
  program, reader = jax.jit(chain(count)), Reader()
  jax.block_until_ready(program(x))
  reader.new()
  before = time.monotonic_ns()
  jax.block_until_ready(program(x))
  after = time.monotonic_ns()
  events = reader.new()
  bench.holds("all marks arrive, in the order of the program",
              events[:, 1].tolist() == [0, *range(2, 2 + count), 1],
              f"{len(events)} of {count + 2}")
  off = max(host_ring._source.uncertain_ns) if host_ring._source else 0  # type: ignore[union-attr]
  bench.holds("their times lie between dispatch and end by the host's clock",
              bool(before - off <= events[0, 0] and events[-1, 0] <= after + off),
              f"{(events[0, 0] - before) * 1e-3:.1f} us after, "
              f"{(after - events[-1, 0]) * 1e-3:.1f} us before")
  bench.holds("no mark is earlier than the one before", bool((np.diff(events[:, 0]) >= 0).all()))


def _cost(bench: Bench, x: jax.Array) -> None:
  short, long, rounds = 32, 160, bench.times(40, 20, 3)
  programs, reader = {count: jax.jit(chain(count)) for count in (short, long)}, Reader()
  for program in programs.values():
    jax.block_until_ready(program(x))
  own = []
  for _ in range(rounds):
    reader.new()
    jax.block_until_ready(programs[long](x))
    own.append(np.median(np.diff(reader.new()[:, 0])) * 1e-3)
  bench.at_most("a mark, from one to the next", estimate(np.asarray(own)), WANTED_US, "us")
  spans = {count: seconds_a_call(lambda program=program: program(x), 10, rounds)  # type: ignore[misc]
           for count, program in programs.items()}
  bench.figure("a mark by the host's clock",
               estimate((spans[long] - spans[short]) / (long - short) * 1e6), "us")


def _truth(bench: Bench, x: jax.Array) -> None:
  def around(x: jax.Array, nanoseconds: jax.Array) -> jax.Array:
    x, block = launched([x, lane()], 2)
    x = known.spin(x, nanoseconds)
    return launched([x, block], 3)[0]

  program, reader = jax.jit(around), Reader()
  nothing = 0.0
  for asked in (0.0, 20e-6, 1e-3, 20e-3):
    words = jax.device_put(np.int32(asked * 1e9), bench.device())
    jax.block_until_ready(program(x, words))
    reader.new()
    spans = []
    for _ in range(bench.times(40, 20, 3)):
      jax.block_until_ready(program(x, words))
      spans.append(float(np.diff(reader.new()[:, 0])[0]) * 1e-9)
    if asked == 0.0:
      # Three kernels, launched one after the other.
      nothing = float(np.median(spans))
      bench.figure("two marks around a kernel that does nothing", nothing * 1e6, "us")
      continue
    bench.within(f"{asked * 1e6:g} us more between two marks, median",
                 float(np.median(spans)) - nothing, asked)


def _meanwhile(bench: Bench, x: jax.Array) -> None:
  """That a timestamp is read while the program goes on: nothing waits for the step."""
  long_ns = 200_000_000

  def late(x: jax.Array, nanoseconds: jax.Array) -> jax.Array:
    x, _ = launched([x, lane()], 2)
    return known.spin(x, nanoseconds)

  program, reader = jax.jit(late), Reader()
  words = jax.device_put(np.int32(long_ns), bench.device())
  jax.block_until_ready(program(x, jax.device_put(np.int32(0), bench.device())))
  reader.new()
  begun = time.perf_counter()
  out = program(x, words)
  seen = None
  while seen is None and not out.is_ready():
    if len(reader.new()):
      seen = time.perf_counter() - begun
  jax.block_until_ready(out)
  bench.holds("a mark is read while the program goes on", seen is not None and seen < 0.1,
              "not before its end" if seen is None
              else f"after {seen * 1e3:.2f} ms of {long_ns * 1e-6:.0f}")


def run_observed(bench: Bench) -> None:
  """Section observed: several GPUs; bits, timestamps and overhead of steps that `jaxpace.observe`
  made."""
  devices = jax.devices(bench.platform)
  if bench.platform == "cpu" or len(devices) < 2:
    bench.note("Observed steps need two GPUs at least: on one there is nobody to wait for.")
    return
  mesh = jax.make_mesh((len(devices),), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
  step = observed_steps.transformer(mesh, bench.times(12, 12, 2), bench.times(768, 768, 64),
                                    fsdp=True, scan=True)

  def fresh() -> Any:
    keys = iter(range(10_000))
    return jax.tree.map(lambda leaf: jax.device_put(
        (np.random.default_rng(next(keys)).standard_normal(leaf.shape) * 0.02).astype(leaf.dtype),
        leaf.sharding),
        step.state)

  tokens = jax.device_put(np.random.default_rng(0).integers(0, observed_steps.VOCABULARY,
                                                            step.batch.shape, np.int32),
                          step.batch.sharding)
  jitted = jax.jit(step.function, donate_argnums=0, out_shardings=step.out_shardings)
  calls: dict[str, Callable[..., Any]] = {
      "bare": jitted, "bare again": jitted,
      "observed": jaxpace.observe(jax.jit(lambda state, batch: step.function(state, batch),
                                          donate_argnums=0, out_shardings=step.out_shardings),
                                  clock="stream")}
  states = {}
  for arm, call in calls.items():
    state = fresh()
    for _ in range(bench.times(20, 20, 2)):
      state, _ = call(state, tokens)
    states[arm] = [np.asarray(leaf.addressable_shards[0].data) for leaf in jax.tree.leaves(state)]
  plan = calls["observed"].plan.programs[-1]  # type: ignore[attr-defined]
  bench.holds("the step has marks", not plan.bare, plan.bare or f"{plan.marks} a step")
  for arm in ("bare again", "observed"):
    differ = sum(int(np.count_nonzero(a != b))
                 for a, b in zip(states["bare"], states[arm], strict=True))
    bench.holds(f"{arm}: the same bits as bare", differ == 0, f"{differ} numbers differ")
  held = {arm: fresh() for arm in calls}

  def block(arm: str) -> float:
    begun = time.perf_counter()
    for _ in range(5):
      held[arm], value = calls[arm](held[arm], tokens)
    jax.block_until_ready(value)
    return (time.perf_counter() - begun) / 5

  figures = interleave({arm: lambda arm=arm: block(arm) for arm in calls}, bench.times(60, 20, 2))  # type: ignore[misc]
  bench.figure("bare step", estimate(figures["bare"] * 1e3), "ms")
  for arm in ("bare again", "observed"):
    bench.figure(f"{arm}, above bare", estimate((figures[arm] / figures["bare"] - 1) * 100), "%")
