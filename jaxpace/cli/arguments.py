"""What several commands take as arguments: a window of steps, a number of ranks."""

from __future__ import annotations

import argparse


def window(text: str) -> tuple[int | None, int | None]:
  """Parses "A:B".

  >>> window("100:200"), window(":50")
  ((100, 200), (None, 50))
  """
  begin, colon, end = text.partition(":")
  try:
    found = (int(begin) if begin else None, int(end) if end else None)
  except ValueError:
    found = None
  if not colon or found is None:
    raise argparse.ArgumentTypeError(
        f"{text!r} is no range of steps: write A:B, such as 100:200, 100: or :200")
  first, stop = found
  if (first is not None and first < 0) or (stop is not None and stop < 0):
    raise argparse.ArgumentTypeError(f"{text!r} has a negative step")
  if first is not None and stop is not None and stop <= first:
    raise argparse.ArgumentTypeError(
        f"{text!r} is empty: B is one past the last step, so it must be above A")
  return found


def ranks(text: str) -> int | None:
  """Parses a number of ranks from 1, or "all", which is None."""
  if text == "all":
    return None
  try:
    number = int(text)
  except ValueError:
    number = 0
  if number < 1:
    raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks: give 1 or more, or 'all'")
  return number
