"""Records a run beside the training loop, without blocking it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxpace.core.observed import ObservedProgram
from jaxpace.core.recordable import Marked, Recordable, marked_of
from jaxpace.trace import progress, ringcopy, rundir
from jaxpace.trace.copies import Copies, Pending
from jaxpace.trace.exporting import Exporter
from jaxpace.trace.intake import Batch, Intake
from jaxpace.trace.marks.beside import MarksBeside
from jaxpace.trace.marks.steps import MarkedSteps
from jaxpace.trace.recording import Recording
from jaxpace.trace.writer import Writer, explain

_LOG = logging.getLogger("jaxpace")
_URGENT_SECONDS = 0.1
_NOTHING: Any = object()
_WITHOUT = ("record() lacks the pace state: of an instrumented step, give it what the step "
            "returned first, `pace, out = step(pace, state, batch)`, then `recorder.record(pace)`.")
_WITH = ("record() takes no pace state, since this step is observed, not instrumented: `out = "
         "step(state, batch)`, then `recorder.record()`. Numbers of the host go in by name: "
         "`recorder.record(loss=0.5)`.")


class Recorder(Recording):
  """Writes the stamps of an observed or instrumented step to a run directory, see
  `jaxpace.trace.schema`.

      step = jaxpace.observe(step)
      with jaxpace.Recorder("runs/demo", step) as recorder:
        for batch in batches:
          state, metrics = step(state, batch)
          recorder.record()

  or, of a step that `jaxpace.instrument` made, and that takes and returns a pace state:

      with jaxpace.Recorder("runs/demo", paced) as recorder:
        for batch in batches:
          pace, (state, metrics) = step(pace, state, batch)
          recorder.record(pace)

  `record` only counts. Every few steps it asks the devices for a copy of the ring of stamps; the
  copy is read at a later call, when it is ready, and written by a thread. Marks of observed steps
  lie on the host already, in `marks/<process>.ring`; the thread reads them there. If writing fails,
  recording ends with one warning and training goes on. All processes of a job open and close their
  recorders together, in the same order.

  A step is what was dispatched between two calls of `record`: several calls of observed functions
  add up to one step.

  Host causes (`cpu_ns`, `nivcsw`, `gc_ns`, `data_ns`, `checkpoint_ns`) are those of one iteration
  of the loop, from one `record` call to the next. Devices run behind the loop, so they are
  attributed to the step that the loop was dispatching: the step of the pace state given to
  `record`. They are null where `record` is not called for every step.
  """

  def __init__(self, directory: str | os.PathLike[str] | None,
               paced: Recordable | Sequence[Marked] | None, *, every_steps: int | None = None,
               every_seconds: float = 1.0, resume: bool = False, config: Any = None,
               grace_seconds: float = 5.0, handle_sigterm: bool = True, hosts: bool | float = True,
               exporters: Iterable[Exporter] = (), detail: int | str = "auto",
               first_step: int | None = None):
    """Prepares; nothing is touched before `with` or `open`.

    Args:
      directory: run directory; made if it is missing. An earlier run in it is moved to
        `.previous/`. None: off.
      paced: what `jaxpace.observe` returned, or several such where a step calls several; or what
        `jaxpace.instrument` returned.
      every_steps: steps between two copies of the ring; by default half of what the ring holds.
      every_seconds: time between two copies, if that is sooner.
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
        `jaxpace.reporting.exporters`. They end with the recording.
      detail: of an observed step, the collectives of one step in so many are written one by one,
        and those around slow steps; of the others the sums. 1 writes all; "auto" chooses by what a
        step has.
      first_step: number of the first step that is recorded, of an observed one; by default 0 or,
        with `resume`, the one after the last recorded.

    Raises:
      TypeError: `paced` is neither observed nor instrumented, an exporter is none, or `config` has
        no names for its values.
      ValueError: a period is not positive.
    """
    found = [marked_of(one) for one in (paced if isinstance(paced, list | tuple) else [paced])]
    marked = [one for one in found if one is not None]
    observed = bool(marked) and len(marked) == len(found)
    if directory is not None and not isinstance(paced, Recordable) and not observed:
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
    if (every_steps is not None and every_steps < 1) or not every_seconds > 0:
      raise ValueError(
          f"every_steps={every_steps} and every_seconds={every_seconds} must be positive.")
    source: Any = marked[0] if marked else paced
    super().__init__(directory, source, resume=resume, config=config, grace_seconds=grace_seconds,
                     handle_sigterm=handle_sigterm, hosts=hosts, exporters=exporters)
    self._paced: Any = source
    self._marked = MarkedSteps(marked, detail, first_step) if marked else None
    self._every_steps, self._every_seconds = every_steps, every_seconds
    self._every = 1
    self._pace_type: type | None = None
    self._latest: Any = None
    self._copies = Copies()
    self._progress = progress.AdvanceCheck()
    self._local_ranks = 0
    self._calls = 0  # of `record`
    self._detail = detail
    self._identity: rundir.RunIdentity | None = None
    self._beside: MarksBeside | None = None

  def record(self, pace: Any = _NOTHING, /, **host_columns: float) -> None:
    """Counts a step, and now and then has what was stamped read. Call it after every step.

    Args:
      pace: of an instrumented step, the pace state that it returned. It may be donated to the next
        step afterwards. An observed step has none: `record()`.
      **host_columns: numbers of the host to keep with this step, as columns `host_<name>`;
        `data_ns` and `checkpoint_ns` add to those columns. Not device values: reading them would
        wait for the step.

    Raises:
      TypeError: `pace` is not a pace state, is traced, is missing, or is given though the step is
        observed; or a host column is not a number.
      ValueError: `pace` was donated or is not split over all devices, or the instrumented function
        has no plan.
      RuntimeError: the recorder is not open.
    """
    marked = self._marked
    if (pace is _NOTHING) is (marked is None) and self._paced is not None:
      raise TypeError(_WITHOUT if marked is None else _WITH)
    # Between two steps each function called costs 5 us, since caches hold other things by then:
    # what need not be called is not.
    writer = self._writer
    if writer is None or self._closed or writer.stopped is not None:
      writer = self.takes()
    self._calls += 1
    if writer is None:
      return
    if marked is not None:
      extra = self._host_columns(host_columns) if host_columns else host_columns
      try:
        marked.record(writer, self._causes.sample(), extra)
      except Exception as error:  # Whatever it is, training goes on.
        writer.fail(error)
      if writer.termination.received:
        self.terminate(writer)
      return
    if type(pace) is not self._pace_type:
      self._begin(pace)
    ringcopy.check_alive(pace)
    self._progress.repeated(pace is self._latest)
    self._latest = pace
    copies = self._copies
    copies.note(*self.sample(host_columns))
    if copies:
      self._hand_over(copies.finished())
    if writer.termination.received:
      self.terminate(writer)
    elif (len(copies.samples) >= self._every
          or time.monotonic() - copies.started_at >= self._every_seconds):
      self._copy()

  @property
  def programs(self) -> list[ObservedProgram]:
    """See `Recording`."""
    if self._marked is not None:
      return self._marked.programs()
    return [] if self._beside is None else self._beside.programs

  def due(self) -> int:
    """Rows of `steps` that this process was to record so far: one a call and rank."""
    return self._calls * (self._local_ranks if self._marked is None else self._marked.lanes)

  def prepare(self, writer: Writer, identity: rundir.RunIdentity) -> None:
    """See `Recording`."""
    self._identity = identity
    if self._marked is not None and self.directory is not None:
      self._marked.open(writer, self.directory, identity, self._resume)

  def _begin(self, pace: Any) -> None:
    """Checks the pace state the first time, and reads from it what does not change."""
    ringcopy.check(pace)
    ringcopy.check_alive(pace)
    ringcopy.check_split(pace, self._paced.places)
    rows = pace.ring.shape[-2]
    self._every = max(1, rows // 2)
    self._copies.fit(pace)
    if self._every_steps is not None:
      self._every = self._every_steps
      if self._every_steps >= rows:
        self._every = max(1, rows - 1)
        _LOG.warning(
            "every_steps=%d is more than the ring's %d rows can bridge: copying every %d steps.",
            self._every_steps, rows, self._every)
    if self._paced.plan is None:
      raise ValueError(
          "The recorder's function has not been traced, so these timestamps are another "
          "function's. Give the Recorder the object that `jaxpace.instrument` returned and the "
          "step calls; do not instrument twice.")
    self._pace_type, self._local_ranks = type(pace), ringcopy.local_ranks(pace)
    plan = self._paced.plan
    if (plan.inside and self._beside is None and self.directory is not None
        and self._identity is not None):
      try:
        self._beside = MarksBeside(self.directory, self._identity, plan,
                                   self._paced.settings_json(), ringcopy.local_devices(pace),
                                   ringcopy.local_places(pace), self._detail)
      except OSError as error:
        _LOG.warning("Collectives in loops are not recorded, all else is: %s",
                     explain(error, self.directory))

  def _copy(self) -> None:
    """Asks the devices for a copy of the latest ring."""
    if self._copies.start(self._latest, with_ranks=not self._ranks_known):
      self._ranks_known = True
    if self._writer is not None:
      self._writer.not_copied = self._copies.lost()

  def _hand_over(self, items: Iterable[Pending]) -> None:
    """Hands copies to the writer."""
    assert self._writer is not None
    for item in items:
      try:
        rings, ranks = item.copy.read()
      except Exception as error:  # Whatever it is, training goes on.
        self._copies.fail(error)
        self._copies.give_back(item)
        self._writer.not_copied = self._copies.lost()
        continue
      if ranks is not None:
        self._writer.set_ranks(ranks, Intake if self._beside is None else self._beside.intake)
      self._watch_progress(rings, len(item.samples))
      self._writer.submit(Batch(rings, self._paced.plan, item.samples, item.extra,
                                time.monotonic_ns()))

  def _watch_progress(self, rings: np.ndarray, calls: int) -> None:
    """Copies more often if `record` is not called for every step."""
    advance = self._progress.copied(ringcopy.newest(rings), calls)
    if advance is not None and advance > calls > 0:
      self._every = max(1, min(self._every, (rings.shape[-2] // 2) * calls // advance))

  def bring_in(self, deadline: float | None) -> None:
    """Gets the copies under way and one of the latest ring, waiting until `deadline` if there is
    one."""
    if self._marked is not None:
      if self._writer is not None:
        self._marked.bring_in(self._writer, deadline)
      return
    if self._copies.full:
      self._hand_over(self._copies.awaited(deadline))
    if self._latest is not None and not ringcopy.deleted(self._latest):
      self._copy()
    self._hand_over(self._copies.awaited(deadline))

  def bring_in_again(self) -> None:
    """See `Recording`."""
    if self._marked is not None:
      return
    if time.monotonic() - self._copies.started_at >= _URGENT_SECONDS:
      self._copy()

  def bring_in_last(self, writer: Writer, deadline: float | None) -> None:
    """See `Recording`."""
    if self._marked is not None:
      if writer.stopped is None:
        self._marked.bring_in_last(writer, deadline)
      return
    try:
      if writer.stopped is None:
        lost = (len(self._copies.samples) if self._latest is not None
                and ringcopy.deleted(self._latest) else 0)
        self.bring_in(deadline)
        if self._copies.failed:
          lost = len(self._copies.samples)
        lost += self._copies.steps
        if lost:
          writer.add_lost(lost, self._local_ranks)
    finally:
      self._copies.forget()
      self._latest = None

  def closed(self) -> None:
    """See `Recording`."""
    if self._marked is not None:
      self._marked.close()
    if self._beside is not None:
      self._beside.close()
