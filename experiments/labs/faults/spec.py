"""What a run of the fault lab is: its layout, its work, its faults. Plain data, to JSON and
back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

STRAGGLER, AMPLIFICATION = "persistent_straggler", "synchronization_amplification"
CONTENTION, LOCALITY, RUNTIME = "fabric_contention", "locality", "runtime_jitter"
MODES = (STRAGGLER, AMPLIFICATION, CONTENTION, LOCALITY, RUNTIME)
HEALTHY = "healthy"

MODE_OF = {
    "straggler": STRAGGLER,  # `targets` (ranks) work longer in every step
    "stopped": STRAGGLER,  # one process is stopped and continued by signals
    "hog": STRAGGLER,  # other programs compute on the core of a process that computes
    "rotating": AMPLIFICATION,  # another rank works longer in each step
    "imbalance": AMPLIFICATION,  # all ranks' work varies, as with sequences of unequal length
    "misplaced": LOCALITY,  # ranks whose GPU sits across the socket from its NIC work longer
    "misplaced_link": LOCALITY,  # the host of such a rank has a slow link
    "collecting": RUNTIME,  # processes collect garbage between steps
    "loading": RUNTIME,  # processes wait for data
    "checkpointing": RUNTIME,  # process 0 writes a checkpoint every few steps
    "trunk": CONTENTION,  # other traffic on the racks' uplinks
    "link": CONTENTION,  # one host's link is slow
}
"""Failure mode of each kind of fault."""

PAUSES = {"collecting": "gc", "loading": "data", "checkpointing": "checkpoint"}
"""Kinds that pause a process between steps, and what the recorder calls the cause."""
NETWORK = ("trunk", "link", "misplaced_link")
"""Kinds that need network namespaces."""
OUTSIDE = ("stopped", "hog", *NETWORK)
"""Kinds that are injected from outside of the processes."""


@dataclasses.dataclass(frozen=True)
class Layout:
  """Processes and devices. A layout of several processes has a host for each, in two racks."""

  name: str
  processes: int
  devices: int

  @property
  def ranks(self) -> int:
    return self.processes * self.devices

  def ranks_of(self, process: int) -> tuple[int, ...]:
    return tuple(range(process * self.devices, (process + 1) * self.devices))

  def process_of(self, rank: int) -> int:
    return rank // self.devices


def layout(name: str) -> Layout:
  """Reads "in8" (one process of 8 devices) or "4x1" (4 processes of 1 device).

  Raises:
    ValueError: the name is neither.
  """
  first, _, second = name.partition("x")
  if name.startswith("in") and name[2:].isdigit() and int(name[2:]) > 1:
    return Layout(name, 1, int(name[2:]))
  if first.isdigit() and second.isdigit() and int(first) > 1 and int(second) > 0:
    return Layout(name, int(first), int(second))
  raise ValueError(
      f"{name!r} is no layout: write in8 for one process of 8 devices, or 4x1 for 4 processes "
      "of one.")


@dataclasses.dataclass(frozen=True)
class Fault:
  """One injected fault.

  Attributes:
    kind: a key of `MODE_OF`.
    targets: ranks; of pauses, stops and links, processes. Empty: nobody in particular.
    seconds: what is asked for: time a step, or of one pause or stop; Mbit/s of a link; 1 a hog or a
      flow.
    chance: how likely a pause strikes a process in a step, or steps between two if more than 1; 1
      for everything else.
    onset: first step with it.
    until: first step without it again.
    severity: share of the step it was meant to cost while it lasts.
  """

  kind: str
  targets: tuple[int, ...]
  seconds: float
  onset: int
  until: int
  severity: float
  chance: float = 1.0

  @property
  def mode(self) -> str:
    return MODE_OF[self.kind]


@dataclasses.dataclass(frozen=True)
class Spec:
  """One run.

  Attributes:
    name: of its directory.
    layout: name of the layout.
    seed: of work and noise; a run with a fault and its healthy twin have the same one.
    steps: how many.
    work: seconds each rank works in a step, mean.
    jitter: standard deviation of it, as a share.
    spinning: rank that computes instead of sleeping for a part of its work, or None.
    misplaced: ranks whose GPU sits across the socket from its NIC, by the fixture; None where no
      fixture is written.
    faults: what is injected; none in a healthy control.
    twin: name of the healthy run with the same seed; None if it is one itself.
    probe: whether the links are probed after the last step, while the faults last.
  """

  name: str
  layout: str
  seed: int
  steps: int
  work: float
  jitter: float
  spinning: int | None
  misplaced: tuple[int, ...] | None
  faults: tuple[Fault, ...] = ()
  twin: str | None = None
  probe: bool = False

  @property
  def modes(self) -> tuple[str, ...]:
    return tuple(sorted({fault.mode for fault in self.faults}))

  @property
  def family(self) -> str:
    """The kinds of its faults, "straggler+trunk", or "healthy"."""
    return "+".join(fault.kind for fault in self.faults) or HEALTHY

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def from_json(document: Mapping[str, Any]) -> Spec:
  """Reads what `Spec.to_json` wrote, or its JSON."""
  faults = tuple(Fault(**{**fault, "targets": tuple(fault["targets"])})
                 for fault in document["faults"])
  misplaced = document["misplaced"]
  return Spec(**{**document, "faults": faults,
                 "misplaced": None if misplaced is None else tuple(misplaced)})
