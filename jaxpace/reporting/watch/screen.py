"""The live view as a person sees it in a terminal, of any width and height."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from jaxpace.diagnosis.diagnosis import SHARES
from jaxpace.diagnosis.wording import milliseconds
from jaxpace.reporting import bars
from jaxpace.reporting.terminal import COLOUR
from jaxpace.reporting.watch.alive import duration
from jaxpace.reporting.watch.look import LateRank, Look, Numbers, Pacing
from jaxpace.reporting.watch.plain_text import plain
from jaxpace.trace.problems import plural

WIDEST = 120
_LEVELS, _ASCII_LEVELS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_STYLES = {"waiting": "yellow", "running": "green", "ended": "blue", "quiet": "bold yellow", "dead": "bold red"}
_RANKS = 8
_LEAST_HEIGHT = 8


class Screen:
  """One look, drawn for the console that it is printed on: made anew whenever the console's size has changed."""

  def __init__(self, look: Look, unix: float, whole: bool = False):
    """Holds what is to be drawn.

    Args:
      look: what to show.
      unix: s since 1970, now; says how old events are.
      whole: everything, whatever the console's height.
    """
    self._look, self._unix, self._whole = look, unix, whole

  def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
    width = min(options.max_width, WIDEST)
    height = 1_000_000 if self._whole else max(options.size.height, _LEAST_HEIGHT)
    room = options.update(width=width, height=None)

    def drawn(part: RenderableType) -> list[list[Segment]]:
      return console.render_lines(part, room, pad=False)

    def text(value: object) -> str:
      return plain(value, console.encoding)

    rows = drawn(Group(*_head(self._look, text)))
    # The parts in the order in which they are seen, and how much of each is left where not all fit.
    happened = _happened(self._look, self._unix, text)
    left = height - min(len(happened) + 1, 4) if happened else height
    for part in _parts(self._look, width, console.encoding, text):
      more = drawn(part(_RANKS))
      if len(rows) + len(more) > left:
        more = drawn(part(max(_RANKS - (len(rows) + len(more) - left), 0)))
      if len(rows) + len(more) <= left:
        rows += more
    for sentence in happened:
      more = drawn(sentence)
      if len(rows) + len(more) > height:
        break
      rows += more
    for row in rows[:height]:
      yield from row
      yield Segment.line()


