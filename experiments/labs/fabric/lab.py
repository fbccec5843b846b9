"""A cluster in a machine: hosts, racks and a shaped trunk out of Linux network namespaces, for as
long as a `with`.

    with Lab(fabric.get_config()) as lab:
      server = lab.popen("a0", ["python", "train.py"], env={...})
      print(lab.measure("a0", "a1"))

    python -m experiments.labs.fabric.lab               # build one, measure its trunk, take it down
    python -m experiments.labs.fabric.lab --clean       # remove what killed labs have left

Needs root, and `ip` and `tc` of iproute2. The machine's own interfaces, addresses and routes are
not touched.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import IO, Any, Self

from experiments.labs.fabric import commands, machine
from experiments.labs.fabric.machine import LabError
from experiments.labs.fabric.topology import ConfigError, from_config

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_PROBE = str(pathlib.Path(__file__).with_name("probe.py"))


@dataclasses.dataclass(frozen=True)
class PathReport:
  """What was measured between two hosts.

  Attributes:
    source, to: the hosts.
    mbit: Mbit/s of payload that arrived.
    rtt_ms: median round trip of one byte on the idle path, ms.
    loaded_rtt_ms: the same while the path is full: the queue's wait.
    congestion: TCP congestion control in use.
  """

  source: str
  to: str
  mbit: float
  rtt_ms: float
  loaded_rtt_ms: float
  congestion: str


class Lab:
  """Builds a lab on entry and removes it on exit: after exceptions, Ctrl-C, SIGTERM and SIGHUP too.

  What SIGKILL leaves behind, `machine.abandoned` finds and `--clean` removes; the processes die
  with their maker. Signals are handled in the main thread only, and not where the program has set
  handlers of its own.
  """

  def __init__(self, config: Mapping[str, Any], *, grace: float = 2.0):
    """Checks the config; nothing is built before `with`.

    Args:
      config: as `configs/fabric.py` gives.
      grace: seconds between SIGTERM and SIGKILL for processes that are left at the end.

    Raises:
      ConfigError: the config describes no lab.
    """
    self.topology = from_config(config)
    self.name = secrets.token_hex(3)
    self._grace = grace
    self._lock: IO[bytes] | None = None
    self._processes: list[subprocess.Popen[Any]] = []
    self._handlers: dict[signal.Signals, Any] = {}
    self._pid = os.getpid()

  def __enter__(self) -> Self:
    if reason := machine.why_not(self.topology.algorithms()):
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
      ConfigError: there is no such host.
      LabError: the lab isn't up.
    """
    self.topology.address(host)
    if self._lock is None:
      raise LabError("The lab isn't up: call popen inside `with Lab(config) as lab:`.")
    process = subprocess.Popen(
        machine.found(commands.enter(self.name, host, str(self._hosts_file), command)),
        **{"start_new_session": True, **options})
    self._processes.append(process)
    return process

  def run(self, host: str, command: Sequence[str], *, timeout: float = 60.0) -> str:
    """Runs a command on a host to its end and returns what it prints.

    Raises:
      LabError: it fails, or takes longer than `timeout` seconds.
    """
    process = self.popen(host, command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
    try:
      out, said = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
      process.kill()
      process.communicate()
      raise LabError(
          f"`{' '.join(command)}` on {host} did not end within {timeout:g} s.") from error
    if process.returncode:
      raise LabError(
          f"`{' '.join(command)}` on {host} failed with status {process.returncode}: "
          f"{said.strip()}")
    return str(out)

  def measure(self, source: str, to: str, seconds: float = 1.0) -> PathReport:
    """Measures the path between two hosts with TCP; whatever else runs on it takes its share.

    Raises:
      ConfigError: there is no such host.
      LabError: the measurement fails.
    """
    server = self.popen(to, [sys.executable, _PROBE, "serve"], stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE, text=True)
    try:
      assert server.stdout is not None
      port = server.stdout.readline().strip()
      said = self.run(source, [sys.executable, _PROBE, "send", self.topology.address(to), port,
                               str(seconds)],
                      timeout=30 + 4 * seconds)
    finally:
      server.kill()
      server.communicate()
    return PathReport(source, to, **json.loads(said))

  def counters(self) -> dict[str, dict[str, int]]:
    """What every shaped interface has counted since the lab was built: bytes and packets sent,
    packets dropped."""
    found = {}
    for way in commands.shaped(self.topology):
      place = commands.namespace(self.name, way.place)
      said = json.loads(machine.run(["tc", "-s", "-j", "-n", place, "qdisc", "show", "dev",
                                     way.interface]))
      top = next(entry for entry in said if entry.get("root"))
      found[way.name] = {name: int(top[name]) for name in ("bytes", "packets", "drops")}
    return found

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


def _show(lab: Lab) -> None:
  topology = lab.topology
  print(f"lab {lab.name}: {len(topology.racks)} racks, hosts {' '.join(topology.hosts)}")
  first, last = topology.hosts[0], topology.racks[-1][-1]
  began = time.monotonic()
  report = lab.measure(first, last)
  asked = f"asked for {topology.trunk_mbit:g}" if topology.trunk_mbit else "not shaped"
  print(f"{first} to {last}: {report.mbit:.1f} Mbit/s ({asked}), round trip {report.rtt_ms:.3f} ms "
        f"idle, {report.loaded_rtt_ms:.2f} ms loaded, {report.congestion}; measured in "
        f"{time.monotonic() - began:.1f} s")
  for name, selected in lab.counters().items():
    print(f"  {name}: {selected['bytes'] / 1e6:.1f} MB sent, {selected['drops']} packets dropped")


def main() -> None:
  """Command line, see the head of this file."""
  from absl import app, flags
  from ml_collections import config_flags

  config = config_flags.DEFINE_config_file("config", "configs/fabric.py", "The lab to build.",
                                           lock_config=True)
  cleaning = flags.DEFINE_bool("clean", False,
                               "Remove what killed labs have left, and build nothing.")

  def go(argv: list[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(
          f"What is {argv[1]!r}? The flags are --config=FILE, --config.FIELD=VALUE and --clean.")
    try:
      if cleaning.value:
        print("\n".join(clean() or ["nothing to remove"]))
        return
      with Lab(config.value) as lab:
        _show(lab)
    except (ConfigError, LabError) as error:
      sys.exit(f"lab: {error}")

  app.run(go)


if __name__ == "__main__":
  main()
