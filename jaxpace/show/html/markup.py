"""Elements of HTML as text in which nothing but what is written here is markup; and numbers on the
page, each of which says where in the JSON document it stands, so that both can be held against each
other."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

from jaxpace.core.words import plain
from jaxpace.diagnose.floor import SHARES
from jaxpace.diagnose.words.names import milliseconds, signed
from jaxpace.show import contents

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


def joined(parts: list[Markup]) -> Markup:
  """Several elements, one after the other."""
  return Markup("".join(parts))


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


UNKNOWN = "–"


def find(document: Any, path: str) -> Any:
  """The value at a JSON pointer (RFC 6901) without its leading slash.

  >>> find({"per_host": {"a/b": [{"lateness": 0.5}]}}, "per_host/a~1b/0/lateness")
  0.5
  """
  for key in path.split("/"):
    document = document[int(key)] if isinstance(document, list) else document[
        key.replace("~1", "/").replace("~0", "~")]
  return document


def escaped(key: str) -> str:
  """A key as part of a path."""
  return key.replace("~", "~0").replace("/", "~1")


class DocumentFigures:
  """Makes figures of one document."""

  def __init__(self, document: dict[str, Any]):
    self.document = document

  def time(self, path: str, *, signed: bool = False) -> Markup:
    """Seconds, shown in milliseconds."""
    return self._data(path, late if signed else milliseconds)

  def share(self, path: str, digits: int = 1, *, signed: bool = False) -> Markup:
    """A share of one, shown in per cent."""
    form = f"{{:{'+' if signed else ''}.{digits}f}} %"
    return self._data(path, lambda value: form.format(100 * value).replace("-", "−"))

  def times(self, path: str) -> Markup:
    """How many times as fast."""
    return self._data(path, "{:.2f}×".format)

  def number(self, path: str) -> Markup:
    """A whole number."""
    return self._data(path, "{:,}".format)

  def confidence(self, path: str) -> Markup:
    """A confidence, never shown as certainty."""
    return self._data(path, contents.confidence)

  def _data(self, path: str, shown: Callable[[Any], str]) -> Markup:
    value = find(self.document, path)
    return element("data", UNKNOWN if value is None else shown(value),
                   value="" if value is None else repr(value), data_json=path)


def late(seconds: float) -> str:
  """A lateness in seconds, shown as milliseconds with its sign.

  >>> late(0.0123), late(-0.0005)
  ('+12.3 ms', '−0.50 ms')
  """
  return signed(seconds).replace("-", "−")


_HEIGHT = 46
_LABELLED = 0.085
"""Segments of this share of the bar are wide enough for their name on a wide screen, ..."""
_ALWAYS = 0.25
"""... those of this share on any."""
# Lines of each pattern, in a square of 10: they separate the segments in black and white.
_PATTERNS = {"skew": "M-2,2 l4,-4 M0,10 l10,-10 M8,12 l4,-4", "transfer": "M2,2 h2 M7,7 h2",
             "contention": "M0,0 l10,10 M10,0 l-10,10",
             "runtime": "M-2,8 l4,4 M0,0 l10,10 M8,-2 l4,4", "pacing": "M3,0 v10 M8,0 v10"}


def patterns() -> Markup:
  """Definitions of the patterns, once a page."""
  made = [element("pattern", element("path", d=d), id=f"pattern-{name}", width=10, height=10,
                  patternUnits="userSpaceOnUse") for name, d in _PATTERNS.items()]
  return element("svg", element("defs", *made), class_="unseen", aria_hidden="true", width=0,
                 height=0)


def swatch(name: str) -> Markup:
  """A square in the colour and pattern of a share."""
  return element("svg", *_filled(name, 0, "100%", 14), class_="swatch", width=14, height=14,
                 aria_hidden="true")


def bar(shares: dict[str, float], described: str) -> Markup:
  """The bar, drawn without script.

  Args:
    shares: by name in `SHARES`, sum 1; what is below nothing is left out.
    described: what it shows, in words, for those who don't see it.
  """
  parts: list[Markup] = []
  at = 0.0
  total = sum(max(share, 0.0) for share in shares.values()) or 1.0
  for name in SHARES:
    width = max(shares[name], 0.0) / total
    x, wide = f"{100 * at:.3f}%", f"{100 * width:.3f}%"
    parts += _filled(name, x, wide, _HEIGHT)
    if width >= _LABELLED:
      middle = f"{100 * (at + width / 2):.3f}%"
      narrow = "" if width >= _ALWAYS else " roomy"
      parts.append(element("text", name, x=middle, y=20, class_=f"on-{name}{narrow}",
                           text_anchor="middle"))
      parts.append(element("text", f"{100 * shares[name]:.0f} %", x=middle, y=37,
                           class_=f"on-{name}{narrow}", text_anchor="middle"))
    at += width
  return element("svg", *parts, class_="shares", width="100%", height=_HEIGHT, role="img",
                 aria_label=described)


def _filled(name: str, x: str | int, width: str, height: int) -> list[Markup]:
  filled = [element("rect", x=x, width=width, height=height, class_=f"fill-{name}")]
  if name in _PATTERNS:
    filled.append(element("rect", x=x, width=width, height=height, fill=f"url(#pattern-{name})"))
  return filled
