"""Faults that strike a process from outside: signals, other load on its core, a slow link, traffic
on the trunk.

Each is a context manager that injects while it is open, undoes everything on the way out, and keeps
in `done` when it did what, in nanoseconds of the monotonic clock.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.labs.fabric import commands, machine
from experiments.labs.fabric.lab import Lab

_TRAFFIC = str(pathlib.Path(__file__).with_name("traffic.py"))
_BURST, _QUEUE = "8kb", "128kb"
Done = list[tuple[int, int]]
Start = Callable[[Sequence[str]], "subprocess.Popen[Any]"]


@contextlib.contextmanager
def stopped(pid: int, seconds: float, period: float, seed: int) -> Iterator[Done]:
  """Stops a process for `seconds`, and again about `period` after it went on, each time anew."""
  done: Done = []
  end, draw = threading.Event(), random.Random(seed)

  def turn() -> None:
    try:
      while not end.wait(period * draw.uniform(0.5, 1.5)):
        begun = time.monotonic_ns()
        os.kill(pid, signal.SIGSTOP)
        end.wait(seconds)
        os.kill(pid, signal.SIGCONT)
        done.append((begun, time.monotonic_ns()))
    except ProcessLookupError:
      pass  # it ended; its cluster says so

  thread = threading.Thread(target=turn, daemon=True)
  thread.start()
  try:
    yield done
  finally:
    end.set()
    thread.join()
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def hogged(victim: int, others: Sequence[int], count: int, start: Start) -> Iterator[Done]:
  """Holds a process to one core, its peers to the other cores, and has `count` programs compute on
  its core."""
  cores = sorted(os.sched_getaffinity(0))
  held = {victim: {cores[0]}, **{pid: set(cores[1:] or cores) for pid in others}}
  done: Done = []
  hogs: list[subprocess.Popen[Any]] = []
  begun = time.monotonic_ns()
  try:
    for pid, where in held.items():
      _hold(pid, where)
    hogs += [start([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    for hog in hogs:
      _hold(hog.pid, {cores[0]})
    yield done
  finally:
    _end(hogs)
    for pid in held:
      _hold(pid, set(cores))
    done.append((begun, time.monotonic_ns()))


def _hold(pid: int, cores: set[int]) -> None:
  """Holds all threads of a process to some cores."""
  with contextlib.suppress(FileNotFoundError):
    for thread in os.listdir(f"/proc/{pid}/task"):
      with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(int(thread), cores)


@contextlib.contextmanager
def slow_link(lab: Lab, host: str, mbit: float) -> Iterator[Done]:
  """Shapes the link of a host, both ways, to `mbit` Mbit/s."""
  ways = [(commands.namespace(lab.name, host), "eth0"),
          (commands.namespace(lab.name, commands.FABRIC), f"h-{host}")]
  done: Done = []
  begun = time.monotonic_ns()
  try:
    for namespace, interface in ways:
      machine.run(["tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf",
                   "rate", f"{round(1e6 * mbit)}bit", "burst", _BURST, "limit", _QUEUE])
    yield done
  finally:
    for namespace, interface in ways:
      with contextlib.suppress(machine.LabError):  # it was not there yet, or the lab is gone
        machine.run(["tc", "-n", namespace, "qdisc", "del", "dev", interface, "root"])
    done.append((begun, time.monotonic_ns()))


@contextlib.contextmanager
def crowded_trunk(lab: Lab, ends: tuple[str, str], flows: float, port: int) -> Iterator[Done]:
  """Sends as fast as it goes between two hosts on different racks, `flows` connections each way,
  see `traffic`."""
  started: list[subprocess.Popen[Any]] = []
  done: Done = []
  begun = time.monotonic_ns()
  try:
    for host in ends:
      started.append(_ready(lab, host, [sys.executable, "-S", _TRAFFIC, "serve", str(port)]))
    for source, to in (ends, ends[::-1]):
      started.append(_ready(lab, source, [sys.executable, "-S", _TRAFFIC, "send",
                                          lab.topology.address(to), str(port), str(flows)]))
    yield done
  finally:
    _end(started)
    done.append((begun, time.monotonic_ns()))


def _ready(lab: Lab, host: str, command: Sequence[str]) -> subprocess.Popen[Any]:
  process = lab.popen(host, command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                      stderr=subprocess.DEVNULL)
  assert process.stdout is not None
  if not process.stdout.readline():
    process.wait()
    raise machine.LabError(f"The traffic on {host} did not start: `{' '.join(command)}`.")
  return process


def _end(processes: Sequence[subprocess.Popen[Any]]) -> None:
  for process in processes:
    with contextlib.suppress(ProcessLookupError):
      process.kill()
  for process in processes:
    process.wait()
    if process.stdout is not None:
      process.stdout.close()


def starter(environment: Mapping[str, str]) -> Start:
  """Starts programs that say nothing and end with the lab."""
  def start(command: Sequence[str]) -> subprocess.Popen[Any]:
    return subprocess.Popen(list(command), env=dict(environment), stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            start_new_session=True)
  return start
