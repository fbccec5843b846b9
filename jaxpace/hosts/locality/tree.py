"""Reads files below a root, which stands for "/": the real one, a copy of another machine's, or one
made by a test.

What is missing, unreadable or not what it should be is None. Nothing here raises.
"""

from __future__ import annotations

import os
import re

from jaxpace.core.words import successive


class Tree:
  """Files of sysfs and procfs below `root`. Paths are given as on the machine, with or without the
  leading slash."""

  def __init__(self, root: str | os.PathLike[str] = "/"):
    self.root = os.path.realpath(root)

  @property
  def live(self) -> bool:
    """Whether this is the running machine, so that other sources than files speak of the same
    one."""
    return self.root == "/"

  def path(self, path: str) -> str:
    """Where `path` lies."""
    return os.path.join(self.root, path.lstrip("/"))

  def text(self, path: str) -> str | None:
    """The file's text without surrounding blanks."""
    try:
      # A few attributes of sysfs fail with EINVAL while their device is down.
      with open(self.path(path), encoding="utf-8", errors="replace") as file:
        return file.read(1 << 20).strip()
    except (OSError, ValueError):
      return None

  def match(self, path: str, pattern: str) -> str | None:
    """The first group of a pattern in the file's text, of which `^` and `$` match at line ends."""
    found = re.search(pattern, self.text(path) or "", re.MULTILINE)
    return found[1] if found else None

  def number(self, path: str) -> int | None:
    """The file's first word as a whole number, decimal or 0x…"""
    words = (self.text(path) or "").split()
    try:
      return int(words[0], 0) if words else None
    except ValueError:
      return None

  def names(self, path: str) -> list[str]:
    """Names in a folder, sorted; none if there is no such folder."""
    try:
      return sorted(os.listdir(self.path(path)))
    except OSError:
      return []

  def exists(self, path: str) -> bool:
    """Whether there is such a file or folder."""
    return os.path.exists(self.path(path))

  def resolve(self, path: str) -> str:
    """The path on the machine that `path` leads to through its links, with a leading slash."""
    real = os.path.realpath(self.path(path))
    below = os.path.relpath(real, self.root)
    return real if below.startswith("..") else "/" + below


def parse_list(text: str | None) -> tuple[int, ...]:
  """Numbers of a kernel list; those that can't be read are left out.

  >>> parse_list("0-3,8")
  (0, 1, 2, 3, 8)
  >>> parse_list(None), parse_list("x")
  ((), ())
  """
  found: set[int] = set()
  for piece in (text or "").split(","):
    first, dash, last = piece.strip().partition("-")
    if first.isdecimal() and (not dash or last.isdecimal()):
      begin, end = int(first), int(last or first)
      if end - begin < 1 << 16:
        found.update(range(begin, end + 1))
  return tuple(sorted(found))


def format_list(numbers: tuple[int, ...]) -> str:
  """Inverse of `parse_list`.

  >>> format_list((0, 1, 2, 3, 8))
  '0-3,8'
  """
  return ",".join(str(piece[0]) if len(piece) == 1 else f"{piece[0]}-{piece[-1]}"
                  for piece in successive(set(numbers)))

