"""What the timestamps of a compiled program mean; and what a recorder records: a function that
timestamps its steps.

A timestamp is an event (device, tag, nanoseconds) that the running program writes. The plan says
what the tags of each program mean, so that a recorded run can be read without the program that made
it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxpace.core.plan import Collective, Plan, Untimed
from jaxpace.core.words import plural

# Kinds of collectives, by XLA's names, and the operations and primitives that are of each.

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
         "collective-permute", "collective-broadcast")
"""Kinds of collectives of a compiled program."""

_OF_PRIMITIVE = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
                 "all_to_all": "all-to-all", "ragged_all_to_all": "ragged-all-to-all",
                 "ppermute": "collective-permute"}
SEVERAL = "several"


def of_primitives(names: Iterable[str]) -> str:
  """Kind of a collective that primitives of these names make: sums, means, least and greatest are
  all-reduces.

  >>> [of_primitives(names) for names in (["psum", "pmin"], ["ppermute"], ["psum", "ppermute"])]
  ['all-reduce', 'collective-permute', 'several']
  """
  kinds = {_OF_PRIMITIVE.get(name, "all-reduce") for name in names}
  return kinds.pop() if len(kinds) == 1 else SEVERAL


TAG_BITS = 20
"""Bits of an event's tag that are the program's own; the bits above are the program's number."""


@dataclasses.dataclass(frozen=True)
class ObservedProgram:
  """One compiled shape of an observed step."""

  number: int
  """Number of the program in this process: the upper bits of its events' tags."""
  name: str
  """Name of the function that was compiled."""
  ranks: tuple[int, ...]
  """Rank of each partition: the place of its device in `jax.devices()`."""
  mesh_axes: dict[str, int]
  """Sizes of the mesh's axes, slowest first; {} where the step has no mesh."""
  collectives: tuple[Collective, ...]
  notices: tuple[str, ...] = ()
  """What is worth knowing about how the timestamps went in, a sentence each."""
  unstamped: tuple[Untimed, ...] = ()
  """Collectives that have no timestamps, and why."""
  bare: str = ""
  """Why this program runs unmodified, without timestamps, in a sentence; "" where it has
  timestamps."""
  differentiated: bool = False
  """Whether it computes gradients."""
  paced: int | None = None
  """Number of the program whose events an instrumented step writes that is in it; None where none
  is, or writes none."""
  decisions: tuple[str, ...] = ()
  """Names of that step's pacer's decision columns, in the order of their events."""
  clock: str = "host"
  """Whose clock its timestamps are of: "host", or "stream" for the GPU's own, set by the host's
    once."""
  bare_compile_s: float | None = None
  """Seconds that compiling the step unmodified took; None where not measured."""
  stamped_compile_s: float | None = None
  """Seconds that putting timestamps in took."""
  origin: str = ""
  """Line of the function, such as "train.py:40"; "" where that isn't known."""

  @property
  def title(self) -> str:
    """Its name with what tells it from all other programs; the same in every process, whatever else
    is compiled there."""
    if not self.origin:
      return self.name
    return f"{self.name} ({self.origin}{'' if self.differentiated else ', without gradients'})"

  @property
  def marks(self) -> int | None:
    """Timestamps that one device writes in a step; None where a loop's iterations are not known."""
    if self.bare:
      return 0
    iterations = [each.iterations for each in self.collectives if each.enter_tag >= 0]
    if None in iterations:
      return None
    return 2 + 2 * sum(filter(None, iterations))


def function_of(title: str) -> str:
  """Name of the function in a program's title.

  >>> function_of("fit (eval/train.py:3, without gradients)")
  'fit'
  """
  return title.partition(" (")[0]


