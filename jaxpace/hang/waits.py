"""Who waits for whom: unfinished collectives, and the first cause among them. Pure.

A rank that has entered a collective and not left it waits for those of its group that have not
entered. One of those may itself wait in another collective, for others; the end of such a chain is
a rank that waits nowhere, a collective that all have entered, or a circle.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple

from jaxpace.hang.positions import Position, ProgramsByKey
from jaxpace.record.ring.plan import iterations_of

Kind = Literal["absent", "order", "stuck", "unknown"]
"""What keeps a collective from finishing.

"absent": ranks that are in no collective have not entered; "order": ranks wait for each other in
different collectives; "stuck": all have entered; "unknown": nothing is known of those that have
not.
"""


SHORT = 3.0
"""Seconds; shorter waits are nobody's concern."""
_RUNNING, _USUAL_STEPS = 10.0, 20.0


def too_long(usual: float, shortest: float = _RUNNING) -> float:
  """Seconds of a wait from which on it is reported: so many of the usual steps, of as many seconds,
  if that is longer than the shortest such wait of a job that runs, or of another. Whether such a
  job hangs or waits for a checkpoint, timestamps don't tell."""
  return max(shortest, _USUAL_STEPS * usual)


class GroupRun(NamedTuple):
  """One time that one group runs one collective."""

  program: str
  number: int
  """Executions of the program that had started before."""
  place: int
  iteration: int
  group: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Wait:
  """A meeting that is not finished; ranks rising."""

  meeting: GroupRun
  waiting: tuple[int, ...]
  """Have entered and not left."""
  absent: tuple[int, ...] = ()
  """Have not entered."""
  left: tuple[int, ...] = ()
  unknown: tuple[int, ...] = ()
  """Have no ring, or one that does not tell."""


@dataclasses.dataclass(frozen=True)
class Cause:
  """Why ranks wait."""

  kind: Kind
  ranks: tuple[int, ...]
  """Who is to be looked at: those absent, in the circle, inside, or unknown."""
  waits: tuple[Wait, ...]
  """The meetings that wait for these ranks, in the order of the program; for a circle, all in
  it."""
  behind: tuple[Wait, ...]
  """Meetings that wait for ranks in those."""

  @property
  def held(self) -> int:
    """How many ranks wait because of it, directly or not."""
    return len({rank for wait in (*self.waits, *self.behind) for rank in wait.waiting})


def unfinished(positions: Mapping[int, Position], programs: ProgramsByKey) -> tuple[Wait, ...]:
  """Finds the meetings that somebody waits in, by where each rank is; one that is not among these
  is unknown."""
  found: set[GroupRun] = set()
  for rank, where in positions.items():
    for execution in where.executions if not where.moving else ():
      if execution.number is None:
        continue
      for place, iteration in execution.pending:
        group = programs.group(execution.program, place, rank)
        found.add(GroupRun(execution.program, execution.number, place, iteration, group))
  waits = [_wait(meeting, positions) for meeting in sorted(found)]
  missed = {rank for wait in waits for rank in wait.absent}
  return tuple(wait for wait in waits if not _is_outdated(wait, missed, positions))


def _is_outdated(wait: Wait, missed: set[int], positions: Mapping[int, Position]) -> bool:
  """Whether others have left and wait elsewhere for all who seem to be inside, whose processes no
  longer write: of one that was killed, the file lacks the last timestamps."""
  return bool(wait.left) and all(rank in missed and positions[rank].state == "silent"
                                 for rank in wait.waiting)


def _wait(meeting: GroupRun, positions: Mapping[int, Position]) -> Wait:
  sides: dict[str, list[int]] = {"waiting": [], "absent": [], "left": [], "unknown": []}
  for rank in meeting.group:
    where = positions.get(rank)
    sides["unknown" if where is None else _side(meeting, where)].append(rank)
  return Wait(meeting, **{name: tuple(ranks) for name, ranks in sides.items()})


