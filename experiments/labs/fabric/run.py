"""Runs a program as the config's jobs in a lab: each rank a process on its host, joined as `jaxpace
launch` would.

    python -m experiments.labs.fabric.run -- python -m experiments.examples.digits.main --workdir=runs/digits-{job}
    python -m experiments.labs.fabric.run --jobs=a --config.trunk_mbit=50 -- python train.py

Any program joins that calls `jaxpace.distributed.initialize()`, or reads JAX_COORDINATOR_ADDRESS,
JAX_NUM_PROCESSES and JAX_PROCESS_ID itself. `{job}`, `{rank}` and `{host}` in its arguments are
filled in. Rank 0 of every job is shown, all are logged. If a rank fails the others are ended, and
its status is this program's.
"""  # noqa: E501

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from experiments.labs.fabric import jobs
from experiments.labs.fabric.lab import Lab
from experiments.labs.fabric.machine import LabError
from experiments.labs.fabric.topology import ConfigError

_POLL_SECONDS = 0.05


def filled(command: Sequence[str], job: str, rank: int, host: str) -> list[str]:
  """The command with `{job}`, `{rank}` and `{host}` put in; other braces are left as they are."""
  values = {"{job}": job, "{rank}": str(rank), "{host}": host}
  words = list(command)
  for mark, value in values.items():
    words = [word.replace(mark, value) for word in words]
  return words


def run(lab: Lab, names: Sequence[str], command: Sequence[str], logs: pathlib.Path) -> int:
  """Runs a command as jobs side by side and waits for all of them.

  Args:
    lab: it must be up.
    names: of its jobs.
    command: program and arguments, see `filled`.
    logs: directory for a log of each rank, made if missing.

  Returns:
    0, or the status of the first rank seen to fail.

  Raises:
    ConfigError: there is no such job.
  """
  logs.mkdir(parents=True, exist_ok=True)
  ranks: dict[str, subprocess.Popen[Any]] = {}
  for job in names:
    for index, host in enumerate(jobs.hosts_of(lab.topology, job)):
      with (logs / f"{job}-{index}.log").open("wb") as log:
        ranks[f"{job}-{index}"] = lab.popen(
            host, filled(command, job, index, host),
            env=jobs.environment(lab.topology, job, index, os.environ), stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT)
  shown = {name: _Shown(logs / f"{name}.log", f"[{name.rpartition('-')[0]}] ")
           for name in ranks if name.endswith("-0")}
  status = 0
  while status == 0 and any(rank.poll() is None for rank in ranks.values()):
    time.sleep(_POLL_SECONDS)
    for view in shown.values():
      view.update()
    status = next((rank.returncode for rank in ranks.values() if rank.poll()), 0)
  status = status or next((rank.returncode for rank in ranks.values() if rank.returncode), 0)
  for view in shown.values():
    view.update()
  if status:
    _explain(ranks, status, logs)
    for rank in ranks.values():
      rank.terminate()
  return status if status >= 0 else 128 - status


class _Shown:
  """A log that is copied to the terminal while it grows, whole lines only."""

  def __init__(self, path: pathlib.Path, prefix: str):
    self._path, self._prefix, self._read, self._rest = path, prefix, 0, b""

  def update(self) -> None:
    with self._path.open("rb") as log:
      log.seek(self._read)
      new = log.read()
    self._read += len(new)
    *lines, self._rest = (self._rest + new).split(b"\n")
    for line in lines:
      print(self._prefix + line.decode(errors="replace"), flush=True)


def _explain(ranks: dict[str, subprocess.Popen[Any]], status: int, logs: pathlib.Path) -> None:
  failed = next(name for name, rank in ranks.items() if rank.returncode == status)
  how = f"ended with status {status}" if status > 0 else f"was killed by signal {-status}"
  last = (logs / f"{failed}.log").read_text(errors="replace").splitlines()[-10:]
  print(f"fabric: {failed} {how}, the others are ended. Last lines of {logs / failed}.log:", *last,
        sep="\n", file=sys.stderr)


def main(arguments: Sequence[str]) -> None:
  """Command line, see the head of this file.

  Args:
    arguments: `sys.argv`. What follows `--` is the program's: its flags, --config too, are none of
      ours.
  """
  from absl import app, flags
  from ml_collections import config_flags

  split = list(arguments).index("--") if "--" in arguments else len(arguments)
  # config_flags reads all of sys.argv
  sys.argv, command = list(arguments[:split]), list(arguments[split + 1:])
  config = config_flags.DEFINE_config_file("config", "configs/fabric.py", "The lab and its jobs.",
                                           lock_config=True)
  names = flags.DEFINE_list("jobs", [],
                            "Which of the config's jobs to run; all of them by default.")
  logs = flags.DEFINE_string("logs", "runs/fabric", "Directory for a log of each rank.")

  def go(argv: list[str]) -> None:
    if len(argv) > 1 or not command:
      raise app.UsageError("The program follows `--`; for example: "
                           "python -m experiments.labs.fabric.run -- python train.py")
    try:
      with Lab(config.value) as lab:
        status = run(lab, names.value or list(lab.topology.jobs), command, pathlib.Path(logs.value))
    except (ConfigError, LabError) as error:
      sys.exit(f"fabric: {error}")
    sys.exit(status)

  app.run(go)


if __name__ == "__main__":
  main(sys.argv)
