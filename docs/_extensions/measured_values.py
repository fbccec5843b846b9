"""What a measured value is in the table of measurements, and how numbers are written there."""


from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).parents[1] / "measurements"


class Found(NamedTuple):
  """What a file holds: in words, and whether that was aimed at (None: nothing was, or it can't be
  told)."""

  words: str
  met: bool | None


class Figure(NamedTuple):
  """One row: what is measured, what was aimed at, in which file the value is, and how it is read
  out."""

  what: str
  aim: str
  file: str
  read: Callable[[Any], Found]


class Claim(NamedTuple):
  """A sentence of a page, or part of one."""

  page: str  # below the root of the repository
  words: str  # with `{}` where values go
  file: str  # in docs/measurements
  values: Callable[[Any], list[str]]

  def filled(self) -> str:
    """The words with the values of the file.

    Raises:
      KeyError, IndexError, TypeError: the file no longer holds them.
    """
    return self.words.format(*self.values(json.loads((FOLDER / self.file).read_text())))


def percent(value: float, digits: int = 1) -> str:
  return f"{100 * value:.{digits}f} %"


def interval(triple: list[float], unit: str, digits: int = 1) -> str:
  estimate, low, high = (f"{number:.{digits}f}" for number in triple)
  return f"{estimate} {unit} [{low}, {high}]"
