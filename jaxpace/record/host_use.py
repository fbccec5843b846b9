"""What the host did in each step: as the loop says with each call of `record`, or as the clock
reads it at the end of each execution.

The loop's values are of one of its iterations, from one `sample` to the next. Devices run behind
the loop: a value belongs to the step that the loop was dispatching, not to what the devices
computed meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import time
from collections.abc import Iterator, Sequence

import numpy as np

from jaxpace.observation.clocks import host_ring
from jaxpace.record.columns import DeviceSteps, Sample
from jaxpace.runs.run import ASKED, HOST_CAUSES

_PLACES = {cause.name: place for place, cause in enumerate(HOST_CAUSES)}
_UNKNOWN_NS = -1
_COUNTERS = ("cpu_ns", "switches", "faults", "queued_ns")
_MOST_PAUSES = 256
"""Collections of garbage that are remembered."""


class StepCauseMeter:
  """Collects the host's doings between two steps. Belongs to one thread, that of the training
  loop, but for `collected`."""

  def __init__(self) -> None:
    self._gc_start = self._gc_total = 0
    # Made anew, never changed: reading it takes memory, and that may collect garbage.
    self._pauses: tuple[tuple[int, int], ...] = ()
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
    pauses = np.array(self._pauses, np.int64).reshape(-1, 2)
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
      self._pauses = (*self._pauses[1 - _MOST_PAUSES:], (self._gc_start, now))
      self._gc_total += now - self._gc_start
      self._gc_start = 0


class HostUse:
  """What the process did between the ends of its steps, though it says nothing: the native clock
  reads what it has used when its first device ends a program, at most every 10 ms. What it used
  between two readings counts evenly for the time between.

  Of one device, since they share the process: a column says what the process did in all.
  """

  def __init__(self, meter: StepCauseMeter) -> None:
    """Begins; `meter` watches the garbage collector."""
    self._meter, self._usage = meter, host_ring.Usage()
    self._read: list[np.ndarray] = []
    self._last, self._there = np.zeros((1, len(_COUNTERS)), np.int64), np.False_
    self._end, self._ended = np.zeros(1, np.int64), np.int64(_UNKNOWN_NS)  # and on all devices

  def keep(self) -> None:
    """Takes over what the native clock has read, before it is written over."""
    self._read.append(self._usage.take())

  def samples(self, devices: Sequence[DeviceSteps]) -> np.ma.MaskedArray:
    """What the process did in K successive steps, each from the end of the one before on the first
    device: [K, causes] int64, masked where not known."""
    # The training loop waits for the interpreter meanwhile: arrays, no step by itself.
    self.keep()
    read, own = np.concatenate(self._read), devices[0]
    start = np.min([one.start_ns for one in devices], axis=0)
    end = np.max([one.end_ns for one in devices], axis=0)
    at = np.searchsorted(read["ns"], own.end_ns)
    asked = read["cpu_ns"] >= 0
    there = own.whole & (_picked(read["ns"], at) == own.end_ns) & asked.any()
    # [K + 1] each, with what was last known before these steps.
    now = np.concatenate([self._last, _used_by(own.end_ns, read[asked])])
    ends = np.append(self._end, own.end_ns)
    there, ended = np.append(self._there, there), np.append(
        self._ended, np.where(own.whole, end, _UNKNOWN_NS))
    # Programs beside the step end there, too.
    before = np.searchsorted(read["ns"], start) - 1
    begin = np.maximum(ended[:-1], np.where(before < 0, 0, _picked(read["ns"], before)))
    used = dict(zip(_COUNTERS, np.diff(now, axis=0).T, strict=True))
    collected = np.diff(self._meter.collected(ends))
    others = np.where(ended[:-1] >= 0, np.maximum(begin - ended[:-1], 0), 0)
    # What a busy machine takes is nothing that the loop does.
    between = np.maximum(start - begin, 0) - collected - used["queued_ns"]
    measured = there[1:] & there[:-1]
    queued = now[:, _COUNTERS.index("queued_ns")] >= 0
    counted = measured & (ended[:-1] >= 0) & queued[1:] & queued[:-1]
    self._last, self._end, self._there, self._ended = now[-1:], ends[-1:], there[-1], ended[-1]
    past = own.end_ns[own.whole].max(initial=0)
    self._read = [read[asked & (read["ns"] <= past)][-1:], read[read["ns"] > past]]
    found = np.ma.masked_all((len(start), len(HOST_CAUSES)), np.int64)
    for cause, (values, known) in {
        "cpu": (used["cpu_ns"], measured), "nivcsw": (used["switches"], measured),
        "gc": (collected, measured), "others": (others, measured & (ended[:-1] >= 0)),
        "between": (np.maximum(between, 0), counted), "majflt": (used["faults"], measured)}.items():
      found[known, _PLACES[cause]] = values[known]
    return found


def _used_by(ns: np.ndarray, read: np.ndarray) -> np.ndarray:
  """Counters at these times, [n, counters] int64, from readings in order: on the line between two
  of them, and as the first or last one beyond."""
  if not len(read):
    return np.zeros((len(ns), len(_COUNTERS)), np.int64)
  return np.stack([np.interp(ns, read["ns"], read[name]).astype(np.int64) for name in _COUNTERS],
                  axis=1)


def _picked(values: np.ndarray, places: np.ndarray) -> np.ndarray:
  """Values at these places, or at the nearest there is; zeros where there are none."""
  if not len(values):
    return np.zeros(len(places), values.dtype)
  return values[np.clip(places, 0, len(values) - 1)]
