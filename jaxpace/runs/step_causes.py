"""What the host does in a step, one table of the columns that say it: CPU time, involuntary
switches, garbage collection, data, checkpoints, other programs, time between steps, page faults.
All else that names them is made from it."""

from __future__ import annotations

from typing import NamedTuple


class HostCause(NamedTuple):
  """A column of the table `steps` that says what the process did besides the devices' work."""

  column: str
  label: str
  """What it is, for people."""
  pauses: str = ""
  """What a process does meanwhile, for people, where the loop stands still for it; else empty."""
  asked: bool = False
  """Whether it is known only where the program has it measured, see `jaxpace.Recorder.measure`."""

  @property
  def name(self) -> str:
    """In arrays, findings and metrics."""
    return self.column.removesuffix("_ns")

  @property
  def scale(self) -> float:
    """From what is recorded to seconds; 1 for a number of times."""
    return 1e-9 if self.column.endswith("_ns") else 1.0


HOST_CAUSES = (
    HostCause("cpu_ns", "CPU time"),
    HostCause("nivcsw", "involuntary context switches"),
    HostCause("gc_ns", "garbage collection", "collects garbage"),
    HostCause("data_ns", "waiting for data", "waits for data", asked=True),
    HostCause("checkpoint_ns", "checkpoints", "writes checkpoints", asked=True),
    HostCause("others_ns", "other programs", "runs other programs (an evaluation, or what "
              "processes meet in, as for a checkpoint)"),
    HostCause("between_ns", "time between steps", "is between two steps (data, a checkpoint, a "
              "program without collectives)"),
    HostCause("majflt", "major page faults"),
)
TIMES = tuple(cause.name for cause in HOST_CAUSES if cause.scale != 1)
"""Those in seconds."""
PAUSES = {cause.name: cause for cause in HOST_CAUSES if cause.pauses}
"""By name, those for which the loop stands still."""
ASKED = {cause.column: cause.name for cause in HOST_CAUSES if cause.asked}
"""By column."""
