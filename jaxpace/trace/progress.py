"""Whether the pace states given to `record` advance with the calls, and how often they must be
copied for that."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("jaxpace")
_STANDING = 2
"""Calls without a new step that are no slip: a state may be recorded twice, at the end of an epoch,
say."""


class AdvanceCheck:
  """Compares steps completed with calls of `record`; warns once of a state that does not
  advance."""

  def __init__(self) -> None:
    self._newest: int | None = None  # step, as of the last copy
    # calls without a new step; calls in a row with the very same state
    self._standing = self._repeated = 0
    self._warned = False

  def repeated(self, same: bool) -> None:
    """Takes note of a call, given whether its state is the very object of the call before."""
    self._repeated = self._repeated + 1 if same else 0
    if self._repeated >= _STANDING:
      self._warn()

  def copied(self, newest: int, calls: int) -> int | None:
    """Takes note of a copy.

    Args:
      newest: newest step in it, -1 for none.
      calls: calls of `record` since the copy before.

    Returns:
      Steps completed since the copy before; None for the first one.
    """
    advance = None if self._newest is None else newest - self._newest
    if advance is not None:
      self._standing = self._standing + calls if advance == 0 else 0
    elif newest < 1:  # A first copy of later steps may be of a restored state.
      self._standing = calls - (newest + 1)
    if self._standing >= _STANDING:
      self._warn()
    self._newest = newest
    return advance

  def _warn(self) -> None:
    if not self._warned:
      self._warned = True
      _LOG.warning("The pace state given to record() does not advance, so steps are missing from "
                   "the recording. Record the state that the latest step returned, and give it to "
                   "the next one: `pace, out = step(pace, state, batch)`, then "
                   "`recorder.record(pace)`.")
