"""How a process of a joined job ends when an exception is not caught: at once, and with notice to
the launcher."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pathlib
import sys
import time
from types import TracebackType

from jaxpace.files import atomic_write
from jaxpace.hosts.launch.environment import NOTICE


def announce(path: str, exception: str) -> None:
  """Says, from inside a worker, that an exception is ending it. The file appears whole or not at
  all.

  Args:
    path: the file named by `JAXPACE_FAILURE_NOTICE`; its reader is `jaxpace.hosts.launch.outcome`.
    exception: one line.
  """
  notice = {"when_ns": time.monotonic_ns(), "pid": os.getpid(), "exception": exception}
  # the launcher is gone, or the disk full: the process fails anyway and says why
  with contextlib.suppress(OSError):
    atomic_write.write_text(pathlib.Path(path), json.dumps(notice))


def install() -> None:
  """Installs the hook for uncaught exceptions and what follows it at exit.

  JAX's own exit waits, for minutes, until all processes have come to theirs, and they wait in a
  collective for this one. Exit functions run last in, first out: those registered after this call
  run before `end`, which replaces the rest.
  """
  before = sys.excepthook
  owner = os.getpid()
  failed = False

  def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    nonlocal failed
    failed = os.getpid() == owner  # a forked child is not the process that joined
    if failed and (path := os.environ.get(NOTICE)) and not issubclass(kind, KeyboardInterrupt):
      words = str(error).strip().splitlines()
      announce(path, f"{kind.__name__}: {words[0][:300]}" if words else kind.__name__)
    before(kind, error, trace)

  def end() -> None:
    if not failed or os.getpid() != owner:
      return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(AttributeError, OSError, ValueError):
        stream.flush()
    os._exit(1)

  sys.excepthook = hook
  atexit.register(end)
