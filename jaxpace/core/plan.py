"""What is static about an instrumented step, known after its first trace.

The step writes bare events; the plan says what each of them means. The recorder writes it into
`run.json`, so that a recorded run can be read without the program that made it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

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
  """Name of the loop: "while.12" in a compiled program, "scan.0" in a traced one."""
  trips: int | None
  """Turns of the loop each time it is entered; None where the compiler does not know it."""


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective of an instrumented step: timestamped, or in a loop, a branch or `jax.checkpoint`,
  where timestamps time each iteration of it.

  Collectives of one body that depend on none of each other are one (XLA combines them, and a rank
  enters them together). A nested one then has several tags: a rank enters at the last of the enter
  timestamps, and leaves at the first of the exit timestamps.
  """

  slot: int
  """Of a timestamped one, with one row per step in the `collectives` table; else its place among
  those that are nested."""
  name: str
  primitives: tuple[str, ...]
  axis: str
  bytes: int | None
  """Bytes of all operands on one rank, each iteration; None where the source of the timestamps does
  not tell."""
  operands: int
  dtypes: tuple[str, ...]
  phase: str
  """Phase the collective was called from: "forward" (loss, batch norm), "backward", or "update"."""
  pairs: tuple[tuple[int, int], ...] = ()
  """Sources and targets of point-to-point transfers, by index along `axis`; else empty."""
  index_groups: tuple[tuple[int, ...], ...] = ()
  """Ranks that meet, by their index along `axis`, where not all along it do."""
  may_begin_early: bool = False
  """Whether it can begin before its entry timestamp, which may then be late."""
  meanwhile: float | None = None
  """Share of the step's operations that may run while it is under way: it needs none of their
  results, and they need none of its. None where that is unknown."""
  loops: tuple[Loop, ...] = ()
  """Loops around it, outermost first; () in a branch or `jax.checkpoint` alone."""
  conditional: bool = False
  """Whether it is in a branch that need not run in each step."""
  enter_tags: tuple[int, ...] = ()
  exit_tags: tuple[int, ...] = ()
  """Tags of the timestamps around a nested one."""
  source: str | None = None
  """Line of the model that a nested one comes from, such as "model.py:120"; None where not
  known."""
  after: int = 0
  """How many timestamped collectives come before a nested one."""

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars; of a timestamped one what it has."""
    data = dataclasses.asdict(self)
    return data if self.enter_tags else {
        name: value for name, value in data.items() if name not in _NESTED}


_NESTED = ("loops", "conditional", "enter_tags", "exit_tags", "source", "after")
"""What only nested collectives have."""


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
  """Collectives in loops, branches and `jax.checkpoint`, timed by timestamps."""
  program: int | None = None
  """Number of the program whose events the step's are; None where they go nowhere."""

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars."""
    return dataclasses.asdict(self) | {
        "collectives": [one.to_json() for one in self.collectives],
        "inside": [one.to_json() for one in self.inside]}
