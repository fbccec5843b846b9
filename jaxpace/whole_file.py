"""Files that are there as a whole or not at all: a reader sees the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator


def temporary(path: pathlib.Path) -> pathlib.Path:
  """Returns the name, in the same folder, under which this process writes what is to become `path`."""
  return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextlib.contextmanager
def replacing(path: pathlib.Path, written: pathlib.Path | None = None, *,
              fsync: bool = False) -> Iterator[pathlib.Path]:
  """Gives the body a temporary name to write to, and the file its own afterwards; after an error nothing is left.

  Args:
    path: the file to make or replace.
    written: the temporary name; None takes `temporary(path)`.
    fsync: whether the data must have reached the disk before the file gets its name: that guards against a crash of the
      machine, and is not needed against one of the process.

  Raises:
    OSError: it can't be written.
  """
  written = temporary(path) if written is None else written
  try:
    yield written
    if fsync:
      descriptor = os.open(written, os.O_RDONLY)
      try:
        os.fsync(descriptor)
      finally:
        os.close(descriptor)
    os.replace(written, path)
  except BaseException:
    with contextlib.suppress(OSError):
      written.unlink(missing_ok=True)
    raise


def write_text(path: pathlib.Path, text: str, *, fsync: bool = False) -> None:
  """Replaces a text file.

  Raises:
    OSError: it can't be written.
  """
  with replacing(path, fsync=fsync) as written:
    written.write_text(text, encoding="utf-8")
