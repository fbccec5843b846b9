"""Elements of HTML as text in which nothing but what is written here is markup."""

from __future__ import annotations

import html
from collections.abc import Sequence

from jaxpace.runs.plain_text import plain

_VOID = ("br", "meta")


class Markup(str):
  """Text that is HTML already; any other text is escaped before it gets into some."""

  __slots__ = ()


def text(value: object) -> Markup:
  r"""Text as HTML: markup, control characters and changes of direction show as what they are.

  >>> text("<b>\x1b[2J&")
  '&lt;b&gt;\\x1b[2J&amp;'
  """
  return value if isinstance(value, Markup) else Markup(html.escape(plain(value)))


def element(tag: str, *children: Markup | str | int | None,
            **attributes: str | int | float | bool | None) -> Markup:
  """An element. Children that are None are left out, as are attributes that are None or False.

  Underscores in attributes' names become hyphens; one at the end is for Python's keywords.

  >>> element("p", "a < b", element("br"), class_="note", data_first=3, hidden=True)
  '<p class="note" data-first="3" hidden>a &lt; b<br></p>'
  """
  given = []
  for name, value in attributes.items():
    if value is None or value is False:
      continue
    name = name.rstrip("_").replace("_", "-")
    given.append(f" {name}" if value is True else f' {name}="{text(value)}"')
  inner = "".join(text(child) for child in children if child is not None)
  return Markup(f"<{tag}{''.join(given)}>" + ("" if tag in _VOID else f"{inner}</{tag}>"))


def prose(sentence: str) -> Markup:
  """A sentence; what is between backticks is code.

  >>> prose("Use `--floor`, or `<b>`.")
  'Use <code>--floor</code>, or <code>&lt;b&gt;</code>.'
  """
  parts = sentence.split("`")
  if len(parts) % 2 == 0:  # one that isn't closed
    return text(sentence)
  return joined([element("code", part) if i % 2 else text(part) for i, part in enumerate(parts)])


def joined(parts: list[Markup], between: str = "") -> Markup:
  """Several elements, one after the other."""
  return Markup(text(between).join(parts))


Cell = Markup | str | int | None


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[Cell]], *,
          texts: Sequence[int] = (0,), strong: Sequence[bool] = (), hidden_caption: bool = True,
          tight: bool = False) -> Markup:
  """A table whose rows are headed by their first cell.

  Args:
    caption: what it shows; read out, and not seen unless asked for.
    head: names of the columns.
    rows: cells.
    texts: columns of text, which start on the left; numbers end on the right.
    strong: rows that stand out.
    hidden_caption: whether the caption is for screen readers only.
    tight: whether it is only as wide as it needs to be.
  """
  def kind(i: int) -> str | None:
    return None if i in texts else "number"

  header = element("tr", *(element("th", name, scope="col", class_=kind(i))
                           for i, name in enumerate(head)))
  body = [element("tr", element("th", row[0], scope="row", class_=kind(0)),
                  *(element("td", cell, class_=kind(i)) for i, cell in enumerate(row[1:], 1)),
                  class_="strong" if n < len(strong) and strong[n] else None)
          for n, row in enumerate(rows)]
  made = element("table", element("caption", caption, class_="unseen" if hidden_caption else None),
                 element("thead", header), element("tbody", *body),
                 class_="tight" if tight else None)
  return element("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption)
