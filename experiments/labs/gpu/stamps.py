"""Timestamps back to back: resolution of the timer, cost of a timestamp on the stream, order, the
carry between the words."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.labs.gpu import hosttime
from experiments.labs.gpu.bench import Bench
from experiments.lib.paired import Estimate, estimate
from jaxpace.observation.clocks import Clock, gate, words

WANTED_US = 3.0


def chain(clock: Any, count: int) -> Callable[[jax.Array], jax.Array]:
  """A program of `count` timestamps, each after the one before: uint32 [2] -> [count, 2]. `clock`
  needs only `timestamp`."""

  def stamps(previous: jax.Array) -> jax.Array:
    taken = []
    for _ in range(count):
      previous = clock.timestamp(previous)
      taken.append(previous)
    return jnp.stack(taken)

  return stamps


def between_products(clock: Clock, count: int,
                     stamped: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """A program of `count` small matrix products between two timestamps, each followed, or not, by a
  timestamp that holds it.

  Products, since XLA makes a kernel of each in either case.
  """

  def products(x: jax.Array, w: jax.Array) -> jax.Array:
    first = stamp = clock.timestamp(words.zero(), x)
    (x,) = gate(clock, stamp, [x])
    for _ in range(count):
      x = x @ w
      if stamped:
        stamp = clock.timestamp(stamp, x)
        (x,) = gate(clock, stamp, [x])
    return jnp.stack([first, clock.timestamp(stamp, x)])

  return products


def gaps(stamps: np.ndarray) -> np.ndarray:
  """[n - 1] ns between timestamps [n, 2] of words."""
  return np.diff(words.to_ns(stamps))


def resolution(times: np.ndarray) -> int:
  """The largest step that all readings [n] ns are whole multiples of, apart from where they start;
  0 if all are equal.

  >>> resolution(np.array([5, 37, 69, 165]))
  32
  """
  return int(np.gcd.reduce(np.diff(times)))


def carries(times: np.ndarray) -> int:
  """How often the low word of readings [n] ns came round."""
  return int(np.count_nonzero(np.diff(times >> 32)))


def seconds_a_call(call: Callable[[], Any], times: int, rounds: int) -> np.ndarray:
  """[rounds] seconds of one of `times` calls that are dispatched without waiting, the last one
  waited for."""
  jax.block_until_ready(call())
  taken = np.empty(rounds)
  for k in range(rounds):
    start = time.perf_counter()
    for _ in range(times):
      result = call()
    jax.block_until_ready(result)
    taken[k] = (time.perf_counter() - start) / times
  return taken


def cost(bench: Bench, clock: Any, name: str, short: int, long: int, rounds: int) -> Estimate:
  """Cost of a timestamp, by the timestamps themselves and by the host's clock; the former in us."""
  previous = jax.device_put(words.zero(), bench.device())
  programs = {count: jax.jit(chain(clock, count)) for count in (short, long)}
  own = []
  for _ in range(rounds):
    own.append(np.median(gaps(np.asarray(programs[long](previous)))))
  each = estimate(np.asarray(own) * 1e-3)
  bench.figure(f"{name}: from one stamp to the next", each, "us")
  spans = {count: seconds_a_call(lambda program=program: program(previous), 10, rounds)  # type: ignore[misc]
           for count, program in programs.items()}
  bench.figure(f"{name}: a stamp by the host's clock, {short} and {long} in a program",
               estimate((spans[long] - spans[short]) / (long - short) * 1e6), "us")
  return each


def run(bench: Bench) -> None:
  """Section timestamp: and once more, with command buffers off, stamp_no_graphs."""
  read = hosttime.reader(bench)
  hosttime.note_offset(bench, read, bench.times(200, 100, 20))
  clock = bench.timer()
  short, long = bench.times(32, 32, 4), bench.times(160, 160, 16)
  each = cost(bench, clock, f"{bench.clock} clock", short, long, bench.times(40, 20, 5))
  bench.at_most("a stamp on the stream", each, WANTED_US, "us")
  _with_hold(bench, clock)
  _order(bench, clock, long)
  hosttime.note_offset(bench, read, bench.times(200, 100, 20))


def run_callback(bench: Bench) -> None:
  """Section stamp_callback: the host callback clock beside it."""
  cost(bench, bench.timer("callback"), "host callback clock", 2, bench.times(18, 18, 6),
       bench.times(20, 10, 3))


def _with_hold(bench: Bench, clock: Clock) -> None:
  width, count = bench.times(256, 256, 16), bench.times(32, 32, 8)
  device = bench.device()
  x, w = (jax.device_put(np.eye(width, dtype=np.float32), device) for _ in range(2))
  programs = [jax.jit(between_products(clock, count, stamped)) for stamped in (False, True)]
  spans = np.empty((bench.times(60, 30, 5), 2))
  for k in range(len(spans)):
    for i, program in enumerate(programs):
      spans[k, i] = gaps(np.asarray(program(x, w)))[0]
  added = estimate((spans[1:, 1] - spans[1:, 0]) / count * 1e-3)
  bench.figure("a stamp between two kernels, with what it holds back", added, "us")


def _order(bench: Bench, clock: Clock, count: int) -> None:
  """Timestamps until there are enough of them and the low word has come round; it does every 4.3
  s."""
  program = jax.jit(chain(clock, count))
  previous = jax.device_put(words.zero(), bench.device())
  wanted = bench.times(100_000, 100_000, 200)
  until = time.monotonic() + bench.times(9, 9, 0)
  kept: list[jax.Array] = []
  high: set[int] = set()
  while True:
    taken = program(previous)
    previous = taken[-1]
    kept.append(taken)
    if len(kept) % 64 == 0 or bench.size == "tiny":
      high.add(int(np.asarray(previous)[0]))
      enough = len(kept) * count >= wanted
      if enough and (len(high) > 1 or time.monotonic() >= until):
        break
  times = words.to_ns(np.concatenate([np.asarray(part) for part in kept]))
  steps = np.diff(times)
  bench.figure("stamps in a row", len(times))
  bench.figure("steps of the timer (greatest common divisor)", resolution(times), "ns")
  bench.figure("shortest time between two stamps that differ",
               int(steps[steps > 0].min(initial=2**62)), "ns")
  bench.figure("stamps equal to the one before", int(np.count_nonzero(steps == 0)))
  bench.figure("longest time between two stamps", float(steps.max()) * 1e-3, "us")
  bench.holds("no stamp is earlier than the one before", bool((steps >= 0).all()),
              f"least step {steps.min()} ns")
  seen = carries(times)
  bench.figure("times the low word came round", seen)
  if seen:
    places = np.flatnonzero(np.diff(times >> 32))
    around = np.concatenate([steps[max(0, p - 3):p + 4] for p in places])
    bench.holds("the words carry: stamps around it are in order and close", bool((around >= 0).all()
                and around.max() < 50_000_000), f"largest step there {around.max() * 1e-3:.1f} us")
  elif bench.size != "tiny":
    bench.note("The low word did not come round while stamps were taken: the carry was not seen.")
