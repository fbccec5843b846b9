"""Stable codes of what the diagnosis says in sentences, each with its words.

A code keeps its meaning; the wording beside it may change from one release to the next. Programs
and tests ask for codes. docs/reference/codes.md is made of these files.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, Self

from jaxpace.core.words import Sentence


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
      "one: what lies between hosts was not measured. Give --floor (from `jaxpace bench`), "
      "or --ranks-per-host if so many share a host.")
  BEYOND_FABRIC = ("beyond_fabric", "the fabric file ends below so many ranks",
      "{source} describes a fabric of {ranks} at most (level '{level}'): what lies beyond was "
      "not measured.")
  NO_COST = ("no_cost", "the fabric file has no cost of a collective",
      "{source} has no cost of {kinds} at level '{level}'.")


class Verdict(Code):
  """What the verdict of a report says. Of a finding in the headline it is the finding's mode."""

  PERSISTENT = "persistent_straggler", "the same ranks are late"
  AMPLIFICATION = "synchronization_amplification", "ranks are late in turn"
  CONTENTION = "fabric_contention", "transfers take longer than they need"
  LOCALITY = "locality", "ranks in a bad place are slow"
  JITTER = "runtime_jitter", "processes pause between steps"
  COSTS_LITTLE = ("costs_little", "findings, of which none costs much",
      "No fault that costs much. {largest} {said}")
  HEALTHY = ("healthy", "nothing found, and nothing that hides", {
      "waiting": "Healthy: {waiting}. {largest}",
      "alone": "Healthy: one rank has nobody to wait for."})
  DATA_WAITS = ("data_waits", "no finding, but every step waits for data",
      "On average a step waits {data} ({part} of it) for data: prefetch further "
      "ahead, and look at the storage and the decoding it comes from.")
  SLOW_TRANSFERS = ("slow_transfers", "no finding, but transfers take longer than their best",
      "Transfers that take longer than the quickest ones cost {saving} of the step, which would be "
      "{speedup:.2f} times as fast without that: {why}.")
  IDLE_BETWEEN = ("idle_between", "no finding, but every step is followed by a long gap",
      "Devices stand idle between steps for {gap} as a rule ({part} of the time): see what the "
      "loop does there (`recorder.measure` names it), prefetch data, and wait for results less "
      "often.")
  FEW_PAUSES = "few_pauses", "no finding, but few long pauses take much of the time"
  OTHER_SHAPES = ("other_shapes", "no finding, but steps of another shape take much of the time",
      "Steps of another shape, which are left out here, took {part} of the time (see the notes).")
  UNNAMED_WAITING = ("unnamed_waiting", "no finding, but much waiting without a cause that shows",
      "No lasting fault: no rank is persistently late, and the waiting ({part} of the time) "
      "{where}: see the notes.")
  NO_STEPS = ("no_steps", "no step can be measured",
      "Nothing to judge: {steps} recorded, and none of them has a recorded step before it to "
      "measure from. Let the job run on.")
  TOO_FEW_STEPS = ("too_few_steps", "fewer steps count than a judgement needs", {
      "lost":
          "Too many steps are missing to judge: process {process} recorded {recorded:,} and "
          "lost {lost:,} of {steps}, and those need not be like these. What kept them from "
          "the record is in the notes and in the job's log.",
      "counted":
          "Too few steps to judge: {counted} count, {needed} are needed. So far waiting for "
          "late ranks takes {waiting:.1f} % of the step."})
  NO_COLLECTIVES = ("no_collectives", "no collective was recorded",
      "No collective was recorded: the run does not show whether ranks wait for each other; "
      "see the notes.")
  UNTOLD = "untold", "timestamps cannot show who waits for whom"
  UNTIMED = ("untimed", "collectives of the step are not timed",
      "The run does not show whether ranks wait for each other: {collectives} of the step "
      "{are} not timed ({what}), ranks meet there, and their waiting counts as compute; the "
      "notes say why. {largest}")
  DOUBT = ("doubt", "a sampled run can't tell what was seen in it",
      "The run does not show whether a rank is late: {doubt}, and waiting takes {waiting} of "
      "the step; see the notes.")
  UNSEEN_RANKS = ("unseen_ranks", "nothing is known of some ranks; `not_judged` has them",
      "{unseen} {others}: {said}")
