"""Process 0's part: what the control file and the signal ask for, said to all processes."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from typing import Any, NamedTuple

from jaxpace.live.control.follower import ControlFileFollower
from jaxpace.live.control.request import ControlRequest, RequestError
from jaxpace.live.control.toggle import Toggle

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
