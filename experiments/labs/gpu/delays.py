"""Delays asked for, against what timestamps around them and the host's clock say; what is out of
range; power."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.labs.gpu import hosttime, kernels
from experiments.labs.gpu.bench import Bench
from jaxpace.observation.clocks import Clock, words

ASKED_S = (0.0, 1e-6, 2e-6, 5e-6, 10e-6, 20e-6, 50e-6, 100e-6, 500e-6, 1e-3, 5e-3, 20e-3, 50e-3)


def around(clock: Clock, limit_s: float) -> Callable[[jax.Array], jax.Array]:
  """A program of a delay with timestamps around it: seconds [] -> [4, 2] words: before, its own
  two, after."""

  def delayed(seconds: jax.Array) -> jax.Array:
    first = clock.timestamp(words.zero(), seconds)
    before, after = clock.delay(seconds, limit_s, first)
    return jnp.stack([first, before, after, clock.timestamp(after)])

  return delayed


def run(bench: Bench) -> None:
  """Section delay."""
  read = hosttime.reader(bench)
  hosttime.note_offset(bench, read, bench.times(200, 100, 20))
  clock, device = bench.timer(), bench.device()
  program = jax.jit(around(clock, 0.25))

  def call(seconds: float) -> jax.Array:
    return program(jax.device_put(np.float32(seconds), device))

  jax.block_until_ready(call(0.0))
  asked_s = ASKED_S if bench.size != "tiny" else (0.0, 2e-3, 5e-3)
  repeats = bench.times(60, 25, 3)
  own: dict[float, list[float]] = {asked: [] for asked in asked_s}
  outer: dict[float, list[float]] = {asked: [] for asked in asked_s}
  host: dict[float, list[float]] = {asked: [] for asked in asked_s}
  rng = np.random.default_rng(0)
  for _ in range(repeats):
    for asked in rng.permutation(asked_s):
      if asked >= 20e-3 and len(own[asked]) >= max(3, repeats // 3):
        continue
      start = time.perf_counter()
      taken = jax.block_until_ready(call(asked))
      host[asked].append(time.perf_counter() - start)
      times = words.to_ns(np.asarray(taken))
      own[asked].append((times[2] - times[1]) * 1e-9)
      outer[asked].append((times[3] - times[0]) * 1e-9)
  nothing = {name: float(np.median(found[0.0]))
             for name, found in (("outer", outer), ("host", host))}
  bench.figure("stamps around a delay of nothing", nothing["outer"] * 1e6, "us")
  for asked in asked_s:
    if asked == 0.0:
      bench.holds("a delay of 0 has equal stamps", max(own[asked]) == 0.0,
                  f"{max(own[asked]) * 1e6:g} us at most")
      continue
    bench.within(f"delay of {asked * 1e6:g} us, by its own stamps, median",
                 float(np.median(own[asked])), asked)
    bench.within(f"delay of {asked * 1e6:g} us, by stamps around it, median",
                 float(np.median(outer[asked])) - nothing["outer"], asked)
    bench.figure(f"delay of {asked * 1e6:g} us, shortest and longest",
                 [min(own[asked]) * 1e6, max(own[asked]) * 1e6], "us")
    waited = float(np.median(host[asked])) - nothing["host"]
    # The host's own way there and back scatters by half a millisecond.
    if asked >= 10e-3:
      bench.within(f"delay of {asked * 1e6:g} us, by the host's clock, median", waited, asked,
                   least=50e-6)
    else:
      bench.figure(f"delay of {asked * 1e6:g} us, by the host's clock, median", waited * 1e6, "us")
  shortest = min(min(found) - asked for asked, found in own.items())
  bench.holds("no delay is shorter than asked", shortest >= -2e-9 - 1e-6 * max(asked_s),
              f"{shortest * 1e9:+.1f} ns")
  _out_of_range(bench, clock)
  if bench.platform != "cpu":
    _power(bench, clock)
  hosttime.note_offset(bench, read, bench.times(200, 100, 20))


def _out_of_range(bench: Bench, clock: Clock) -> None:
  limit = 10e-3
  program = jax.jit(around(clock, limit))
  none = jax.jit(around(clock, 0.0))
  for value in (np.nan, -1.0, -np.inf, -0.0):
    times = words.to_ns(np.asarray(program(jax.device_put(np.float32(value), bench.device()))))
    bench.holds(f"a delay of {value} is none", int(times[2] - times[1]) == 0,
                f"{(times[2] - times[1]) * 1e-3:g} us")
  for value in (np.inf, 3e38, 1e3, 0.011):
    times = words.to_ns(np.asarray(program(jax.device_put(np.float32(value), bench.device()))))
    bench.within(f"a delay of {value} s with a limit of 10 ms is 10 ms",
                 (times[2] - times[1]) * 1e-9, limit)
  times = words.to_ns(np.asarray(none(jax.device_put(np.float32(1.0), bench.device()))))
  bench.holds("nothing waits with a limit of 0", int(times[2] - times[1]) == 0,
              f"{(times[2] - times[1]) * 1e-3:g} us")


def _power(bench: Bench, clock: Clock) -> None:
  """Figures only: what the GPU draws while it waits, while a kernel spins as long, and at rest."""
  if shutil.which("nvidia-smi") is None:
    bench.note("Power was not read: there is no nvidia-smi.")
    return
  device, seconds = bench.device(), bench.times(2, 1, 0)
  wait = jax.jit(around(clock, 0.25))
  spin = jax.jit(lambda x, ns: kernels.spin(x, ns))
  twentieth = jax.device_put(np.float32(50e-3), device)
  x, ns = jax.device_put(np.zeros(1,
                                  np.float32), device), jax.device_put(np.int32(50_000_000), device)
  jobs: dict[str, Callable[[], object]] = {
      "at rest": lambda: time.sleep(50e-3), "in delays": lambda: wait(twentieth),
      "spinning": lambda: spin(x, ns)}
  for name, job in jobs.items():
    jax.block_until_ready(job())
    drawn = watts(lambda job=job: jax.block_until_ready(job()), seconds)  # type: ignore[misc]
    bench.figure(f"power {name}", drawn, "W")


def watts(job: Callable[[], object], seconds: float) -> float:
  """Median of the GPU's power, by nvidia-smi, while a job is done over and over; NaN where it does
  not say."""
  command = ["nvidia-smi", "--query-gpu=power.draw.instant", "--format=csv,noheader,nounits",
             "-lms", "100", "-i", "0"]
  meter = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
  end = time.monotonic() + seconds
  while time.monotonic() < end:
    job()
  meter.terminate()
  said, _ = meter.communicate(timeout=10)
  values = []
  for line in said.splitlines():
    try:
      values.append(float(line))
    except ValueError:  # "[N/A]"
      continue
  return float(np.median(values[len(values) // 3:])) if values else float("nan")