@dataclasses.dataclass(frozen=True)
class ObservedPlan:
  """The programs that an observed step was compiled to so far, in the order they were met."""

  programs: tuple[ObservedProgram, ...] = ()

  def __str__(self) -> str:
    """A table of each program's collectives, for people."""
    return "\n\n".join(_written(program) for program in self.programs) or (
        "No program yet: the step has not been called.")

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars."""
    return dataclasses.asdict(self)


Decisions = Mapping[str, Mapping[int, float]]
"""What was decided for a step beside it, by the name of its column: of each of this process's
devices, by its place in `jax.devices()`."""
MOST_DECIDED = 1024
"""Changes of what is decided that wait to be recorded, at most."""


class Recordable:
  """Base of what `jaxpace.instrument` and `jaxpace.observe` return.

  A class to inherit from, not a protocol: `jax.jit` and `jax.shard_map` copy the attributes of what
  they wrap, so attributes can't tell an instrumented function from a compiled one around it.
  """

  plan: Plan | ObservedPlan | None = None
  """What the timestamps mean; known once the function has been traced."""

  def settings_json(self) -> dict[str, Any]:
    """Returns how the function was instrumented, as plain JSON values."""
    raise NotImplementedError


class InstrumentedFunction(Recordable):
  """Base of what `jaxpace.instrument` returns: a function whose steps write events."""

  plan: Plan | None = None
  """What the events mean; known once the function has been traced and, of collectives in loops,
  branches and `jax.checkpoint`, compiled."""

  traced: Plan | None = None
  """The plan as the last trace left it, in which these have no timestamps."""

  left: int = 0
  """How many of them, the first of its `unstamped`, are left to what compiles it."""

  number: int | None = None
  """Number of its events' program in this process; None before the first trace, or where they go
  nowhere."""

  devices: tuple[int, ...] = ()
  """`jax.Device.id` of each place of the pace state, from `first_place` on, as `init` last made
  it."""

  first_place: int = 0
  """Number of the first of these."""

  def note_traced(self, plan: Plan, left: int) -> None:
    """Takes note of a trace: its plan, and how much it leaves to what compiles it. A plan that was
    completed stays as it is until then: a step is traced for its shapes, too."""
    self.traced, self.left = plan, left
    if self.plan is None or not left:
      self.plan = plan

  def note_compiled(self, inside: Sequence[tuple[int, Collective]], notice: str = "") -> None:
    """Completes the plan of the trace with what it left that now has timestamps, each with the
    number of slots before it; `notice` says why none of it has, empty where it has."""
    assert self.traced is not None, "what is compiled has been traced"
    before = {one.index: slots for slots, one in inside}
    # What has n slots before it comes before slot n.
    order = sorted(range(len(self.traced.collectives) + len(inside)),
                   key=lambda index: before.get(index, index + 0.5))
    self.plan = dataclasses.replace(
        self.traced, inside=tuple(one for _, one in inside), order=tuple(order),
        unstamped=self.traced.unstamped[0 if notice else self.left:],
        notices=(*self.traced.notices, *([notice] if notice else [])))


def observed_function(step: Any) -> ObservedFunction | None:
  """The observed function that a call of `step` runs: itself, or that of a bound method."""
  if isinstance(step, ObservedFunction):  # asked in each step of a loop
    return step
  step = getattr(step, "__func__", None)
  return step if isinstance(step, ObservedFunction) else None


class ObservedFunction(Recordable):
  """Base of what `jaxpace.observe` returns: a function whose compiled programs write timestamps."""

  plan: ObservedPlan | None = None
  """What the timestamps mean: the programs met so far."""

  runs: frozenset[int] = frozenset()
  """Numbers of the programs with timestamps of which each call dispatches one; what is compiled
  beside them, to cut arguments up say, is not among them."""

  decided: tuple[tuple[int, Decisions], ...] = ()
  """What was decided for calls, from which number on each. Empty where no work is shared by
  speed."""

  coming: collections.deque[Callable[[], None]]
  """What is to be done with the next calls, one each, just before it: where work is shared."""

  shared: frozenset[tuple[int, int]] = frozenset()
  """Of each feed that gives it counts: micro-batches of all ranks, and most of them of one rank."""

  calls: int = 0
  """Calls so far in this process: the k-th execution of any of these to start on a device is of the
  k-th call. Counted as long as all programs of the function have timestamps."""

  @property
  def functions(self) -> Sequence[ObservedFunction]:
    """Those whose calls run these programs."""
    return (self,)

  def decide(self, decisions: Decisions) -> None:
    """Takes note of what was decided for the next call, for whoever records it."""
    if not self.decided or self.decided[-1][1] is not decisions:
      self.decided = (*self.decided[1 - MOST_DECIDED:], (self.calls, decisions))


_COLUMNS = ("collective", "bytes", "along", "groups", "times", "phase", "from")


def _written(program: ObservedProgram) -> str:
  mesh = ", ".join(f"{name}={size}" for name, size in program.mesh_axes.items())
  title = f"{program.name} (program {program.number}) on {len(program.ranks)} devices"
  if mesh:
    title += f", mesh {mesh}"
  if program.bare:
    return f"{title}: runs unmodified: {program.bare}"
  marks = "an unknown number of timestamps" if program.marks is None else (
      f"{program.marks} timestamps per step and device")
  lines = [f"{title}: {plural(len(program.collectives), 'collective')}, {marks}."]
  if program.bare_compile_s is not None and program.stamped_compile_s is not None:
    lines.append(f"  It was compiled in {program.bare_compile_s:.1f} s; adding timestamps took "
                 f"{program.stamped_compile_s:.2f} s.")
  rows = [_COLUMNS, *(_row(one) for one in program.collectives)]
  widths = [max(len(row[place]) for row in rows) for place in range(len(_COLUMNS))]
  for row in rows:
    lines.append(("  " + "  ".join(
        cell.rjust(width) if place in (1, 4) else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)))).rstrip())
  for one in program.unstamped:
    lines.append(f"  {one.name}, {one.bytes} bytes, is not timed: {one.reason}.")
  lines += [f"  {notice}" for notice in program.notices]
  return "\n".join(lines)


def _row(one: Collective) -> tuple[str, ...]:
  if one.pairs:
    met = f"{len(one.pairs)} pairs"
  elif one.groups:
    met = f"{len(one.groups)} of {len(one.groups[0])}"
  else:
    met = ""
  iterations = " x ".join("?" if loop.trips is None else str(loop.trips)
                          for loop in one.loops) or "1"
  if one.conditional:
    iterations += " at most"
  return (one.name, "" if one.bytes is None else f"{one.bytes:,}", ", ".join(one.axes), met,
          iterations,
          one.phase, one.source or "")
