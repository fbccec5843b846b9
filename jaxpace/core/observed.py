"""What the timestamps of a compiled program mean.

A timestamp is an event (device, tag, nanoseconds) that the running program writes. The plan says
what the tags of each program mean, so that a recorded run can be read without the program that made
it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxpace.core.plan import Collective, Untimed

# Kinds of collectives, by XLA's names, and the operations and primitives that are of each.

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
         "collective-permute", "collective-broadcast")
"""Kinds of collectives of a compiled program."""

OF_OPERATION = {
    "stablehlo.all_reduce": "all-reduce",
    "stablehlo.all_gather": "all-gather",
    "stablehlo.reduce_scatter": "reduce-scatter",
    "stablehlo.all_to_all": "all-to-all",
    "stablehlo.collective_permute": "collective-permute",
    "stablehlo.collective_broadcast": "collective-broadcast",
}
"""Kind of each operation of a partitioned program that is a collective."""

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
  start_tag: int = 0
  end_tag: int = 1
  notices: tuple[str, ...] = ()
  """What is worth knowing about how the timestamps went in, a sentence each."""
  unstamped: tuple[Untimed, ...] = ()
  """Collectives that have no timestamps, and why."""
  bare: str = ""
  """Why this program runs unmodified, without timestamps, in a sentence; "" where it has
  timestamps."""
  clock: str = "host"
  """Whose clock its timestamps are of: "host", or "stream" for the GPU's own, set by the host's
    once."""
  bare_compile_s: float | None = None
  """Seconds that compiling the step unmodified took; None where not measured."""
  stamped_compile_s: float | None = None
  """Seconds that putting marks in took; on GPUs it is compiled again for that."""

  @property
  def marks(self) -> int | None:
    """Timestamps that one device writes in a step; None where a loop's iterations are not known."""
    if self.bare:
      return 0
    written = {self.start_tag: 1, self.end_tag: 1}
    for collective in self.collectives:
      iterations = collective.iterations
      if iterations is None:
        return None
      written |= dict.fromkeys((*collective.enter_tags, *collective.exit_tags), iterations)
    return sum(written.values())


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


_COLUMNS = ("collective", "bytes", "along", "groups", "turns", "phase", "from")


def _written(program: ObservedProgram) -> str:
  mesh = ", ".join(f"{name}={size}" for name, size in program.mesh_axes.items())
  title = f"{program.name} (program {program.number}) on {len(program.ranks)} devices"
  if mesh:
    title += f", mesh {mesh}"
  if program.bare:
    return f"{title}: runs unmodified: {program.bare}"
  marks = "an unknown number of timestamps" if program.marks is None else (
      f"{program.marks} timestamps per step and device")
  lines = [f"{title}: {len(program.collectives)} collectives, {marks}."]
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
