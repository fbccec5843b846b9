"""Other ways to make a stamp and a delay, measured as jaxpace's own are."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from experiments.labs.gpu import delays, stamps
from experiments.labs.gpu.bench import Bench
from jaxpace.execution import words


def measure(bench: Bench, clock: Any, name: str) -> None:
  """Cost of a stamp, and delays by their own stamps; figures, and that they are right.

  Args:
    bench: keeps them.
    clock: has `stamp` and `delay` of a `jaxpace.execution.Clock`.
    name: as it is called in the figures.
  """
  stamps.cost(bench, clock, name, bench.times(32, 32, 4), bench.times(160, 160, 16),
              bench.times(40, 20, 5))
  program = jax.jit(delays.around(clock, 0.1))
  for asked in (0.0, 10e-6, 100e-6, 1e-3, 20e-3, np.nan, np.inf):
    taken = []
    for _ in range(bench.times(20, 10, 3)):
      times = words.to_ns(np.asarray(program(jax.device_put(np.float32(asked), bench.device()))))
      taken.append(float(times[2] - times[1]) * 1e-9)
    wanted = 0.1 if asked == np.inf else 0.0 if np.isnan(asked) else asked
    bench.within(f"{name}: delay of {asked * 1e6:g} us, limit 100 ms, by its own stamps, median",
                 float(np.median(taken)), wanted)
