"""`jaxpace run`: arguments and their checks. Processes are started by `jaxpace.hosts.launch`, and
recorded by `jaxpace.record.observed`."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import select
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from jaxpace.cli.running import number
from jaxpace.core.words import plural
from jaxpace.files import UserError
from jaxpace.hosts import launch
from jaxpace.hosts.launch import environment
from jaxpace.hosts.launch.environment import EXACT, MATCH, RUN, UNNAMED, UNSEEN
from jaxpace.hosts.launch.launcher import Launcher, find_program, marked

EPILOG = """\
The program is run unchanged. Every program that JAX compiles in it with collectives over several devices gets
timestamps; the one that takes most of the time, or the sequence that repeats, is recorded as the step. Without
--nproc this process becomes the command's, so `srun jaxpace run --out RUN -- python train.py` records a job; where
jaxpace is installed, JAXPACE_RUN=RUN in the environment does the same.

With --nproc the script finds its place with `jax.distributed.initialize()`, or with
`jaxpace.distributed.initialize()`, which works in plain python as well. One process failing ends the job: the others
get SIGTERM, and SIGKILL after the grace time. The exit status is that of the process that failed first (128 + the
signal's number if a signal killed it).

examples:
  jaxpace run -- python train.py
  jaxpace run --out runs/demo --match 'train*' -- python -m trainer --steps 1000
  jaxpace run --nproc 4 -- python train.py --config configs/digits.py
  jaxpace run --nproc 2 --devices-per-process 4 --show all --no-record -- python train.py
"""  # noqa: E501

_NOBODY = ("Nothing was recorded: no process of this command used a device through JAX, or its "
           "Python did not see PYTHONPATH (python -I or -E, sudo, a container, an "
           "environment of its own).")
_LEFT = ("Nothing was recorded so far: no process of this command used a device through JAX. What "
         "it left running (pid {}) is recorded once it does.")
_WORKERS = ("Nothing was recorded: only workers of multiprocessing used a device through JAX, and "
            "those of a data loader are left alone. Where they train, put `with "
            "jaxpace.observed(RUN):` around that.")
_LOOK_MILLISECONDS = 1000
_SETTLE_SECONDS = 0.5
"""So long what helps a process may outlive it, such as multiprocessing's tracker of resources."""
_OF_JOBS = ("logs", "show", "grace", "threads")
"""Options that say something of jobs of several processes alone."""
_MOST_DEVICES, _MOST_THREADS = 1024, 4096
_LEAST_BOUND, _PROCESSES_A_CORE = 256, 32
"""Processes that are never too many, and those that a core may have: more are a slip, and would
take the machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace run`."""
  parser.usage = "jaxpace run [options] -- COMMAND [ARGUMENT ...]"
  parser.epilog = EPILOG
  parser.add_argument("--out", type=_directory, metavar="RUN",
                      help="run directory (default: runs/<time>-<random> of process 0)")
  parser.add_argument("--match", default="", metavar="NAME",
                      help="name of the step's program, such as train_step or 'train*', where it "
                           "shall not be found")
  parser.add_argument("--exact", action="store_true",
                      help="record a program only if its first three executions give the same bits "
                           "as without timestamps: each runs twice, the second time on copies")
  parser.add_argument("--no-record", action="store_true", help="record nothing")
  parser.add_argument("--nproc", "-n", type=number("the number of processes", 1),
                      metavar="N", help="start so many processes on this machine, as one job")
  parser.add_argument("--devices-per-process",
                      type=number("the number of devices", 1, _MOST_DEVICES), metavar="D",
                      help="devices of each process: simulated ones on CPU, D of the machine's "
                           "GPUs each otherwise (default: one GPU each where there are enough, "
                           "else JAX's own choice)")
  parser.add_argument("--logs", type=_directory, metavar="DIR",
                      help="directory of the logs, process-0.log and so on, of what each process "
                           "writes to stdout and stderr (default: runs/launch-<time>-<random>)")
  parser.add_argument("--show", choices=("first", "all", "none"),
                      help="whose log appears live on stdout: process 0's, everyone's with the "
                           "process number before each line, or nobody's (default: first)")
  parser.add_argument("--grace", type=number("the grace time", 0, whole=False),
                      metavar="S",
                      help="seconds between SIGTERM and SIGKILL (default: 10)")
  parser.add_argument("--threads", type=number("the number of threads", 1, _MOST_THREADS),
                      metavar="T",
                      help="XLA CPU threads of each process (default: the cores shared out, at "
                           "least D + 1)")
  parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND",
                      help=argparse.SUPPRESS)


def _directory(text: str) -> Path:
  """Parses the name of a directory; an empty one would be the working directory."""
  if not text:
    raise argparse.ArgumentTypeError("'' names no directory; is a variable of the shell empty?")
  return Path(text)


