"""What a trace of JAX's profiler shows of some steps: kernels, copies to the host, host callbacks,
graph launches."""

from __future__ import annotations

import collections
import glob
import os
import re
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

WINDOW = "gpu_check_steps"
"""Annotation on the host around the steps in question."""

_TO_HOST = re.compile(r"memcpy.?(d2h|dtoh)|device.?to.?host", re.IGNORECASE)
_CALLBACK = re.compile(r"callback(?!s? ?thread)", re.IGNORECASE)
_GRAPH = re.compile(r"c[ud]\w*GraphLaunch", re.IGNORECASE)


class Seen(NamedTuple):
  """Within the window; names as in the trace."""

  kernels: dict[str, tuple[int, float]]  # on the GPU's streams: how many, ns in all
  to_host: dict[str, int]
  callbacks: dict[str, int]
  graphs: int  # launches of CUDA graphs: of XLA's command buffers
  seconds: float  # length of the window


def look(profile: Any) -> Seen:
  """Reads a `jax.profiler.ProfileData`.

  Events of derived lines of a device ("XLA Ops") repeat those of its streams: only the latter are
  counted.

  Raises:
    ValueError: the annotation around the steps is not in it.
  """
  begin = end = None
  for plane in profile.planes:
    for line in plane.lines:
      for event in line.events:
        if event.name == WINDOW:
          begin, end = event.start_ns, event.start_ns + event.duration_ns
  if begin is None or end is None:
    raise ValueError(
        f"The trace has no annotation {WINDOW!r}: nothing was traced, or the profiler lost events.")
  kernels: dict[str, list[float]] = collections.defaultdict(list)
  to_host: collections.Counter[str] = collections.Counter()
  callbacks: collections.Counter[str] = collections.Counter()
  graphs = 0
  for plane in profile.planes:
    device = plane.name.startswith("/device:GPU")
    for line in plane.lines:
      if device and not line.name.startswith("Stream"):
        continue
      for event in line.events:
        if not begin <= event.start_ns <= end:
          continue
        name = event.name
        if _TO_HOST.search(name):
          to_host[name] += 1
        elif _CALLBACK.search(name):
          callbacks[name] += 1
        elif _GRAPH.search(name):
          graphs += 1
        if device:
          kernels[name].append(event.duration_ns)
  return Seen({name: (len(times), sum(times)) for name, times in kernels.items()}, dict(to_host),
              dict(callbacks), graphs, (end - begin) * 1e-9)


def trace(steps: Callable[[], Any]) -> Seen:
  """Traces what a function does until its result is there."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder), jax.profiler.TraceAnnotation(WINDOW):
      jax.block_until_ready(steps())
    files = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
    if not files:
      raise ValueError("The profiler wrote no trace.")
    return look(jax.profiler.ProfileData.from_file(files[0]))
