"""Where the timestamps go: the stages of a step, with the timestamps put in.

Static, decided at trace time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxpace.core.observed import of_primitives
from jaxpace.core.plan import COMPUTE, DELAY, GAP, SYNC, UPDATE, Collective, Timestamp, Untimed
from jaxpace.core.ring_layout import MAX_PHASE_TIMESTAMPS, slot_tags
from jaxpace.instrumentation import gates, piggyback, primitives, schedule
from jaxpace.instrumentation.piggyback import Carrier
from jaxpace.instrumentation.program import Program, axes_of, size_bytes
from jaxpace.instrumentation.schedule import BucketTimestamps, Segment, Stage
from jaxpace.observation import phases


@dataclasses.dataclass(frozen=True)
class Script:
  """The whole step."""

  program: Program
  stages: tuple[Stage, ...]
  carrier: Carrier | None
  """The all-reduce that the ranks' arrivals ride in, if it can take them."""
  marks: tuple[Timestamp, ...]
  collectives: tuple[Collective, ...]
  unstamped: tuple[Untimed, ...]
  overflow: int
  notices: tuple[str, ...]


def write_script(program: Program, axis: Sequence[str], *, slots: int, delayed: bool,
                 phases_apart: bool = True, overlap: bool = False) -> Script:
  """Decides where the timestamps go; evaluating the script gives the outputs of the program, bit
  for bit. Of more buckets of collectives than slots the smallest get no timestamps; the step's
  beginning has a `delay` mark if a pacer may ask for one; and there are timestamps between the
  phases, too, if these are apart. `overlap` says that collectives may run beside computation."""
  bare = schedule.stages(program, most_segments=MAX_PHASE_TIMESTAMPS if phases_apart else 0)
  writer = _Writer(program, bare, slots, overlap)
  stages = [writer.stage(number, delayed) for number in range(len(bare))]
  timestamped = [(stage, stage.timestamps) for stage in stages if stage.timestamps is not None]
  left = [stage.bucket for stage in stages if stage.bucket and stage.timestamps is None]
  unstamped = [*program.hidden,
               *(_left_out(program, index) for collectives in left for index in collectives)]
  return Script(
      program=program, stages=tuple(stages),
      carrier=_carrier(program, stages, tuple(axis)),
      marks=_marks(stages, delayed),
      collectives=tuple(_describe(program, stage, timestamps, axis) for stage,
                        timestamps in timestamped),
      unstamped=tuple(unstamped), overflow=len(left),
      notices=(*writer.notices, *_early([timestamps for _, timestamps in timestamped])))


_HEAVY = primitives.PRODUCTS | primitives.UNKNOWN_WORK


class _Writer:
  """Puts the timestamps into the stages of a step."""

  def __init__(self, program: Program, stages: Sequence[Stage], slots: int, overlap: bool):
    self.program, self.stages = program, stages
    self.order = gates.meeting_order(program)
    self.work_behind = gates.dependencies(program, program.significant)
    self.products_behind = gates.dependencies(program, (
        i for i, equation in enumerate(program.equations) if equation.primitive.name in _HEAVY
    )) if overlap else {}
    self.collectives_behind = gates.dependencies(
        program, (i for i, equation in enumerate(program.equations) if equation.collective))
    self.slot_of = _slots(program, stages, slots)
    self.notices: list[str] = []

  def stage(self, number: int, delayed: bool) -> Stage:
    """A stage with its timestamps, as the bare one at this place."""
    bare = self.stages[number]
    first, *others = bare.segments
    # In later stages the exit timestamp holds back the collective's own results.
    if number == 0:
      gated, complete = gates.cover(self.program, first.equations)
      first = dataclasses.replace(first, gated=tuple(gated))
      if delayed and not complete:
        self.notices.append("Part of the step can start before its delay: no value there can be "
                            "held back exactly.")
    segments = [first]
    for segment in others:
      self.append(segments, segment)
    return Stage(tuple(segments), bare.bucket,
                 self.timestamps(bare.bucket, number) if number in self.slot_of else None)

  def append(self, segments: list[Segment], segment: Segment) -> None:
    """Appends a segment behind a boundary; where none can be held, joins it to the one before."""
    before = segments[-1]
    waits_for = gates.ends(self.program, before.equations)
    gated, complete = gates.cover(self.program, segment.equations)
    if complete and waits_for:
      segments.append(dataclasses.replace(segment, gated=tuple(gated), boundary=tuple(waits_for)))
      return
    self.notices.append(f"The boundary between {before.phase} and {segment.phase} can't be held "
                        "without a risk to the last bits of the results; both are reported as "
                        "compute.")
    segments[-1] = dataclasses.replace(
        before, phase=COMPUTE, equations=before.equations + segment.equations)

  def timestamps(self, collectives: Sequence[int], number: int) -> BucketTimestamps:
    """The timestamps around the bucket that ends a stage."""
    met = sorted(collectives, key=lambda index: self.order.get(index, len(self.order)))
    results = gates.results(self.program, met)
    following = [i for segment in self.stages[number + 1].segments for i in segment.equations]
    slot = self.slot_of[number]
    return BucketTimestamps(
        slot=slot,
        operands=tuple(gates.operands(self.program, met, self.work_behind)),
        gate=gates.gate(self.program, collectives, self.products_behind),
        joinable=_joinable(self.program, collectives, slot),
        last=number == len(self.stages) - 2,
        results=tuple(results),
        latest_result=gates.latest(self.program, results, self.collectives_behind),
        held_after=tuple(gates.scalar_inputs(self.program, following)))


