"""Makes a process slower for real: a quota of a processor of its own, or a neighbour that takes
part of that.

Every process of `experiments.measure.balanced` is a host with a share of a processor, by a control
group (version 1 or 2). The kernel gives it that much of each period, and enforces it at its ticks
(4 ms where it has 250 a second), so over some tens of milliseconds it is a slower processor: how
slow is measured, not believed.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

SHARE = 0.4
"""Of a processor, of a healthy process."""
_PERIOD = 5_000
"""us. Short, so that throttling is even; the kernel allows no quota below 1,000 us."""
_LEAST = 1_000  # us
_NICE_0 = 1024.0
_WEIGHTS = {-5: 3121, -4: 2501, -3: 1991, -2: 1586, -1: 1277, 0: 1024, 1: 820, 2: 655, 3: 526,
            4: 423, 5: 335, 6: 272, 7: 215, 8: 172, 9: 137, 10: 110}
"""The scheduler's weight of each niceness."""


class Host:
  """This process's share of a processor, by its control group. A context: the group is removed at
  the end."""

  def __init__(self) -> None:
    old = pathlib.Path("/sys/fs/cgroup/cpu")
    self.old = old.is_dir()
    self.root = old if self.old else pathlib.Path("/sys/fs/cgroup")
    self.folder = self.root / f"jaxpace-balanced-{os.getpid()}"
    self.neighbour: subprocess.Popen[bytes] | None = None
    self.folder.mkdir()
    if self.old:
      # First among what else runs on this machine.
      self._write("cpu.shares", 262_144)
    else:
      self._write("cpu.weight", 10_000)
    self._write("cgroup.procs", os.getpid())

  def __enter__(self) -> Host:
    return self

  def __exit__(self, *_: object) -> None:
    self.alone()
    (self.root / "cgroup.procs").write_text(str(os.getpid()))
    self.folder.rmdir()

  def _write(self, name: str, value: object) -> None:
    (self.folder / name).write_text(str(value))

  def slower(self, times: float) -> None:
    """Lets it have 1 / `times` of a healthy process's share."""
    share = SHARE / times
    period = max(_PERIOD, -(-_LEAST // share))
    if self.old:
      self._write("cpu.cfs_quota_us", -1)
      self._write("cpu.cfs_period_us", int(period))
      self._write("cpu.cfs_quota_us", int(period * share))
    else:
      self._write("cpu.max", f"{int(period * share)} {int(period)}")

  def beside(self, times: float) -> None:
    """Starts a neighbour that never rests, on its processor and within its share: it is `times`
    slower beside that."""
    self.alone()
    if times <= 1:
      return
    niceness = min(_WEIGHTS, key=lambda nice: abs(1 + _WEIGHTS[nice] / _NICE_0 - times))
    core = min(os.sched_getaffinity(0))
    code = (f"import os\nos.sched_setaffinity(0, [{core}])\n"
            f"os.setpriority(os.PRIO_PROCESS, 0, {niceness})\nwhile os.getppid() == "
            f"{os.getpid()}: pass")
    # It is born into this process's control group.
    self.neighbour = subprocess.Popen([sys.executable, "-c", code])

  def alone(self) -> None:
    """Ends the neighbour, if there is one."""
    if self.neighbour is not None:
      self.neighbour.kill()
      self.neighbour.wait()
      self.neighbour = None


def pinned(place: int) -> None:
  """Puts this process's threads, XLA's too, on one processor."""
  cores = sorted(os.sched_getaffinity(0))
  for thread in os.listdir(f"/proc/{os.getpid()}/task"):
    os.sched_setaffinity(int(thread), [cores[place % len(cores)]])
