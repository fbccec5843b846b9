"""Horizontal bars of characters."""

from __future__ import annotations

_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, width: int, encoding: str = "utf-8") -> str:
  """Draws a share of 1 as a bar of at most `width` characters, padded with blanks.

  Args:
    share: 0 to 1; what lies outside is cut.
    width: characters of a whole bar.
    encoding: of the terminal; without Unicode, `#` is used.

  >>> bar(0.5, 4), bar(0.3, 4), bar(0.3, 10, "ascii")
  ('██  ', '█▎  ', '###       ')
  """
  share = min(max(share, 0.0), 1.0)
  if not encoding.lower().startswith("utf"):
    return ("#" * round(share * width)).ljust(width)
  eighths = round(share * width * 8)
  full, rest = divmod(eighths, 8)
  return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)
