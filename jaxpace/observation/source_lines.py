"""The line of the user's code that an operation comes from."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import PurePath

_INSTALLED = ("site-packages", "dist-packages")
"""Folders that hold packages in every environment, whichever of them this Python searches."""
_MACHINERY = ("jax", "jaxlib", "jaxpace")


def innermost(frames: Sequence[tuple[str, int]]) -> str | None:
  """The innermost line that is no installed package's, such as "models/layer.py:120".

  A trainer that is installed itself has none: its innermost line outside of JAX then, such as
  "flax/linen/linear.py:287". Paths are those by which Python imports the file, so they say more
  than a name that many packages use.

  Args:
    frames: file and line of each call, innermost first.

  Returns:
    Path and line; None without frames.
  """
  if not frames:
    return None
  paths = [(*_imported_from(file), line) for file, line in frames]
  others = [each for each in paths if each[0].split("/")[0] not in _MACHINERY]
  of_the_user = [each for each in others if not each[1]]
  path, _, line = (of_the_user or others or paths)[0]
  return f"{path}:{line}"


def _imported_from(file: str) -> tuple[str, bool]:
  """The path of a file below the folder that Python imports it from, and whether it is
  installed."""
  parts = PurePath(file).parts
  for index in reversed(range(len(parts))):
    if parts[index] in _INSTALLED:
      return "/".join(parts[index + 1:]), True
  standard = sysconfig.get_paths()["stdlib"]
  if file.startswith(standard):
    return os.path.relpath(file, standard), True
  folders = [os.path.abspath(folder) + os.sep for folder in sys.path]
  holding = max((folder for folder in folders if file.startswith(folder)), key=len, default=None)
  return (parts[-1] if holding is None else file[len(holding):]).replace(os.sep, "/"), False
