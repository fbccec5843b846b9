"""How a command ends that can't do what it was asked, or whose output nobody takes."""

from __future__ import annotations

import os
import sys

from jaxpace.trace.plain_text import plain


def refuse(command: str, sentence: str) -> int:
  """Prints one sentence on standard error, with the command's name before it; returns the exit
  status, 2.

  A path or name in it may be anybody's: it stays text, in one line.
  """
  print(plain(f"jaxpace {command}: {sentence}"), file=sys.stderr)
  return 2


def give_up_output() -> None:
  """Sends what is left of standard output nowhere: the interpreter would complain of it once more
  while it ends."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
