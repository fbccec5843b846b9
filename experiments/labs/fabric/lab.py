"""A cluster in a machine: hosts, racks and a shaped trunk out of Linux network namespaces, for as
long as a `with`.

    with Lab(Topology((("a0",), ("a1",)), trunk_mbit=100.0)) as lab:
      server = lab.popen("a0", ["python", "train.py"], env={...})

    python -m experiments.labs.fabric.lab               # remove what killed labs have left

Needs root, and `ip` and `tc` of iproute2. The machine's own interfaces, addresses and routes are
not touched.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import IO, Any, Self

from experiments.labs.fabric import commands, machine
from experiments.labs.fabric.commands import Topology
from experiments.labs.fabric.machine import LabError

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


class Lab:
  """Builds a lab on entry and removes it on exit: after exceptions, Ctrl-C, SIGTERM and SIGHUP too.

  What SIGKILL leaves behind, `machine.abandoned` finds and `clean` removes; the processes die
  with their maker. Signals are handled in the main thread only, and not where the program has set
  handlers of its own.
  """

  def __init__(self, topology: Topology, *, grace: float = 2.0):
    """Nothing is built before `with`.

    Args:
      topology: what to build.
      grace: seconds between SIGTERM and SIGKILL for processes that are left at the end.
    """
    self.topology = topology
    self.name = secrets.token_hex(3)
    self._grace = grace
    self._lock: IO[bytes] | None = None
    self._processes: list[subprocess.Popen[Any]] = []
    self._handlers: dict[signal.Signals, Any] = {}
    self._pid = os.getpid()

  def __enter__(self) -> Self:
    if reason := machine.why_not([self.topology.congestion]):
      raise LabError(reason)
    self._pid = os.getpid()
    self._take_signals()
    atexit.register(self.close)
    try:
      self._lock = machine.claim(self.name)
      self._hosts_file.write_text(self.topology.hosts_file())
      for command in commands.build(self.topology, self.name):
        machine.run(command)
    except BaseException:
      self.close()
      raise
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               traceback: TracebackType | None) -> None:
    self.close()

  def close(self) -> None:
    """Ends all processes of the lab and removes it. Calling it again does nothing."""
    # a fork of the program has nothing to remove
    if self._lock is None or os.getpid() != self._pid:
      self._give_signals_back()
      return
    with _uninterrupted():
      problems = machine.remove(self.name, self._grace)
      for process in self._processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
          process.wait(timeout=1)
      self._lock.close()
      self._lock = None
      atexit.unregister(self.close)
      self._give_signals_back()
    for problem in problems:
      print(f"lab {self.name}: {problem}", file=sys.stderr)

  def popen(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts a process on a host. It sees the lab's network, host name and /etc/hosts, and the
    machine's files.

    Args:
      host: one of the topology's.
      command: program and arguments.
      **options: of `subprocess.Popen`.

    Raises:
      ValueError: there is no such host.
      LabError: the lab isn't up.
    """
    self.topology.address(host)
    if self._lock is None:
      raise LabError("The lab isn't up: call popen inside `with Lab(topology) as lab:`.")
    process = subprocess.Popen(
        machine.found(commands.enter(self.name, host, str(self._hosts_file), command)),
        **{"start_new_session": True, **options})
    self._processes.append(process)
    return process

  @property
  def _hosts_file(self) -> pathlib.Path:
    return machine.STATE / self.name / "hosts"

  def _take_signals(self) -> None:
    """Makes signals that would end the program at once end it by an exception, so that `with` ends
    too."""
    if threading.current_thread() is not threading.main_thread():
      return
    for number in _ENDINGS:
      if signal.getsignal(number) is signal.SIG_DFL:
        self._handlers[number] = signal.signal(number, _leave)

  def _give_signals_back(self) -> None:
    if threading.current_thread() is threading.main_thread():
      while self._handlers:
        signal.signal(*self._handlers.popitem())


def _leave(number: int, frame: FrameType | None) -> None:
  raise SystemExit(128 + number)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
  """Holds signals back until what is inside is done, so that a second Ctrl-C does not leave half a
  lab."""
  held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDINGS})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, held)


def clean() -> list[str]:
  """Removes the labs whose maker is dead and says so; labs in use are left alone.

  Raises:
    LabError: this machine can have no labs.
  """
  if reason := machine.why_not():
    raise LabError(reason)
  said = []
  for lab in machine.abandoned():
    problems = machine.remove(lab)
    said += problems or [f"lab {lab} removed"]
  return said


if __name__ == "__main__":
  try:
    print("\n".join(clean() or ["nothing to remove"]))
  except LabError as error:
    sys.exit(f"lab: {error}")
