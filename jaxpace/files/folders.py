"""Folders that are held open while files are written in them.

A run directory may be shared: whatever stands there under a name that can be guessed may have been
put there to have something else written over, and a folder may be replaced by a link while a job
runs. What is done in a `Folder` stays in it, wherever its name leads later: no link is followed, no
pipe waited for, nobody else's file changed. Files are written whole or not at all: readers see the
old one or the new one, never half of one.

What the user names, a report say, is another matter: there a link is a wish, and a device or a pipe
is where the user wants it (`writing_named`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import stat
import uuid
import weakref
from collections.abc import Iterator
from typing import BinaryIO

_LOG = logging.getLogger("jaxpace")
_CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# macOS has no O_PATH.
_HELD = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_TRIES = 3


class ForeignFileError(OSError):
  """Something that isn't one's own stands where a file is to be written, or somebody else writes
  there: a sentence that says what."""


class Folder:
  """A folder, held open until nobody refers to it. Names in it are those of files, without
  folders."""

  def __init__(self, path: str | os.PathLike[str], *inside: str):
    """Opens a folder that the user named, which must be there and may be a link; and those inside,
    one in the other, which are made where they are missing: ForeignFileError, if one of these is a
    link, which may lead anywhere."""
    self.path = pathlib.Path(path)
    """Where it was when it was opened."""
    self._closing: weakref.finalize | None = None
    self._hold(os.open(self.path, _HELD))
    for name in inside:
      self._enter(name)

  def open(self, name: str, flags: int) -> int:
    """Opens a file, without following links and without waiting; returns its descriptor."""
    return os.open(name, flags | _CAREFULLY, 0o666, dir_fd=self._descriptor)

  def stat(self, name: str) -> os.stat_result:
    """Returns what stands under a name; of a link, the link."""
    return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

  def names(self) -> list[str]:
    """Returns what there is in the folder, sorted."""
    listed = os.open(".", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._descriptor)
    try:
      return sorted(os.listdir(listed))
    finally:
      os.close(listed)

  def rename(self, name: str, new: str, to: Folder | None = None) -> None:
    """Gives a file another name, in this folder or another; what has that name is replaced."""
    os.replace(name, new, src_dir_fd=self._descriptor, dst_dir_fd=(to or self)._descriptor)

  def unlink(self, name: str) -> None:
    """Removes a file, if there is one."""
    with contextlib.suppress(FileNotFoundError):
      os.unlink(name, dir_fd=self._descriptor)

  @contextlib.contextmanager
  def replacing(self, name: str, *, fsync: bool = False) -> Iterator[BinaryIO]:
    """Gives the body a new file to write to, which then takes the place of `name`; after an error
    nothing is left. A link there is replaced, not followed. What a crash leaves is named
    `.<name>.<random>.tmp`. With `fsync` the data have reached the disk before the file gets its
    name: that guards against a crash of the machine, and is not needed against one of the process.
    """
    file, written = self._new(name)
    try:
      with file:
        yield file
        if fsync:
          file.flush()
          os.fsync(file.fileno())
      self.rename(written, name)
    except BaseException:
      with contextlib.suppress(OSError):
        self.unlink(written)
      raise

  def write_text(self, name: str, text: str, *, fsync: bool = False) -> None:
    """Replaces a text file."""
    with self.replacing(name, fsync=fsync) as file:
      file.write(text.encode("utf-8"))

  def try_out(self, name: str) -> int:
    """Finds out whether a file could be made beside `name`, and returns the number of the user whom
    it would belong to; nothing is left."""
    file, written = self._new(name)
    with file:
      owner = os.fstat(file.fileno()).st_uid
    self.unlink(written)
    return owner

  def open_own(self, name: str, flags: int, *, create: bool = True) -> int:
    """Opens a file that stays where it is, to write to it in place: a lock, a note that grows;
    makes it where it is missing, if asked to. Returns a descriptor, which is the caller's to close.

    What stands there and is no regular file with one name (a link, a pipe) is taken away, the name
    alone, and a new file made. ForeignFileError, if it is somebody else's, or can't be taken away.
    """
    path = self.path / name
    for _ in range(_TRIES):
      if create:
        with contextlib.suppress(FileExistsError):
          return self.open(name, flags | os.O_CREAT | os.O_EXCL)
      try:
        descriptor = self.open(name, flags)
      except OSError as error:
        # a link; a pipe that nobody reads, a socket
        if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
          raise
      else:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
          if self._is_own(found):
            return descriptor
          os.close(descriptor)
          raise ForeignFileError(f"{path} belongs to another user (number {found.st_uid}): it is "
                                 "left as it is. Use a directory of your own, or have the "
                                 "file removed.")
        os.close(descriptor)
      self._take_away(name)
    raise ForeignFileError(
        f"{path} is made anew by somebody as soon as it is removed. Use a directory of your own.")

  def append(self, name: str, text: str, *, fsync: bool = False) -> None:
    """Appends to a file of one's own, in one write."""
    descriptor = self.open_own(name, os.O_WRONLY | os.O_APPEND)
    try:
      os.write(descriptor, text.encode("utf-8"))
      if fsync:
        os.fsync(descriptor)
    finally:
      os.close(descriptor)

  def _hold(self, descriptor: int) -> None:
    if self._closing is not None:
      self._closing()
    self._descriptor = descriptor
    self._closing = weakref.finalize(self, os.close, descriptor)
    # The system does it then, once no thread can be writing here.
    self._closing.atexit = False

  def _enter(self, name: str) -> None:
    path = self.path / name
    with contextlib.suppress(FileExistsError):
      os.mkdir(name, dir_fd=self._descriptor)
    if stat.S_ISLNK(self.stat(name).st_mode):
      raise ForeignFileError(f"{path} is a link, and the folders of a run directory are not. "
                             "Remove it; to have the run elsewhere, record to a directory there.")
    self._hold(os.open(name, _HELD | os.O_NOFOLLOW, dir_fd=self._descriptor))
    self.path = path

  def _new(self, name: str) -> tuple[BinaryIO, str]:
    """Makes a file that is to become `name`, under a name that nobody can guess."""
    written = f".{name}.{uuid.uuid4().hex[:12]}.tmp"
    return open(self.path / written, "xb", opener=self._open_named), written

  def _open_named(self, path: str, flags: int) -> int:
    """For `open`, which shows the whole path in what it returns."""
    return self.open(os.path.basename(path), flags)

  def _take_away(self, name: str) -> None:
    path = self.path / name
    try:
      self.unlink(name)
    except OSError as error:
      raise ForeignFileError(f"{path} is a link, a pipe or has a second name, and can't be removed "
                             f"({error.strerror or error}). Use a directory of your own."
                             ) from error
    _LOG.warning("%s was a link, a pipe or had a second name: it was removed, not followed.", path)

  def _is_own(self, found: os.stat_result) -> bool:
    """Whether a file belongs to this user, or to whom files made in this folder belong (some file
    systems say so)."""
    try:
      return found.st_uid == os.geteuid() or found.st_uid == self.try_out("owner")
    except OSError:
      return False


@contextlib.contextmanager
def writing_named(target: str | os.PathLike[str]) -> Iterator[BinaryIO]:
  """Gives the body the file that the user names, as a whole or not at all.

  A link stays a link: the file that it leads to is replaced. A device or a pipe is written to as it
  stands: root could put a file in the place of `/dev/null`, and every program of the machine would
  then read from it.
  """
  path = pathlib.Path(os.path.realpath(target))
  if is_special(path):
    with open(path, "wb") as file:
      yield file
  else:
    with Folder(path.parent).replacing(path.name) as file:
      yield file


def is_special(path: pathlib.Path) -> bool:
  """Returns whether a device, a pipe or a socket has that name: nothing may take its place."""
  return path.exists() and not path.is_file() and not path.is_dir()
