"""Process 0's thread: follows the control file and tells the others."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import queue

from jaxpace import distributed
from jaxpace.control import file
from jaxpace.control.listener import Listener, Message
from jaxpace.control.request import Request, RequestError

_LOG = logging.getLogger("jaxpace")
KEPT = 8
"""Rounds whose keys are kept: a process would have to lag this many behind to miss one."""


class Leader(Listener):
  """Process 0, or a process that is alone."""

  def __init__(self, name: str, processes: int, path: pathlib.Path, poll_seconds: float, toggle_signal: int | None):
    super().__init__(name, toggle_signal)
    self._processes, self._path, self._poll_seconds = processes, path, poll_seconds
    self._seen: file.Signature = None
    self._request, self._version = Request(), 0

  def _listen(self) -> None:
    while not self._closing.is_set():
      question = None
      with contextlib.suppress(queue.Empty):
        question = self._questions.get(timeout=self._poll_seconds)
      if self.ranks is not None:  # before the first call no request can be checked
        self._look()
      if question is not None:
        self._tell(*question)

  def _look(self) -> None:
    """Takes over what has changed in the file, or the signal."""
    now = file.signature(self._path)
    if now != self._seen:
      self._seen = now
      try:
        self._change(file.read(self._path, self.ranks))
      except RequestError as error:
        _LOG.warning("%s is not followed: %s. Pacing stays as it is: %s.", self._path, error, self._request)
    if self.toggled:
      self.toggled = False
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

  def _tell(self, number: int, next_call: int) -> None:
    message = Message(next_call, self._version, self._request)
    if self._processes > 1:
      distributed.key_value_set(self.key(number), message.to_text())
      if number >= KEPT:
        distributed.key_value_delete(self.key(number - KEPT))
    self._answered(number, message)
