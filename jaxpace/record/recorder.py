"""Records a run beside the training loop, without blocking it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from jaxpace.core.observed import ObservedProgram
from jaxpace.core.recordable import (
  InstrumentedFunction,
  ObservedFunction,
  Recordable,
  observed_function,
)
from jaxpace.record.exporting import Exporter
from jaxpace.record.recording import Recording
from jaxpace.record.ring.steps import InstrumentedSteps, ObservedSteps, RingSteps
from jaxpace.record.writer import Writer
from jaxpace.runs import rundir

_NOTHING: Any = object()
_WITH = ("record() takes no pace state and no results: what the step wrote is read where it lies. "
         "Call `recorder.record()` after each step; numbers of the host go in by name: "
         "`recorder.record(loss=0.5)`.")


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
    if detail != "auto" and (not isinstance(detail, int) or isinstance(detail, bool) or detail < 1):
      raise ValueError(
          f'detail={detail!r} must be "auto" or a whole number, of how many steps one is '
          'detailed.')
    if first_step is not None and (not isinstance(first_step, int) or first_step < 0):
      raise ValueError(f"first_step={first_step!r} must be the number of a step, 0 or more.")
    source: Any = marked[0] if marked else paced
    super().__init__(directory, source, resume=resume, config=config, grace_seconds=grace_seconds,
                     handle_sigterm=handle_sigterm, hosts=hosts, exporters=exporters)
    self._steps: RingSteps = (ObservedSteps(marked, detail, first_step) if marked
                              else InstrumentedSteps(source or InstrumentedFunction(), detail))
    self._calls = 0  # of `record`

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
      self._steps.record(writer, self._causes.sample(), extra)
    except Exception as error:  # Whatever it is, training goes on.
      writer.fail(error)
    if writer.termination.received:
      self.terminate(writer)

  @property
  def programs(self) -> list[ObservedProgram]:
    """See `Recording`."""
    return self._steps.programs()

  def due(self) -> int:
    """Rows of `steps` that this process was to record so far: one a call and rank."""
    return self._calls * self._steps.buffers

  def prepare(self, writer: Writer, identity: rundir.RunIdentity) -> None:
    """See `Recording`."""
    if self.directory is not None:
      self._steps.open(writer, self.directory, identity, self._resume)

  def bring_in(self, deadline: float | None) -> None:
    """See `Recording`."""
    if self._writer is not None:
      self._steps.bring_in(self._writer, deadline)

  def bring_in_last(self, writer: Writer, deadline: float | None) -> None:
    """See `Recording`."""
    if writer.stopped is None:
      self._steps.bring_in_last(writer, deadline)

  def closed(self) -> None:
    """See `Recording`."""
    self._steps.close()
