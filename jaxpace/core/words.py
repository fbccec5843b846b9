"""Words that sentences of all layers share: numbers of things, ranks, durations; sentences with
their codes; and names that others wrote, of which nothing steers the terminal."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable
from typing import Self, TextIO


def plural(number: int, noun: str, many: str = "") -> str:
  """A number of things; `many` where their plural isn't made by an s.

  >>> plural(1, "row"), plural(2500, "row"), plural(2, "copy", "copies")
  ('1 row', '2,500 rows', '2 copies')
  """
  return f"{number:,} {noun if number == 1 else many or noun + 's'}"


def successive(numbers: Iterable[int]) -> list[list[int]]:
  """Numbers in their order, those that follow one another together.

  >>> successive([9, 0, 1, 2])
  [[0, 1, 2], [9]]
  """
  pairs = enumerate(sorted(numbers))
  return [[number for _, number in piece]
          for _, piece in itertools.groupby(pairs, lambda pair: pair[1] - pair[0])]


def list_ranks(ranks: Iterable[int], most: int = 12) -> str:
  """Names ranks briefly.

  >>> list_ranks([9, 0, 1, 2, 5])
  '0-2, 5, 9'
  """
  runs = successive(map(int, ranks))
  words = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs]
  if len(words) <= most:
    return ", ".join(words)
  return ", ".join(words[:most]) + f" and {sum(len(r) for r in runs[most:])} more"


def some_ranks(ranks: Collection[int]) -> str:
  """Names ranks in a sentence.

  >>> some_ranks([3]), some_ranks([3, 5])
  ('rank 3', 'ranks 3, 5')
  """
  return f"rank{'s' if len(ranks) > 1 else ''} {list_ranks(ranks)}"


def duration(seconds: float) -> str:
  """Puts a duration into words.

  >>> duration(0.0123), duration(3.25), duration(75.0), duration(312), duration(16440)
  ('12 ms', '3.2 s', '75 s', '5 min 12 s', '4 h 34 min')
  >>> duration(200000)
  '2 d 7 h'
  """
  if seconds < 1.0:
    return f"{1e3 * seconds:.0f} ms"
  if seconds < 10.0:
    return f"{seconds:.1f} s"
  whole = round(seconds)
  if whole < 120:
    return f"{whole} s"
  if whole < 7200:
    return f"{whole // 60} min {whole % 60} s"
  hours = whole // 3600
  return f"{hours} h {whole % 3600 // 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


class Sentence(str):
  """A sentence for people, with the code that stands for it in programs. To everything else it is a
  string."""

  __slots__ = ("code",)
  code: str

  def __new__(cls, code: str, text: str) -> Self:
    """Puts them together."""
    made = str.__new__(cls, text)
    made.code = code
    return made

  def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
    """For copies and pickles."""
    return self.code, str(self)


def plain(text: object, encoding: str = "utf-8") -> str:
  r"""Shows control characters, escapes, line ends and changes of direction as what they are.

  Args:
    text: anything; its `str` counts.
    encoding: of the terminal; what it lacks is escaped as well.

  >>> plain("host\x1b[2J\u202egnp"), plain("é", "ascii"), plain("[red]a[/red]")
  ('host\\x1b[2J\\u202egnp', '\\xe9', '[red]a[/red]')
  """
  shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
                  for c in str(text))
  return shown.encode(encoding, "backslashreplace").decode(encoding)


def shortened(name: str, most: int = 40) -> str:
  """Leaves the middle of a long name out, for lines that are to fit into a terminal.

  >>> shortened("node-17"), shortened("ip-10-0-12-7.compute.a-long-domain.example", 20)
  ('node-17', 'ip-10-0-1....example')
  """
  if len(name) <= most:
    return name
  begin = (most - 3 + 1) // 2
  return f"{name[:begin]}...{name[begin + 3 - most:]}"


def write_plain(text: str, stream: TextIO | None = None) -> None:
  """Prints lines in which there may be names that others wrote, the path of a run, say; nothing in
  them steers."""
  stream = sys.stdout if stream is None else stream
  encoding = getattr(stream, "encoding", None) or "utf-8"
  print("\n".join(plain(line, encoding) for line in text.split("\n")), file=stream, flush=True)
