"""Jobs on a lab's hosts: the environment that joins any JAX program's ranks, and the lab's own
training job."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.labs.fabric.lab import Lab
from experiments.labs.fabric.machine import LabError
from experiments.labs.fabric.topology import ConfigError, Topology
from experiments.labs.fabric.trainer import Run, Work
from jaxpace.hosts.launch.environment import ADDRESS, COUNT, INDEX, with_device_count

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_FIRST_PORT = 29400  # a job's coordinator; nobody else is in the lab's network
_START_SECONDS = 180.0


def environment(topology: Topology, job: str, index: int,
                base: Mapping[str, str]) -> dict[str, str]:
  """Returns the environment in which one rank of a job joins the others: what `jaxpace launch`
  would set.

  Args:
    topology: of the lab.
    job: one of its jobs.
    index: rank, which is the process, one device each.
    base: environment to start from.

  Raises:
    ConfigError: there is no such job.
  """
  hosts = hosts_of(topology, job)
  port = _FIRST_PORT + list(topology.jobs).index(job)
  env = {name: value for name, value in base.items()
         if not name.startswith(("JAX_COORDINATOR", "SLURM_", "OMPI_"))}
  env.update({ADDRESS: f"{topology.address(hosts[0])}:{port}", COUNT: str(len(hosts)),
              INDEX: str(index), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1",
              "XLA_FLAGS": with_device_count(base.get("XLA_FLAGS", ""), 1)})
  env.setdefault("PYTHONUNBUFFERED", "1")
  # one thread for the device, one for a host callback: the ranks share the cores
  env.setdefault("PJRT_NPROC", "2")
  return env


def hosts_of(topology: Topology, job: str) -> tuple[str, ...]:
  """Hosts of a job's ranks.

  Raises:
    ConfigError: there is no such job.
  """
  if job not in topology.jobs:
    raise ConfigError(
        f"There is no job {job!r} in this config; there are {', '.join(topology.jobs) or 'none'}.")
  return topology.jobs[job]


class TrainingJob:
  """The ranks of one job, each a process on its host that runs `trainer` and waits for requests."""

  def __init__(self, lab: Lab, job: str, work: Work, logs: pathlib.Path):
    """Starts the ranks; `prepare` waits until they can run.

    Args:
      lab: it must be up.
      job: one of its jobs.
      work: what a step costs.
      logs: existing directory for what the ranks say.

    Raises:
      ConfigError: there is no such job.
    """
    self.name = job
    self._logs = [logs / f"{job}-{index}.log" for index in range(len(hosts_of(lab.topology, job)))]
    self._answers: list[queue.SimpleQueue[str]] = []
    self._ranks: list[subprocess.Popen[str]] = []
    self.plan: dict[str, Any] = {}
    """What rank 0 says of its step, once it is ready."""
    setting = {"work": dataclasses.asdict(work), "key": zlib.crc32(job.encode())}
    for index, host in enumerate(hosts_of(lab.topology, job)):
      with self._logs[index].open("wb") as log:
        rank = lab.popen(host, [sys.executable, "-m", "experiments.labs.fabric.trainer",
                                json.dumps(setting)],
                         cwd=_ROOT,
                         env=environment(lab.topology, job, index, os.environ),
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
      answers: queue.SimpleQueue[str] = queue.SimpleQueue()
      threading.Thread(target=_collect, args=(rank, answers), daemon=True).start()
      self._ranks.append(rank)
      self._answers.append(answers)

  def prepare(self, pacer: str, settings: Mapping[str, Any] | None = None) -> None:
    """Has every rank compile its step with a pacer, before runs may ask for it, and waits.

    Args:
      pacer: a key of `trainer.PACERS`.
      settings: arguments of it besides the job's key.

    Raises:
      LabError: a rank ended or took too long.
    """
    self.begin_to_prepare(pacer, settings)
    self.prepared()

  def begin_to_prepare(self, pacer: str, settings: Mapping[str, Any] | None = None) -> None:
    """As `prepare`, and does not wait: `prepared` does."""
    self._ask({"pacer": pacer, "settings": dict(settings or {})})

  def prepared(self) -> None:
    """Waits until what `begin_to_prepare` asked for once is compiled.

    Raises:
      LabError: a rank ended or took too long.
    """
    answers = [self._answer(index, "ready", _START_SECONDS) for index in range(len(self._ranks))]
    self.plan = answers[0]

  def begin(self, run: Run) -> None:
    """Asks every rank for a run, and does not wait."""
    self._ask(dataclasses.asdict(run))

  def _ask(self, request: Mapping[str, Any]) -> None:
    for index, rank in enumerate(self._ranks):
      assert rank.stdin is not None
      try:
        rank.stdin.write(json.dumps(request) + "\n")
        rank.stdin.flush()
      except OSError as error:
        raise LabError(self._ended(index)) from error

  def finish(self, timeout: float) -> list[dict[str, Any]]:
    """Waits for the end of the run; returns what each rank says.

    Raises:
      LabError: a rank ended, or took longer than `timeout` seconds.
    """
    return [self._answer(index, "done", timeout) for index in range(len(self._ranks))]

  def close(self) -> None:
    """Lets the ranks end by themselves, or ends them."""
    for rank in self._ranks:
      with contextlib.suppress(OSError):
        assert rank.stdin is not None
        rank.stdin.close()
    for rank in self._ranks:
      try:
        rank.wait(timeout=15)
      except subprocess.TimeoutExpired:
        rank.kill()
        rank.wait()

  def _answer(self, index: int, kind: str, timeout: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
      try:
        line = self._answers[index].get(timeout=min(left, 1.0))
      except queue.Empty:
        continue
      if not line:
        raise LabError(self._ended(index))
      with contextlib.suppress(ValueError):
        answer = json.loads(line)
        if isinstance(answer, dict) and kind in answer:
          found: dict[str, Any] = answer[kind]
          return found
    raise LabError(
        f"Rank {index} of job {self.name} said nothing for {timeout:g} s; see {self._logs[index]}.")

  def _ended(self, index: int) -> str:
    last = self._logs[index].read_text(errors="replace").strip().splitlines()[-3:]
    return f"Rank {index} of job {self.name} ended. Its last words: {' / '.join(last) or 'none'}"


def _collect(rank: subprocess.Popen[str], answers: queue.SimpleQueue[str]) -> None:
  assert rank.stdout is not None
  for line in rank.stdout:
    answers.put(line)
  answers.put("")  # it ended


@contextlib.contextmanager
def training(lab: Lab, jobs: Sequence[str], work: Work,
             logs: pathlib.Path) -> Iterator[dict[str, TrainingJob]]:
  """Starts training jobs side by side, prepared to run without a pacer, and ends them in the
  end."""
  started: dict[str, TrainingJob] = {}
  try:
    for name in jobs:
      started[name] = TrainingJob(lab, name, work, logs)
    for job in started.values():
      job.prepare("none")
    yield started
  finally:
    for job in started.values():
      job.close()
