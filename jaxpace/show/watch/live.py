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

from jaxpace.diagnose.floor import SHARES
from jaxpace.diagnose.live.follower import Follower
from jaxpace.diagnose.live.look import Snapshot
from jaxpace.diagnose.words.names import milliseconds
from jaxpace.runs.plain_text import plain, shortened
from jaxpace.runs.problems import duration
from jaxpace.runs.run import RunError
from jaxpace.show.console import make_console
from jaxpace.show.watch.screen import Screen


def line(look: Snapshot, news: list[str], encoding: str = "utf-8") -> str:
  """Says the look in one line.

  Args:
    look: what to say.
    news: sentences that have not been said yet; they come last.
    encoding: of the output.
  """
  words = []
  if look.state.kind != "running":
    words.append(look.state.sentence)
  if look.step >= 0:
    words.append(f"step {look.step:,}"
                 + (f" (attempt {look.attempt + 1})" if look.attempt > 0 else "") + ";")
  numbers = look.numbers
  if numbers is not None:
    mean, median, p99, _ = map(milliseconds, numbers.step_time)
    words.append(f"{mean} per step (median {median}, 99th percentile {p99});")
    if numbers.shares:
      words.append(", ".join(f"{name} {100 * numbers.shares[name]:.1f} %" for name in SHARES) + ";")
    if numbers.late:
      latest = numbers.late[0]
      where = f" on {shortened(latest.host)}" if latest.host else ""
      words.append(f"latest rank {latest.rank}{where} by {milliseconds(latest.lateness)};")
    if numbers.guard.on is not None:
      effect = ("" if numbers.guard.effect is None
                else f", effect {100 * numbers.guard.effect:+.1f} %")
      words.append(f"guard {'on' if numbers.guard.on else 'off'}{effect};")
  if look.age is not None:
    words.append(f"rows {duration(look.age)} old.")
  return plain(" ".join([*words, *news]), encoding)


class News:
  """Picks the sentences on onsets, events and notes that are new."""

  def __init__(self) -> None:
    """Everything is new."""
    self._shown: set[str] = set()

  def of(self, look: Snapshot) -> list[str]:
    """Returns new sentences, in their order."""
    every = ([alert.sentence for alert in look.alerts] + [event.sentence for event in look.events]
             + list(look.notes))
    fresh = [sentence for sentence in dict.fromkeys(every) if sentence not in self._shown]
    self._shown = set(every)
    return fresh


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
