"""Process 0's part: what the control file and the signal ask for, as messages to all processes."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
from typing import NamedTuple

from jaxpace.control import file
from jaxpace.control.request import Request, RequestError
from jaxpace.control.toggle import Toggle

_LOG = logging.getLogger("jaxpace")


class Message(NamedTuple):
  """What process 0 says about a round."""

  next_call: int  # the call of the loop that is the next round
  version: int  # 0 for settings as made, counted up with every change
  request: Request  # what applies from this round on

  def to_text(self) -> str:
    """Returns it as one line of JSON."""
    return json.dumps([self.next_call, self.version, self.request.to_json()])

  @staticmethod
  def from_text(text: str) -> Message:
    """Inverse of `to_text`."""
    next_call, version, request = json.loads(text)
    return Message(next_call, version, Request.from_json(request))


class Leader:
  """Follows the file. `message` does its I/O, and belongs to one thread."""

  def __init__(self, path: pathlib.Path, toggle: Toggle, ranks: int):
    """Prepares; `ranks` along the data axis, against which requests are checked."""
    self._path, self._toggle, self._ranks = path, toggle, ranks
    self._seen: file.Signature = None
    self._request, self._version = Request(), 0

  def message(self, next_call: int) -> Message:
    """Says what applies now, by the file and the signal; `next_call` is the round after."""
    self._look()
    return Message(next_call, self._version, self._request)

  def _look(self) -> None:
    now = file.signature(self._path)
    if now != self._seen:
      self._seen = now
      try:
        self._change(file.read(self._path, self._ranks))
      except RequestError as error:
        _LOG.warning("%s is not followed: %s. Pacing stays as it is: %s.", self._path, error, self._request)
    if self._toggle.turned():
      self._change(dataclasses.replace(self._request, enabled=not self._request.enabled))
      try:
        file.write(self._path, self._request)
        self._seen = file.signature(self._path)
      except OSError as error:
        _LOG.warning("%s can't be written, it does not say that a signal switched pacing: %s", self._path, error)

  def _change(self, request: Request) -> None:
    if request != self._request:
      self._request = request
      self._version += 1
