"""The `jaxpace` command."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxpace.cli import running
from jaxpace.show.console import give_up_output

COMMANDS = {
    "bench": "measure collectives, or the links between hosts",
    "compare": "say what changed between two recorded runs",
    "control": "change a running job's pacing: on, off, threshold, longest delay, ranks",
    "doctor": "show where processes run, and what is wrong there",
    "read-nccl": "make a run of what NCCL's Inspector plugin dumped",
    "replay": "say what a pacer would have done in a recorded run",
    "report": "say where the step time of a recorded run went",
    "run": "run any JAX program unchanged, and record its steps",
    "simulate": "simulate jobs on a fabric, with the pacers of the live step",
    "watch": "show a run in the terminal while it grows",
}
"""What each subcommand does, in one line. Its module has the same name."""


def version() -> str:
  """Returns the installed version, or "unknown" when run from a bare checkout."""
  from importlib import metadata
  try:
    return metadata.version("jaxpace")
  except metadata.PackageNotFoundError:
    return "unknown"


def usage() -> str:
  """Returns the help of `jaxpace` itself."""
  width = max(map(len, COMMANDS))
  lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
  return "\n".join([
      "usage: jaxpace [--help] [--version] COMMAND ...", "",
      "Finds out where the time of a multi-process JAX training step goes, and who is late.", "",
      "commands:", *lines, "", "`jaxpace COMMAND --help` says more."])


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line.

  Args:
    argv: arguments without the program's name; None takes `sys.argv`.

  Returns:
    The exit status: 2 for a slip in the arguments, 141 when the reader of the output has left.
  """
  for name in ("stdout", "stderr"):
    if getattr(sys, name) is None:  # closed by the shell (`>&-`)
      # As long as the process; what it becomes or starts has it closed, as before.
      setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
  own = sys.__stderr__
  if own is not None and sys.stderr is own:
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_StandardError(own.fileno(), "w", closefd=False)), own.encoding,
        "backslashreplace", line_buffering=True)
  status = 0
  try:
    status = _dispatch(list(sys.argv[1:] if argv is None else argv))
    sys.stdout.flush()
    return status
  except BrokenPipeError:
    give_up_output()
    return 141
  except KeyboardInterrupt:
    return 130
  except OSError as error:  # of standard output: a command says of all others what they mean
    give_up_output()
    if status == 0:
      print(f"jaxpace: standard output can't be written: {error.strerror or error}.",
            file=sys.stderr)
    return status or 2


class _StandardError(io.FileIO):
  """Where sentences go: what can't be said, on a full disk or to a reader that has left, is no
  reason to end a job or to fail."""

  def write(self, data: Any) -> int:
    """See `io.FileIO`."""
    try:
      return super().write(data)
    except OSError:
      return len(data)


class _Parser(argparse.ArgumentParser):
  """Says of a value that looks like an option how it is given."""

  given: Sequence[str] = ()
  """What is parsed."""

  def error(self, message: str) -> NoReturn:
    """See `argparse.ArgumentParser`."""
    names, missing, _ = message.removeprefix("argument ").partition(": expected one argument")
    for option, value in zip(self.given, self.given[1:], strict=False):
      if missing and option in names.split("/") and value.startswith("-"):
        message = f"argument {names}: write {option}={value}, or it is taken for an option"
    super().error(message)


def _dispatch(argv: list[str]) -> int:
  if not argv or argv[0] in ("-h", "--help", "help"):
    print(usage())
    return 0
  name, rest = argv[0], argv[1:]
  if name in ("--version", "-V"):
    print(f"jaxpace {version()}")
    return 0
  if name not in COMMANDS:
    # Not for right commands: it takes milliseconds to import.
    import difflib
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    meant = f"did you mean `jaxpace {close[0]}`?" if close else f"there are: {', '.join(COMMANDS)}."
    kind = "option" if name.startswith("-") else "command"
    print(f"jaxpace: unknown {kind} {name!r}; {meant}", file=sys.stderr)
    return 2
  if name != "run":
    # What our own commands run on devices is no job to record.
    os.environ.pop("JAXPACE_RUN", None)
  what = COMMANDS[name]
  command = importlib.import_module(f"jaxpace.cli.{name.replace('-', '_')}")
  parser = _Parser(
      prog=f"jaxpace {name}", description=what[0].upper() + what[1:] + ".",
      epilog=getattr(command, "EPILOG", None), allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  command.add_arguments(parser)
  parser.given = rest
  try:
    args = parser.parse_args(rest)
  except SystemExit as done:  # argparse has printed its sentence
    return done.code if isinstance(done.code, int) else 2
  return running.call(name, command, args)