def run(args: argparse.Namespace) -> int:
  """Runs `jaxpace run`.

  Returns:
    The exit status: 0, the failed worker's, 128 + a signal's number, or 2 for a slip in the
    arguments. Without --nproc it does not return.
  """
  command = args.command[1:] if args.command[:1] == ["--"] else args.command
  if wrong := find_program(command):
    raise UserError(wrong)
  if args.nproc is None and (given := [name for name in _OF_JOBS if vars(args)[name] is not None]):
    raise UserError(f"--{given[0]} is about the processes that jaxpace run starts: give --nproc N "
                    "as well, or leave it out.")
  # No process's number: containers that share a disk may all have the same.
  name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
  os.environ.pop(UNSEEN, None)
  if args.no_record:
    os.environ.pop(RUN, None)
  else:
    _record(args.out or Path("runs") / name, args.match, args.exact, unnamed=args.out is None)
  unseen = os.environ.get(UNSEEN)
  if args.nproc is None:
    if args.devices_per_process:
      os.environ["XLA_FLAGS"] = environment.with_device_count(
          os.environ.get("XLA_FLAGS", ""), args.devices_per_process)
    if unseen:
      try:
        _say_at_end(unseen)
      except OSError:  # An old kernel, say, or no room for another process.
        _forget(unseen)
    try:
      os.execvp(command[0], command)
    except OSError as error:
      _forget(unseen)
      raise UserError(f"{command[0]} can't be run: {error.strerror}") from error
  try:
    status = _launch(args, command, args.logs or Path("runs") / f"launch-{name}")
  except UserError:
    _forget(unseen)
    raise
  _say_if_unseen(unseen)
  return status


def _record(directory: Path, match: str, exact: bool, unnamed: bool) -> None:
  """Has the processes to come record themselves: JAX looks for plugins on Python's path."""
  folder = str(Path(launch.__file__).parent / "on_path")
  path = os.environ.get("PYTHONPATH")
  try:
    descriptor, unseen = tempfile.mkstemp(prefix="jaxpace-run-")
    os.close(descriptor)
  except OSError:  # All of the machine's disks are full, or can only be read.
    unseen = ""
  os.environ |= {RUN: os.path.abspath(directory), MATCH: match,
                 EXACT: "1" if exact else os.environ.get(EXACT, ""),
                 UNNAMED: "1" if unnamed else "",
                 UNSEEN: unseen,
                 "PYTHONPATH": os.pathsep.join([folder, *([path] if path else [])])}


def _forget(unseen: str | None) -> None:
  if unseen:
    with contextlib.suppress(OSError):
      os.unlink(unseen)


def _say_if_unseen(unseen: str | None, left: Collection[int] = ()) -> None:
  """Says that nothing was recorded, if no process has removed the file, or that those `left` still
  may be."""
  if unseen and os.path.exists(unseen):
    said = (_WORKERS if os.path.getsize(unseen) else
            _LEFT.format(", ".join(map(str, sorted(left)))) if left else _NOBODY)
    _forget(unseen)
    print(f"jaxpace: {said}", file=sys.stderr, flush=True)


def _say_at_end(unseen: str) -> None:
  """The same at the end of this process, which is about to become the command: a process that is
  not its child waits for that, or until JAX begins in it."""
  if not hasattr(os, "pidfd_open"):
    _forget(unseen)
    return
  command = os.pidfd_open(os.getpid())
  sys.stdout.flush()
  if child := os.fork():
    with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored.
      os.waitpid(child, 0)
    os.close(command)
    return
  try:
    os.setsid()
    if not os.fork():
      # Whoever reads what the command writes waits for nobody else.
      nothing = os.open(os.devnull, os.O_RDWR)
      os.dup2(nothing, 0)
      os.dup2(nothing, 1)
      ended = select.poll()
      ended.register(command, select.POLLIN)
      while os.path.exists(unseen) and not ended.poll(_LOOK_MILLISECONDS):
        pass
      _say_if_unseen(unseen, _outliving(unseen))
  finally:
    os._exit(0)


def _outliving(unseen: str) -> set[int]:
  """Returns what the command left running, daemons of it."""
  over = time.monotonic() + _SETTLE_SECONDS
  before, left = {0}, marked(UNSEEN, unseen)
  # A look misses what forks meanwhile, so two must find nothing.
  while (left or before) and os.path.exists(unseen) and time.monotonic() < over:
    time.sleep(_SETTLE_SECONDS / 5)
    before, left = left, marked(UNSEEN, unseen)
  return left


def _launch(args: argparse.Namespace, command: list[str], logs: Path) -> int:
  """Starts the processes of a job and waits for them."""
  cores = environment.available_cores()
  most = max(_LEAST_BOUND, _PROCESSES_A_CORE * cores)
  if args.nproc > most:
    raise UserError(f"--nproc {args.nproc:,} is more than this machine of {cores} cores can run: "
                    f"at most {most:,}. Simulated devices are cheaper: --devices-per-process.")
  if (together := environment.started_together(os.environ)) > 1:
    print(f"jaxpace run: this is one of {together} commands that were started together, and each "
          f"starts a job of its own, of {plural(args.nproc, 'process', 'processes')}. For one job "
          "of all leave out --nproc, and start a command for each process.",
          file=sys.stderr, flush=True)
  threads = args.threads or environment.threads_for(
      args.nproc, args.devices_per_process or 1, cores)
  job = Launcher(command, args.nproc, logs, args.show or "first",
                 10.0 if args.grace is None else args.grace, args.devices_per_process, threads)
  print(f"jaxpace run: {plural(job.nproc, 'process', 'processes')}, logs in {logs}",
        file=sys.stderr, flush=True)
  return job.run()
