"""The GPU's timer against the host's monotonic clock: timestamps taken between two readings of the
host's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from experiments.labs.gpu.bench import Bench
from jaxpace.observation.clocks import words


class Offset(NamedTuple):
  """Device time minus host time, ns: somewhere between `low` and `high`, at `host_ns` of the host's
  clock."""

  host_ns: int
  low: int
  high: int

  @property
  def middle(self) -> float:
    return (self.low + self.high) / 2

  @property
  def half_width(self) -> float:
    return (self.high - self.low) / 2


def bracketed(before: np.ndarray, device: np.ndarray, after: np.ndarray) -> Offset:
  """The offset that fits all readings, or, where the clocks drift too much for that, the narrowest
  one.

  A timestamp was taken after `before` and not later than `after`, so device − after <= offset <=
  device − before.

  Args:
    before, device, after: [n] int64 ns, of the host's clock, the device's and the host's.
  """
  lows, highs = device - after, device - before
  low, high = int(lows.max()), int(highs.min())
  if low > high:
    place = int(np.argmin(highs - lows))
    low, high = int(lows[place]), int(highs[place])
  return Offset(int(np.median(before)), low, high)


def reader(bench: Bench) -> Callable[[], int]:
  """A function that takes one timestamp and waits for it: device ns."""
  timer = bench.timer()
  previous = jax.device_put(words.zero(), bench.device())
  read = jax.jit(timer.timestamp)
  jax.block_until_ready(read(previous))
  return lambda: int(words.to_ns(np.asarray(read(previous))))


def measure(read: Callable[[], int], times: int) -> tuple[Offset, np.ndarray]:
  """Takes timestamps between readings of the host's clock.

  Returns:
    The offset; and the widths of all brackets, [times] ns: a timestamp's way there and back.
  """
  taken = np.empty((times, 3), np.int64)
  for k in range(times):
    taken[k, 0] = time.monotonic_ns()
    taken[k, 1] = read()
    taken[k, 2] = time.monotonic_ns()
  return bracketed(*taken.T), taken[:, 2] - taken[:, 0]


def drift(offsets: list[list[float]]) -> tuple[float, float, float]:
  """A line through offsets measured at several times.

  Args:
    offsets: (host ns, offset ns, half its interval's width ns) each.

  Returns:
    Drift in parts per million; the seconds it was seen over; the largest distance from the line,
    ns.
  """
  if len(offsets) < 2:
    return float("nan"), 0.0, float("nan")
  table = np.asarray(offsets, np.float64)
  x, y = table[:, 0] - table[0, 0], table[:, 1] - table[0, 1]
  if not np.ptp(x):
    return float("nan"), 0.0, float("nan")
  slope, at_start = np.polyfit(x, y, 1)
  return (float(slope * 1e6), float(np.ptp(x) * 1e-9),
          float(np.max(np.abs(y - slope * x - at_start))))


def note_offset(bench: Bench, read: Callable[[], int], times: int = 200) -> Offset:
  """Measures the offset and keeps it, for the drift over all sections."""
  found, _ = measure(read, times)
  bench.offsets.append([float(found.host_ns), found.middle, found.half_width])
  return found


def run(bench: Bench) -> None:
  """Section host_time."""
  read = reader(bench)
  times = bench.times(1000, 300, 50)
  pauses = bench.times(8, 3, 2)
  for k in range(pauses):
    found, widths = measure(read, times)
    bench.offsets.append([float(found.host_ns), found.middle, found.half_width])
    if k == 0:
      bench.figure("device time minus host's monotonic clock", found.middle * 1e-9, "s")
      bench.figure("device time minus seconds since 1970", (read() - time.time_ns()) * 1e-9, "s")
      bench.figure("uncertainty of the offset, half width", found.half_width * 1e-3, "us")
      bench.figure("a stamp's way to the device and back, median",
                   float(np.median(widths)) * 1e-3, "us")
      bench.figure("the same, shortest", float(widths.min()) * 1e-3, "us")
      bench.holds("the clocks can be related: some offset fits", found.high >= found.low,
                  f"[{found.low}, {found.high}] ns")
    if k + 1 < pauses:
      time.sleep(bench.times(2, 1, 0))
  ppm, seconds, residual = drift(bench.offsets)
  bench.figure(f"drift over {seconds:.0f} s", ppm, "ppm")
  bench.figure("largest distance from a straight line", residual * 1e-3, "us")
  bench.at_most("uncertainty of the offset, half width", min(o[2] for o in bench.offsets) * 1e-3,
                100.0, "us")
