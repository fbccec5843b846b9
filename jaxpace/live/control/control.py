"""The loop's side of run-time control: a request in a file becomes settings at one step on all ranks."""

from __future__ import annotations

import itertools
import logging
import os
import time
from types import TracebackType
from typing import Self

from jaxpace.core.pace import PaceState
from jaxpace.hosts import distributed
from jaxpace.live.control import file, steering
from jaxpace.live.control.leader import Leader, Message
from jaxpace.live.control.request import ControlRequest
from jaxpace.live.control.toggle import Toggle

_LOG = logging.getLogger("jaxpace")
_FIRST_CALLS, _LEAST_CALLS, _MOST_CALLS = 8, 4, 1_000_000
_NEVER = 1 << 62
_RETRY_SECONDS = 5.0  # before a message that could not be read is asked for again
_counter = itertools.count()  # Makes the keys of successive controls differ; the same in every process.


class Control:
  """Changes a steerable pacer's settings while the job runs, at one step index on all ranks.

      paced = jaxpace.instrument(train_step, "data", jaxpace.steerable(jaxpace.pace_early_ranks()), share=True)
      ...
      with jaxpace.Recorder("runs/demo", paced) as recorder, jaxpace.Control("runs/demo") as control:
        for batch in batches:
          pace = control(pace)
          pace, (state, metrics) = step(pace, state, batch)
          recorder.record(pace)

  Then `jaxpace control runs/demo --off` (or any other way of replacing `runs/demo/control.json`) switches pacing off a
  few seconds later. Every process calls `control` once a step, as it does the step; the file is read by process 0
  alone, in a thread.

  A call counts and compares. Every few seconds' worth of calls there is a *round*: process 0 says, half a round
  before, what applies from there on and when the next round is; so every process knows at which call to look, and none
  can be late: one whose answer has not come yet waits for it there, up to `timeout`; then it keeps its settings, goes
  on, and joins again as soon as it hears of a later round. Nothing is compiled again, no collective is added. The file
  is never touched by the loop's thread: a file system that hangs holds up nothing but the next change.
  """

  def __init__(self, path: str | os.PathLike[str] | None, *, every_seconds: float = 2.0, timeout: float = 120.0,
               toggle_signal: int | None = None):
    """Prepares; nothing is touched before `with` or `open`.

    Args:
      path: the run directory, whose `control.json` is followed, or a file of that kind. None: off.
      every_seconds: about how long a round takes. A change applies one to two rounds after it was made.
      timeout: s, longest wait for process 0 at a round. After that this process keeps its settings, with a warning,
        until it hears of process 0 again.
      toggle_signal: a signal to process 0, such as `signal.SIGUSR1`, that switches pacing off, and on again. Only in
        the main thread. The file is rewritten, so that it says what applies.

    Raises:
      ValueError: a time is not positive.
    """
    if not every_seconds > 0 or not timeout > 0:
      raise ValueError(f"every_seconds={every_seconds} and timeout={timeout} must be positive.")
    self.path = None if path is None else file.locate(path)
    self._every_seconds, self._timeout = every_seconds, timeout
    self._toggle = Toggle(toggle_signal)
    self._messages: distributed.Announcements | None = None
    self._leader: Leader | None = None  # on process 0, from the first call on
    self._opened = False
    self._call = 0
    self._wake = 0 if path is not None else _NEVER  # the call at which there is something to do
    self._ask_at = self._boundary = 0  # calls: when to ask what applies from the next round on, and that round
    self._round = self._version = self._first_step = 0
    self._taken_at, self._taken_call = 0.0, 0
    self._late = False  # whether a round's message did not come in time, and is waited for no more
    self._retry_at = 0.0
    self.request = ControlRequest()
    """What applies now."""

  def __enter__(self) -> Self:
    self.open()
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    self.close()

  def open(self) -> None:
    """Starts to follow the file. After `jaxpace.distributed.initialize`, in every process.

    Raises:
      RuntimeError: it was open before.
    """
    if self._opened:
      raise RuntimeError("A Control is used once: make a new one.")
    self._opened = True
    if self.path is None:
      return
    self._messages = distributed.Announcements(f"control/{next(_counter)}")
    self._toggle.install()

  def close(self) -> None:
    """Stops to follow the file. Further calls do nothing; the pacer keeps its settings."""
    if self._messages is not None:
      self._messages.close()
      self._messages = None
      if self._leader is not None:
        self._leader.follower.close()
      self._toggle.restore()
    self._wake = _NEVER

  def __call__(self, pace: PaceState) -> PaceState:
    """Returns the pace state for the next step: the same, but where a change is due.

    Args:
      pace: what the last step returned, or `paced.init`.

    Raises:
      TypeError, ValueError: it is no pace state, or its pacer can't be steered.
      RuntimeError: the control is not open.
    """
    call = self._call
    self._call = call + 1
    if call < self._wake:
      return pace
    return self._due(pace, call)

  def _due(self, pace: PaceState, call: int) -> PaceState:
    messages = self._messages
    if messages is None:
      raise RuntimeError("control(pace) outside of its `with` block: open the control around the loop.")
    if call == 0:
      steering.check(pace)
      self._first_step = steering.next_step(pace)
      if distributed.process_index() == 0:
        assert self.path is not None
        self._leader = Leader(self.path, self._toggle, pace.arrivals.shape[-1])
    if call >= self._ask_at:
      self._ask(messages, max(self._boundary, call) + (self._round_calls(call) if call else _FIRST_CALLS))
      self._ask_at = _NEVER
    if call >= self._boundary:
      pace = self._take(messages, pace, call)
    self._wake = min(self._ask_at, self._boundary)
    return pace

  def _ask(self, messages: distributed.Announcements, next_call: int) -> None:
    """Has the next round's message made, or read. `next_call` is process 0's choice of the round after."""
    leader = self._leader
    if leader is None:
      messages.expect(self._round)
    else:
      messages.say(self._round, lambda: leader.message(next_call).to_text())

  def _round_calls(self, call: int) -> int:
    """Calls that take about a round's time. Process 0's count is what counts."""
    seconds = max(time.monotonic() - self._taken_at, 1e-9)
    return min(max(round(self._every_seconds * (call - self._taken_call) / seconds), _LEAST_CALLS), _MOST_CALLS)

  def _take(self, messages: distributed.Announcements, pace: PaceState, call: int) -> PaceState:
    """A round: learns what applies from this call on, and when the next round is."""
    if time.monotonic() < self._retry_at:
      return pace
    try:
      number, text = messages.take(self._round, 0.0 if self._late else self._timeout)
      message = Message.from_text(text)
    except TimeoutError as error:
      self._lag(str(error))
      return pace
    except (ConnectionError, ValueError, TypeError) as error:
      self._lag(str(error))
      self._retry_at = time.monotonic() + _RETRY_SECONDS
      self._ask_at = self._boundary = call + 1
      return pace
    behind = message.next_call <= call
    if self._late and not behind:
      _LOG.warning("Run-time control goes on in this process: process 0 is heard of again.")
    self._round = number + 1
    self._boundary = message.next_call
    # Behind the others: what comes next was said already, and is asked for at once.
    self._ask_at = max(call + (message.next_call - call) // 2, call + 1)
    self._late = behind
    self._taken_at, self._taken_call = time.monotonic(), call
    if message.version != self._version:
      self._version, self.request = message.version, message.request
      steering.check(pace)
      pace = steering.apply(pace, message.request)
      self._tell(self._first_step + call + 1)  # the delay of this very step was decided after the last
    return pace

  def _lag(self, reason: str) -> None:
    """The message of this round has not come: goes on without, and looks for it now and then."""
    if not self._late:
      _LOG.warning("Pacing stays as it is in this process (%s) until process 0 is heard of again: %s.", self.request,
                   reason)
    self._late = True

  def _tell(self, step: int) -> None:
    if self._leader is None or self.path is None:
      return
    if step == self._first_step + 1:
      _LOG.warning("%s was there when the job began. From step %d on: %s.", self.path, step, self.request)
    else:
      _LOG.info("From step %d on: %s (%s).", step, self.request, self.path)
    self._leader.follower.note(step, time.time_ns(), self.request)
