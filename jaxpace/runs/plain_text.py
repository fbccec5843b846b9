"""Names that others wrote, as text: nothing in them steers the terminal."""

from __future__ import annotations

import sys
from typing import TextIO


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
  them steers.

  Args:
    text: one line or several.
    stream: where to; None takes standard output.
  """
  stream = sys.stdout if stream is None else stream
  encoding = getattr(stream, "encoding", None) or "utf-8"
  print("\n".join(plain(line, encoding) for line in text.split("\n")), file=stream, flush=True)
