"""Finds, checks and registers the shared libraries of the clocks, each once, at first use."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import re
import struct
from collections.abc import Sequence

import jax
import jaxlib

# Whether a shared library is there as a whole: loading a part of one would kill the process.

_LARGEST = 1 << 28


def whole(path: pathlib.Path) -> bool:
  """Returns whether all that the library's own tables speak of is in the file.

  The dynamic linker maps what the headers say. Where the file ends sooner, the first touch of a
  page beyond its end is a SIGBUS, which no `except` catches. Linkers write the table of sections
  last: with any piece of the end missing, or left as zeros, that table is wrong.

  Returns:
    True as well for what is no 64-bit ELF file: other systems' loaders check for themselves, and
    anything else is refused by the loader with an error.
  """
  try:
    if not path.is_file() or path.stat().st_size > _LARGEST:
      return False
    data = path.read_bytes()
  except OSError:
    return True
  if data[:4] != b"\x7fELF" or data[4:5] != b"\x02":
    return True
  try:
    return _tables(data, "<" if data[5] == 1 else ">")
  except (struct.error, IndexError):
    return False


def _tables(data: bytes, order: str) -> bool:
  """Whether segments lie inside `data`, and all sections are described; `struct.error` where a
  table doesn't."""
  segments, sections = struct.unpack_from(f"{order}QQ", data, 32)
  segment_size, segment_count, size, count = struct.unpack_from(f"{order}HHHH", data, 54)
  # Where each begins, and how long it is in the file.
  ends = [sum(struct.unpack_from(f"{order}Q16xQ", data, segments + 8 + number * segment_size))
          for number in range(segment_count)]
  kinds = [struct.unpack_from(f"{order}I", data, sections + number * size + 4)[0]
           for number in range(1, count)]
  return bool(ends) and all(kinds) and max(*ends, sections + count * size) <= len(data)


STAMP, DELAY, HOLD, NOTE, MARK = (
    "jaxpace_stamp", "jaxpace_delay", "jaxpace_hold", "jaxpace_note", "jaxpace_mark")
"""Names under which the handlers are known to XLA, and in the library."""

HANDLERS = 5
"""Version of the handlers' operands, as in clock.cc."""

REINSTALL = (
    "Install a C++ compiler (g++ or clang++) and reinstall jaxpace: "
    "`pip install --force-reinstall --no-deps --no-cache-dir` with the same source as before.")


@functools.cache
def unavailable() -> str:
  """Registers the native clock with XLA, unless it has been already.

  Returns:
    Empty once registered; else a sentence that says why it can't be used, and what to do about it.
    A library built on newer XLA FFI headers than those of the running jaxlib is never registered:
    XLA would refuse it while setting up the CPU backend, and every JAX program in the process would
    fail.
  """
  return registered("The native clock", built_as("clock"), ("jaxpace_handlers", HANDLERS),
                    (STAMP, DELAY, HOLD, NOTE, MARK), "cpu")


def registered(what: str, path: pathlib.Path | None, version: tuple[str, int],
               handlers: Sequence[str], platform: str) -> str:
  """Registers the handlers of a library with XLA.

  Args:
    what: whose library it is, as the beginning of a sentence.
    path: of the library; None where it was not built.
    version: the function that says of what version its handlers are, and the version wanted.
    handlers: names of its handlers.
    platform: of XLA's, which they are for.

  Returns:
    Empty once registered; else a sentence that says why it can't be used, as `unavailable`.
  """
  if path is None:
    return (f"{what} is not part of this installation of jaxpace (no compiler at the "
            f"time?). {REINSTALL}")
  if not whole(path):
    return (f"{what}'s library {path} is damaged: a part of it is missing (was a copy or "
            f"an installation cut short?). {REINSTALL}")
  try:
    library = ctypes.CDLL(str(path))
    if getattr(library, version[0])() != version[1]:
      return f"{what}'s library is left over from another version of jaxpace. {REINSTALL}"
    built = library.jaxpace_ffi_major(), library.jaxpace_ffi_minor()
    capsules = {name: jax.ffi.pycapsule(getattr(library, name)) for name in handlers}
  except (OSError, AttributeError) as error:
    return f"{what}'s library can't be loaded: {error}. {REINSTALL}"
  if reason := incompatibility(built, running_api(), what):
    return reason
  for name, capsule in capsules.items():
    jax.ffi.register_ffi_target(name, capsule, platform=platform)
  return ""


@functools.cache
def functions() -> ctypes.CDLL:
  """Returns the library itself, for what is called from the host; only where `unavailable` is
  empty."""
  library = ctypes.CDLL(str(built_as("clock")))
  pointer, word, long = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
  library.jaxpace_lanes.argtypes = [ctypes.POINTER(ctypes.c_int32), word]
  library.jaxpace_ring.argtypes = [pointer, pointer, long, word]
  library.jaxpace_executions.argtypes, library.jaxpace_executions.restype = [word, word], word
  if hasattr(library, "jaxpace_used"):  # younger than the handlers' version
    library.jaxpace_used.argtypes = [pointer, long, ctypes.c_int]
    library.jaxpace_usage_head.argtypes, library.jaxpace_usage_head.restype = [], long
  library.jaxpace_mark_here.argtypes = [word, word, word, word]
  library.jaxpace_record.argtypes = [word, word, word, ctypes.c_int64]
  return library


def built_as(name: str) -> pathlib.Path | None:
  """Returns the path of a library by the name of its source, or None where it was not built."""
  folder = pathlib.Path(__file__).parent
  return next(iter(sorted(folder.glob(f"{name}*.so")) + sorted(folder.glob(f"{name}*.dylib"))),
              None)


def running_api() -> tuple[int, int] | None:
  """Returns (major, minor) of the running jaxlib's XLA FFI, or None where its headers don't say."""
  header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
  try:
    text = header.read_text()
  except OSError:
    return None
  numbers = [re.search(rf"#define\s+XLA_FFI_API_{part}\s+(\d+)", text)
             for part in ("MAJOR", "MINOR")]
  major, minor = (int(number.group(1)) if number else None for number in numbers)
  return None if major is None or minor is None else (major, minor)


def incompatibility(built: tuple[int, int], running: tuple[int, int] | None,
                    what: str = "The native clock") -> str:
  """Returns why a library built on one version of XLA FFI can't run in another; empty where it can.

  Args:
    built: (major, minor) of the headers the library was built on.
    running: (major, minor) of the running jaxlib, None where unknown.
    what: whose library it is.
  """
  if running is None:
    return (f"{what} is not used: jaxlib {jaxlib.__version__} does not say which version "
            "of XLA FFI it has, and a wrong one would break the CPU backend. A released jaxlib "
            "from the package index has the headers.")
  if built[0] != running[0] or built[1] > running[1]:
    return (f"{what} is not used: it was built on XLA FFI {built[0]}.{built[1]}, and "
            f"jaxlib {jaxlib.__version__} has {running[0]}.{running[1]}. Reinstall jaxpace beside "
            "this jaxlib: `pip install --force-reinstall --no-deps --no-cache-dir` with the same "
            "source as before.")
  return ""
