"""Where commands put what they found: the terminal, with progress and how a command ends that can't
do what it was asked; and the files that their user names, the JSON report above all."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO

from jaxpace.core.words import plain
from jaxpace.files import UserError

if TYPE_CHECKING:
  from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
  from rich.measure import Measurement
  from rich.segment import Segment
  from rich.table import Table

_PIPED_WIDTH, _WIDEST = 100, 120
_PIECES = re.compile(r"[^\s/_-]*[\s/_-]+|[^\s/_-]+")


def make_console() -> Console:
  """Makes a console on standard output, of a width that reads well also in a pipe.

  Names that a run directory holds may be anybody's: what is printed there is text, neither markup
  nor steering.
  """
  from rich.console import Console  # not at the top: `jaxpace --help` needs no rich
  from rich.segment import Segment

  class PlainConsole(Console):
    """Shows control characters, and what the terminal lacks, as what they are."""

    def render(self, renderable: RenderableType,
               options: ConsoleOptions | None = None) -> Iterable[Segment]:
      for segment in super().render(renderable, options):
        if segment.control:
          yield segment
        else:
          lines = segment.text.split("\n")
          yield Segment("\n".join(plain(line, self.encoding) for line in lines), segment.style)

  options: dict[str, Any] = {}
  columns = os.environ.get("COLUMNS", "")
  # 0 is what a terminal says that does not know its size.
  if not columns.strip("0") and (columns or not sys.stdout.isatty()):
    options["width"] = shutil.get_terminal_size((_PIPED_WIDTH, 0)).columns
  console = PlainConsole(highlight=False, markup=False, emoji=False, **options)
  if console.width > _WIDEST:
    console.width = _WIDEST
  return console


_NUMBERS: dict[str, Any] = {"justify": "right", "no_wrap": True}
_NAMES: dict[str, Any] = {"no_wrap": True}
_WORDS: dict[str, dict[str, Any]] = {
    "host": {"overflow": "ellipsis", "no_wrap": True, "max_width": 24},
    "collective": {}, "": _NAMES, "phase": _NAMES, "most in": {},
    "mostly for": _NAMES}


def make_table(*headers: str) -> Table:
  """Makes a table with these columns; those that hold words start on the left, others are numbers.
  """
  from rich import box
  from rich.table import Table

  table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
  for header in headers:
    table.add_column(header, **_WORDS.get(header, _NUMBERS))
  return table


class LongName:
  """A name in a table's cell. Where it is too long for its line it goes on in the next one behind a
  separator: half a word of a file's name can't be searched for."""

  def __init__(self, name: str):
    self._pieces = _PIECES.findall(name)

  def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
    from rich.measure import Measurement

    return Measurement(max(map(len, self._pieces), default=0), sum(map(len, self._pieces))
                       ).with_maximum(options.max_width)

  def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
    from rich.text import Text

    lines = [""]
    for piece in self._pieces:
      if len(lines[-1] + piece.rstrip()) > options.max_width:
        lines.append("")
      lines[-1] += piece
    yield Text("\n".join(line.rstrip() for line in lines), overflow="fold")


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


_QUIET_SECONDS = 2.0
_EVERY_SECONDS = 0.2


class Progress:
  """One line on standard error, from the third second on; nothing where that is no terminal."""

  def __init__(self, stream: TextIO | None = None, quiet_seconds: float = _QUIET_SECONDS):
    self._stream = stream or sys.stderr
    self._begin, self._quiet = time.monotonic(), quiet_seconds
    self._said = ""
    self._over = threading.Event()
    self._ticker: threading.Thread | None = None

  def during(self, what: str) -> None:
    """Shows what goes on, and for how many seconds the command has run, until `clear`."""
    self._said = what
    if self._ticker is None and self._stream.isatty():
      self._ticker = threading.Thread(target=self._tick, name="jaxpace-progress", daemon=True)
      self._ticker.start()

  def counting(self, what: str) -> Callable[[int, int], None]:
    """Returns what shows how much of something is done: called with what is done, and with all."""
    return lambda done, total: self.during(f"{what} {100 * done // max(1, total)} %")

  def clear(self) -> None:
    """Takes the line away."""
    if self._ticker is not None:
      self._over.set()
      self._ticker.join()

  def _tick(self) -> None:
    shown = ""
    while not self._over.wait(_EVERY_SECONDS):
      now = time.monotonic() - self._begin
      text = f"{self._said}, {now:.0f} s"
      if now >= self._quiet and text != shown:
        self._write(text)
        shown = text
    if shown:
      self._write("")

  def _write(self, text: str) -> None:
    self._stream.write(f"\r\x1b[K{text}")
    self._stream.flush()


def check_target(target: str, only_files_for: str = "") -> None:
  """Finds out, before the work is done, whether a document can be written there.

  Args:
    target: the file, or "-" for standard output.
    only_files_for: option that takes no "-"; empty where it may be one.

  Raises:
    UserError: it can't.
  """
  from jaxpace.files.folders import Folder, is_special  # not at the top, as rich

  path = pathlib.Path(target)
  if target == "-" and only_files_for:
    raise UserError(f"{only_files_for} takes the name of a file, not '-'.")
  if target == "-" or is_special(path):
    return
  if path.is_dir():
    raise UserError(
        f"{path} is a directory: give the name of a file in it, such as {path / 'report.json'}.")
  if not path.parent.is_dir():
    reason = "is a file" if path.parent.exists() else "does not exist"
    raise UserError(f"{path} can't be written: the directory {path.parent} {reason}.")
  try:
    real = path.resolve()
    Folder(real.parent).try_out(real.name)
  except OSError as error:
    raise UserError(_refused(path, error)) from error


def write_file(pieces: Iterable[bytes], target: str) -> None:
  """Writes what a command made to the file that its user names, see `check_target`.

  A reader of the file sees the old one or the new one, never half of one.

  Raises:
    UserError: the file can't be written.
  """
  from jaxpace.files.folders import writing_named

  try:
    with writing_named(target) as file:
      file.writelines(pieces)
  except OSError as error:
    raise UserError(_refused(pathlib.Path(target), error)) from error


def _refused(path: pathlib.Path, error: OSError) -> str:
  if error.errno == errno.ENOENT:  # the directory is there: what it lacks is the wish
    return f"{path} can't be written: no file can be made in {path.parent}."
  return f"{path} can't be written: {error.strerror or error}."
