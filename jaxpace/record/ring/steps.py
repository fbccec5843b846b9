"""The recorder's part in the training loop: it takes what the host did, nothing else."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxpace.core.observed import ObservedProgram
from jaxpace.core.recordable import InstrumentedFunction, ObservedFunction
from jaxpace.files.folders import Folder
from jaxpace.files.schemas import ProcessFile
from jaxpace.observation.clocks import host_ring
from jaxpace.record import describe
from jaxpace.record.ring.copier import RingCopier
from jaxpace.record.ring.found import Agreement, Executed, FoundIntake, Together
from jaxpace.record.ring.instrumented import InstrumentedIntake
from jaxpace.record.writer import Writer
from jaxpace.runs import ring_file, rundir
from jaxpace.runs.step_causes import Sample

_LOG = logging.getLogger("jaxpace")
_SHARE_SECONDS = 60.0
_STUCK_SECONDS = 60.0
"""How long the end of a recording waits while the devices finish nothing."""
_IDLE_SECONDS = 2.0
"""The same where the devices run no step: the loop may have recorded more than there were."""
_NOTICE_SECONDS = 2.0


class RingSteps:
  """Steps whose events lie in the ring, from `open` to `close`. Belongs to the thread of the
  training loop."""

  def __init__(self, detail: int | str) -> None:
    """Prepares; `detail` as for `jaxpace.Recorder`."""
    self._detail = detail
    self._handed = 0
    self._intake: FoundIntake | InstrumentedIntake | None = None
    self._copier: RingCopier | None = None

  @property
  def buffers(self) -> int:
    """Ranks of this process of which steps are recorded."""
    raise NotImplementedError

  def programs(self) -> list[ObservedProgram]:
    """The programs met so far. From any thread."""
    raise NotImplementedError

  def open(self, writer: Writer, directory: pathlib.Path, identity: rundir.RunIdentity,
           resume: bool) -> None:
    """Copies events to the run directory and says who reads them.

    Raises:
      OSError: the directory can't be written.
    """
    raise NotImplementedError

  def record(self, writer: Writer, sample: Sample, extra: dict[str, float]) -> None:
    """Counts a step."""
    raise NotImplementedError

  def bring_in(self, writer: Writer, deadline: float | None) -> None:
    """Waits until the devices have ended all steps, until `deadline` if there is one."""
    intake = self._intake
    if intake is None:
      return
    began = since = time.monotonic()
    over: Any = None
    while not intake.reached(self._handed) and writer.stopped is None:
      now = time.monotonic()
      # A long step finishes nothing for a while, and yet its timestamps come.
      reached = intake.over, host_ring.current().heads().tolist()
      if reached != over:
        over, since = reached, now
      patience = _STUCK_SECONDS if intake.underway else _IDLE_SECONDS
      if (deadline is not None and now > deadline) or now - since > patience:
        return
      if now - began > _NOTICE_SECONDS:
        began = float("inf")
        _LOG.info("Waiting for the devices to finish the last steps, to record them.")
      writer.poke()
      time.sleep(0.002)

  def bring_in_last(self, writer: Writer, deadline: float | None) -> None:
    """The same at the end; what is not finished then is lost."""
    intake = self._intake
    if intake is None:
      return
    intake.finish()
    self.bring_in(writer, deadline)
    left = self._handed - intake.over
    if left > 0 and intake.underway:
      writer.add_lost(left, self.buffers)

  def close(self) -> None:
    """Copies the last timestamps; the file stays."""
    if self._copier is not None:
      self._copier.close()
      self._copier = None


class ObservedSteps(RingSteps):
  """Steps of observed functions: what the devices executed of them."""

  def __init__(self, observed: Sequence[ObservedFunction], detail: int | str,
               first_step: int | None):
    """Prepares; see `jaxpace.Recorder`."""
    super().__init__(detail)
    self._observed = tuple(observed)
    self._first = first_step
    self._intake: FoundIntake | None = None
    self._executed: Executed | None = None
    self._ranks: list[int] = []

  @property
  def buffers(self) -> int:
    """Devices of this process."""
    return len(self._ranks)

  def open(self, writer: Writer, directory: pathlib.Path, identity: rundir.RunIdentity,
           resume: bool) -> None:
    """See `RingSteps`."""
    process, first = jax.process_index(), self._first or 0
    if resume and self._first is None:
      first = _next_step(directory, identity, process)
    clocks = {one.clock for one in self._observed}
    if reason := host_ring.unavailable("stream" if "stream" in clocks else "auto"):
      _LOG.warning("Steps are not recorded, training goes on: %s", reason)
      return
    if any(one.runs for one in self._observed):
      _wait_for_earlier_steps()
    self._copier = copied_ring(directory, identity)
    together = Together(self._observed)
    self._executed = executed = Executed(together, together.plan.programs)
    self._ranks = executed.collector.ranks
    self._intake = FoundIntake(
        executed, directory, identity.run, process, identity.attempt, jax.device_count(),
        writer.losses, "*", Agreement(f"jaxpace/step/{identity.run}/{identity.attempt}", _LOG.info),
        self._detail, first, each=len(self._observed) == 1)
    writer.set_intake(self._intake)

  def record(self, writer: Writer, sample: Sample, extra: dict[str, float]) -> None:
    """Takes what the host did in a step."""
    if self._intake is not None:
      self._intake.record(sample, extra)
      self._handed += 1

  def bring_in_last(self, writer: Writer, deadline: float | None) -> None:
    """See `RingSteps`."""
    intake = self._intake
    if intake is None:
      return
    self.bring_in(writer, deadline)
    left = self._handed - intake.over
    # Of steps without timestamps nothing comes.
    bare = any(one.bare for one in self.programs())
    if left > 0 and (bare or intake.underway) and (ranks := self._ranks_with_marks()):
      writer.add_lost(left, ranks)
    intake.finish()

  def close(self) -> None:
    """See `RingSteps`."""
    super().close()
    if self._executed is not None:
      self._executed.host.close()

  def _ranks_with_marks(self) -> int:
    """Ranks of this process of which a step with timestamps gives rows."""
    ranks = {rank for program in self.programs() if not program.bare for rank in program.ranks}
    return len(ranks.intersection(self._ranks))

  def programs(self) -> list[ObservedProgram]:
    """See `RingSteps`."""
    return list(Together(self._observed).plan.programs)


class InstrumentedSteps(RingSteps):
  """Steps of an instrumented function: its executions, by the number that the pace state gives
  them."""

  def __init__(self, paced: InstrumentedFunction, detail: int | str):
    """Prepares; see `jaxpace.Recorder`."""
    super().__init__(detail)
    self._paced = paced
    self._intake: InstrumentedIntake | None = None

  @property
  def buffers(self) -> int:
    """Devices of this process that have a place in the pace state."""
    mine = {device.id for device in jax.local_devices()}
    return len(mine.intersection(self._paced.devices))

  def open(self, writer: Writer, directory: pathlib.Path, identity: rundir.RunIdentity,
           resume: bool) -> None:
    """See `RingSteps`."""
    if self._paced.number is not None:
      _wait_for_earlier_steps()
    self._copier = copied_ring(directory, identity)
    self._intake = InstrumentedIntake(self._paced, directory, identity.run, jax.process_index(),
                                 identity.attempt, writer.losses, self._detail)
    writer.set_intake(self._intake)

  def record(self, writer: Writer, sample: Sample, extra: dict[str, float]) -> None:
    """Counts a step, with what the host did since the one before."""
    if self._intake is not None:
      if self._paced.plan is None and not self._handed:
        _LOG.warning("The recorder's function has not been traced, so nothing is recorded. Give "
                     "the Recorder the very object that jaxpace.instrument returned and the step "
                     "calls; do not instrument twice.")
      self._intake.calls.append((sample, extra))
      self._handed += 1

  def programs(self) -> list[ObservedProgram]:
    """See `RingSteps`."""
    return [] if self._intake is None else self._intake.programs


def _wait_for_earlier_steps() -> None:
  """Waits for what the program has dispatched so far, warm-up steps say, which is not recorded: a
  step that begins later is taken for one of the recording's."""
  for array in jax.live_arrays():
    with contextlib.suppress(Exception):  # The program will meet it itself.
      array.block_until_ready()


def copied_ring(directory: pathlib.Path, identity: rundir.RunIdentity) -> RingCopier:
  """Starts to copy the ring of this process to the run directory; what a killed process left there
  is kept.

  Raises:
    OSError: the directory can't be written.
  """
  folder = Folder(directory, ring_file.FOLDER)
  ring_file.keep_unclosed(folder, jax.process_index())
  copier = RingCopier(folder, identity.run, identity.attempt)
  copier.start()
  return copier


def _next_step(directory: pathlib.Path, identity: rundir.RunIdentity, process: int) -> int:
  """The step after the last one that process 0 recorded in this run; 0 where it recorded none."""
  text: Any = None
  if process == 0:
    earlier = rundir.read_json(directory / "process" / "0.json", ProcessFile) or {}
    last = earlier.get("last_step") if earlier.get("run") == identity.run else None
    text = str(-1 if last is None else last)
  text = describe.share(f"jaxpace/observed/{identity.run}/{identity.attempt}", text, _SHARE_SECONDS)
  return int(text) + 1 if text is not None else 0