def _slots(program: Program, stages: Sequence[Stage], slots: int) -> dict[int, int]:
  """By number of a stage, the slot of its bucket: the largest buckets get one, in order of time."""
  sizes = {number: schedule.operand_bytes(program, stage.bucket)
           for number, stage in enumerate(stages) if stage.bucket}
  kept = sorted(sizes, key=lambda number: (-sizes[number], number))[:slots]
  return {number: slot for slot, number in enumerate(sorted(kept))}


def _early(timestamped: Sequence[BucketTimestamps]) -> tuple[str, ...]:
  """A notice on the collectives that can begin before their entry timestamps, if any can."""
  early = [timestamps.slot for timestamps in timestamped if timestamps.may_begin_early]
  if not early:
    return ()
  several = len(early) > 1
  return (f"Collective{'s' if several else ''} {', '.join(map(str, early))} can start before "
          f"{'their entry timestamps' if several else 'its entry timestamp'}, which may then be "
          f"late: none of {'their' if several else 'its'} operands can be held back without a risk "
          "to the last bits of the results.",)


def _left_out(program: Program, index: int) -> Untimed:
  """A collective that has no timestamps for want of a slot."""
  equation = program.equations[index]
  return Untimed(equation.stack or equation.primitive.name, equation.primitive.name,
                   schedule.operand_bytes(program, [index]), "more collectives than slots")


def _carrier(program: Program, stages: Sequence[Stage], axis: tuple[str, ...]) -> Carrier | None:
  """The all-reduce that arrivals should ride in: the last that can carry them.

  It has seen most of the step. If none can it is the largest, which is named in the reason.
  """
  sizes = {stage.timestamps.joinable: schedule.operand_bytes(program, stage.bucket)
           for stage in stages if stage.timestamps and stage.timestamps.joinable}
  able = [carrier for carrier in sizes if not piggyback.refusal(carrier, axis)]
  return able[-1] if able else max(sizes, key=lambda carrier: sizes[carrier], default=None)


def _joinable(program: Program, collectives: Sequence[int], slot: int) -> Carrier | None:
  """The largest sum of a bucket: an operand of ours must have its dtype and axes to join it.

  Of a type that times can be written in, if there is one: what is counted beside the gradients may
  be of integers.
  """
  sizes: dict[tuple[str, tuple[str, ...]], int] = {}
  for index in collectives:
    equation = program.equations[index]
    grouped = equation.params.get("axis_index_groups") is not None
    if equation.primitive.name not in primitives.SUMS or grouped:
      continue
    axes = axes_of(equation.primitive, equation.params)
    if len(axes) != len(equation.params["axes"]):
      # Also sums over an array dimension.
      continue
    for value in equation.reads():
      dtype = str(program.avals[value].dtype)
      sizes[dtype, axes] = sizes.get((dtype, axes), 0) + program.size(value)
  if not sizes:
    return None
  dtype, axes = max(sizes, key=lambda key: (piggyback.carries(key[0]), sizes[key], key))
  return Carrier(slot, dtype, axes)


def _describe(program: Program, stage: Stage, timestamps: BucketTimestamps, axis: Sequence[str]
              ) -> Collective:
  """What the plan says of a timestamped bucket."""
  equations = [program.equations[i] for i in stage.bucket]
  largest = max(equations, key=lambda e: sum(program.size(v) for v in e.reads()))
  name = phases.collective_name(largest.stack) or largest.primitive.name.removesuffix("_invariant")
  names = tuple(sorted({e.primitive.name for e in equations}))
  operands = [program.avals[v] for e in equations for v in e.reads()]
  return Collective(
      index=timestamps.slot, name=name, phase=stage.segments[-1].phase,
      enter_tag=slot_tags(timestamps.slot)[0], may_begin_early=timestamps.may_begin_early,
      meanwhile=schedule.meanwhile(program, stage.bucket),
      primitives=names, kind=of_primitives(names), axes=tuple(_axes(equations, axis)),
      bytes=sum(map(size_bytes, operands)), operands=len(operands),
      dtypes=tuple(sorted({str(aval.dtype) for aval in operands})),
      index_pairs=_pairs(equations), index_groups=_index_groups(equations))


def _axes(equations: Sequence[Any], axis: Sequence[str]) -> Sequence[str]:
  """Axes of a bucket's collectives: the step's, unless all of them name the same others."""
  named = {tuple(axes_of(e.primitive, e.params)) for e in equations}
  own = named.pop() if len(named) == 1 else ()
  return own if own and set(own) != set(axis) else axis


def _pairs(equations: Sequence[Any]) -> tuple[tuple[int, int], ...]:
  """Sources and targets where all collectives are point-to-point transfers; else none."""
  if any(e.primitive.name != "ppermute" for e in equations):
    return ()
  return tuple(sorted({(int(source), int(target))
                       for e in equations for source, target in e.params.get("perm", ())}))


def _index_groups(equations: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
  """Groups along the axis where all collectives have the same ones; else none."""
  groups = {tuple(tuple(map(int, group)) for group in e.params.get("axis_index_groups") or ())
          for e in equations}
  return groups.pop() if len(groups) == 1 else ()


def _marks(stages: Sequence[Stage], delayed: bool) -> tuple[Timestamp, ...]:
  """Lists the timestamps in order; a timestamp's segment names the time before it."""
  marks = [Timestamp("start", GAP)]
  if delayed:
    marks.append(Timestamp("delay", DELAY))
  current = COMPUTE
  for stage in stages:
    for segment in stage.segments:
      if segment.boundary is not None:
        marks.append(Timestamp("phase", current))
      current = segment.phase
    if stage.timestamps is not None:
      marks.append(Timestamp("enter", current, stage.timestamps.slot))
      marks.append(Timestamp("exit", SYNC, stage.timestamps.slot))
  marks.append(Timestamp("end", current if stages[-1].segments else UPDATE))
  return tuple(marks)
