"""Flushing on SIGTERM without taking it away from anyone else.

The recorder wants the rows on disk before the process dies; the program may want to checkpoint
first. So:

  * a wake-up file descriptor (`signal.set_wakeup_fd`) wakes the writer thread at once, even while
    the main thread waits inside a collective and no Python handler can run;
  * a Python handler that was there before is called as before;
  * a handler of a C library, such as the preemption notifier `jax.distributed.initialize` installs,
    is called as well, so that `reached_preemption` and orbax work on: it is called through its
    pointer. That notifier swallows the signal. Where the program never asks it, nobody will stop
    for it, and the process dies as if there were none;
  * where nobody handled SIGTERM the process dies of it as before, only later: once the loop has
    reached a step boundary, or after the grace time. So it is with a C handler that can't be called
    by hand;
  * forked children (data loaders) get back what was there before: their SIGTERM is not this
    process's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal

_LOG = logging.getLogger("jaxpace")

Mode = Literal["off", "default", "python", "native", "ignored"]
"""Who handled SIGTERM before: nobody, a Python function, a C library; or it was ignored. "off": not
watching."""

# Room for any platform's `struct sigaction`; its first field is the handler's pointer.
_ACTION_BYTES = 512
_IGNORE = 1  # SIG_IGN
_SA_SIGINFO = 0x40 if sys.platform == "darwin" else 0x4
_FLAGS_OFFSET = 12 if sys.platform == "darwin" else ctypes.sizeof(ctypes.c_void_p) + 128


class Termination:
  """Watches for SIGTERM. `install` and `restore` belong to the main thread, the rest to any."""

  def __init__(self, wake: socket.socket, asked: Callable[[], bool] = lambda: True,
               listens: Callable[[], bool] = lambda: True):
    """Prepares, installs nothing.

    Args:
      wake: non-blocking socket; the number of an arriving signal is written to it as one byte.
      asked: whether the program asks a C library's handler whether the signal has come.
      listens: whether anybody reads from the other end; else the signal takes its course at once.
    """
    self._wake, self._asked, self._listens = wake, asked, listens
    self._previous: Any = None
    self._saved_action: ctypes.Array | None = None
    self._native: Any = None
    self._told = False
    self._had_wakeup = False
    self._pointer = 0
    self.mode: Mode = "off"
    self.received = False

  def install(self) -> bool:
    """Begins to watch.

    Call it after `jax.distributed.initialize`, whose notifier would otherwise replace this handler.

    Returns:
      Whether it watches: only Python's main thread may install signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
      _LOG.info("The recorder runs outside the main thread: SIGTERM is not watched, "
                "the rows of the last seconds may be lost to it.")
      return False
    # Python's own table knows nothing of a handler that a C library has laid over it: look at the
    # real one.
    saved = _read_action()
    self._previous = signal.signal(signal.SIGTERM, self._handle)
    pointer, self._pointer = _handler_pointer(saved), _handler_pointer(_read_action())
    if not pointer:
      self.mode = "default"
    elif pointer == _IGNORE:
      self.mode = "ignored"
    elif pointer == self._pointer:
      self.mode = "python"
    else:
      self.mode = "native"
      self._saved_action, self._native = saved, _native_handler(saved)
      self._asked()  # from here on it is known whether it is
    other = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))
    self._had_wakeup = other == -1
    if not self._had_wakeup:
      signal.set_wakeup_fd(other)
      _LOG.info("Another part of the program (asyncio, say) uses the signal wake-up descriptor: it "
                "keeps it. On SIGTERM rows are written once the main thread runs Python again.")
    return True

  def restore(self) -> None:
    """Puts back what was there before, unless someone else has taken over since."""
    if self.mode == "off" or threading.current_thread() is not threading.main_thread():
      return
    if self._had_wakeup:
      current = signal.set_wakeup_fd(-1)
      if current not in (-1, self._wake.fileno()):
        signal.set_wakeup_fd(current)
    if signal.getsignal(signal.SIGTERM) == self._handle:
      signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
      # Python's own table is as it was; now the C handler over it.
      if self._saved_action is not None:
        _libc().sigaction(int(signal.SIGTERM), self._saved_action, None)
    self.mode = "off"

  def tell_native(self) -> None:
    """Passes the signal on to the C handler that was there before, once."""
    if self._native is not None and not self._told:
      self._told = True
      self._native(int(signal.SIGTERM), None, None)

  @property
  def raises_again(self) -> bool:
    """Whether the signal still has to take its course (`raise_again`) once the rows are written.
    Where another handler has been put in this one's place, that one is its course."""
    return self._stands() and (self.mode == "default" or (
        self.mode == "native" and (self._native is None or not self._asked())))

  @property
  def may_be_asked(self) -> bool:
    """Whether the program may have been about to ask a C library's handler for the first time."""
    return self.mode == "native" and self._native is not None

  def _stands(self) -> bool:
    return (signal.getsignal(signal.SIGTERM) == self._handle
            and _handler_pointer(_read_action()) == self._pointer)

  def raise_again(self) -> None:
    """Lets SIGTERM do what it would have done without the recorder. Works from any thread."""
    libc = _libc()
    if self._saved_action is not None and self._native is None:
      libc.sigaction(int(signal.SIGTERM), self._saved_action, None)
    else:
      libc.signal.restype = ctypes.c_void_p
      libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
      libc.signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)

  def _handle(self, signum: int, frame: Any) -> None:
    self.received = True
    with contextlib.suppress(OSError):
      self._wake.send(bytes([signum]))
    self.tell_native()
    if self.mode == "python" and callable(self._previous):
      self._previous(signum, frame)
    elif not self._listens() and self.raises_again:
      self.raise_again()


def in_main_thread(do: Callable[[], object]) -> None:
  """Has the main thread call `do` when it next runs Python; from any thread. What goes wrong with
  it is nothing to what the main thread does."""
  def call(_: Any) -> int:
    try:
      do()
    except Exception as error:
      _LOG.debug("Signals", exc_info=error)
    return 0

  if threading.current_thread() is threading.main_thread():
    call(None)
    return
  called = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call)
  _pending.append(called)
  ctypes.pythonapi.Py_AddPendingCall(called, None)


_pending: list[Any] = []
"""What Python calls is held for good: it must be there while it runs."""


def _forget(reference: weakref.ref[Termination]) -> None:
  """In a forked child: stops watching."""
  termination = reference()
  if termination is not None:
    termination.restore()


def _libc() -> ctypes.CDLL:
  return ctypes.CDLL(None, use_errno=True)


def _read_action() -> ctypes.Array:
  """Reads the installed `struct sigaction` of SIGTERM as bytes."""
  action = ctypes.create_string_buffer(_ACTION_BYTES)
  if _libc().sigaction(int(signal.SIGTERM), None, action) != 0:
    raise OSError(ctypes.get_errno(), "sigaction")
  return action


def _handler_pointer(action: ctypes.Array) -> int:
  return ctypes.cast(action, ctypes.POINTER(ctypes.c_void_p))[0] or 0


def _native_handler(action: ctypes.Array) -> Any:
  """Makes the saved action's handler callable; None where it can't be called with a signal number
  alone."""
  flags = ctypes.c_int.from_buffer(action, _FLAGS_OFFSET).value
  if flags & _SA_SIGINFO:
    return None
  pointer = _handler_pointer(action)
  return ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(pointer)
