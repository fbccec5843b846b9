"""Names that others wrote, as text: nothing in them steers the terminal."""

from __future__ import annotations


def plain(text: object, encoding: str = "utf-8") -> str:
  r"""Shows control characters, escapes, line ends and changes of direction as what they are.

  Args:
    text: anything; its `str` counts.
    encoding: of the terminal; what it lacks is escaped as well.

  >>> plain("host\x1b[2J\u202egnp"), plain("é", "ascii"), plain("[red]a[/red]")
  ('host\\x1b[2J\\u202egnp', '\\xe9', '[red]a[/red]')
  """
  shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))
  return shown.encode(encoding, "backslashreplace").decode(encoding)
