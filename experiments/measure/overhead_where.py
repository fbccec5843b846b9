"""Which part of jaxpace the overhead of a step is: arms that add one part after the other, in turns
in one run.

Wall time says what it costs, the process's CPU time says whether that is work or overlap lost
between kernels. The recorder's threads run beside all arms alike, so no arm shows them; their CPU
time is read from the system.
"""

from __future__ import annotations

import functools
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.lib import measured
from experiments.lib.paired import estimate, interleave
from experiments.measure.overhead_loops import Loop, batch_for, mlp, one_device

_PACED = {"clock": "native", "share": None}
ARMS: dict[str, tuple[dict[str, Any] | None, bool, bool]] = {
    "bare": (None, False, False),
    "bare again": (None, False, False),
    "instrumented, `phases=False`": ({**_PACED, "phases": False}, False, False),
    "instrumented": (_PACED, False, False),
    "recorded, `hosts=False`": (_PACED, True, False),
    "recorded": (_PACED, True, True),
}
"""Options of `instrument`, whether it is recorded, whether the host is sampled."""


def measure(sizes_ms: Sequence[float], rounds: int) -> dict[str, Any]:
  """Runs all arms in turns, blocks of 100 ms, for each size of the bare step.

  Args:
    sizes_ms: sizes to aim at.
    rounds: blocks of each arm.

  Returns:
    By size: "bare_ms"; by arm [wall, cpu], each the median and interval of the microseconds it adds
    to a step; and by thread the microseconds of CPU time in a second.
  """
  return {f"{size:g}": _one(size, rounds) for size in sizes_ms}


def _one(size_ms: float, rounds: int) -> dict[str, Any]:
  mesh = one_device()
  state, data = mlp(batch_for(mesh, size_ms * 1e-3))
  steps = max(2, round(100 / size_ms))
  with tempfile.TemporaryDirectory() as root:
    loops = {name: Loop(mesh, state, data, paced, os.path.join(root, str(i)) if recorded else None,
                        hosts, len(ARMS))
             for i, (name, (paced, recorded, hosts)) in enumerate(ARMS.items())}
    started, before = time.monotonic(), threads_us()
    wall = interleave({name: functools.partial(loop.block, steps) for name, loop in loops.items()},
                      rounds, progress=measured.progress(f"{size_ms:g} ms", rounds))
    seconds, after = time.monotonic() - started, threads_us()
    for loop in loops.values():
      loop.close()
  entry: dict[str, Any] = {"bare_ms": estimate(wall["bare"] * 1e3).to_json(),
                           "steps_per_block": steps, "arms": {},
                           "threads_us_a_second":
                           {name: round((after[name] - before.get(name, 0.0)) / seconds, 1)
                            for name in after}}
  for name in list(ARMS)[1:]:
    cpu = np.asarray(loops[name].cpu_seconds) - np.asarray(loops["bare"].cpu_seconds)
    entry["arms"][name] = {"wall_us": estimate((wall[name] - wall["bare"]) * 1e6).to_json(),
                           "percent": estimate((wall[name] / wall["bare"] - 1) * 100).to_json(),
                           "cpu_us": estimate(cpu * 1e6).to_json()}
    print(f"{size_ms:g} ms  {name:<30} " + "  ".join(
        f"{key} {value[0]:8.4g} [{value[1]:.4g}, {value[2]:.4g}]"
        for key, value in entry["arms"][name].items()),
          flush=True)
  return entry


def threads_us() -> dict[str, float]:
  """CPU time of the recorder's threads so far, in microseconds, the mean of those of one name;
  empty but on Linux."""
  found: dict[str, list[float]] = {}
  for thread in threading.enumerate():
    path = pathlib.Path(f"/proc/self/task/{thread.native_id}/schedstat")
    if thread.name.startswith("jaxpace-") and path.exists():
      found.setdefault(thread.name, []).append(float(path.read_text().split()[0]) * 1e-3)
  return {name: sum(times) / len(times) for name, times in found.items()}
