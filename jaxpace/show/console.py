"""The terminal that commands print to, and how a command ends that can't do what it was asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jaxpace.runs.plain_text import plain

if TYPE_CHECKING:
  from rich.console import Console, ConsoleOptions, RenderableType
  from rich.segment import Segment


_PIPED_WIDTH, _WIDEST = 100, 120


def make_console() -> Console:
  """Makes a console on standard output, of a width that reads well also in a pipe.

  Names that a run directory holds may be anybody's: what is printed there is text, neither markup
  nor steering.
  """
  from rich.console import Console  # not at the top: `jaxpace --help` needs no rich
  from rich.segment import Segment

  class PlainConsole(Console):
    """Shows control characters as what they are."""

    def render(self, renderable: RenderableType,
               options: ConsoleOptions | None = None) -> Iterable[Segment]:
      for segment in super().render(renderable, options):
        if segment.control or segment.text.isprintable() or segment.text == "\n":
          yield segment
        else:
          lines = segment.text.split("\n")
          yield Segment("\n".join(plain(line, self.encoding) for line in lines), segment.style)

  options: dict[str, Any] = {}
  if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
    options["width"] = _PIPED_WIDTH
  console = PlainConsole(highlight=False, markup=False, emoji=False, **options)
  if console.width > _WIDEST:
    console.width = _WIDEST
  return console


_EIGHTHS = " ▏▎▍▌▋▊▉"


def draw_bar(share: float, width: int, encoding: str = "utf-8") -> str:
  """Draws a share of 1 as a bar of at most `width` characters, padded with blanks.

  Args:
    share: 0 to 1; what lies outside is cut.
    width: characters of a whole bar.
    encoding: of the terminal; without Unicode, `#` is used.

  >>> draw_bar(0.5, 4), draw_bar(0.3, 4), draw_bar(0.3, 10, "ascii")
  ('██  ', '█▎  ', '###       ')
  """
  share = min(max(share, 0.0), 1.0)
  if not encoding.lower().startswith("utf"):
    return ("#" * round(share * width)).ljust(width)
  eighths = round(share * width * 8)
  full, rest = divmod(eighths, 8)
  return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def refuse(command: str, sentence: str) -> int:
  """Prints one sentence on standard error, with the command's name before it; returns the exit
  status, 2.

  A path or name in it may be anybody's: it stays text, in one line.
  """
  print(plain(f"jaxpace {command}: {sentence}"), file=sys.stderr)
  return 2


def give_up_output() -> None:
  """Sends what is left of standard output nowhere: the interpreter would complain of it once more
  while it ends."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
