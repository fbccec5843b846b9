"""The order in which a step is re-evaluated: segments in stages, each ended by a bucket.

    Stage     what is computed between two buckets
      Segment   its equations of one phase
      bucket    the collectives that end it, and the two timestamps around them

Collectives that depend on none of each other form one bucket: XLA combines them, and a rank enters
them together. Buckets are formed from the end (a gradient's psum that only feeds the update belongs
to the last bucket, whatever layer it comes from), and everything that a bucket does not feed comes
before it. What `stages` returns has no timestamps yet: `jaxpace.instrumentation.script` puts them
in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxpace.core.plan import BACKWARD, COMPUTE, FORWARD, UPDATE
from jaxpace.instrumentation.piggyback import Carrier
from jaxpace.instrumentation.program import Equation, Program, bodies, nested_phases
from jaxpace.observation import phases


@dataclasses.dataclass(frozen=True)
class Segment:
  """Equations of one stage that belong to one phase, in program order."""

  phase: str
  equations: tuple[int, ...]
  gated: tuple[int, ...] = ()
  """Values that this segment sees only after the timestamp before it."""
  boundary: tuple[int, ...] | None = None
  """Values that a timestamp of its own before this segment waits for; None where there is none."""


@dataclasses.dataclass(frozen=True)
class BucketTimestamps:
  """The timestamps before and after a bucket: what they wait for, and what they hold back."""

  slot: int
  operands: tuple[int, ...]
  """Operands of the bucket, which the entry timestamp waits for."""
  gate: int | None
  """Operand that the entry timestamp holds back; None where none can be."""
  joinable: Carrier | None
  """An all-reduce of this bucket that an operand of ours can join."""
  last: bool
  """Whether these are the step's last collectives."""
  results: tuple[int, ...]
  """Results of the bucket: where XLA makes several collectives of it, the last to come ends it."""
  latest_result: int
  """The one that the exit timestamp waits for, where what it waits for must be little."""
  held_after: tuple[int, ...]
  """Scalar inputs of the step that what follows sees only after the exit timestamp."""

  @property
  def may_begin_early(self) -> bool:
    """Whether nothing holds the collectives back until their entry timestamp is taken."""
    return self.gate is None and not (self.last and self.joinable)


@dataclasses.dataclass(frozen=True)
class Stage:
  """What is computed between two buckets, then the bucket that ends it."""

  segments: tuple[Segment, ...]
  bucket: tuple[int, ...]
  """Collectives that depend on none of each other, in program order; none in the last stage."""
  timestamps: BucketTimestamps | None = None
  """None before the timestamps are decided on, and where there are more buckets than slots."""


def meanwhile(program: Program, collectives: Sequence[int]) -> float | None:
  """The share of the step's operations that may run while the collectives of one bucket are under
  way, 0 to 1 by `Program.costs`; what can't be counted (a loop) is left out of the whole, so that
  the share is rather too large. None where any of that may run meanwhile.

  Those that no operand of theirs needs, and that need none of their results. More than really run
  meanwhile: most of them may be over before.
  """
  before, after = program.behind(collectives), program.after(collectives)
  # What nobody needs the compiler drops.
  needed = program.behind(collectives, (ref for ref in program.outputs if isinstance(ref, int)))
  apart_from = needed - before - after
  costs = [(program.costs[index], index in apart_from) for index in sorted(needed)]
  apart = sum(cost for cost, alone in costs if alone)
  total = sum(cost for cost, _ in costs if cost != math.inf)
  if apart == math.inf:
    return None
  return apart / total if total else 0.0


def buckets(program: Program) -> list[tuple[int, ...]]:
  """Returns the collectives of a step, those that depend on none of each other together, first to
  last."""
  # By value and by collective, how many collectives follow on a path to the end at most: those of
  # the same level depend on none of each other.
  height: dict[int, int] = {}
  level: dict[int, int] = {}
  for index in range(len(program.equations) - 1, -1, -1):
    equation = program.equations[index]
    own = max((height.get(value, 0) for value in equation.outputs), default=0)
    if equation.collective:
      level[index] = own
      own += 1
    for value in equation.reads():
      height[value] = max(height.get(value, 0), own)
  return [tuple(sorted(index for index, its in level.items() if its == one))
          for one in sorted(set(level.values()), reverse=True)]


