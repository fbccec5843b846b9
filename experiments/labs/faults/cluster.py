"""The processes of one layout: started once, told one run after the other, struck from outside
while they run."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.labs.fabric.commands import Topology
from experiments.labs.fabric.lab import Lab
from experiments.labs.faults import outside
from experiments.labs.faults.outside import Done
from experiments.labs.faults.spec import OUTSIDE, Fault, Layout, Spec
from jaxpace.hosts.launch import environment
from jaxpace.hosts.launch.environment import (
  ADDRESS,
  COUNT,
  INDEX,
  LAUNCH_ID,
)

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_START_SECONDS, _RUN_SECONDS = 180.0, 60.0
_TRAFFIC_PORT = 5201
_PORT = 29400  # the coordinator's; nobody else is in the lab's network


class ClusterError(RuntimeError):
  """A process of the cluster ended or says nothing; the message is a sentence."""


class Stopped(Exception):
  """The lab is being stopped."""


def fabric(shape: Layout, trunk_mbit: float) -> Topology:
  """A lab with a host for each process of a layout, on two racks, and one on each for other
  traffic."""
  hosts = [f"h{process}" for process in range(shape.processes)]
  half = (len(hosts) + 1) // 2
  return Topology(((*hosts[:half], "t0"), (*hosts[half:], "t1")), trunk_mbit)


def environment_of(topology: Topology, process: int, processes: int,
                   base: Mapping[str, str]) -> dict[str, str]:
  """The environment in which a process on a host of a lab joins the others: what `jaxpace run`
  would set.

  Args:
    topology: of the lab.
    process: which of them.
    processes: how many.
    base: environment to start from.
  """
  env = {name: value for name, value in base.items()
         if not name.startswith(("JAX_COORDINATOR", "SLURM_", "OMPI_"))}
  return {**env, ADDRESS: f"{topology.address('h0')}:{_PORT}", COUNT: str(processes),
          INDEX: str(process), "JAX_PLATFORMS": "cpu"}


class Cluster:
  """Processes of one layout, each on a host of its own where there is a lab."""

  def __init__(self, shape: Layout, setting: Mapping[str, Any], logs: pathlib.Path, lab: Lab | None,
               mark: str, stop: threading.Event):
    """Starts the processes; `wait` waits until they are ready.

    Args:
      shape: the layout.
      setting: what a `worker` needs to know.
      logs: existing directory.
      lab: up, made of `fabric`; None starts plain processes, to which nothing on the network
        can be done.
      mark: of all processes of this program, by which what is left of them is found.
      stop: set when the program is to end.
    """
    self.shape, self.lab, self._stop = shape, lab, stop
    self._logs = [logs / f"{shape.name}-{process}.log" for process in range(shape.processes)]
    self._answers: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
    self._processes: list[subprocess.Popen[str]] = []
    self._listeners: list[threading.Thread] = []
    self._port = None if lab or shape.processes == 1 else environment.reserve_port()
    self._base = {**os.environ, LAUNCH_ID: mark, "JAX_PLATFORMS": "cpu"}
    argument = json.dumps({**setting, "distributed": shape.processes > 1})
    for process in range(shape.processes):
      self._start(process, [sys.executable, "-m", "experiments.labs.faults.worker", argument])

  def _start(self, process: int, command: list[str]) -> None:
    shape = self.shape
    options: dict[str, Any] = {"cwd": _ROOT, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE,
                               "text": True}
    with self._logs[process].open("wb") as log:
      if self.lab:
        env = {**environment_of(self.lab.topology, process, shape.processes, self._base),
               **self._devices(self._base)}
        started = self.lab.popen(f"h{process}", command, env=env, stderr=log, **options)
      else:
        env = {**self._base, **self._devices(self._base)}
        if self._port:
          env = environment.worker_environment(
              env, index=process, nproc=shape.processes, port=self._port.getsockname()[1],
              launch_id=self._base[LAUNCH_ID], devices=shape.devices)
        started = subprocess.Popen(command, env=env, stderr=log, start_new_session=True, **options)
    self._processes.append(started)
    listener = threading.Thread(target=self._listen, args=(process, started), daemon=True)
    listener.start()
    self._listeners.append(listener)

  def _devices(self, base: Mapping[str, str]) -> dict[str, str]:
    threads = 2 * self.shape.devices if self.shape.processes == 1 else self.shape.devices + 1
    return {"XLA_FLAGS": environment.with_device_count(base.get("XLA_FLAGS", ""),
                                                       self.shape.devices),
            "JAX_NUM_CPU_DEVICES": str(self.shape.devices), "PJRT_NPROC": str(threads),
            "PYTHONUNBUFFERED": "1"}

  def wait(self) -> None:
    """Waits until every process is ready for a run.

    Raises:
      ClusterError: one ended, or takes too long.
      Stopped: the program is to end.
    """
    self._collect("ready", _START_SECONDS, {})

  def run(self, spec: Spec, directory: pathlib.Path, record: str = "calls") -> dict[str, Any]:
    """Makes one run and injects its faults from outside.

    Args:
      spec: of this layout.
      directory: of the run; it exists and is empty.
      record: how it is recorded, one of `worker.PROCESSES`.

    Returns:
      `stopped`: why recording stopped, or None; `outside`: for each fault from outside, when it did
        what.

    Raises:
      ClusterError: a process ended, or takes too long.
      Stopped: the program is to end.
    """
    with contextlib.ExitStack() as open_now:
      done: dict[str, Done] = {}
      early = [fault for fault in spec.faults if fault.kind in OUTSIDE and fault.onset == 0]
      for fault in early:
        done[fault.kind] = open_now.enter_context(self._injected(fault, spec))
      later = {fault.onset: fault for fault in spec.faults if fault.kind in OUTSIDE
               and fault.onset > 0}

      def at(step: int) -> None:
        if step in later:
          fault = later.pop(step)
          done[fault.kind] = open_now.enter_context(self._injected(fault, spec))

      self._tell({"spec": spec.to_json(), "directory": str(directory), "record": record})
      answers = self._collect("done", _RUN_SECONDS + 60 * spec.steps * spec.work, {"mark": at})
    stopped = [answer["stopped"] for answer in answers if answer["stopped"]]
    return {"stopped": stopped[0] if stopped else None, "outside": done}

  def close(self) -> None:
    """Lets the processes end by themselves, or ends them."""
    for process in self._processes:
      with contextlib.suppress(OSError):
        assert process.stdin is not None
        process.stdin.close()
    deadline = time.monotonic() + (1.0 if self._stop.is_set() else 10.0)
    for process in self._processes:
      try:
        process.wait(timeout=max(0.1, deadline - time.monotonic()))
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for listener in self._listeners:
      listener.join(1)
    if self._port:
      self._port.close()

  @contextlib.contextmanager
  def _injected(self, fault: Fault, spec: Spec) -> Iterator[Done]:
    pids = [process.pid for process in self._processes]
    if fault.kind == "stopped":
      with outside.stopped(pids[fault.targets[0]], fault.seconds, spec.work, spec.seed) as done:
        yield done
    elif fault.kind == "hog":
      victim = pids[fault.targets[0]]
      with outside.hogged(victim, [pid for pid in pids if pid != victim], round(fault.seconds),
                          outside.starter(self._base)) as done:
        yield done
    elif self.lab is None:
      raise ClusterError(
          f"A fault of the kind {fault.kind!r} needs network namespaces, and this cluster "
          "has none.")
    elif fault.kind == "trunk":
      with outside.crowded_trunk(self.lab, ("t0", "t1"), fault.seconds, _TRAFFIC_PORT) as done:
        yield done
    else:
      with outside.slow_link(self.lab, f"h{fault.targets[0]}", fault.seconds) as done:
        yield done

  def _tell(self, request: Mapping[str, Any]) -> None:
    for process, started in enumerate(self._processes):
      assert started.stdin is not None
      try:
        started.stdin.write(json.dumps(request) + "\n")
        started.stdin.flush()
      except OSError as error:
        raise ClusterError(self._ended(process)) from error

  def _listen(self, process: int, started: subprocess.Popen[str]) -> None:
    assert started.stdout is not None
    with started.stdout as said:
      for line in said:
        with contextlib.suppress(ValueError):
          self._answers.put((process, json.loads(line)))
    self._answers.put((process, None))

  def _collect(self, kind: str, timeout: float, also: Mapping[str, Any]) -> list[Any]:
    """Waits for an answer of every process; calls `also[name]` with what is said under another
    name."""
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(found) < len(self._processes):
      if self._stop.is_set():
        raise Stopped
      if time.monotonic() > deadline:
        silent = sorted(set(range(len(self._processes))) - set(found))
        raise ClusterError(f"Process {silent[0]} of {self.shape.name} said nothing for {timeout:g} "
                           f"s; see {self._logs[silent[0]]}.")
      with contextlib.suppress(queue.Empty):
        process, answer = self._answers.get(timeout=0.2)
        if answer is None:
          raise ClusterError(self._ended(process))
        if kind in answer:
          found[process] = answer[kind]
        for name, call in also.items():
          if name in answer:
            call(answer[name])
    return [found[process] for process in sorted(found)]

  def _ended(self, process: int) -> str:
    last = self._logs[process].read_text(errors="replace").strip().splitlines()[-3:]
    return (f"Process {process} of {self.shape.name} ended. Its last words: "
            f"{' / '.join(last) or 'none'}")
