"""What the JSON files of a run hold: types, ranges and how long they may be. Every key may be
absent.

These are limits for readers: a file within them may still be wrong, but takes no more time or
memory than it should.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

RANKS = 1 << 24
"""Rank numbers, processes and counts of them are below."""
TIME = 1 << 62
"""Nanoseconds, either sign: the difference of two such times still fits."""

Line = Annotated[str, Meta(max_length=4096)]
Text = Annotated[str, Meta(max_length=1 << 20)]
Count = Annotated[int, Meta(ge=0, le=TIME)]
Step = Annotated[int, Meta(ge=-1, lt=TIME)]
Number = Annotated[int, Meta(ge=0, lt=RANKS)]
Nanoseconds = Annotated[int, Meta(gt=-TIME, lt=TIME)]
Seconds = Annotated[float, Meta(ge=0, lt=1e12)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Numbers = Annotated[list[Number], Meta(max_length=1 << 20)]
Lines = Annotated[list[Line], Meta(max_length=4096)]
Groups = Annotated[list[Numbers], Meta(max_length=1 << 20)]
_MOST_OF_A_STEP = 4096


class TimestampJson(Struct):
  """A timestamp of the step."""

  kind: Line = ""
  segment: Line = ""
  collective: Number | None = None


class CollectiveJson(Struct):
  """A timestamped collective."""

  slot: Number | None = None
  name: Line = ""
  primitives: Lines = []
  axis: Line = ""
  bytes: Count | None = None
  operands: Count | None = None
  dtypes: Lines = []
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


class DetailJson(Struct):
  """Which steps of an observed run are written in detail, see `jaxpace.core.detail`."""

  every: Annotated[int, Meta(ge=1, lt=RANKS)] = 1


class UntimedJson(Struct):
  """A collective without timestamps."""

  name: Line = ""
  primitive: Line = ""
  bytes: Count | None = None
  reason: Line = ""


class PlanOfStep(Struct):
  """`plan` of run.json, see `jaxpace.core.plan`."""

  axis: Line | None = None
  ranks: Annotated[int, Meta(ge=1, lt=RANKS)] | None = None
  clock: Line | None = None
  marks: Annotated[list[TimestampJson], Meta(max_length=4 * _MOST_OF_A_STEP)] = []
  collectives: Annotated[list[CollectiveJson], Meta(max_length=_MOST_OF_A_STEP)] = []
  unstamped: Annotated[list[UntimedJson], Meta(max_length=_MOST_OF_A_STEP)] = []
  share: bool | None = None
  share_reason: Line | None = None
  carrier: Number | None = None
  decisions: Lines = []
  overflow: Number = 0
  detail: DetailJson | None = None
  notices: Annotated[list[Line], Meta(max_length=256)] = []


class SettingsJson(Struct):
  """`settings` of run.json: how the step was instrumented."""

  axis: Annotated[list[Line], Meta(max_length=64)] | Line | None = None
  mesh: Annotated[dict[Line,
                       Annotated[int, Meta(ge=1, lt=RANKS)]], Meta(max_length=64)] | None = None
  slots: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
  rows: Count | None = None
  max_delay: Seconds | None = None
  pacer: Line | None = None
  clock: Line | None = None


class Attempt(Struct):
  """One start of the job."""

  attempt: Number = 0
  started_unix_ns: Nanoseconds | None = None
  processes: Number | None = None
  devices: Number | None = None


class RunFile(Struct):
  """`run.json`."""

  schema_version: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
  run: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
  attempt: Annotated[int, Meta(ge=0, lt=1 << 15)] | None = None
  attempts: Annotated[list[Attempt], Meta(max_length=1 << 15)] = []
  started_unix_ns: Nanoseconds | None = None
  ranks: Annotated[int, Meta(ge=1, lt=RANKS)] | None = None
  processes: Annotated[int, Meta(ge=1, lt=RANKS)] | None = None
  devices: Annotated[int, Meta(ge=1, lt=RANKS)] | None = None
  axis: Line | None = None
  clock: Line | None = None
  pacer: Line | None = None
  platform: Line | None = None
  device_kind: Line | None = None
  program: Text | None = None
  kind: Line | None = None
  versions: dict[Line, Line] | None = None
  settings: SettingsJson | None = None
  plan: PlanOfStep | None = None


class ProcessFile(Struct):
  """`process/<process>.json`."""

  schema_version: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
  run: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
  attempt: Annotated[int, Meta(ge=0, lt=1 << 15)] | None = None
  process: Number | None = None
  hostname: Annotated[str, Meta(max_length=255)] | None = None
  host: Annotated[str, Meta(max_length=255)] | None = None
  pid: Count | None = None
  ranks: Numbers = []
  lost_rows: Count = 0
  holes: Count = 0
  dropped_batches: Count = 0
  rows_written: Count = 0
  closed_cleanly: bool | None = None
  ended_by: Line | None = None
  stopped: Line | None = None
  last_step: Step | None = None
  monotonic_ns: Nanoseconds | None = None
  wall_ns: Nanoseconds | None = None


class LateJson(Struct):
  """A process that has not arrived, in a watchdog's event, see
  `jaxpace.runs.alarms.LateProcess`."""

  process: Number | None = None
  state: Line | None = None
  host: Line | None = None
  pid: Count | None = None
  last_step: Step | None = None
  phase: Line | None = None
  seconds: Seconds | None = None
  stack: Text | None = None


class CauseOfWait(Struct):
  """Why ranks wait within a step, in a watchdog's event."""

  kind: Line = ""
  ranks: Numbers = []
  collective: Line | None = None


