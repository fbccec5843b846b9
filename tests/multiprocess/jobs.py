"""Real processes for the tests: started with an environment each, waited for, their words
collected."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpace.hosts.launch import environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONGEST = 600.0
"""Seconds after which a process hangs that takes three on a quiet machine."""
_OUTER = ("XLA_FLAGS", "SLURM_", "OMPI_", "PMI", "JAX_COORDINATOR", "JAX_NUM", "JAX_PROCESS",
          "KUBERNETES_", "JOB_COMPLETION")


def clean_environment(**extra: str) -> dict[str, str]:
  """Returns this environment without what the test set-up or an outer job put into it, and with
  `extra`."""
  kept = {name: value for name, value in os.environ.items() if not name.startswith(_OUTER)}
  return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **extra}


_held: list[socket.socket] = []


def free_high_port() -> int:
  """Returns a free port of 61440 to 65535, where JAX puts the coordinators of SLURM and Open MPI
  jobs. It is held until the tests end: two coordinators can share a port, and mix up their jobs."""
  for offset in range(4096):
    port = 61440 + (os.getpid() * 37 + time.monotonic_ns() // 1000 + offset) % 4096
    try:
      _held.append(environment.reserve_port(port))
      return port
    except OSError:
      continue
  raise AssertionError("no free port")


def finish(processes: Sequence[subprocess.Popen[str]],
           timeout: float = LONGEST) -> list[tuple[int, str]]:
  """Waits for processes that write stderr into stdout; returns their exit statuses and outputs."""
  deadline = time.monotonic() + timeout
  try:
    outputs = [process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
               for process in processes]
  finally:
    for process in processes:
      process.kill()
      process.wait()
  return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def start(worker: str, *arguments: object, devices: int = 1,
          **variables: str) -> subprocess.Popen[str]:
  """Starts a worker of this folder on so many devices, with variables beside this environment's."""
  return subprocess.Popen(
      [sys.executable, str(pathlib.Path(__file__).with_name(worker)), *map(str, arguments)],
      cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=clean_environment(
          XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}", **variables))


def pair(worker: str, *arguments: object, devices: int = 1) -> list[str]:
  """Runs a worker of this folder in the two processes of a job; returns what each printed.

  `jaxpace.distributed.initialize()` joins them, or `joining.join()`.
  """
  place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_high_port()}", "JAX_NUM_PROCESSES": "2"}
  done = finish([start(worker, *arguments, devices=devices, JAX_PROCESS_ID=str(index), **place)
                 for index in range(2)])
  assert [status for status, _ in done] == [0, 0], done
  return [output for _, output in done]


def run(script: pathlib.Path, environments: Sequence[Mapping[str, str]]) -> list[tuple[int, str]]:
  """Runs a script once for each environment, side by side."""
  return finish([subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env=dict(env), text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                 for env in environments])


def facts(output: str) -> Any:
  """Returns what a worker printed as JSON after `FACTS `."""
  found = [line.partition("FACTS ")[2] for line in output.splitlines() if "FACTS " in line]
  assert len(found) == 1, output
  return json.loads(found[0])
