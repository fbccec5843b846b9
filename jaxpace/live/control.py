"""The loop's side of run-time control: a request in a file becomes settings at one step on all
ranks."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import jax
import numpy as np

from jaxpace.coordination.knobs import Steering, turned
from jaxpace.core import fields, own_context
from jaxpace.core.pace import PaceState, change_pacer_state
from jaxpace.core.packing import Packed
from jaxpace.hosts import distributed
from jaxpace.live import control_file
from jaxpace.live.control_file import MAX_STEP, ControlRequest
from jaxpace.live.shares import Shares

Steered = TypeVar("Steered", PaceState, Shares)
"""What is steered: a pacer through its pace state, or counts of micro-batches."""


def check(pace: Any) -> None:
  """Checks that this is a pace state whose pacer can be steered, or shares. Raises TypeError where
  it is something else, ValueError where nothing in it can be steered, or it was donated."""
  if isinstance(pace, Shares):
    return
  if not isinstance(pace, PaceState):
    raise TypeError("Control takes the pace state and returns it: pace = control(pace), before the "
                    f"step. This is a {type(pace).__name__}.")
  if not isinstance(pace.pacer, Packed) or not _steered(pace.pacer):
    raise ValueError("The pacer of this pace state can't be steered. Make it so where it is given "
                     "to jaxpace.instrument: pacer=jaxpace.steerable(jaxpace.pace_early_ranks()).")
  if pace.step.is_deleted():
    raise ValueError("Control was given a pace state that was donated to a step. Give it the one "
                     "the step returned: pace = control(pace), then pace, out = step(pace, "
                     "state, batch).")


def next_step(pace: PaceState | Shares) -> int:
  """Reads the number of the step that comes next; of a pace state it waits for those under way."""
  if isinstance(pace, Shares):
    return int(pace.state().step)
  return int(own_context.fetch(pace.step.addressable_shards[0].data).reshape(-1)[0])


def apply(pace: PaceState, request: ControlRequest) -> PaceState:
  """Returns the state with the request in it. Every process does this at the same step; no data is
  exchanged.

  What a request changes is a few numbers among others in the pacer's vector, so its devices' own
  values are read: this waits for the steps under way. It happens once a request.
  """
  ranks = pace.arrivals.shape[-1]
  unknown = np.float32(np.nan)
  mask = np.ones(ranks, bool)
  if request.ranks is not None:
    mask = np.isin(np.arange(ranks), request.ranks)
  to: dict[str, Any] = {
      "enabled": request.enabled,
      "max_delay": unknown if request.max_delay is None else request.max_delay,
      "threshold": unknown if request.threshold is None else request.threshold, "ranks": mask,
      "from_step": request.from_step,
      "until_step": MAX_STEP if request.until_step is None else request.until_step}

  def put(node: Steering) -> Steering:
    return Steering._make(np.broadcast_to(np.asarray(to[name], leaf.dtype), leaf.shape)
                          for name, leaf in node._asdict().items())

  assert isinstance(pace.pacer, Packed)
  return pace._replace(pacer=change_pacer_state(
      pace.pacer, lambda state: turned(state, Steering, put)))


def _steered(packed: Packed) -> bool:
  state = jax.tree.unflatten(packed.layout.structure, packed.layout.shapes)
  return any(isinstance(node, Steering)
             for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Steering)))


_LOG = logging.getLogger("jaxpace")
_FIRST_CALLS, _LEAST_CALLS, _MOST_CALLS = 8, 4, 1_000_000
_LOOKS_A_ROUND = 4
# Makes the keys of successive controls differ; the same in every process.
_counter = itertools.count()


def _read_applied(said: Any) -> tuple[int, ControlRequest]:
  """Inverse of `ControlFileFollower.applied`."""
  version, request = said
  return version, ControlRequest.from_json(request)


class Control:
  """Changes a steerable pacer's settings while the job runs, at one step index on all ranks.

      pacer = jaxpace.steerable(jaxpace.pace_early_ranks())
      paced = jaxpace.instrument(train_step, "data", pacer, share=True)
      ...
      with jaxpace.Recorder("runs/demo", paced) as recorder, jaxpace.Control("runs/demo") as control:
        for batch in batches:
          pace = control(pace)
          pace, (state, metrics) = step(pace, state, batch)
          recorder.record()

  Then `jaxpace control runs/demo --off` (or any other way of replacing `runs/demo/control.json`)
  switches pacing off a few seconds later. Every process calls `control` once a step, as it does the
  step; the file is read by process 0 alone, in a thread.

  A call counts and compares. Every few seconds' worth of calls there is a *round*: process 0 says,
  half a round before, what applies from there on and when the next round is; so every process knows
  at which call to look, and none can be late: one whose answer has not come yet waits for it there,
  up to `timeout`; then it keeps its settings, goes on, and joins again as soon as it hears of a
  later round. Nothing is compiled again, no collective is added. The file is never touched by the
  loop's thread: a file system that hangs holds up nothing but the next change.
  """  # noqa: E501

  def __init__(self, path: str | os.PathLike[str] | None, *, every_seconds: float = 2.0,
               timeout: float = 120.0):
    """Prepares; nothing is touched before `with` or `open`.

    Args:
      path: the run directory, whose `control.json` is followed, or a file of that kind. None: off.
      every_seconds: about how long a round takes. A change applies one to two rounds after it was
        made.
      timeout: s, longest wait for process 0 at a round. After that this process keeps its settings,
        with a warning, until it hears of process 0 again.

    Raises:
      ValueError: a time is no positive number.
    """
    for name, seconds in (("every_seconds", every_seconds), ("timeout", timeout)):
      if not fields.is_number(seconds, 0, strictly=True):
        raise ValueError(f"{name}={seconds!r} must be seconds, a positive number.")
    self.path = None if path is None else control_file.locate(path)
    self._every_seconds, self._timeout = every_seconds, timeout
    self._rounds: distributed.Rounds | None = None
    # on process 0, from the first call on
    self._follower: control_file.ControlFileFollower | None = None
    self._opened = False
    self._call = 0
    # the call at which there is something to do
    self._wake = 0 if path is not None else distributed.NEVER
    self._version = self._first_step = 0
    self._taken_at, self._taken_call = 0.0, 0
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
    self._rounds = distributed.Rounds(
        f"control/{next(_counter)}", timeout=self._timeout, read=_read_applied,
        propose=self._propose if distributed.process_index() == 0 else None)

  def close(self) -> None:
    """Stops to follow the file. Further calls do nothing; the pacer keeps its settings."""
    if self._rounds is not None:
      self._rounds.close()
      self._rounds = None
      if self._follower is not None:
        self._follower.close()
    self._wake = distributed.NEVER

  def __call__(self, pace: Steered) -> Steered:
    """Returns the pace state for the next step: the same, but where a change is due.

    Args:
      pace: what the last step returned, or `paced.init`; of an observed step whose work is shared
        by speed what `jaxpace.shares` returned, always the same: `control(feed)` before the step
        or `feed.next(step)`, in the thread of either.

    Raises:
      TypeError, ValueError: it is no pace state, or its pacer can't be steered.
      RuntimeError: the control is not open.
    """
    call = self._call
    self._call = call + 1
    if call < self._wake:
      return pace
    return self._due(pace, call)

  def _due(self, pace: Steered, call: int) -> Steered:
    rounds = self._rounds
    if rounds is None:
      raise RuntimeError(
          "control(pace) outside of its `with` block: open the control around the loop.")
    if call == 0:
      # What is refused is no call.
      self._call = 0
      check(pace)
      self._call = 1
      self._first_step = next_step(pace)
      if distributed.process_index() == 0:
        assert self.path is not None
        ranks = (len(pace.state().counts) if isinstance(pace, Shares)
                 else pace.arrivals.shape[-1])
        self._follower = control_file.ControlFileFollower(
            self.path, ranks, self._every_seconds / _LOOKS_A_ROUND)
    try:
      found = rounds.at(call)
      if found is not None:
        pace = self._take_up(pace, call, found)
    except ConnectionError as error:
      _LOG.warning(
          "Pacing stays as it is in this process (%s) until process 0 is heard of again: %s.",
          self.request, error)
    self._wake = rounds.wake
    return pace

  def _propose(self, begins: int) -> tuple[int, Callable[[], Any]]:
    assert self._follower is not None
    return (begins + (self._round_calls(self._call) if begins else _FIRST_CALLS),
            self._follower.applied)

  def _round_calls(self, call: int) -> int:
    """Calls that take about a round's time. Process 0's count is what counts."""
    seconds = max(time.monotonic() - self._taken_at, 1e-9)
    calls = call - self._taken_call
    # No more than twice as many as last time: the loop runs ahead of the devices, and calls that
    # come together do not show how long a step takes.
    most = min(_MOST_CALLS, 2 * max(calls, _LEAST_CALLS))
    return min(max(round(self._every_seconds * calls / seconds), _LEAST_CALLS), most)

  def _take_up(self, pace: Steered, call: int, found: distributed.Round) -> Steered:
    """A round begins: puts what applies from this call on into the pace state, where that is
    another."""
    if found.again:
      _LOG.warning("Run-time control goes on in this process: process 0 is heard of again.")
    self._taken_at, self._taken_call = time.monotonic(), call
    version, request = found.said
    if version != self._version:
      self._version, self.request = version, request
      check(pace)
      step = self._first_step + call
      if isinstance(pace, Shares):
        begins = pace.steer(self.request, step)
      else:
        # The delay of this very step was decided after the last.
        begins, pace = step + 1, apply(pace, self.request)
      self._tell(begins)
    return pace

  def _tell(self, step: int) -> None:
    if self._follower is None:
      return
    if self._taken_call == 0:
      _LOG.warning("%s was there when the job began. From step %d on: %s.", self.path, step,
                   self.request)
    else:
      _LOG.info("From step %d on: %s (%s).", step, self.request, self.path)
    self._follower.note(step, time.time_ns(), self.request)
