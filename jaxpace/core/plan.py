"""What is static about an instrumented step, known after its first trace.

The step writes bare events; the plan says what each of them means. The recorder writes it into
`run.json`, so that a recorded run can be read without the program that made it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

from jaxpace.core.words import plural

TimestampKind = Literal["start", "delay", "phase", "enter", "exit", "end"]

FORWARD, BACKWARD, SYNC, UPDATE, GAP, COMPUTE, DELAY = (
    "forward", "backward", "sync", "update", "gap", "compute", "delay")


@dataclasses.dataclass(frozen=True)
class Timestamp:
  """One timestamp of the step. Timestamps are listed in the order in which they are taken."""

  kind: TimestampKind
  segment: str
  """Phase of the time since the previous mark: one of those above or a user's.

  The segment of `start` is "gap": it begins at the previous step's `end`.
  """
  collective: int | None = None
  """Slot of the collective, for `enter` and `exit`."""


@dataclasses.dataclass(frozen=True)
class Loop:
  """A loop of the program that a collective runs in."""

  name: str
  """Name of the loop in the compiled program: "while.12"."""
  trips: int | None
  """Turns of the loop each time it is entered; None where the compiler does not know it."""


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective of the step that has timestamps before and after it.

  Collectives that the compiler combines into one are one here, with several tags: a rank enters it
  at the last of its enter timestamps and leaves it at the first of its exit timestamps. Within a
  loop the t-th occurrence of a tag in a step is the t-th time that the collective ran.
  """

  index: int
  """Its number in the step. Of a compiled program its place in it; of an instrumented step its slot
  in the pace state, those in loops, branches and `jax.checkpoint` behind these."""
  name: str
  """Name in the compiled program, such as "all-gather.11", or of the module it is called in."""
  kind: str
  """What it does: "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
  "collective-permute", "collective-broadcast", "ragged-all-to-all", or "several"."""
  bytes: int | None
  """Bytes of all operands on one device, each time; None where that is not known."""
  operands: int
  dtypes: tuple[str, ...]
  """Types of the operands, each once, in numpy's words."""
  axes: tuple[str, ...]
  """Axes of the mesh along which ranks meet; () where no choice of axes gives these groups."""
  phase: str
  """Phase of the step: "forward" (loss, batch norm), "backward", "update", or "compute" where it is
  unknown."""
  enter_tag: int
  """Tag of the timestamp before it, without the program's number; -1 where it has none."""
  groups: tuple[tuple[int, ...], ...] = ()
  """Ranks that meet, a tuple for each group; () for permutes, and where only the axes tell."""
  pairs: tuple[tuple[int, int], ...] = ()
  """Ranks that send and receive, for permutes; else ()."""
  loops: tuple[Loop, ...] = ()
  """Loops it runs in, outermost first; () where it runs once a step."""
  source: str | None = None
  """Line of the model it comes from, such as "model.py:120"; None where not known."""
  operation: str | None = None
  """JAX's name of the operation it comes from; None where not known."""
  conditional: bool = False
  """Whether it is in a branch that need not run in each step."""
  primitives: tuple[str, ...] = ()
  """Names of the JAX primitives that were traced; () in a compiled program."""
  index_groups: tuple[tuple[int, ...], ...] = ()
  """Of a traced one, who meets by index along `axes`, where not all along them do."""
  index_pairs: tuple[tuple[int, int], ...] = ()
  """Of a traced one, sources and targets of point-to-point transfers, by index along `axes`."""
  may_begin_early: bool = False
  """Whether it can begin before its entry timestamp, which may then be late."""
  meanwhile: float | None = None
  """Share of the step's operations that may run while it is under way: it needs none of their
  results, and they need none of its. None where that is unknown."""

  @property
  def exit_tag(self) -> int:
    """Tag of the timestamp after it, the next; -1 where it has none."""
    return self.enter_tag if self.enter_tag < 0 else self.enter_tag + 1

  @functools.cached_property
  def members(self) -> tuple[tuple[int, ...], ...]:
    """Its groups; for permutes, the ranks that pairs connect, rising."""
    if self.groups or not self.pairs:
      return self.groups
    found: dict[int, list[int]] = {}
    for source, target in self.pairs:
      one, other = found.setdefault(source, [source]), found.setdefault(target, [target])
      if one is not other:
        small, large = sorted((one, other), key=len)
        large += small
        found.update(dict.fromkeys(small, large))
    return tuple(sorted({tuple(sorted(ranks)) for ranks in found.values()}))

  @property
  def iterations(self) -> int | None:
    """How often it runs in one step; None where a loop's iterations are not known."""
    iterations = 1
    for loop in self.loops:
      if loop.trips is None:
        return None
      iterations *= loop.trips
    return iterations

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars, as `run.json` tells of a collective."""
    told = {"name": self.name, "primitives": list(self.primitives or (self.kind,)),
            "kind": self.kind, "axis": ",".join(self.axes), "bytes": self.bytes,
            "operands": self.operands, "dtypes": list(self.dtypes), "phase": self.phase,
            "operation": self.operation, "source": self.source, "conditional": self.conditional}
    if not self.primitives:
      return told | {"groups": list(map(list, self.members)),
                     "rank_pairs": list(map(list, self.pairs)) or None}
    return told | {"pairs": list(map(list, self.index_pairs)),
                   "index_groups": list(map(list, self.index_groups)),
                   "may_begin_early": self.may_begin_early, "meanwhile": self.meanwhile}


@dataclasses.dataclass(frozen=True)
class Untimed:
  """A collective over the axis that was seen but can't be timestamped, and why."""

  name: str
  primitive: str
  bytes: int | None
  reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
  """What every timestamp of a step means, and what was decided when the step was traced."""

  axis: str
  ranks: int
  """Ranks along `axis`."""
  clock: str
  marks: tuple[Timestamp, ...]
  collectives: tuple[Collective, ...]
  """Those that have a slot in the pace state, by it."""
  unstamped: tuple[Untimed, ...] = ()
  share: bool = False
  """Whether the ranks' arrivals ride in an existing all-reduce."""
  share_reason: str = ""
  carrier: int | None = None
  """Slot of the collective they ride in, where they do."""
  decisions: tuple[str, ...] = ()
  """Names of the pacer's decision columns, in the order of their events."""
  holds: bool = False
  """Whether a pacer may hold collectives back, so that events tell of each what that cost."""
  overflow: int = 0
  """Collectives left without a slot because there were more than slots."""
  notices: tuple[str, ...] = ()
  inside: tuple[Collective, ...] = ()
  """Collectives in loops, branches and `jax.checkpoint`, each iteration of which has timestamps."""
  order: tuple[int, ...] = ()
  """Indices of all collectives, in the order in which the step comes to them."""
  program: int | None = None
  """Number of the program whose events the step's are; None where they go nowhere."""

  def __str__(self) -> str:
    """What was found and decided, for people."""
    found = (*self.collectives, *self.inside)
    lines = [f"{plural(len(found), 'collective')} over {self.axis!r} of {self.ranks} ranks, "
             f"{self.clock} clock; arrivals are {self.share_reason or 'not shared'}."]
    for one in found:
      lines.append(f"  {one.index}  {one.name}, {one.kind}, {one.bytes or 0:,} bytes, {one.phase}"
                   + (f", {one.source}" if one.source else ""))
    lines += [f"  {one.name} is not timed: {one.reason}." for one in self.unstamped]
    return "\n".join([*lines, *(f"  {notice}" for notice in self.notices)])

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars, as `run.json` has them."""
    told = {name: value for name, value in dataclasses.asdict(self).items() if name != "order"}
    for name in ("collectives", "inside"):
      told[name] = [{"slot": one.index, **one.to_json()} for one in getattr(self, name)]
    return told
