"""Stable codes of what the diagnosis says in sentences, each with its words.

A code keeps its meaning; the wording beside it may change from one release to the next. Programs
and tests ask for codes. docs/reference/codes.md is made of these files.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, Self


class Code(enum.StrEnum):
  """A code that knows in a line what it stands for, and the words that say it.

  A code may have several wordings, each with a name, or none: whoever uses it has the words then.
  """

  meaning: str
  wordings: str | Mapping[str, str]

  def __new__(cls, value: str, meaning: str = "", words: str | Mapping[str, str] = "") -> Self:
    """Makes a member of its parts."""
    member = str.__new__(cls, value)
    member._value_ = value
    member.meaning, member.wordings = meaning, words
    return member

  def __repr__(self) -> str:
    """As the string that it is to programs."""
    return repr(self.value)

  def say(self, wording: str = "", /, **values: Any) -> Sentence:
    """Says it.

    Args:
      wording: which of the code's wordings; empty where it has one.
      values: what stands in it.
    """
    words = self.wordings if isinstance(self.wordings, str) else self.wordings[wording]
    return Sentence(self, words.format(**values))


class Sentence(str):
  """A sentence for people, with the code that stands for it in programs. To everything else it is a
  string."""

  __slots__ = ("code",)
  code: Code

  def __new__(cls, code: Code, text: str) -> Self:
    """Puts them together."""
    made = str.__new__(cls, text)
    made.code = code
    return made

  def __getnewargs__(self) -> tuple[Code, str]:  # type: ignore[override]
    """For copies and pickles."""
    return self.code, str(self)


def codes(sentences: Iterable[str]) -> list[str | None]:
  """The codes of some sentences, in their order; None of a string that has none."""
  return [str(s.code) if isinstance(s, Sentence) else None for s in sentences]


class HangCode(Code):
  """What a job waits for: the kind of a cause, where a rank is instead, how its process is."""

  ABSENT = "absent", "ranks have not entered a collective that others wait in"
  ORDER = "order", "ranks wait for each other in different collectives"
  STUCK = "stuck", "all ranks have entered a collective, and it does not finish"
  UNKNOWN = "unknown", "nothing is known of the ranks that others wait for"
  IN_CALL = "in_call", "where in the same call of the program the rank is"
  EARLIER_CALL = "earlier_call", "the rank is still in an earlier call of the program"
  OTHER_PROGRAM = "other_program", "the rank is in another program"
  DEVICE_BEHIND = "device_behind", "the rank has not begun a call that others of its process have"
  NOT_BEGUN = "not_begun", "no rank of the process has begun the call"
  CLOSED = "closed", "the process has closed its recording"
  SILENT = "silent", "the process wrote nothing while its ring was watched"


class ChangeCode(Code):
  """What the verdict of a comparison says; `failed` says whether that is too much."""

  NONE = "no_change", "no change of the step time is sure"
  SLOWER = "slower", "the second run is surely slower"
  FASTER = "faster", "the second run is surely faster"


class Silence(Code):
  """Why there is no forecast for a number of ranks."""

  TOO_SHORT = ("too_short", "the run has too few steps for so many ranks",
      "The run is too short: the slowest of {ranks:,} ranks is one in {units:,}, and "
      "{recorded} x {by:,} recorded steps reach up to {reach:,} ranks. {needed:,} steps would "
      "do.")
  NEW_TIER = ("new_tier",
      "the job would reach other hosts, and transfers between hosts were not "
      "measured",
      "With {per_host} a host, {ranks:,} ranks need {hosts:,} hosts, and this run never left "
      "one: what lies between hosts was not measured. Give --fabric (from `jaxpace bench`), "
      "or --ranks-per-host if so many share a host.")
  BEYOND_FABRIC = ("beyond_fabric", "the fabric file ends below so many ranks",
      "{source} describes a fabric of {ranks} at most (level '{level}'): what lies beyond was "
      "not measured.")
  NO_COST = ("no_cost", "the fabric file has no cost of a collective",
      "{source} has no cost of {kinds} at level '{level}'.")
