"""Shows a run again and again, on a terminal or in a pipe, until it is interrupted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

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

_REDRAWN = 2
"""Times per second; nothing is read for it."""


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


def on_terminal(follower: Follower, console: Console, every: float) -> None:
  """Fills the terminal until Ctrl-C, and gives it back as it was, with the last look left on it.

  Args:
    follower: of the run.
    console: a terminal; a change of its size draws the same look again.
    every: s between two looks.
  """
  screen: Screen | None = None
  try:
    with Live(Text("Reading ..."), console=console, screen=True, refresh_per_second=_REDRAWN,
              redirect_stdout=False, redirect_stderr=False) as live:
      while True:
        begin, unix = time.monotonic(), time.time()
        screen = Screen(follower.poll(begin, unix), unix)
        live.update(screen, refresh=True)
        time.sleep(max(begin + every - time.monotonic(), 0.0))
  finally:
    if screen is not None:
      console.print(screen)


def in_lines(follower: Follower, every: float,
             sleep: Callable[[float], None] = time.sleep) -> None:
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
