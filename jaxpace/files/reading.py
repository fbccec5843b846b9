"""Reads files that may be anything: regular ones only, without waiting, up to a size."""

from __future__ import annotations

import os
import pathlib
import stat
from typing import BinaryIO

_KINDS = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"),
          (stat.S_ISCHR, "a device file"), (stat.S_ISBLK, "a device file"))


class UnreadableError(ValueError):
  """What a file holds can't be used; the message is the end of a sentence that begins with the
  file's name."""


def check_regular(path: str | os.PathLike[str]) -> int:
  """Checks that a file is a regular one: opening a FIFO would wait for its writer, reading a device
  has no end.

  Returns:
    Its size in bytes.

  Raises:
    UnreadableError: it is something else.
    OSError: there is no such file.
  """
  return _size(os.stat(path))


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
  """Reads a file.

  Args:
    path: the file, or a link to it.
    most: bytes that it may have.

  Raises:
    UnreadableError: it is no regular file, or has more than `most` bytes.
    OSError: there is no such file, or it can't be opened.
  """
  file, _ = _opened(path)
  with file:
    data = file.read(most + 1)
  if len(data) > most:
    raise UnreadableError(f"has more than {most:,} bytes")
  return data


def read_end(path: str | os.PathLike[str], most: int) -> bytes:
  """Reads the last `most` bytes of a file that grows by lines; a line that is cut is left out.

  Raises:
    UnreadableError: it is no regular file.
    OSError: there is no such file, or it can't be opened.
  """
  file, size = _opened(path)
  with file:
    begin = max(0, size - most)
    file.seek(begin)
    data = file.read(most)
  return data.partition(b"\n")[2] if begin else data


def is_regular(path: pathlib.Path) -> bool:
  """Whether there is such a file, and it is a regular one or a link to one."""
  try:
    return stat.S_ISREG(path.stat().st_mode)
  except OSError:
    return False


def _size(status: os.stat_result) -> int:
  if stat.S_ISREG(status.st_mode):
    return status.st_size
  kind = next((name for test, name in _KINDS if test(status.st_mode)),
              "of a kind that is not known")
  raise UnreadableError(f"is {kind}, not a regular file")


def _opened(path: str | os.PathLike[str]) -> tuple[BinaryIO, int]:
  """Opens a regular file for reading, and tells its size. A FIFO without a writer opens at once,
  and is refused."""
  descriptor = os.open(path,
                       os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
  try:
    size = _size(os.fstat(descriptor))
  except BaseException:
    os.close(descriptor)
    raise
  return os.fdopen(descriptor, "rb"), size
