"""What a launch is asked to run, and whether it can be run at all."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Launch:
  """What to run and how.

  Attributes:
    command: program and arguments, the same for every process.
    nproc: number of processes, at least 1.
    logs: directory of the logs; made if missing.
    show: whose output appears on the terminal: process 0's, everyone's with a prefix, or nobody's.
    grace: seconds between SIGTERM and SIGKILL.
    tail_lines: lines of the failed process's log to print.
    devices: devices a process, or None to leave it to JAX.
    threads: XLA CPU threads a process, or None to leave it to XLA.
    port: TCP port of the coordinator, 0 for a free one.
  """

  command: Sequence[str]
  nproc: int
  logs: Path
  show: Literal["first", "all", "none"] = "first"
  grace: float = 10.0
  tail_lines: int = 20
  devices: int | None = None
  threads: int | None = None
  port: int = 0


class LaunchError(Exception):
  """The job could not be started; the message is one sentence for the user."""


def find_program(command: Sequence[str]) -> str | None:
  """Returns what is wrong with the command, as one sentence, or None if it can be run."""
  if not command:
    return "no command after `--`; for example: jaxpace run --nproc 2 -- python train.py"
  program = command[0]
  if shutil.which(program):
    return None
  path = Path(program)
  if os.sep in program or path.exists():
    if path.is_dir():
      return f"{program} is a directory, not a program"
    if path.exists():
      how = f"; did you mean `-- python {program}`?" if path.suffix == ".py" else "; see `chmod +x`"
      return f"{program} is not executable{how}"
    return f"{program} does not exist"
  return f"the command {program!r} was not found in PATH"
