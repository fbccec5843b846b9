"""Shows a run again and again, on a terminal or in a pipe, until it is interrupted."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from jaxpace.diagnosis.live.follower import Follower
from jaxpace.reporting.console import make_console
from jaxpace.reporting.watch.line import News, line
from jaxpace.reporting.watch.screen import Screen
from jaxpace.trace.run import RunError

Sleep = Callable[[float], None]
"""Waits so many seconds, or until there is something to draw: the terminal's size has changed."""


def once(follower: Follower, console: Console | None = None) -> None:
  """Prints what there is now, whole.

  Raises:
    RunError: there is nothing yet.
  """
  unix = time.time()
  look = follower.poll(time.monotonic(), unix)
  if look.state.kind == "waiting" and not look.processes:
    raise RunError(f"Nothing is recorded at {look.path} yet. Without --once it is waited for.")
  (console or make_console()).print(Screen(look, unix, whole=True))


def on_terminal(follower: Follower, console: Console, every: float,
                sleep: Sleep | None = None) -> None:
  """Fills the terminal, and gives it back as it was, with the last look left on it.

  Args:
    follower: of the run.
    console: a terminal; its size is asked again at every refresh.
    every: s between two looks.
    sleep: replaces the wait between two looks; the exception it raises ends the view.
  """
  screen: Screen | None = None
  with contextlib.ExitStack() as stack:
    wait = sleep or stack.enter_context(_woken_by_resizing())
    try:
      with Live(Text("Reading ..."), console=console, screen=True, auto_refresh=False,
                redirect_stdout=False, redirect_stderr=False) as live:
        while True:
          begin, unix = time.monotonic(), time.time()
          screen = Screen(follower.poll(begin, unix), unix)
          live.update(screen, refresh=True)
          # A change of size draws the same look again; nothing is read for it.
          while (left := begin + every - time.monotonic()) > 0:
            wait(left)
            if begin + every > time.monotonic():
              live.refresh()
    finally:
      if screen is not None:
        console.print(screen)


def in_lines(follower: Follower, every: float, sleep: Sleep = time.sleep) -> None:
  """Prints a line a look, until the run has ended.

  Args:
    follower: of the run.
    every: s between two looks.
    sleep: waits so long; the exception it raises ends the view.

  Raises:
    BrokenPipeError: the reader has left.
  """
  news, encoding = News(), sys.stdout.encoding or "utf-8"
  while True:
    begin = time.monotonic()
    look = follower.poll(begin, time.time())
    print(line(look, news.of(look), encoding), flush=True)
    if look.state.kind == "ended":
      return
    sleep(max(begin + every - time.monotonic(), 0.0))


@contextlib.contextmanager
def _woken_by_resizing() -> Iterator[Sleep]:
  """A sleep that ends early where the terminal's size changes."""
  if not hasattr(signal, "SIGWINCH"):
    yield time.sleep
    return
  receive, send = os.pipe()
  os.set_blocking(send, False)

  def resized(*_: object) -> None:
    with contextlib.suppress(BlockingIOError):
      os.write(send, b"\0")

  def sleep(seconds: float) -> None:
    ready, _, _ = select.select([receive], [], [], seconds)
    if ready:
      os.read(receive, 4096)

  before = signal.signal(signal.SIGWINCH, resized)
  try:
    yield sleep
  finally:
    signal.signal(signal.SIGWINCH, before)
    os.close(receive)
    os.close(send)
