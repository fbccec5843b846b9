"""What a control file asks for, checked."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

MAX_STEP = 2**31 - 1
MAX_RANK = 2**20 - 1
"""A range is written out, rank by rank."""


class RequestError(ValueError):
  """The file asks for something that can't be: a sentence that says what."""


@dataclasses.dataclass(frozen=True)
class Request:
  """Settings of a running job's pacer. The default leaves everything as the pacer was made."""

  enabled: bool = True
  max_delay: float | None = None
  """Seconds; None: as the pacer was made."""
  threshold: float | None = None
  """A share of the median step; None: as the pacer was made."""
  ranks: tuple[int, ...] | None = None
  """Ranks along the data axis that may be delayed; None: all."""
  from_step: int = 0
  """First step in which delays are allowed."""
  until_step: int | None = None
  """One past the last; None: for good."""

  @staticmethod
  def from_json(data: Any, ranks: int | None = None) -> Request:
    """Checks what was read from a file.

    Args:
      data: a JSON value; absent keys and nulls mean the default.
      ranks: ranks along the data axis, where that is known.

    Raises:
      RequestError: it is no object, has unknown keys, or a value is out of range.
    """
    if not isinstance(data, Mapping):
      raise RequestError(f"it must hold an object such as {{\"enabled\": false}}, not a {type(data).__name__}")
    names = {field.name for field in dataclasses.fields(Request)}
    for key in data:
      if key not in names:
        close = difflib.get_close_matches(str(key), names, n=1)
        raise RequestError(f"there is no setting {key!r}; " + (
            f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(sorted(names))}"))
    given = {key: value for key, value in data.items() if value is not None}
    enabled = given.get("enabled", True)
    if not isinstance(enabled, bool):
      raise RequestError(f"enabled must be true or false, not {enabled!r}")
    chosen = None
    if "ranks" in given:
      chosen = parse_ranks(given["ranks"])
      if ranks is not None and chosen[-1] >= ranks:
        raise RequestError(f"there is no rank {chosen[-1]}: the data axis has ranks 0 to {ranks - 1}")
    first, end = _step(given, "from_step") or 0, _step(given, "until_step")
    if end is not None and end <= first:
      raise RequestError(f"until_step={end} must be above from_step={first}, or there is no step between them; to "
                         "switch pacing off: enabled false")
    return Request(enabled, _number(given, "max_delay", 10, "seconds from 0 to 10; 5 ms is 5e-3"),
                   _number(given, "threshold", 1, "a share of the step from 0 to 1; 5 % is 0.05"), chosen, first, end)

  def to_json(self) -> dict[str, Any]:
    """Returns plain values; inverse of `from_json`. What is as made is left out, but for `enabled`."""
    default = Request()
    values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
            if name == "enabled" or value != getattr(default, name)}

  def __str__(self) -> str:
    """Says it in words."""
    if not self.enabled:
      return "pacing off"
    words = []
    if self.max_delay is not None:
      words.append(f"longest delay {self.max_delay * 1e3:g} ms")
    if self.threshold is not None:
      words.append(f"threshold {self.threshold:g}")
    if self.ranks is not None:
      words.append(f"ranks {format_ranks(self.ranks)} only")
    if self.from_step:
      words.append(f"from step {self.from_step}")
    if self.until_step is not None:
      words.append(f"until step {self.until_step}")
    return "pacing on, " + (", ".join(words) if words else "as the pacer was made")


def parse_ranks(value: Any) -> tuple[int, ...]:
  """Reads ranks: a list of numbers, or text such as "0-7,9".

  >>> parse_ranks("0-2,9")
  (0, 1, 2, 9)

  Raises:
    RequestError: there are none, or it is something else.
  """
  wrong = RequestError(f"ranks must be a list of rank numbers, or text such as \"0-7,9\", not {value!r}")
  chosen: set[int] = set()
  try:
    for item in value.split(",") if isinstance(value, str) else value:
      if isinstance(item, str):
        first, dash, last = item.strip().partition("-")
        low, high = int(first), int(last if dash else first)
      else:
        low = high = item
      if type(low) is not int or not 0 <= low <= high <= MAX_RANK:
        raise wrong
      chosen.update(range(low, high + 1))
  except (TypeError, ValueError):
    raise wrong from None
  if not chosen:
    raise wrong
  return tuple(sorted(chosen))


def format_ranks(ranks: Iterable[int]) -> str:
  """Writes ranks shortly.

  >>> format_ranks([0, 1, 2, 9])
  '0-2,9'
  """
  pieces: list[list[int]] = []
  for rank in sorted(ranks):
    if pieces and rank == pieces[-1][1] + 1:
      pieces[-1][1] = rank
    else:
      pieces.append([rank, rank])
  return ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in pieces)


def _number(given: Mapping[str, Any], name: str, most: float, hint: str) -> float | None:
  value = given.get(name)
  if value is None:
    return None
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:  # NaN neither
    raise RequestError(f"{name} must be {hint}, not {value!r}")
  return float(value)


def _step(given: Mapping[str, Any], name: str) -> int | None:
  value = given.get(name)
  if value is None:
    return None
  if type(value) is not int or not 0 <= value <= MAX_STEP:
    raise RequestError(f"{name} must be the number of a step, from 0, not {value!r}")
  return value
