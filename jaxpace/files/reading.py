"""Reads files that may be anything: regular ones only, without waiting, up to a size."""

from __future__ import annotations

import os
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


def regular_file(descriptor: int) -> BinaryIO:
  """Returns a descriptor that was opened for reading as a file, once it is a regular one; else it
  is closed.

  Raises:
    UnreadableError: it is something else.
  """
  try:
    _size(os.fstat(descriptor))
  except BaseException:
    os.close(descriptor)
    raise
  return os.fdopen(descriptor, "rb")


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
  """Reads a file.

  Args:
    path: the file, or a link to it.
    most: bytes that it may have.

  Raises:
    UnreadableError: it is no regular file, or has more than `most` bytes.
    OSError: there is no such file, or it can't be opened.
  """
  with _opened(path) as file:
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
  with _opened(path) as file:
    begin = max(0, os.fstat(file.fileno()).st_size - most)
    file.seek(begin)
    data = file.read(most)
  return data.partition(b"\n")[2] if begin else data


def _size(status: os.stat_result) -> int:
  if stat.S_ISREG(status.st_mode):
    return status.st_size
  kind = next((name for test, name in _KINDS if test(status.st_mode)),
              "of a kind that is not known")
  raise UnreadableError(f"is {kind}, not a regular file")


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
  """Opens a regular file for reading. A FIFO without a writer opens at once, and is refused."""
  return regular_file(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
