"""Process 0's part: what the control file and the signal ask for, as messages to all processes."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
from typing import NamedTuple

from jaxpace.live.control.follower import Follower
from jaxpace.live.control.request import ControlRequest, RequestError
from jaxpace.live.control.toggle import Toggle

_LOG = logging.getLogger("jaxpace")


class Message(NamedTuple):
  """What process 0 says about a round."""

  next_call: int  # the call of the loop that is the next round
  version: int  # 0 for settings as made, counted up with every change
  request: ControlRequest  # what applies from this round on

  def to_text(self) -> str:
    """Returns it as one line of JSON."""
    return json.dumps([self.next_call, self.version, self.request.to_json()])

  @staticmethod
  def from_text(text: str) -> Message:
    """Inverse of `to_text`."""
    next_call, version, request = json.loads(text)
    return Message(next_call, version, ControlRequest.from_json(request))


class Leader:
  """Says what applies. `message` belongs to one thread; it does no I/O, and never waits for the file system long."""

  def __init__(self, path: pathlib.Path, toggle: Toggle, ranks: int):
    """Prepares; `ranks` along the data axis, against which requests are checked."""
    self._path, self._toggle = path, toggle
    self.follower = Follower(path, ranks)
    self._request, self._version = ControlRequest(), 0

  def message(self, next_call: int) -> Message:
    """Says what applies now, by the file and the signal; `next_call` is the round after."""
    self._look()
    return Message(next_call, self._version, self._request)

  def _look(self) -> None:
    found = self.follower.look()
    if isinstance(found, RequestError):
      _LOG.warning("%s is not followed: %s. Pacing stays as it is: %s.", self._path, found, self._request)
    elif found is not None:
      self._change(found)
    if self._toggle.turned():
      self._change(dataclasses.replace(self._request, enabled=not self._request.enabled))
      self.follower.write(self._request)

  def _change(self, request: ControlRequest) -> None:
    if request != self._request:
      self._request = request
      self._version += 1
