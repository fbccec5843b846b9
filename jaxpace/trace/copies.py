"""Copies of the ring that are under way on the devices, with what the host did in the steps they
hold."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxpace.trace import ringcopy
from jaxpace.trace import step_causes as host
from jaxpace.trace.problems import plural
from jaxpace.trace.writer import KEEP_SAMPLES

_LOG = logging.getLogger("jaxpace")
_PENDING_BYTES = 32 << 20  # on the devices
_NOTICE_SECONDS = 5.0


class Pending(NamedTuple):
  """A copy under way."""

  copy: ringcopy.RingCopy
  samples: list[host.Sample]  # one for each step since the copy before, the newest last
  extra: list[dict[str, float]]  # the user's own columns, one dict a sample


class Copies:
  """A queue of them, oldest first. Belongs to the thread of the training loop."""

  def __init__(self) -> None:
    self.samples: list[host.Sample] = []  # of the steps since the last copy
    self.extra: list[dict[str, float]] = []
    self.started_at = 0.0  # when the last was started, monotonic
    self.most = 1
    self.failed = 0  # copies that could not be made or read
    self.reason: str | None = None  # of the first of them
    self._queue: collections.deque[Pending] = collections.deque()

  def __len__(self) -> int:
    return len(self._queue)

  @property
  def steps(self) -> int:
    """Steps whose stamps are in copies under way."""
    return sum(len(item.samples) for item in self._queue)

  @property
  def full(self) -> bool:
    """Whether as many are under way as memory is set aside for."""
    return len(self._queue) >= self.most

  def fit(self, pace: Any) -> None:
    """Sets memory aside for copies of this state's ring."""
    self.most = max(4, _PENDING_BYTES // ringcopy.local_bytes(pace))

  def note(self, sample: host.Sample, extra: dict[str, float]) -> None:
    """Keeps what the host did in a step until the next copy."""
    self.samples.append(sample)
    self.extra.append(extra)

  def start(self, pace: Any, with_ranks: bool) -> bool:
    """Asks the devices for a copy of the ring, for the steps noted since the last; returns whether
    one is under way."""
    if self.full or not self.samples:
      del self.samples[:-KEEP_SAMPLES], self.extra[:-KEEP_SAMPLES]
      return False  # The devices lag; the ring holds what is not copied now.
    try:
      copy = ringcopy.start(pace, with_ranks)
    except Exception as error:  # Whatever it is, training goes on.
      self.fail(error)
      return False
    self._queue.append(Pending(copy, self.samples, self.extra))
    self.samples, self.extra = [], []
    self.started_at = time.monotonic()
    return True

  def fail(self, error: BaseException) -> None:
    """Takes note of a copy that could not be made or read; the first time, with a warning."""
    self.failed += 1
    _LOG.debug("The ring of timestamps could not be copied", exc_info=error)
    if self.reason is None:
      self.reason = in_a_line(error)
      _LOG.warning("The timestamps of these steps can't be copied off the devices, so they are not "
                   "recorded; training goes on: %s", self.reason)

  def finished(self) -> Iterator[Pending]:
    """Takes out those that can be read at once."""
    while self._queue and self._queue[0].copy.ready():
      yield self._queue.popleft()

  def awaited(self, deadline: float | None) -> Iterator[Pending]:
    """Takes all out, waiting for each until `deadline` if there is one."""
    notice_at = time.monotonic() + _NOTICE_SECONDS
    while self._queue:
      while not self._queue[0].copy.ready():
        now = time.monotonic()
        if deadline is not None and now > deadline:
          return
        if now > notice_at:
          notice_at = float("inf")
          _LOG.info("Waiting for the devices to finish the last steps, to record them.")
        time.sleep(0.001)
      yield self._queue.popleft()

  def give_back(self, item: Pending) -> None:
    """Keeps the samples of a copy that could not be read for the next, which holds the same steps
    and more."""
    samples, extra = ((self._queue[0].samples, self._queue[0].extra) if self._queue
                      else (self.samples, self.extra))
    samples[:0], extra[:0] = item.samples, item.extra

  def lost(self) -> str | None:
    """What was not recorded for that, in a sentence; None if all could be copied."""
    if not self.failed:
      return None
    return (f"{plural(self.failed, 'copy', 'copies')} of the timestamps could not be made: "
            f"{self.reason}")

  def forget(self) -> None:
    """Lets go of all of them."""
    self._queue.clear()


def in_a_line(error: BaseException) -> str:
  """What went wrong, in one line."""
  message = next(iter(str(error).splitlines()), "")[:200]
  return f"{type(error).__name__}: {message}" if message else type(error).__name__