def sparkline(values: np.ndarray, width: int, encoding: str = "utf-8") -> str:
  """Draws [K] values, the newest last, as at most `width` characters; each stands for the mean of neighbouring values.

  >>> sparkline(np.array([1.0, 1.0, 2.0, 8.0, np.nan, 4.5]), 6), sparkline(np.array([1.0, 3.0, 5.0]), 3, "ascii")
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
  return "".join(levels[int((mean - low) / span * (len(levels) - 1))] if np.isfinite(mean) else " " for mean in means)


def binned(values: np.ndarray, width: int) -> np.ndarray:
  """[B] means of neighbouring values, at most `width` of them; NaN where none is known."""
  bins = min(len(values), max(1, width))
  if not bins:
    return np.empty(0)
  of = np.arange(len(values)) * bins // len(values)
  known = np.isfinite(values)
  number = np.bincount(of[known], minlength=bins)
  return np.divide(np.bincount(of[known], values[known], bins), number, out=np.full(bins, np.nan), where=number > 0)


def _head(look: Look, text: Callable[[object], str]) -> list[RenderableType]:
  title = Text(no_wrap=True, overflow="ellipsis")
  title.append(text(look.path), "bold")
  if look.run:
    title.append(f"  {text(look.run)}", "dim")
  facts = []
  if look.ranks:
    facts.append(plural(look.ranks, "rank"))
  if look.processes:
    facts.append(plural(look.processes, "process", "processes"))
  if look.hosts:
    facts.append(plural(look.hosts, "host"))
  if look.attempt > 0:
    facts.append(f"attempt {look.attempt + 1}")
  if look.step >= 0:
    facts.append(f"step {look.step:,}")
  if look.age is not None:
    facts.append(f"newest rows {duration(look.age)} old")
  rows: list[RenderableType] = [title]
  if facts:
    rows.append(Text(", ".join(facts)))
  rows.append(Text(text(look.state.sentence), style=_STYLES[look.state.kind]))
  return rows


def _parts(look: Look, width: int, encoding: str,
           text: Callable[[object], str]) -> list[Callable[[int], RenderableType]]:
  """What can be drawn with a number of table rows."""
  numbers = look.numbers
  if numbers is None:
    return []
  parts: list[Callable[[int], RenderableType]] = [lambda _: _step_time(numbers, width, encoding)]
  if numbers.shares is not None:
    parts.append(lambda _: _shares(numbers, width, encoding))
  parts.append(lambda _: _pacing(numbers.pacing))
  if numbers.late:
    parts.append(lambda rows: _ranks(numbers.late[:rows], width, text) if rows else _latest(numbers.late[0], text))
  return parts


def _titled(title: str, body: RenderableType) -> RenderableType:
  return Group(Text(), Text(title, style="bold"), Padding(body, (0, 0, 0, 2), expand=False))


def _step_time(numbers: Numbers, width: int, encoding: str) -> RenderableType:
  line = Text.assemble((milliseconds(numbers.mean), "bold"), f", median {milliseconds(numbers.median)}, "
                       f"99th percentile {milliseconds(numbers.p99)}, variation {100 * numbers.cv:.1f} %")
  drawn = sparkline(numbers.series, max(8, min(60, width - 26)), encoding)
  means = binned(numbers.series, max(8, min(60, width - 26)))
  known = means[np.isfinite(means)]
  spark = Text(drawn, style="cyan", no_wrap=True)
  if known.size:
    low, high = milliseconds(float(known.min())).removesuffix(" ms"), milliseconds(float(known.max()))
    spark.append(f"  {low} to {high}", style="dim")
  title = f"Step time, steps {numbers.first:,} to {numbers.last:,}" + (
      f" without {numbers.warmup} of warm-up" if numbers.warmup else "")
  return _titled(title, Group(line, spark))


def _shares(numbers: Numbers, width: int, encoding: str) -> RenderableType:
  assert numbers.shares is not None
  table = Table.grid(padding=(0, 2, 0, 0))
  for justify in ("left", "left", "right", "right"):
    table.add_column(justify=justify, no_wrap=True)
  bar = max(4, min(40, width - 34))
  for name in SHARES:
    share = numbers.shares[name]
    quiet = "dim" if abs(share) < 5e-4 else ""
    table.add_row(Text(name, style=quiet), Text(bars.bar(share, bar, encoding), style=COLOUR[name]),
                  Text(milliseconds(share * numbers.mean), style=quiet), Text(f"{100 * share:.1f} %", style=quiet))
  return _titled("Where the step goes", table)


def _pacing(pacing: Pacing) -> RenderableType:
  return Text.assemble("\n", ("Pacing", "bold"), "  ", pacing_words(pacing))


def pacing_words(pacing: Pacing) -> str:
  """What pacing does, in words."""
  delays = f"delays in {100 * pacing.active:.1f} % of the ranks' steps" if pacing.active else "no delays"
  if pacing.on is None:
    return delays if pacing.active else "none"
  words = f"guard {'on' if pacing.on else 'off'}, {delays}"
  if pacing.effect is None:
    return f"{words}; effect not known yet"
  words += f"; effect on the mean step {100 * pacing.effect:+.1f} %"
  if pacing.interval:
    words += f" [{100 * pacing.interval[0]:+.1f}, {100 * pacing.interval[1]:+.1f}]"
  return f"{words}, {plural(pacing.pairs, 'pair')} of blocks"


def _latest(rank: LateRank, text: Callable[[object], str]) -> Text:
  host = f" on {text(rank.host)}" if rank.host else ""
  return Text(f"Latest: rank {rank.rank}{host}, {milliseconds(rank.lateness)}, last in {100 * rank.last:.0f} % of the "
              "steps")


def _ranks(late: tuple[LateRank, ...], width: int, text: Callable[[object], str]) -> RenderableType:
  table = Table.grid(padding=(0, 2, 0, 0))
  hosts = width >= 60 and any(rank.host for rank in late)
  headers = ["rank", *(["host"] if hosts else []), "lateness", "last", "cost"]
  for header in headers:
    table.add_column(justify="left" if header == "host" else "right", no_wrap=True, overflow="ellipsis",
                     max_width=min(40, width - 42) if header == "host" else None)
  table.add_row(*(Text(header, style="dim") for header in headers))
  for rank in late:
    cells = [str(rank.rank), *([text(rank.host)] if hosts else []), milliseconds(rank.lateness),
             f"{100 * rank.last:.0f} %", f"{100 * rank.cost:.1f} %"]
    table.add_row(*(Text(cell, style="bold" if rank.cost > 0.05 else "") for cell in cells))
  return _titled("Who is late", table)


def _happened(look: Look, unix: float, text: Callable[[object], str]) -> list[RenderableType]:
  """Events and onsets, the newest first, then notes; each on as many lines as it takes."""
  rows: list[RenderableType] = []
  for event in reversed(look.events[-6:]):
    ago = f" ({duration(max(0.0, unix - event.unix))} ago)"
    now = event is look.events[-1] and not event.over
    rows.append(Text(text(event.sentence) + ago, style="bold red" if now else "dim"))
  for told in list(reversed(look.told))[:40]:
    rows.append(Text(text(told.sentence), style="dim" if told.over else "red"))
  rows += [Text(text(note), style="yellow") for note in look.notes]
  return [Text("\nWhat happened", style="bold"), *(Padding(row, (0, 0, 0, 2)) for row in rows)] if rows else []
