"""Process 0's part: what the control file and the signal ask for, said to all processes."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import signal
import threading
from types import FrameType
from typing import Any, NamedTuple

from jaxpace.live.control_file import ControlFileFollower
from jaxpace.live.control_request import ControlRequest, RequestError


class Toggle:
  """Counts arrivals of a signal; whoever listened to it before still does. `install` and `restore`:
  main thread."""

  def __init__(self, number: int | None):
    """Prepares; `number` is the signal, None for none."""
    self._number, self._installed = number, False
    self._before: Any = None
    self._pressed = self._seen = 0

  def install(self) -> None:
    """Begins to count; a warning where that can't be, outside of the main thread."""
    if self._number is None:
      return
    if threading.current_thread() is threading.main_thread():
      self._before = signal.signal(self._number, self._on_signal)
      self._installed = True
    else:
      _LOG.warning(
          "jaxpace.Control runs outside the main thread: signal %d does not switch pacing.",
          self._number)

  def restore(self) -> None:
    """Gives the signal back, unless someone else has taken it since."""
    if (self._number is None or not self._installed
        or threading.current_thread() is not threading.main_thread()):
      return
    if signal.getsignal(self._number) == self._on_signal:
      signal.signal(self._number, signal.SIG_DFL if self._before is None else self._before)
    self._installed = False

  def turned(self) -> bool:
    """Whether the signal has come an odd number of times since the last call. For one thread."""
    pressed = self._pressed
    odd = (pressed - self._seen) % 2 == 1
    self._seen = pressed
    return odd

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    self._pressed += 1
    if callable(self._before):
      self._before(number, frame)


_LOG = logging.getLogger("jaxpace")


class Applied(NamedTuple):
  """What applies in a round."""

  version: int  # 0 for settings as made, counted up with every change
  request: ControlRequest

  @staticmethod
  def from_json(said: Any) -> Applied:
    """Inverse of `Leader.applied`."""
    version, request = said
    return Applied(version, ControlRequest.from_json(request))


class Leader:
  """Says what applies. `applied` belongs to one thread; it does no I/O, and never waits for the
  file system long."""

  def __init__(self, path: pathlib.Path, toggle: Toggle, ranks: int):
    """Prepares; `ranks` along the data axis, against which requests are checked."""
    self._path, self._toggle = path, toggle
    self.follower = ControlFileFollower(path, ranks)
    self._request, self._version = ControlRequest(), 0

  def applied(self) -> list[Any]:
    """Says what applies now, by the file and the signal, as JSON values."""
    self._look()
    return [self._version, self._request.to_json()]

  def _look(self) -> None:
    found = self.follower.look()
    if isinstance(found, RequestError):
      _LOG.warning("%s is not followed: %s. Pacing stays as it is: %s.", self._path, found,
                   self._request)
    elif found is not None:
      self._change(found)
    if self._toggle.turned():
      self._change(dataclasses.replace(self._request, enabled=not self._request.enabled))
      self.follower.write(self._request)

  def _change(self, request: ControlRequest) -> None:
    if request != self._request:
      self._request = request
      self._version += 1
