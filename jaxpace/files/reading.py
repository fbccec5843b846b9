"""Reads files that may be anything: regular ones only, without waiting, up to a size; and JSON
against its schema. What does not fit is left out, key by key, and named."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec

_KINDS = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"),
          (stat.S_ISCHR, "a device file"), (stat.S_ISBLK, "a device file"))


class UnreadableError(ValueError):
  """What a file holds can't be used; the message is the end of a sentence that begins with the
  file's name."""


def why_unreadable(error: OSError | UnreadableError) -> str:
  """The end of a sentence that begins with a file's name."""
  if isinstance(error, FileNotFoundError):
    return "is missing"
  return f"can't be read ({error.strerror or error})" if isinstance(error, OSError) else str(error)


def check_regular(path: str | os.PathLike[str]) -> int:
  """Checks that a file is a regular one, and returns its size in bytes: opening a FIFO would wait
  for its writer, reading a device has no end. Raises UnreadableError where it is something else."""
  return _size(os.stat(path))


def regular_file(descriptor: int) -> BinaryIO:
  """Returns a descriptor that was opened for reading as a file, once it is a regular one; else it
  is closed, and an UnreadableError raised."""
  try:
    _size(os.fstat(descriptor))
  except BaseException:
    os.close(descriptor)
    raise
  return os.fdopen(descriptor, "rb")


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
  """Reads a file, or what a link leads to; UnreadableError, if it is no regular file, or has more
  than `most` bytes."""
  with _opened(path) as file:
    data = file.read(most + 1)
  if len(data) > most:
    raise UnreadableError(f"has more than {most:,} bytes")
  return data


def read_end(path: str | os.PathLike[str], most: int) -> bytes:
  """Reads the last `most` bytes of a file that grows by lines; a line that is cut is left out.
  Raises UnreadableError where it is no regular file."""
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


LARGEST = 16 << 20
"""Bytes of a JSON file, unless its reader knows better: a run's own files are a thousandth of
it."""
DEEPEST = 40
"""Objects and lists inside each other. A configuration is written with 20 at most."""
_LARGE = 1 << 63
_ONE_BY_ONE = 16
_MOST_LEFT_OUT = 64
_LONGEST_SENTENCE = 200
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?$", re.DOTALL)
_TOKEN = re.compile(r"\.([^.\[]+)|\[(\d+)\]|\[\.\.\.\]")


def read_document(path: str | os.PathLike[str], schema: type[msgspec.Struct],
                  most: int = LARGEST) -> tuple[dict[str, Any], list[str]]:
  """Reads a file that should hold one JSON object, of at most so many bytes, whose known keys are
  as its schema says; every key may be absent. See `check`. Raises UnreadableError where it is no
  regular file, too large, no JSON object, or nested too deeply: the end of a sentence that begins
  with the file's name."""
  return check(parse(read_bytes(path, most)), schema)


def parse(data: bytes) -> dict[str, Any]:
  """Reads one JSON object, or raises an UnreadableError. Numbers beyond 64 bits, NaN and infinities
  become text, and half characters visible ones."""
  try:
    value = json.loads(data.decode("utf-8"), parse_constant=str, parse_int=_whole,
                       parse_float=_real)
  except RecursionError:
    raise UnreadableError(
        f"nests more than {DEEPEST} objects and lists inside each other") from None
  except ValueError:
    raise UnreadableError("can't be read (torn or not JSON)") from None
  if not isinstance(value, dict):
    raise UnreadableError("can't be read (torn or not JSON: it holds no object)")
  return _clean(value, 0)


def check(value: dict[str, Any], schema: type) -> tuple[dict[str, Any], list[str]]:
  """Leaves out of an object what is not as its schema says; UnreadableError, if hardly anything of
  it fits.

  Returns:
    The object, changed, keys that the schema does not know as they were; and what did not fit, as
    ends of sentences: "'plan.ranks' is left out: Expected `int`, got `str`".
  """
  left_out: list[str] = []
  while True:
    try:
      msgspec.convert(value, schema)
      return value, left_out
    except msgspec.ValidationError as error:
      what, path = explained(error)
    tokens = [name or int(index or -1) for name, index in _TOKEN.findall(path)]
    # A key that is named by its object's path only, a name of the object's own: the object goes as
    # a whole.
    gone = _remove(value, tokens[:1] if len(left_out) >= _ONE_BY_ONE else tokens)
    if not gone or len(left_out) >= _MOST_LEFT_OUT:
      raise UnreadableError(f"is not of its format ({what})")
    left_out.append(f"{gone!r} is left out: {what[:1].lower()}{what[1:]}")


def explained(error: msgspec.ValidationError) -> tuple[str, str]:
  """Returns what does not fit, and the path of that in the object; empty where it is unknown."""
  found = _AT.match(str(error))
  return (found["what"], found["path"] or "") if found else (str(error), "")


def in_words(error: msgspec.ValidationError, meanings: Mapping[str, str], otherwise: str) -> str:
  """Says what does not fit in a file that a person may have written, as the end of a sentence: by
  what each of its keys takes, or what it takes at all where the key is unknown."""
  what, path = explained(error)
  name = next((name for name, _ in reversed(_TOKEN.findall(path)) if name in meanings), "")
  said = f"{what} for {name}" if name else what
  return f"{said[:_LONGEST_SENTENCE]}: {meanings.get(name, otherwise)}"


def _remove(value: Any, tokens: list[Any]) -> str:
  """Takes the innermost named value on a path out; returns its path, empty where there is none."""
  holder, key, name, at = None, "", "", value
  path: list[str] = []
  for token in tokens:
    if isinstance(token, str) and isinstance(at, dict) and token in at:
      path.append(token)
      holder, key, name = at, token, ".".join(path)
      at = at[token]
    elif isinstance(token, int) and isinstance(at, list) and 0 <= token < len(at):
      at = at[token]
    else:
      break
  if holder is None:
    return ""
  del holder[key]
  return name


def _clean(value: Any, depth: int) -> Any:
  if depth > DEEPEST:
    raise UnreadableError(f"nests more than {DEEPEST} objects and lists inside each other")
  if isinstance(value, dict):
    return {_text(key): _clean(entry, depth + 1) for key, entry in value.items()}
  if isinstance(value, list):
    return [_clean(entry, depth + 1) for entry in value]
  return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
  """A half of a pair of surrogates can't be written anywhere: shown as its escape."""
  return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _whole(text: str) -> int | str:
  value = int(text) if len(text) < 21 else _LARGE
  return value if -_LARGE <= value < _LARGE else text[:40]


def _real(text: str) -> float | str:
  value = float(text)
  return value if abs(value) < float("inf") else text[:40]
