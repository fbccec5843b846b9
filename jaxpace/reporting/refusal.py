"""How a command ends that can't do what it was asked: one sentence on standard error, and status 2."""

from __future__ import annotations

import sys


def refuse(command: str, sentence: str) -> int:
  """Prints the sentence, with the command's name before it; returns the exit status."""
  print(f"jaxpace {command}: {sentence}", file=sys.stderr)
  return 2
