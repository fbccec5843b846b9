"""Words that sentences of all layers share."""

from __future__ import annotations


def plural(number: int, noun: str, many: str = "") -> str:
  """A number of things; `many` where their plural isn't made by an s.

  >>> plural(1, "row"), plural(2500, "row"), plural(2, "copy", "copies")
  ('1 row', '2,500 rows', '2 copies')
  """
  return f"{number:,} {noun if number == 1 else many or noun + 's'}"
