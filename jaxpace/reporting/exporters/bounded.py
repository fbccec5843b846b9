"""Label values, bounded in number: every one of them is a time series that some server keeps."""

from __future__ import annotations

MOST_RANKS, MOST_PHASES, MOST_COLLECTIVES, MOST_DECISIONS = 64, 16, 32, 32
"""Label values a process exports of each kind; what comes beyond them is added up under "other"."""
OTHER = "other"


class Bounded:
  """Lets the first values of each label through.

  >>> bounded = Bounded()
  >>> [bounded("phase", value, 2) for value in ("forward", "backward", "mine", "forward")]
  ['forward', 'backward', 'other', 'forward']
  """

  def __init__(self) -> None:
    self._seen: dict[str, set[str]] = {}

  def __call__(self, label: str, value: str, most: int) -> str:
    """The value, or "other" where that many others were seen before it."""
    seen = self._seen.setdefault(label, set())
    if value not in seen and len(seen) >= most:
      return OTHER
    seen.add(value)
    return value
