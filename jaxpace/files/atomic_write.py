"""Writes files whole or not at all: a reader sees the old one or the new one, never half of one.

By path, for what the user names or is written once; `jaxpace.files.folders` has the same in a
folder that is held open while a job runs, where no link is followed. What the user names, a report
say, is another matter: there a link is a wish, and a device or a pipe is where the user wants it
(`writing_named`).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import BinaryIO

from jaxpace.files.folders import Folder


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
    with Folder(path.parent).replacing(path.name) as file:
      yield file


def is_special(path: pathlib.Path) -> bool:
  """Returns whether a device, a pipe or a socket has that name: nothing may take its place."""
  return path.exists() and not path.is_file() and not path.is_dir()


def write_text(path: pathlib.Path, text: str, *, fsync: bool = False) -> None:
  """Replaces a text file; see `Folder.replacing`.

  Raises:
    OSError: it can't be written.
  """
  Folder(path.parent).write_text(path.name, text, fsync=fsync)


def try_out(path: pathlib.Path) -> None:
  """Finds out whether a file could be made beside `path`; nothing is left.

  Raises:
    OSError: it can't be.
  """
  Folder(path.parent).try_out(path.name)
