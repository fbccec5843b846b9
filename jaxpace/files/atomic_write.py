"""Files that others may look at, or tamper with, while they are written.

Whole or not at all: a reader sees the old one or the new one, never half of one. And one's own: a
run directory may be shared, so whatever stands there under a name that can be guessed may have been
put there to have something else written over. No link is followed, no pipe waited for, nobody
else's file changed. What the user names, a report say, is another matter: there a link is a wish,
and a device or a pipe is where the user wants it (`writing_named`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import stat
import uuid
from collections.abc import Iterator
from typing import BinaryIO

_LOG = logging.getLogger("jaxpace")
# Absent on Windows, where links need a privilege and there are no pipes in folders.
_CAREFULLY = (getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
              | getattr(os, "O_CLOEXEC", 0))
_TRIES = 3


class ForeignFileError(OSError):
  """Something that isn't this user's own file stands where one is to be written: a sentence that
  says what."""


def temporary(path: pathlib.Path) -> pathlib.Path:
  """Returns the name, in the same folder, under which this process writes what is to become
  `path`."""
  return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextlib.contextmanager
def replacing(path: pathlib.Path, written: pathlib.Path | None = None, *,
              fsync: bool = False) -> Iterator[BinaryIO]:
  """Gives the body a new file to write to, which then takes the place of `path`; after an error
  nothing is left.

  Args:
    path: the file to make or replace. A link there is replaced, not followed.
    written: the temporary name; None takes `temporary(path)`. Where that is taken for good, another
      that begins and ends alike.
    fsync: whether the data must have reached the disk before the file gets its name: that guards
      against a crash of the machine, and is not needed against one of the process.

  Raises:
    OSError: it can't be written.
  """
  file, written = _new(temporary(path) if written is None else written)
  try:
    with file:
      yield file
      if fsync:
        file.flush()
        os.fsync(file.fileno())
    os.replace(written, path)
  except BaseException:
    with contextlib.suppress(OSError):
      written.unlink(missing_ok=True)
    raise


@contextlib.contextmanager
def writing_named(target: str | os.PathLike[str]) -> Iterator[BinaryIO]:
  """Gives the body the file that the user names, as a whole or not at all.

  A link stays a link: the file that it leads to is replaced. A device or a pipe is written to as it
  stands: root could put a file in the place of `/dev/null`, and every program of the machine would
  then read from it.

  Raises:
    OSError: it can't be written.
  """
  path = pathlib.Path(os.path.realpath(target))
  if is_special(path):
    with open(path, "wb") as file:
      yield file
  else:
    with replacing(path) as file:
      yield file


def is_special(path: pathlib.Path) -> bool:
  """Returns whether a device, a pipe or a socket has that name: nothing may take its place."""
  return path.exists() and not path.is_file() and not path.is_dir()


def write_text(path: pathlib.Path, text: str, *, fsync: bool = False) -> None:
  """Replaces a text file.

  Raises:
    OSError: it can't be written.
  """
  with replacing(path, fsync=fsync) as file:
    file.write(text.encode("utf-8"))


def try_out(path: pathlib.Path) -> None:
  """Finds out whether a file could be made beside `path`; nothing is left.

  Raises:
    OSError: it can't be.
  """
  file, name = _new(temporary(path))
  file.close()
  name.unlink()


def open_own(path: pathlib.Path, flags: int, *, create: bool = True) -> int:
  """Opens a file that stays where it is, to write to it in place: a lock, a note that grows.

  What stands there and is no regular file with one name (a link, a pipe) is taken away, the name
  alone, and a new file made.

  Args:
    path: the file.
    flags: such as `os.O_WRONLY | os.O_APPEND`; it is opened without following links and without
      waiting.
    create: whether to make it where it is missing.

  Returns:
    A descriptor, which is the caller's to close.

  Raises:
    ForeignFileError: it is somebody else's, or can't be taken away.
    OSError: it can't be opened.
  """
  for _ in range(_TRIES):
    if create:
      with contextlib.suppress(FileExistsError):
        return os.open(path, flags | os.O_CREAT | os.O_EXCL | _CAREFULLY, 0o666)
    try:
      descriptor = os.open(path, flags | _CAREFULLY)
    except OSError as error:
      # a link; a pipe that nobody reads, a socket
      if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
        raise
    else:
      found = os.fstat(descriptor)
      if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        if _is_own(found, path.parent):
          return descriptor
        os.close(descriptor)
        raise ForeignFileError(f"{path} belongs to another user (number {found.st_uid}): it is "
                               "left as it is. Use a directory of your own, or have the "
                               "file removed.")
      os.close(descriptor)
    _take_away(path)
  raise ForeignFileError(
      f"{path} is made anew by somebody as soon as it is removed. Use a directory of your own.")


def append(path: pathlib.Path, text: str, *, fsync: bool = False) -> None:
  """Appends to a file of one's own, in one write.

  Raises:
    OSError: it can't be written.
  """
  descriptor = open_own(path, os.O_WRONLY | os.O_APPEND)
  try:
    os.write(descriptor, text.encode("utf-8"))
    if fsync:
      os.fsync(descriptor)
  finally:
    os.close(descriptor)


def folder(path: pathlib.Path) -> pathlib.Path:
  """Makes a folder of a run directory if it is missing; its parent must be there.

  Raises:
    ForeignFileError: it is a link, which may lead anywhere.
    OSError: it can't be made.
  """
  path.mkdir(exist_ok=True)
  if path.is_symlink():
    raise ForeignFileError(f"{path} is a link, and the folders of a run directory are not. Remove "
                           "it; to have the run elsewhere, record to a directory there.")
  return path


def _new(path: pathlib.Path) -> tuple[BinaryIO, pathlib.Path]:
  """Makes a file that was not there, as `path` or with a name that begins and ends alike."""
  for name in (path, path, path.with_name(f"{path.stem}.{uuid.uuid4().hex[:8]}{path.suffix}")):
    try:
      return open(name, "xb"), name
    except FileExistsError:
      # left by a process that was killed, or put there: the name goes, and nothing that it leads to
      with contextlib.suppress(OSError):
        name.unlink(missing_ok=True)
  raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def _take_away(path: pathlib.Path) -> None:
  try:
    path.unlink(missing_ok=True)
  except OSError as error:
    raise ForeignFileError(f"{path} is a link, a pipe or has a second name, and can't be removed "
                           f"({error.strerror or error}). Use a directory of your own.") from error
  _LOG.warning("%s was a link, a pipe or had a second name: it was removed, not followed.", path)


def _is_own(found: os.stat_result, where: pathlib.Path) -> bool:
  """Whether the file belongs to this user, or to whom files made in that folder belong (some file
  systems say so)."""
  if not hasattr(os, "geteuid") or found.st_uid == os.geteuid():
    return True
  try:
    file, name = _new(where / f".owner.{os.getpid()}.tmp")
    with file:
      owner = os.fstat(file.fileno()).st_uid
    name.unlink(missing_ok=True)
  except OSError:
    return False
  return found.st_uid == owner
