"""Numbers on the page. Each says where in the JSON document it stands, so that both can be held
against each other."""

from __future__ import annotations

from typing import Any

from jaxpace.diagnosis.wording import milliseconds, signed
from jaxpace.reporting.html.markup import Markup, element

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
    value = find(self.document, path)
    if value is None:
      return self._data(path, None, UNKNOWN)
    return self._data(path, value, late(value) if signed else milliseconds(value))

  def share(self, path: str, digits: int = 1, *, signed: bool = False) -> Markup:
    """A share of one, shown in per cent."""
    value = find(self.document, path)
    if value is None:
      return self._data(path, value, UNKNOWN)
    return self._data(path, value,
                      f"{100 * value:{'+' if signed else ''}.{digits}f} %".replace("-", "−"))

  def times(self, path: str) -> Markup:
    """How many times as fast."""
    value = find(self.document, path)
    return self._data(path, value, UNKNOWN if value is None else f"{value:.2f}×")

  def number(self, path: str) -> Markup:
    """A whole number."""
    value = find(self.document, path)
    return self._data(path, value, UNKNOWN if value is None else f"{value:,}")

  def confidence(self, path: str) -> Markup:
    """A confidence, never shown as certainty."""
    value = find(self.document, path)
    shown = UNKNOWN if value is None else "over 99.9 %" if value > 0.999 else f"{100 * value:.1f} %"
    return self._data(path, value, shown)

  def _data(self, path: str, value: Any, shown: str) -> Markup:
    return element("data", shown, value="" if value is None else repr(value), data_json=path)


def late(seconds: float) -> str:
  """A lateness in seconds, shown as milliseconds with its sign.

  >>> late(0.0123), late(-0.0005)
  ('+12.3 ms', '−0.50 ms')
  """
  return signed(seconds).replace("-", "−")
