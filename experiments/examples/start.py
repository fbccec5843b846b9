"""What the example programs share: the training script with or without its patch, joining the job,
and a sentence instead of a traceback for a user's slip."""

from __future__ import annotations

import logging
import pathlib
import re
import sys
import types
from collections.abc import Callable

from absl import flags

import jaxpace


class UserError(ValueError):
  """A slip in the flags; the message names it and the fix."""


def define_flags() -> tuple[flags.FlagHolder[str], Callable[[pathlib.Path], types.ModuleType]]:
  """Defines `--workdir`, `--observe` and `--jaxpace`; returns the first, and what picks the script
  in a folder by the others."""
  workdir = flags.DEFINE_string("workdir", None,
                                "Directory for metrics and, with jaxpace, the recorded run.",
                                required=True)
  observe = flags.DEFINE_bool("observe", False,
                              "Run train.py with observed.patch, which observes the step.")
  paced = flags.DEFINE_bool("jaxpace", True,
                            "Run train.py with paced.patch; --nojaxpace runs it unpatched.")
  return workdir, lambda folder: script(
      folder, "observed" if observe.value else "paced" if paced.value else "")


def script(folder: pathlib.Path, patch: str = "") -> types.ModuleType:
  """Loads a folder's train.py, changed by one of the patches beside it.

  Args:
    folder: of the example.
    patch: "paced", "observed", or "" for none.
  """
  text = (folder / "train.py").read_text()
  if patch:
    text = patched(text, (folder / f"{patch}.patch").read_text())
  module = types.ModuleType(f"experiments.examples.{folder.name}.train")
  module.__file__ = str(folder / "train.py")
  exec(compile(text, module.__file__, "exec"), module.__dict__)
  return module


def patched(text: str, patch: str) -> str:
  """Applies a unified diff without context (`diff -U0`).

  Raises:
    ValueError: the lines that the patch takes out are not there.
  """
  lines = text.splitlines(keepends=True)
  hunks = re.split(r"^@@ -(\d+)(?:,(\d+))? .*\n", patch, flags=re.MULTILINE)[1:]
  for begin, count, body in reversed(list(zip(hunks[::3], hunks[1::3], hunks[2::3], strict=True))):
    gone = int(count) if count else 1
    at = int(begin) - (gone > 0)
    changes = body.splitlines(keepends=True)
    if lines[at:at + gone] != [line[1:] for line in changes if line.startswith("-")]:
      raise ValueError(f"The patch does not fit line {begin} of the script: make it anew.")
    lines[at:at + gone] = [line[1:] for line in changes if line.startswith("+")]
  return "".join(lines)


def run(train: Callable[[], object]) -> None:
  """Joins this process to its job, however it was started, and trains.

  Args:
    train: what to run.

  Raises:
    SystemExit: with status 2 and a sentence, if `train` raises `UserError`.
  """
  # absl's default, INFO, tells how the coordinator starts
  logging.getLogger("jax").setLevel(logging.WARNING)
  try:
    jaxpace.distributed.initialize()
    train()
  except UserError as error:
    print(f"{pathlib.Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    sys.exit(2)
