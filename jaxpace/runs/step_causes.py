"""What the host did in each step: CPU time, involuntary switches, garbage collection, data,
checkpoints, other programs, time between steps, page faults. One table of its columns,
`HOST_CAUSES`: all else that names them is made from it.

Everything is per iteration of the process's loop, from one `sample` to the next. Devices run behind
the loop: a value belongs to the step that the loop was dispatching, not to what the devices
computed meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import resource
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

Sample = tuple[int | None, ...]
"""One value for each of `HOST_CAUSES`, None where it isn't known: data and checkpoint where neither
was measured, other programs and time between steps where the loop says what it does."""


_MOST_PAUSES = 256
"""Collections of garbage that are remembered."""


class StepCauseMeter:
  """Collects the host's doings between two steps. Belongs to one thread, that of the training
  loop, but for `collected`."""

  def __init__(self) -> None:
    self._gc_start = self._gc_total = 0
    self._pauses: collections.deque[tuple[int, int]] = collections.deque(maxlen=_MOST_PAUSES)
    self._measured: dict[str, int] = {}
    self._cpu = self._switches = self._faults = self._gc_seen = 0
    self._used: set[str] = set()
    self.doing: str | None = None  # the cause that is being measured at the moment

  def start(self) -> None:
    """Begins to watch the garbage collector, if it does not yet, and sets the counters' origin."""
    if self._on_gc not in gc.callbacks:
      gc.callbacks.append(self._on_gc)
    self.sample()

  def stop(self) -> None:
    """Leaves the garbage collector alone again."""
    with contextlib.suppress(ValueError):
      gc.callbacks.remove(self._on_gc)

  def sample(self) -> Sample:
    """Returns what happened since the last sample, in the order of `HOST_CAUSES`."""
    # All of one call: between two steps, when caches hold other things, a call takes 15 us.
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu, switches = round((used.ru_utime + used.ru_stime) * 1e6) * 1000, used.ru_nivcsw
    collected, faults = self._gc_total, used.ru_majflt
    data = checkpoint = None
    if self._used:
      data, checkpoint = map(self._take, ASKED.values())
    result = (cpu - self._cpu, switches - self._switches, collected - self._gc_seen, data,
              checkpoint, None, None, faults - self._faults)
    self._cpu, self._switches, self._gc_seen, self._faults = cpu, switches, collected, faults
    return result

  def collected(self, ns: np.ndarray) -> np.ndarray:
    """How long garbage was collected up to each of some times, as far as that is remembered. For
    other threads.

    Args:
      ns: [n] int64 ns, in any order.

    Returns:
      [n] int64 ns.
    """
    pauses = np.array(tuple(self._pauses), np.int64).reshape(-1, 2)
    begun = np.searchsorted(pauses[:, 0], ns, side="right")
    until = np.concatenate([[0], np.cumsum(pauses[:, 1] - pauses[:, 0])])
    ends = np.concatenate([[0], pauses[:, 1]])
    return until[begun] - np.maximum(ends[begun] - ns, 0) * (begun > 0)

  def add(self, cause: str, duration_ns: int) -> None:
    """Adds time to a cause ("data" or "checkpoint") of the current step.

    Raises:
      ValueError: any other cause.
    """
    if cause not in ASKED.values():
      raise ValueError(f'Nothing to measure is called {cause!r}: use "data" or "checkpoint".')
    self._used.add(cause)
    self._measured[cause] = self._measured.get(cause, 0) + duration_ns

  @contextlib.contextmanager
  def measure(self, cause: str) -> Iterator[None]:
    """Adds the time spent inside to a cause of the current step; see `add`."""
    self.add(cause, 0)
    before, self.doing = self.doing, cause
    start = time.monotonic_ns()
    try:
      yield
    finally:
      self.doing = before
      self.add(cause, time.monotonic_ns() - start)

  def _take(self, cause: str) -> int | None:
    # 0 once the loop is known to measure it; before that it isn't known.
    return self._measured.pop(cause, 0) if cause in self._used else None

  def _on_gc(self, phase: str, _info: dict) -> None:
    now = time.monotonic_ns()
    if phase == "start":
      self._gc_start = now
    elif self._gc_start:
      self._pauses.append((self._gc_start, now))
      self._gc_total += now - self._gc_start
      self._gc_start = 0


class HostCause(NamedTuple):
  """A column of the table `steps` that says what the process did besides the devices' work."""

  column: str
  label: str
  """What it is, for people."""
  pauses: str = ""
  """What a process does meanwhile, for people, where the loop stands still for it; else empty."""
  asked: bool = False
  """Whether it is known only where the program has it measured, see `jaxpace.Recorder.measure`."""

  @property
  def name(self) -> str:
    """In arrays, findings and metrics."""
    return self.column.removesuffix("_ns")

  @property
  def scale(self) -> float:
    """From what is recorded to seconds; 1 for a number of times."""
    return 1e-9 if self.column.endswith("_ns") else 1.0


HOST_CAUSES = (
    HostCause("cpu_ns", "CPU time"),
    HostCause("nivcsw", "involuntary context switches"),
    HostCause("gc_ns", "garbage collection", "collects garbage"),
    HostCause("data_ns", "waiting for data", "waits for data", asked=True),
    HostCause("checkpoint_ns", "checkpoints", "writes checkpoints", asked=True),
    HostCause("others_ns", "other programs", "runs other programs (an evaluation, say)"),
    HostCause("between_ns", "time between steps", "is between two steps (data, a checkpoint, a "
              "program without collectives)"),
    HostCause("majflt", "major page faults"),
)
TIMES = tuple(cause.name for cause in HOST_CAUSES if cause.scale != 1)
"""Those in seconds."""
PAUSES = {cause.name: cause for cause in HOST_CAUSES if cause.pauses}
"""By name, those for which the loop stands still."""
ASKED = {cause.column: cause.name for cause in HOST_CAUSES if cause.asked}
"""By column."""