def _side(meeting: GroupRun, where: Position) -> str:
  execution = where.of(meeting.program)
  if execution is None:
    return "absent"
  if execution.number is None:
    return "unknown"
  if execution.number != meeting.number:
    return "left" if execution.number > meeting.number else "absent"
  if execution.ended or execution.left[meeting.place] > meeting.iteration:
    return "left"
  if execution.entered[meeting.place] <= meeting.iteration:
    return "absent"
  return "left" if where.moving else "waiting"


def causes(waits: tuple[Wait, ...], programs: ProgramsByKey) -> tuple[Cause, ...]:
  """Finds why the meetings are not finished, that which keeps most ranks first.

  Every wait is behind at least one cause.
  """
  def before(a: Wait, b: Wait) -> int:
    return _order(a.meeting, b.meeting, programs)

  waits = tuple(sorted(waits, key=functools.cmp_to_key(before)))
  inside: dict[int, list[int]] = {}
  for i, wait in enumerate(waits):
    for rank in wait.waiting:
      inside.setdefault(rank, []).append(i)
  # i waits for a rank that waits in each of these.
  after = [sorted({j for rank in wait.absent for j in inside.get(rank, ())}) for wait in waits]
  reached = [_reached(i, after) for i in range(len(waits))]
  found: list[tuple[Kind, tuple[int, ...], list[int]]] = []
  for circle in _circles(reached):
    found.append(("order", tuple(sorted({rank for i in circle for rank in waits[i].waiting})),
                  circle))
  for kind, ranks_of in (("absent", lambda wait: [r for r in wait.absent if r not in inside]),
                         ("unknown", lambda wait: list(wait.unknown))):
    for ranks, direct in _together([ranks_of(wait) for wait in waits]):
      found.append((kind, ranks, direct))  # type: ignore[arg-type]
  for i, wait in enumerate(waits):
    if not wait.absent and not wait.unknown:
      found.append(("stuck", wait.waiting, [i]))
  result = []
  for kind, ranks, direct in found:
    direct = sorted(direct)
    behind = [i for i in range(len(waits)) if i not in direct and reached[i] & set(direct)]
    result.append(Cause(kind, ranks, tuple(waits[i] for i in direct),
                        tuple(waits[i] for i in behind)))
  order = ("absent", "order", "stuck", "unknown")
  return tuple(sorted(result,
                      key=lambda cause: (-cause.held, order.index(cause.kind), cause.ranks)))


def _order(a: GroupRun, b: GroupRun, programs: ProgramsByKey) -> int:
  """Less than 0 where a comes before b in the program, more than 0 where it comes after."""
  if (a.program, a.number) != (b.program, b.number):
    return -1 if (a.number, a.program) < (b.number, b.program) else 1
  iterations = [iterations_of(programs.collective(one.program, one.place).loops, one.iteration)
                for one in (a, b)]
  for (loop, i, _), (other, j, _) in zip(*iterations, strict=False):
    if loop != other:
      break
    if i != j:
      return -1 if i < j else 1
  return -1 if (a.place, a.iteration, a.group) < (b.place, b.iteration, b.group) else 1


def _reached(start: int, after: list[list[int]]) -> set[int]:
  """What is reached from a place by one arrow or more."""
  found: set[int] = set()
  todo = list(after[start])
  while todo:
    at = todo.pop()
    if at not in found:
      found.add(at)
      todo.extend(after[at])
  return found


def _circles(reached: list[set[int]]) -> list[list[int]]:
  """Places that reach each other; each circle once."""
  done: set[int] = set()
  found = []
  for i, own in enumerate(reached):
    if i in own and i not in done:
      circle = [j for j in sorted(own) if i in reached[j]]
      done.update(circle)
      found.append(circle)
  return found


def _together(ranks_of: list[list[int]]) -> list[tuple[tuple[int, ...], list[int]]]:
  """Sets of ranks that keep the same waits, and those waits."""
  waits: dict[int, list[int]] = {}
  for i, ranks in enumerate(ranks_of):
    for rank in ranks:
      waits.setdefault(rank, []).append(i)
  by_waits: dict[tuple[int, ...], list[int]] = {}
  for rank, own in waits.items():
    by_waits.setdefault(tuple(own), []).append(rank)
  return [(tuple(sorted(ranks)), list(own)) for own, ranks in by_waits.items()]