def stages(program: Program, most_segments: int) -> list[Stage]:
  """Orders the program: one stage for each bucket of collectives, and a last one, in order of time,
  without timestamps; evaluating their segments' equations and their buckets in that order is a
  valid order. If the whole program has more segments than `most_segments` (an unrolled accumulation
  loop, say), those of each stage that has several are merged into one of phase "compute"; a stage
  of one segment keeps its phase."""
  ordered = buckets(program)
  bucket_of = {index: b for b, bucket in enumerate(ordered) for index in bucket}
  feeding = program.behind(bucket_of)
  # By value, the stage in which it can be computed.
  ready: dict[int, int] = {}
  members: list[list[int]] = [[] for _ in range(len(ordered) + 1)]
  for index, equation in enumerate(program.equations):
    if equation.collective:
      number = bucket_of[index] + 1
    elif index not in feeding and phases.classify(equation.stack) == phases.OTHER:
      # Part of the update that needs no gradient.
      number = len(ordered)
    else:
      number = max((ready.get(value, 0) for value in equation.reads()), default=0)
    if not equation.collective:
      members[number].append(index)
    for output in equation.outputs:
      ready[output] = number
  segments = [_segments(program, indices, s == len(ordered)) for s, indices in enumerate(members)]
  if sum(map(len, segments)) > most_segments:
    segments = [of_stage if len(of_stage) == 1 else (Segment(COMPUTE, tuple(
        index for segment in of_stage for index in segment.equations)),) for of_stage in segments]
  return [Stage(of_stage, bucket)
          for of_stage, bucket in zip(segments, [*ordered, ()], strict=True)]


def _segments(program: Program, indices: Sequence[int], last: bool) -> tuple[Segment, ...]:
  """Splits a stage. Only significant equations start a segment; light ones join the one they stand
  in."""
  found: list[tuple[str, list[int]]] = []
  # Light equations whose segment is not decided yet: before the first, or of another phase.
  pending: list[int] = []
  for index in indices:
    phase = _phase(program, index, found[-1][0] if found else None, last)
    if index not in program.significant:
      if found and not pending and phase == found[-1][0]:
        found[-1][1].append(index)
      else:
        pending.append(index)
      continue
    if not found or found[-1][0] != phase:
      found.append((phase, []))
    found[-1][1].extend([*pending, index])
    pending = []
  if not found:
    return (Segment(UPDATE if last else _light_phase(program, indices), tuple(pending)),)
  found[-1][1].extend(pending)
  return tuple(Segment(phase, tuple(equations)) for phase, equations in found)


def _phase(program: Program, index: int, before: str | None, last: bool) -> str:
  """Phase of an equation, which follows a segment of phase `before` if that is not None."""
  equation = program.equations[index]
  if _mixed(equation):
    return COMPUTE
  phase = phases.classify(equation.stack)
  # After the last collective, casting gradients is part of the update.
  if phase == phases.OTHER or last and index not in program.major:
    phase = UPDATE if last else COMPUTE
  # Clipping or casting gradients between backward and sync belongs to what it follows.
  return BACKWARD if phase == COMPUTE and before == BACKWARD else phase


def _light_phase(program: Program, indices: Sequence[int]) -> str:
  """Phase of a stage without significant equations: that of its last equation that has one."""
  for index in reversed(indices):
    phase = phases.classify(program.equations[index].stack)
    if phase != phases.OTHER:
      return phase
  return COMPUTE


def _mixed(equation: Equation) -> bool:
  """Whether one equation holds both forward and backward (a scan over micro-batches)."""
  found = {phase for body in bodies(equation.params)
           for phase in nested_phases(body, equation.stack)}
  return FORWARD in found and BACKWARD in found


def operand_bytes(program: Program, collectives: Sequence[int]) -> int:
  """Bytes of all operands of these collectives on one rank."""
  return sum(program.size(value)
             for index in collectives for value in program.equations[index].reads())
