"""The live view of a run: drawn for a terminal of any width and height, again and again, or said in
lines for a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from jaxpace.core.words import duration, plain, plural, shortened
from jaxpace.diagnose.floor import SHARES
from jaxpace.diagnose.follower import Follower, LateRank, Numbers, Snapshot
from jaxpace.diagnose.selected_steps import ratio
from jaxpace.diagnose.words.names import milliseconds
from jaxpace.runs.run import RunError
from jaxpace.show.console import draw_bar, make_console
from jaxpace.show.terminal import COLOUR

WIDEST = 120
_LEVELS, _ASCII_LEVELS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_STYLES = {"waiting": "yellow", "running": "green", "ended": "blue", "quiet": "bold yellow",
           "dead": "bold red"}
_RANKS = 8
_LEAST_HEIGHT = 8


class Screen:
  """One look, drawn for the console that it is printed on: made anew whenever the console's size
  has changed."""

  def __init__(self, look: Snapshot, unix: float, whole: bool = False):
    """Holds what is to be drawn."""
    self._look, self._unix, self._whole = look, unix, whole

  def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
    width = min(options.max_width, WIDEST)
    height = 1_000_000 if self._whole else max(options.size.height, _LEAST_HEIGHT)
    room = options.update(width=width, height=None)

    def text(value: object) -> str:
      return plain(value, console.encoding)

    def drawn(lines: Sequence[Row | Padding]) -> list[Row]:
      return [row for line in lines
              for row in ([line] if isinstance(line, list)
                          else console.render_lines(line, room, pad=False))]

    rows = [_title(self._look, text), *drawn(_head(self._look, text))]
    # The parts in the order in which they are seen, and how much of each is left where not all fit.
    happened = _happened(self._look, self._unix, text)
    left = height - 2 - len(drawn(happened[:1])) if happened else height
    for part in _parts(self._look, width, console.encoding, text):
      more = drawn(part(_RANKS))
      if len(rows) + len(more) > left:
        more = drawn(part(max(_RANKS - (len(rows) + len(more) - left), 0)))
      if len(rows) + len(more) <= left:
        rows += more
    if happened and len(rows) + 3 <= height:
      rows += [[], _row(("What happened", "bold"))]
      for sentence in happened:
        more = drawn([sentence])
        if len(rows) + len(more) > height:
          break
        rows += more
    for row in rows[:height]:
      yield from Segment.adjust_line_length(row, width, pad=False)
      yield Segment.line()


Row = list[Segment]


def _wrapped(words: str, style: str = "", indent: int = 2) -> Padding:
  """Words that may take several rows."""
  return Padding(Text(words, style), (0, 0, 0, indent))


def _row(*pieces: tuple[str, str]) -> Row:
  """A row of pieces, each with its style. By hand, as it is drawn each second: rich's tables
  measure every cell."""
  return [Segment(words, Style.parse(style)) for words, style in pieces]


def sparkline(values: np.ndarray, width: int, encoding: str = "utf-8") -> str:
  """Draws [K] values, the newest last, as at most `width` characters; each stands for the mean of
  neighbouring values.

  >>> (sparkline(np.array([1.0, 1.0, 2.0, 8.0, np.nan, 4.5]), 6),
  ...  sparkline(np.array([1.0, 3.0, 5.0]), 3, "ascii"))
  ('▁▁▂█ ▄', '.=@')
  """
  levels = _LEVELS if encoding.lower().startswith("utf") else _ASCII_LEVELS
  means = binned(values, width)
  known = means[np.isfinite(means)]
  if not known.size:
    return ""
  low, span = float(known.min()), float(known.max() - known.min())
  if span <= 0.02 * abs(float(known.mean())):  # steady: what is left is not worth a mountain range
    return "".join(levels[0] if np.isfinite(mean) else " " for mean in means)
  return "".join(levels[int((mean - low) / span * (len(levels) - 1))] if np.isfinite(mean) else " "
                 for mean in means)


def binned(values: np.ndarray, width: int) -> np.ndarray:
  """[B] means of neighbouring values, at most `width` of them; NaN where none is known."""
  bins = min(len(values), max(1, width))
  if not bins:
    return np.empty(0)
  of = np.arange(len(values)) * bins // len(values)
  known = np.isfinite(values)
  return ratio(np.bincount(of[known], values[known], bins),
               np.bincount(of[known], minlength=bins))


def _title(look: Snapshot, text: Callable[[object], str]) -> Row:
  return _row((text(look.path), "bold"), (f"  {text(look.run)}" if look.run else "", "dim"))


def _head(look: Snapshot, text: Callable[[object], str]) -> list[Padding]:
  facts = [plural(number, one, many) for number, one, many in (
      (look.ranks, "rank", ""), (look.processes, "process", "processes"), (look.hosts, "host", ""))
           if number]
  if look.attempt > 0:
    facts.append(f"attempt {look.attempt + 1}")
  if look.step >= 0:
    facts.append(f"step {look.step:,}")
  if look.age is not None:
    facts.append(f"newest rows {duration(look.age)} old")
  state = _wrapped(text(look.state), _STYLES[look.state.code], 0)
  return [state, _wrapped(", ".join(facts), "", 0)] if facts else [state]


def _parts(look: Snapshot, width: int, encoding: str, text: Callable[[object], str]
           ) -> list[Callable[[int], Sequence[Row | Padding]]]:
  """What can be drawn with a number of table rows."""
  numbers = look.numbers
  if numbers is None:
    return []
  parts: list[Callable[[int], Sequence[Row | Padding]]] = [
      lambda _: _step_time(numbers, width, encoding),
      lambda _: _shares(numbers, width, encoding),
      lambda _: [[], Padding(Text.assemble(("Pacing", "bold"), "  ", pacing_words(numbers)))]]
  if numbers.late:
    parts.append(lambda rows: _ranks(numbers.late[:rows], width, text) if rows
                 else _latest(numbers.late[0], text))
  return parts


def _step_time(numbers: Numbers, width: int, encoding: str) -> list[Row | Padding]:
  mean, median, p99, cv = numbers.step_time
  facts = (f"{milliseconds(mean)}, median {milliseconds(median)}, 99th percentile "
           f"{milliseconds(p99)}, variation {100 * cv:.1f} %")
  columns = max(8, min(60, width - 26))
  means = binned(numbers.series, columns)
  known = means[np.isfinite(means)]
  span = ""
  if known.size:
    low, high = (milliseconds(float(known.min())).removesuffix(" ms"),
                 milliseconds(float(known.max())))
    span = f"  {low} to {high}"
  title = f"Step time, steps {numbers.first:,} to {numbers.last:,}" + (
      f" without {numbers.warmup} of warm-up" if numbers.warmup else "")
  return [[], _row((title, "bold")), _wrapped(facts),
          _row(("  " + sparkline(numbers.series, columns, encoding), "cyan"), (span, "dim"))]


def _shares(numbers: Numbers, width: int, encoding: str) -> list[Row]:
  rows: list[Row] = [[], _row(("Where the step goes", "bold"))]
  mean = numbers.step_time.mean
  bar = max(4, min(40, width - 34))
  for name in SHARES:
    share = numbers.shares[name]
    quiet = "dim" if abs(share) < 5e-4 else ""
    rows.append(_row((f"  {name:<10}  ", quiet), (draw_bar(share, bar, encoding), COLOUR[name]),
                     (f"  {milliseconds(share * mean):>8}  {100 * share:5.1f} %", quiet)))
  return rows


def pacing_words(numbers: Numbers) -> str:
  """What pacing does, in words."""
  delayed, guard = numbers.delayed, numbers.guard
  delays = (f"delays in {100 * delayed:.1f} % of the ranks' steps" if delayed
            else "no delays")
  if guard.on is None:
    return delays if delayed else "none"
  words = f"guard {'on' if guard.on else 'off'}, {delays}"
  if guard.effect is None:
    return f"{words}; effect not known yet"
  words += f"; effect on the mean step {100 * guard.effect:+.1f} %"
  if guard.interval:
    words += f" [{100 * guard.interval[0]:+.1f}, {100 * guard.interval[1]:+.1f}]"
  return f"{words}, {plural(guard.pairs, 'pair')} of blocks"


def _latest(rank: LateRank, text: Callable[[object], str]) -> list[Row]:
  host = f" on {text(rank.host)}" if rank.host else ""
  return [_row((f"Latest: rank {rank.rank}{host}, {milliseconds(rank.lateness)}, last in "
                f"{100 * rank.last:.0f} % of the steps", ""))]


def _ranks(late: tuple[LateRank, ...], width: int, text: Callable[[object], str]) -> list[Row]:
  hosts = [text(rank.host) for rank in late]
  column = min(max(map(cell_len, hosts)), width - 44, 40)
  # none where there is no name, or no room
  column = max(column, len("host")) + 2 if column > 0 else 0
  head = f"  {'rank':>6}  {'host':<{column}}" if column else f"  {'rank':>6}  "
  rows = [[], _row(("Who is late", "bold")),
          _row((f"{head}{'lateness':>8}  {'last':>5}  {'cost':>7}", "dim"))]
  for rank, host in zip(late, hosts, strict=True):
    if column and cell_len(host) > column - 2:
      host = set_cell_size(host, column - 5) + "..."
    rows.append(_row((f"  {rank.rank:>6}  "
                      f"{set_cell_size(host, column)}{milliseconds(rank.lateness):>8}  "
                      f"{100 * rank.last:3.0f} %  {100 * rank.cost:5.1f} %",
                      "bold" if rank.cost > 0.05 else "")))
  return rows


def _happened(look: Snapshot, unix: float, text: Callable[[object], str]) -> list[Padding]:
  """Events and onsets, the newest first, then notes."""
  rows: list[Padding] = []
  for event in reversed(look.events[-6:]):
    ago = "" if event.unix is None else f" ({duration(max(0.0, unix - event.unix))} ago)"
    now = event is look.events[-1] and not event.over
    rows.append(_wrapped(text(event.sentence) + ago, "bold red" if now else "dim"))
  rows += [_wrapped(text(alert.sentence), "dim" if alert.over else "red")
           for alert in list(reversed(look.alerts))[:40]]
  return [*rows, *(_wrapped(text(note), "yellow") for note in look.notes)]


_REDRAWN = 2
"""Times per second; nothing is read for it."""


def line(look: Snapshot, news: list[str], encoding: str = "utf-8") -> str:
  """Says the look in one line.

  Args:
    look: what to say.
    news: sentences that have not been said yet; they come last.
    encoding: of the output.
  """
  words: list[str] = []
  if look.state.code != "running":
    words.append(look.state)
  if look.step >= 0:
    words.append(f"step {look.step:,}"
                 + (f" (attempt {look.attempt + 1})" if look.attempt > 0 else "") + ";")
  numbers = look.numbers
  if numbers is not None:
    mean, median, p99, _ = map(milliseconds, numbers.step_time)
    words.append(f"{mean} per step (median {median}, 99th percentile {p99});")
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


def sentences(look: Snapshot) -> dict[str, None]:
  """The sentences on onsets, events and notes, in their order, each once."""
  return dict.fromkeys([*(alert.sentence for alert in (*look.alerts, *look.events)), *look.notes])


def once(follower: Follower, console: Console | None = None) -> None:
  """Prints what there is now, whole.

  Raises:
    RunError: there is nothing yet.
  """
  unix = time.time()
  look = follower.poll(time.monotonic(), unix)
  if look.state.code == "waiting" and not look.processes:
    raise RunError(f"Nothing is recorded at {look.path} yet. Without --once it is waited for.")
  (console or make_console()).print(Screen(look, unix, whole=True))


def on_terminal(follower: Follower, console: Console, every: float) -> None:
  """Fills the terminal until Ctrl-C, and gives it back as it was, with the last look left on it."""
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
  said: dict[str, None] = {}
  while True:
    begin = time.monotonic()
    look = follower.poll(begin, time.time())
    before, said = said, sentences(look)
    news = [sentence for sentence in said if sentence not in before]
    print(line(look, news, sys.stdout.encoding or "utf-8"), flush=True)
    if look.state.code == "ended":
      return
    sleep(max(begin + every - time.monotonic(), 0.0))
