"""Timestamps of observed programs on a GPU: whether they arrive, what they cost, whether they tell
the truth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.labs.gpu import kernels as known
from experiments.labs.gpu.bench import Bench
from experiments.labs.gpu.stamps import seconds_a_call
from experiments.lib.paired import estimate
from jaxpace.core.observed import TAG_BITS
from jaxpace.observation.clocks import host_ring
from jaxpace.observation.observe import Observed
from jaxpace.observation.partitioned import collectives, compiling, gpu_thunks

WANTED_US = 3.0
_OWN = (1 << TAG_BITS) - 1


class AtKernels(Observed):
  """A jitted function with the timestamps of observed programs at kernels instead of collectives,
  which one GPU leaves out."""

  def __init__(self, jitted: Callable[..., Any], kernels: int):
    """Prepares; timestamps go around so many kernels, evenly spaced."""
    super().__init__(jitted, exact=False)
    self._kernels = kernels

  def compile(self, request: compiling.Request) -> Any:
    """See `Watcher`."""
    if not self._is_own(request):
      return request.compile()
    program = collectives.Program(compiling.program_of(request.compile()))
    names = [one.name for one in program.run() if one.opcode in ("fusion", "custom-call")]
    places = np.linspace(0, len(names) - 1, min(self._kernels, len(names))).round().astype(int)
    if reason := host_ring.unavailable():
      raise RuntimeError(reason)
    data, _ = gpu_thunks.timestamped(request.serialized(), host_ring.next_program(),
                                     {names[place] for place in places})
    return request.load(data)


def chain(count: int) -> AtKernels:
  """A program of `count` kernels that do nothing, each between two timestamps."""

  def nothing(x: jax.Array, nanoseconds: jax.Array) -> jax.Array:
    for _ in range(count):
      x = known.spin(x, nanoseconds)
    return x

  return AtKernels(jax.jit(nothing), count)


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
  reason = host_ring.unavailable()
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


def _words(bench: Bench, nanoseconds: int) -> jax.Array:
  words: jax.Array = jax.device_put(np.int32(nanoseconds), bench.device())
  return words


def _arrive(bench: Bench, x: jax.Array) -> None:
  count = 32
  program, reader, none = chain(count), Reader(), _words(bench, 0)
  jax.block_until_ready(program(x, none))
  reader.new()
  before = time.monotonic_ns()
  jax.block_until_ready(program(x, none))
  after = time.monotonic_ns()
  events = reader.new()
  bench.holds("all marks arrive, in the order of the program",
              events[:, 1].tolist() == [0, *range(2, 2 + 2 * count), 1],
              f"{len(events)} of {2 * count + 2}")
  off = max(host_ring._source.uncertain_ns) if host_ring._source else 0  # type: ignore[union-attr]
  bench.holds("their times lie between dispatch and end by the host's clock",
              bool(before - off <= events[0, 0] and events[-1, 0] <= after + off),
              f"{(events[0, 0] - before) * 1e-3:.1f} us after, "
              f"{(after - events[-1, 0]) * 1e-3:.1f} us before")
  bench.holds("no mark is earlier than the one before", bool((np.diff(events[:, 0]) >= 0).all()))


def _cost(bench: Bench, x: jax.Array) -> None:
  short, long, rounds = 32, 160, bench.times(40, 20, 3)
  marked = {count: chain(count) for count in (short, long)}
  reader, none = Reader(), _words(bench, 0)
  for program in marked.values():
    jax.block_until_ready(program(x, none))
  own = []
  for _ in range(rounds):
    reader.new()
    jax.block_until_ready(marked[long](x, none))
    # From the exit of one kernel to the enter timestamp of the next.
    own.append(np.median(np.diff(reader.new()[:, 0])[2:-1:2]) * 1e-3)
  bench.at_most("a mark, from one to the next", estimate(np.asarray(own)), WANTED_US, "us")
  spans = {(count, kind): seconds_a_call(lambda call=call: call(x, none), 10, rounds)  # type: ignore[misc]
           for count in (short, long)
           for kind, call in (("bare", marked[count].jitted), ("marked", marked[count]))}
  each = [(spans[long, kind] - spans[short, kind]) / (long - short) * 1e6
          for kind in ("bare", "marked")]
  bench.figure("a kernel that does nothing by the host's clock", estimate(each[0]), "us")
  bench.figure("a mark beside it by the host's clock", estimate((each[1] - each[0]) / 2), "us")


def _truth(bench: Bench, x: jax.Array) -> None:
  program, reader = chain(1), Reader()
  nothing = 0.0
  for asked in (0.0, 20e-6, 1e-3, 20e-3):
    words = _words(bench, int(asked * 1e9))
    jax.block_until_ready(program(x, words))
    reader.new()
    spans = []
    for _ in range(bench.times(40, 20, 3)):
      jax.block_until_ready(program(x, words))
      spans.append(float(np.diff(reader.new()[:, 0])[1]) * 1e-9)
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
  program, reader = chain(1), Reader()
  words = _words(bench, long_ns)
  jax.block_until_ready(program(x, _words(bench, 0)))
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