class EventLine(Struct):
  """A line of `watchdog/<process>.jsonl`."""

  event: Line | None = None
  run: Line | None = None
  when_unix_ns: Nanoseconds | None = None
  process: Number | None = None
  step: Step | None = None
  waited: Seconds | None = None
  seconds: Seconds | None = None
  late: Annotated[list[LateJson], Meta(max_length=1 << 17)] = []
  arrived: Numbers = []
  marks: Lines = []
  causes: Annotated[list[CauseOfWait], Meta(max_length=4096)] = []


class LinksFile(Struct):
  """`links.json`."""

  schema: int | None = None
  when_unix_ns: Nanoseconds | None = None
  message_bytes: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
  taken_seconds: Seconds | None = None
  hosts: Annotated[list[Line], Meta(max_length=4096)] = []
  seconds: Annotated[list[list[Annotated[float, Meta(gt=0, lt=1e6)]
                               | None]], Meta(max_length=4096)] = []
  median_seconds: Annotated[list[list[Annotated[float, Meta(gt=0, lt=1e6)]
                                      | None]], Meta(max_length=4096)] = []
  cannot_tell: Line | None = None


class LoopOfProgram(Struct):
  """See `jaxpace.core.observed.Loop`."""

  name: Line = ""
  trips: Count | None = None


Tags = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 20)]], Meta(max_length=1 << 16)]


class ObservedCollectiveJson(Struct):
  """See `jaxpace.core.observed.ObservedCollective`."""

  index: Number
  name: Line
  kind: Line
  groups: Groups
  pairs: Annotated[list[tuple[Number, Number]], Meta(max_length=1 << 20)]
  enter_tags: Tags
  exit_tags: Tags
  loops: Annotated[list[LoopOfProgram], Meta(max_length=64)]
  axes: Annotated[list[Line], Meta(max_length=64)]
  dtypes: Lines
  operands: Count = 0
  bytes: Count | None = None
  phase: Line = "compute"
  source: Line | None = None
  operation: Line | None = None
  conditional: bool = False


class ObservedProgramJson(Struct):
  """See `jaxpace.core.observed.ObservedProgram`."""

  number: Annotated[int, Meta(ge=0, lt=1 << 12)]
  name: Line
  ranks: Numbers
  mesh_axes: Annotated[dict[Line, Count], Meta(max_length=64)]
  collectives: Annotated[list[ObservedCollectiveJson], Meta(max_length=_MOST_OF_A_STEP)]
  start_tag: Annotated[int, Meta(ge=0, lt=1 << 20)] = 0
  end_tag: Annotated[int, Meta(ge=0, lt=1 << 20)] = 1
  notices: Lines = []
  unstamped: Annotated[list[UntimedJson], Meta(max_length=_MOST_OF_A_STEP)] = []
  bare: Line = ""
  bare_compile_s: Seconds | None = None
  stamped_compile_s: Seconds | None = None


class ObservedPlanJson(Struct):
  """See `jaxpace.core.observed.ObservedPlan`."""

  programs: Annotated[list[ObservedProgramJson], Meta(max_length=1 << 12)]


class RingPlanFile(Struct):
  """`marks/<process>.plan.json`."""

  run: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
  attempt: Annotated[int, Meta(ge=0, lt=1 << 15)] | None = None
  process: Number | None = None
  plan: ObservedPlanJson | None = None
