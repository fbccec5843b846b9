"""What the JSON files of a run hold: types, ranges and how long they may be. Every key may be
absent.

These are limits for readers: a file within them may still be wrong, but takes no more time or
memory than it should.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from jaxpace.core.plan import Timestamp, Untimed

RANKS = 1 << 24
"""Rank numbers, processes and counts of them are below."""
TIME = 1 << 62
"""Nanoseconds, either sign: the difference of two such times still fits."""

Line = Annotated[str, Meta(max_length=4096)]
Text = Annotated[str, Meta(max_length=1 << 20)]
Count = Annotated[int, Meta(ge=0, le=TIME)]
Step = Annotated[int, Meta(ge=-1, lt=TIME)]
Number = Annotated[int, Meta(ge=0, lt=RANKS)]
Positive = Annotated[int, Meta(ge=1, lt=RANKS)]
Version = Annotated[int, Meta(ge=0, lt=1 << 31)]
Attempt = Annotated[int, Meta(ge=0, lt=1 << 15)]
RunId = Annotated[str, Meta(min_length=1, max_length=255)]
Nanoseconds = Annotated[int, Meta(gt=-TIME, lt=TIME)]
Seconds = Annotated[float, Meta(ge=0, lt=1e12)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Numbers = Annotated[list[Number], Meta(max_length=1 << 20)]
Lines = Annotated[list[Line], Meta(max_length=4096)]
Groups = Annotated[list[Numbers], Meta(max_length=1 << 20)]
_MOST_OF_A_STEP = 4096
_MOST_LOOPS = 4


class CollectiveJson(Struct):
  """A timestamped collective."""

  slot: Number | None = None
  name: Line = ""
  primitives: Lines = []
  axis: Line = ""
  bytes: Count | None = None
  phase: Line = ""
  groups: Groups | None = None
  index_groups: Groups | None = None
  pairs: Annotated[list[tuple[Number, Number]], Meta(max_length=1 << 20)] | None = None
  may_begin_early: bool | None = None
  meanwhile: Fraction | None = None
  kind: Line | None = None
  operation: Line | None = None
  source: Line | None = None
  loops: Annotated[list[tuple[Line, Number, Number | None]], Meta(max_length=64)] | None = None
  of: Number | None = None
  program: Number | None = None
  rank_pairs: Annotated[list[tuple[Number, Number]], Meta(max_length=1 << 20)] | None = None


class PlanOfStep(Struct):
  """`plan` of run.json, see `jaxpace.core.plan`."""

  axis: Line | None = None
  ranks: Positive | None = None
  clock: Line | None = None
  marks: Annotated[list[Timestamp], Meta(max_length=4 * _MOST_OF_A_STEP)] = []
  collectives: Annotated[
      list[CollectiveJson], Meta(max_length=_MOST_LOOPS * _MOST_OF_A_STEP)] = []
  unstamped: Annotated[list[Untimed], Meta(max_length=_MOST_OF_A_STEP)] = []
  share: bool | None = None
  carrier: Number | None = None
  decisions: Lines = []
  overflow: Number = 0
  detail: dict[Line, Count | Line | None] | None = None
  notices: Annotated[list[Line], Meta(max_length=256)] = []


class LoopJson(Struct):
  """What was found to be the step of a loop."""

  programs: Annotated[list[Line], Meta(max_length=256)] = []
  why: Line | None = None
  trains: bool | None = None
  first_step: Step | None = None


class FoundStepJson(LoopJson):
  """What was found to be the step last, and in the loops before."""

  before: Annotated[list[LoopJson], Meta(max_length=256)] = []
  beside: Annotated[list[Line], Meta(max_length=256)] = []


class SettingsJson(Struct):
  """`settings` of run.json: how the step was instrumented."""

  axis: Annotated[list[Line], Meta(max_length=64)] | Line | None = None
  mesh: Annotated[dict[Line, Positive], Meta(max_length=64)] | None = None
  slots: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
  max_delay: Seconds | None = None
  max_hold: Seconds | None = None
  pacer: Line | None = None
  clock: Line | None = None
  step: FoundStepJson | Line | None = None


class RunFile(Struct):
  """`run.json`."""

  schema_version: Version | None = None
  run: RunId | None = None
  attempt: Attempt | None = None
  attempts: Annotated[list[dict[str, Any]], Meta(max_length=1 << 15)] = []
  ranks: Positive | None = None
  processes: Positive | None = None
  devices: Positive | None = None
  axis: Line | None = None
  clock: Line | None = None
  pacer: Line | None = None
  kind: Line | None = None
  settings: SettingsJson | None = None
  plan: PlanOfStep | None = None


class ProcessFile(Struct):
  """`process/<process>.json`."""

  schema_version: Version | None = None
  run: RunId | None = None
  attempt: Attempt | None = None
  process: Number | None = None
  hostname: Annotated[str, Meta(max_length=255)] | None = None
  ranks: Numbers = []
  processes: Positive | None = None
  devices: Positive | None = None
  lost_rows: Count = 0
  holes: Count = 0
  rows_written: Count = 0
  closed_cleanly: bool | None = None
  ended_by: Line | None = None
  stopped: Line | None = None
  last_step: Step | None = None


_Pairs = Annotated[list[list[Annotated[float, Meta(gt=0, lt=1e6)] | None]], Meta(max_length=4096)]


class LinksFile(Struct):
  """`links.json`."""

  schema: int | None = None
  when_unix_ns: Nanoseconds | None = None
  message_bytes: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
  taken_seconds: Seconds | None = None
  hosts: Annotated[list[Line], Meta(max_length=4096)] = []
  seconds: _Pairs = []
  median_seconds: _Pairs = []
