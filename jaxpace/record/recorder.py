"""Records a run beside the training loop, without blocking it."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxpace.core.fields import is_whole
from jaxpace.core.observed import (
  InstrumentedFunction,
  ObservedFunction,
  ObservedProgram,
  Recordable,
  observed_function,
)
from jaxpace.files.schemas import ProcessFile
from jaxpace.hosts import distributed
from jaxpace.observation.clocks import host_ring
from jaxpace.record.exporting import Exporter
from jaxpace.record.host_use import HostUse
from jaxpace.record.recording import Recording
from jaxpace.record.ring.collect import Collector
from jaxpace.record.ring.copier import RingCopier
from jaxpace.record.ring.found import StepFinder, agreement
from jaxpace.record.ring.instrumented import InstrumentedStep
from jaxpace.record.ring.intake import Intake
from jaxpace.record.ring.observed import PlannedPrograms
from jaxpace.record.writer import Writer
from jaxpace.runs import rundir

_LOG = logging.getLogger("jaxpace")
_SHARE_SECONDS = 60.0
_STUCK_SECONDS = 60.0
"""How long the end of a recording waits while the devices finish nothing."""
_IDLE_SECONDS = 2.0
"""The same where the devices run no step: the loop may have recorded more than there were."""
_NOTICE_SECONDS = 2.0
_NOTHING: Any = object()
_MOST_STEPS = 1 << 52
"""Readers take numbers of steps up to twice as many."""
_WITH = ("record() takes no pace state and no results: what the step wrote is read where it lies. "
         "Call `recorder.record()` after each step; numbers of the host go in by name: "
         "`recorder.record(loss=0.5)`.")
_UNTRACED = ("The recorder's function has not been traced, so nothing is recorded. Give the "
             "Recorder the very object that jaxpace.instrument returned and the step calls; do "
             "not instrument twice.")


class Recorder(Recording):
  """Writes the timestamps of an observed or instrumented step to a run directory, see
  `jaxpace.runs.schema`.

      step = jaxpace.observe(step)
      with jaxpace.Recorder("runs/demo", step) as recorder:
        for batch in batches:
          state, metrics = step(state, batch)
          recorder.record()

  or, of a step that `jaxpace.instrument` made, `jaxpace.Recorder("runs/demo", paced)`.

  What the step wrote lies on the host already, in the ring of timestamps that is kept as
  `marks/<process>.ring`; a thread reads it there. If writing fails,
  recording ends with one warning and training goes on. All processes of a job open and close their
  recorders together, in the same order.

  An observed step is an execution of the observed function; of several functions it is the sequence
  of executions that repeats, as `jaxpace run` finds it. An instrumented one has the number that its
  pace state gives it.

  `record` adds what only the loop knows. Host causes (`cpu_ns`, `nivcsw`, `gc_ns`, `data_ns`,
  `checkpoint_ns`) are those of one iteration of the loop, from one `record` call to the next.
  Devices run behind the loop, so they are attributed to the step that the loop was dispatching.
  Where `record` is not called after every step of an observed function, the first three are read by
  the clock at the end of each step, and the others are null.
  """

  def __init__(self, directory: str | os.PathLike[str] | None,
               paced: Recordable | Sequence[ObservedFunction] | None, *, resume: bool = False,
               config: Any = None,
               grace_seconds: float = 5.0, handle_sigterm: bool = True, hosts: bool | float = True,
               exporters: Iterable[Exporter] = (), detail: int | str = "auto",
               first_step: int | None = None):
    """Prepares; nothing is touched before `with` or `open`.

    Args:
      directory: run directory; made if it is missing. An earlier run in it is moved to
        `.previous/`. None: off.
      paced: what `jaxpace.observe` returned, or several such where a step calls several; or what
        `jaxpace.instrument` returned.
      resume: whether to go on with the run in `directory`, as its next attempt, instead of setting
        it aside.
      config: the program's configuration, kept in `run.json`: a dict, an
        `ml_collections.ConfigDict`, a dataclass or an `argparse.Namespace`.
      grace_seconds: after SIGTERM, how long the loop has to reach the next `record` call before the
        process ends.
      handle_sigterm: whether to write what is on the host when SIGTERM arrives.
      hosts: whether to sample the host's counters, by a thread: each second, or each so many
        seconds.
      exporters: get the recorded rows every few seconds, on a thread of their own, see
        `jaxpace.show.exporters`. They end with the recording.
      detail: of an observed step, the collectives of one step in so many are written one by one,
        and those around slow steps; of the others the sums. 1 writes all; "auto" chooses by what a
        step has.
      first_step: number of the first step that is recorded, of an observed one; by default 0 or,
        with `resume`, the one after the last recorded.

    Raises:
      TypeError: `paced` is neither observed nor instrumented, an exporter is none, or `config` has
        no names for its values.
      ValueError: `detail` or `first_step` is out of range.
    """
    found = [observed_function(one)
             for one in (paced if isinstance(paced, list | tuple) else [paced])]
    marked = [one for one in found if one is not None]
    observed = bool(marked) and len(marked) == len(found)
    if directory is not None and not isinstance(paced, InstrumentedFunction) and not observed:
      raise TypeError(
          "Recorder takes the function that jaxpace.observe or jaxpace.instrument returned: "
          f"Recorder(directory, step). This is a {type(paced).__name__}. Pass the observed or "
          "instrumented function itself, not the jax.jit, jax.shard_map or jax.pmap around it.")
    if detail != "auto" and not is_whole(detail, 1, _MOST_STEPS):
      raise ValueError(
          f'detail={detail!r} must be "auto" or a whole number, of how many steps one is '
          'detailed.')
    if first_step is not None and not is_whole(first_step, 0, _MOST_STEPS):
      raise ValueError(f"first_step={first_step!r} must be the number of a step, from 0 to "
                       f"{_MOST_STEPS:,}.")
    source: Any = marked[0] if marked else paced
    super().__init__(directory, source, resume=resume, config=config, grace_seconds=grace_seconds,
                     handle_sigterm=handle_sigterm, hosts=hosts, exporters=exporters)
    self._observed, self._detail, self._first = tuple(marked), detail, first_step
    self._recorded = (PlannedPrograms(marked) if marked
                      else InstrumentedStep(source or InstrumentedFunction()))
    self._match = "*" if len(marked) > 1 else None
    """Pattern of the names of the step's programs; empty where they are to be found, None where
    each execution is a step."""
    self._say: Callable[[str], None] = _LOG.info
    """Takes what was found to be the step."""
    self._calls = self._handed = 0  # of `record`, and those that were taken
    self._intake: Intake | None = None
    self._collector: Collector | None = None
    self._host: HostUse | None = None
    self._finder: StepFinder | None = None
    self._copier: RingCopier | None = None

  def record(self, given: Any = _NOTHING, /, **host_columns: float) -> None:
    """Adds what the host did in a step. Call it after every step.

    Args:
      given: nothing.
      **host_columns: numbers of the host to keep with this step, as columns `host_<name>`;
        `data_ns` and `checkpoint_ns` add to those columns. Not device values: reading them would
        wait for the step.

    Raises:
      TypeError: something is given without a name, or a host column is not a number.
      RuntimeError: the recorder is not open.
    """
    if given is not _NOTHING and self.directory is not None:
      raise TypeError(_WITH)
    # Between two steps each function called costs 5 us, since caches hold other things by then:
    # what need not be called is not.
    writer = self._writer
    if writer is None or self._closed or writer.stopped is not None:
      writer = self.takes()
    self._calls += 1
    if writer is None:
      return
    extra = self._host_columns(host_columns) if host_columns else host_columns
    try:
      if self._intake is not None:
        self._intake.record(self._causes.sample(), extra)
        self._handed += 1
        if self._handed == 1 and self._source.plan is None and not self._observed:
          _LOG.warning(_UNTRACED)
    except Exception as error:  # Whatever it is, training goes on.
      writer.fail(error)
    if writer.termination.received:
      self.terminate(writer)

  @property
  def programs(self) -> list[ObservedProgram]:
    """See `Recording`."""
    return self._recorded.programs

  def due(self) -> int:
    """Rows of `steps` that this process was to record so far: one a call and rank."""
    return 0 if self._collector is None else self._calls * len(
        self._recorded.ranks(self._collector))

  def prepare(self, identity: rundir.RunIdentity) -> Intake | None:
    """Copies events to the run directory, and says who reads them.

    Raises:
      OSError: the directory can't be written.
    """
    assert self.directory is not None
    if self._collector is None:
      if self._observed and (reason := host_ring.unavailable()):
        _LOG.warning("Steps are not recorded, training goes on: %s", reason)
        return None
      if self._recorded.runs:
        # Warm-up steps, say: one that begins later is taken for one of the recording's.
        wait_for_dispatched()
      collector = Collector()
      self._recorded.meet(collector)
      self._begin(collector, self._recorded.buffers(collector))
    assert self._collector is not None
    first = self._first or 0
    if self._observed and self._resume and self._first is None:
      first = _next_step(self.directory, identity)
    self._copier = RingCopier(self.directory, identity)
    self._copier.start()
    if self._match is not None:
      self._finder = StepFinder(self._recorded, self._collector, self._match, agreement(
          f"jaxpace/step/{identity.run}/{identity.attempt}"), self._say, first)
    self._intake = Intake(self._recorded, self._collector, self.directory, identity,
                          jax.process_index(), self._detail, first, self._finder, self._host)
    return self._intake

  def _begin(self, collector: Collector, buffers: Mapping[int, Sequence[int]]) -> None:
    """Begins with what is executed from now on; `buffers` of programs that may have run before."""
    collector.skip(buffers)
    self._collector = collector
    if self._observed:
      self._causes.start()
      self._host = HostUse(self._causes)

  def bring_in(self, writer: Writer, deadline: float | None, last: bool) -> None:
    """Waits until the devices have ended all steps; what isn't finished at the end is lost."""
    intake = self._intake
    if intake is None or writer.stopped is not None:
      return
    self._await_devices(writer, intake, deadline)
    if not last:
      return
    left = self._handed - intake.over
    # Of steps without timestamps nothing comes.
    bare = any(one.bare for one in self.programs)
    if left > 0 and (bare or intake.underway) and (ranks := len(intake.ranks)):
      intake.losses.lost_rows += left * ranks
      intake.losses.holes += 1
    intake.last = True

  def _await_devices(self, writer: Writer, intake: Intake, deadline: float | None) -> None:
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

  def closed(self) -> None:
    """Copies the last timestamps; the file stays."""
    if self._copier is not None:
      self._copier.close()
      self._copier = None


def wait_for_dispatched() -> None:
  """Waits until what has been dispatched is done, if the program still holds its results."""
  for array in jax.live_arrays():
    with contextlib.suppress(Exception):  # What fails, fails where the program reads it.
      array.block_until_ready()


def _next_step(directory: pathlib.Path, identity: rundir.RunIdentity) -> int:
  """The step after the last one that process 0 recorded in this run; 0 where it recorded none."""
  last: Any = None
  if jax.process_index() == 0:
    earlier = rundir.read_json(directory / "process" / "0.json", ProcessFile) or {}
    last = earlier.get("last_step") if earlier.get("run") == identity.run else None
  with contextlib.suppress(TimeoutError, ConnectionError):
    text = distributed.share_string("jaxpace/next_step", str(-1 if last is None else last),
                                    _SHARE_SECONDS)
    return int(text or -1) + 1
  return 0
