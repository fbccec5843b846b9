"""The line of the user's code that an operation comes from."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence


def innermost(frames: Sequence[tuple[str, int]]) -> str | None:
  """The innermost line that is no installed package's, such as "model.py:120"; None without frames.

  Args:
    frames: file and line of each call, innermost first.
  """
  if not frames:
    return None
  installed = {sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")}
  for file, line in frames:
    if not any(file.startswith(folder) for folder in installed):
      return f"{os.path.basename(file)}:{line}"
  file, line = frames[0]
  return f"{os.path.basename(file)}:{line}"
