"""Tables."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpace.reporting.html.markup import Markup, element

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
