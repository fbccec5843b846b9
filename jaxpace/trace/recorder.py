"""Records a run beside the training loop, without blocking it."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import pathlib
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from jaxpace.core.recordable import Recordable
from jaxpace.trace import describe, places, progress, ringcopy, rundir
from jaxpace.trace import step_causes as host
from jaxpace.trace.copies import Copies, Pending, in_a_line
from jaxpace.trace.exporting import Exporter, Feed
from jaxpace.trace.host_causes import ASKED
from jaxpace.trace.host_sampler import HostCounters, HostSampler
from jaxpace.trace.intake import Batch
from jaxpace.trace.lock import DirectoryLock
from jaxpace.trace.writer import Writer, explain

_LOG = logging.getLogger("jaxpace")
_SHARE_SECONDS = 120.0
_CLOSE_SECONDS = 60.0
_URGENT_SECONDS = 0.1
_counter = itertools.count()  # Makes the names of successive recorders differ; the same in every process.


class Recorder:
  """Writes the stamps of an instrumented step to a run directory, see `jaxpace.trace.schema`.

      with jaxpace.Recorder("runs/demo", paced) as recorder:
        for batch in batches:
          pace, (state, metrics) = step(pace, state, batch)
          recorder.record(pace)

  `record` only counts. Every few steps it asks the devices for a copy of the ring of stamps; the copy is read at a
  later call, when it is ready, and written by a thread. If writing fails, recording ends with one warning and
  training goes on. All processes of a job open and close their recorders together, in the same order.

  Host causes (`cpu_ns`, `nivcsw`, `gc_ns`, `data_ns`, `checkpoint_ns`) are those of one iteration of the
  loop, from one `record` call to the next. Devices run behind the loop, so they are attributed to the step that the
  loop was dispatching: the step of the pace state given to `record`. They are null where `record` is not called for
  every step.
  """

  def __init__(self, directory: str | os.PathLike[str] | None, paced: Recordable | None, *,
               every_steps: int | None = None, every_seconds: float = 1.0, resume: bool = False,
               config: Any = None, grace_seconds: float = 5.0, handle_sigterm: bool = True,
               hosts: bool | float = True, exporters: Iterable[Exporter] = ()):
    """Prepares; nothing is touched before `with` or `open`.

    Args:
      directory: run directory; made if it is missing. An earlier run in it is moved to `.previous/`. None: off.
      paced: what `jaxpace.instrument` returned.
      every_steps: steps between two copies of the ring; by default half of what the ring holds.
      every_seconds: time between two copies, if that is sooner.
      resume: whether to go on with the run in `directory`, as its next attempt, instead of setting it aside.
      config: the program's configuration, kept in `run.json`: a dict, an `ml_collections.ConfigDict`, a dataclass or an
        `argparse.Namespace`.
      grace_seconds: after SIGTERM, how long the loop has to reach the next `record` call before the process ends.
      handle_sigterm: whether to write what is on the host when SIGTERM arrives.
      hosts: whether to sample the host's counters, by a thread: each second, or each so many seconds.
      exporters: get the recorded rows every few seconds, on a thread of their own, see `jaxpace.reporting.exporters`.
        They end with the recording.

    Raises:
      TypeError: `paced` is not an instrumented function, an exporter is none, or `config` has no names for its values.
      ValueError: a period is not positive.
    """
    if directory is not None and not isinstance(paced, Recordable):
      raise TypeError(
          f"Recorder takes the function that jaxpace.instrument returned: Recorder(directory, paced). This is a "
          f"{type(paced).__name__}. Pass the instrumented function itself, not the jax.jit, jax.shard_map or jax.pmap "
          "around it.")
    describe.check_config(config)
    if not hosts >= 0:
      raise ValueError(f"hosts={hosts} must be True, False or the seconds between two samples of the host.")
    if (every_steps is not None and every_steps < 1) or not every_seconds > 0:
      raise ValueError(f"every_steps={every_steps} and every_seconds={every_seconds} must be positive.")
    # Absolute: a program that changes its working directory goes on recording to the same place.
    self.directory = None if directory is None else pathlib.Path(os.path.abspath(directory))
    self._paced: Any = paced
    self._every_steps, self._every_seconds = every_steps, every_seconds
    self._resume, self._config = resume, config
    self._grace_seconds, self._handle_sigterm, self._hosts = grace_seconds, handle_sigterm, hosts
    self._feed = Feed(exporters)
    self._causes = host.StepCauseMeter()
    self._writer: Writer | None = None
    self._lock: DirectoryLock | None = None
    self._opened = self._closed = self._terminated = self._patient = False
    self._every = 1
    self._pid = 0
    self._pace_type: type | None = None
    self._latest: Any = None
    self._copies = Copies()
    self._progress = progress.AdvanceCheck()
    self._ranks_known = False
    self._local_ranks = 0
    self._calls = 0  # of `record`
    self.run: str | None = None

  @property
  def recording(self) -> bool:
    """Whether rows are still being recorded."""
    return self._writer is not None and not self._closed and self._writer.stopped is None

  @property
  def lost(self) -> dict[str, Any]:
    """What was lost so far: rows, holes, dropped copies, and why recording stopped or copies failed, if so."""
    if self._writer is None:
      return {}
    not_copied = {"not_copied": self._writer.not_copied} if self._writer.not_copied else {}
    lost = vars(self._writer.losses).copy()
    if self._writer.stopped is not None:  # nobody counted since: a row a call and rank was due
      unwritten = self._calls * self._local_ranks - self._writer.rows_written
      if unwritten > lost["lost_rows"]:
        lost |= {"lost_rows": unwritten, "holes": lost["holes"] + 1}
    return {**lost, "stopped": self._writer.stopped, **not_copied}

  def __enter__(self) -> Self:
    self.open()
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    if kind is not None and self._writer is not None and not self._closed and self._writer.ended_by is None:
      # A peer that has ended of the same signal first makes this one's collective fail.
      signalled = self._writer.termination.received and self._writer.termination.raises_again
      self._writer.ended_by = "SIGTERM" if signalled else in_a_line(error or kind())
    self._close(in_trouble=kind is not None)

  def open(self) -> None:
    """Starts recording. Process 0 gives the run its id and sets an earlier run aside; the others wait for that.

    After `jax.distributed.initialize`, before the first step. Trouble with the directory is a warning, no error.

    Raises:
      RuntimeError: the recorder was open before.
    """
    if self._opened:
      raise RuntimeError("A Recorder records once: make a new one for the next run.")
    self._opened = True
    if self.directory is None:
      return
    process = jax.process_index()
    identity = self._agree(process)
    if identity is None:
      return
    self.run = identity.run
    info = describe.process(identity, process)
    run_info = describe.run(identity, self._paced, self._config, self.directory) if process == 0 else None
    place = places.read(process)
    sampler = HostSampler(process, identity.attempt, float(self._hosts), make=lambda: HostCounters(
        gauges=places.gauges(place))) if self._hosts else None
    writer = Writer(self.directory, identity, process, info, run_info, grace_seconds=self._grace_seconds, hosts=sampler,
                    feed=self._feed)
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
      if process != 0:
        rundir.set_aside(self.directory, identity.run, process)
      writer.start()
      places.write(self.directory, identity.run, place)
    except Exception as error:
      self._not_recording(explain(error, self.directory))
      return
    self._writer = writer
    self._causes.start()
    if self._handle_sigterm:
      writer.termination.install()
    atexit.register(self._at_exit)
    self._pid = os.getpid()

  def record(self, pace: Any, **host_columns: float) -> None:
    """Counts a step, and now and then copies the ring. Call it after every step with the pace state it returned.

    Args:
      pace: the pace state returned by the step. It may be donated to the next step afterwards.
      **host_columns: numbers of the host to keep with this step, as columns `host_<name>`; `data_ns` and
        `checkpoint_ns` add to those columns. Not device values: reading them would wait for the step.

    Raises:
      TypeError: `pace` is not a pace state, is traced, or a host column is not a number.
      ValueError: `pace` was donated or is not split over all devices, or the instrumented function has no plan.
      RuntimeError: the recorder is not open.
    """
    writer = self._takes()
    self._calls += 1
    if writer is None:
      return
    if type(pace) is not self._pace_type:
      self._begin(pace)
    ringcopy.check_alive(pace)
    self._progress.repeated(pace is self._latest)
    self._latest = pace
    extra = self._host_columns(host_columns) if host_columns else {}
    copies = self._copies
    copies.note(self._causes.sample(), extra)
    if copies:
      self._hand_over(copies.finished())
    if writer.termination.received:
      self._terminate(writer)
    elif len(copies.samples) >= self._every or time.monotonic() - copies.started_at >= self._every_seconds:
      self._copy()

  def measure(self, cause: str) -> AbstractContextManager[None]:
    """Adds the time spent inside to the current step's `data_ns` or `checkpoint_ns`.

        with recorder.measure("data"):
          batch = next(batches)

    Args:
      cause: "data" or "checkpoint".

    Raises:
      ValueError: any other cause; use `jaxpace.phase` for phases of the compiled step.
    """
    return self._causes.measure(cause)

  def take(self, batch: Batch, ranks: list[int]) -> None:
    """Records stamps that were not left in a pace state's ring, for sources of other kinds. From any thread.

    Args:
      batch: a copy as if of the rings, with its plan.
      ranks: of its rings, in their order; the same in every call.
    """
    if self._writer is None or self._writer.stopped is not None:
      return
    if not self._ranks_known:
      self._writer.set_ranks(ranks)
      self._ranks_known = True
    self._writer.submit(batch)

  @property
  def doing(self) -> str | None:
    """What `measure` measures at the moment: "data", "checkpoint" or None. For other threads."""
    return self._causes.doing

  def close(self) -> None:
    """Waits for the last copies, writes everything and says what was lost. Further calls do nothing."""
    self._close(in_trouble=False)

  def _takes(self) -> Writer | None:
    """The writer; None where nothing is recorded, or no longer. An error where the recorder is not open."""
    writer = self._writer
    if writer is not None and not self._closed and writer.stopped is None:
      return writer
    if not self._opened or (self._closed and self.directory is not None):
      raise RuntimeError("record() outside of the recorder's `with` block: open the recorder around the loop.")
    return None

  def _agree(self, process: int) -> rundir.RunIdentity | None:
    """Learns the run's id; None, with a warning, if it can't be recorded."""
    assert self.directory is not None
    text = None
    if process == 0:
      try:
        rundir.prepare(self.directory)
        self._lock = DirectoryLock.take(self.directory)
        text = rundir.claim(self.directory, self._resume, time.time_ns()).to_text()
      except Exception as error:
        text = "!" + explain(error, self.directory)
    text = describe.share(f"jaxpace/recorder/{next(_counter)}", text, _SHARE_SECONDS)
    if text is None:
      self._not_recording("process 0 did not say which run this is. Every process must open the recorder.")
      return None
    if text.startswith("!"):
      self._not_recording(text[1:])
      return None
    return rundir.RunIdentity.from_text(text)

  def _not_recording(self, reason: str) -> None:
    self._unlock()
    _LOG.warning("Not recording, training goes on: %s", reason)

  def _unlock(self) -> None:
    if self._lock:
      self._lock.release()

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
        _LOG.warning("every_steps=%d is more than the ring's %d rows can bridge: copying every %d steps.",
                     self._every_steps, rows, self._every)
    if self._paced.plan is None:
      raise ValueError(
          "The recorder's function has not been traced, so these stamps are another function's. Give the Recorder the "
          "very object that `jaxpace.instrument` returned and the step calls; do not instrument twice.")
    self._pace_type, self._local_ranks = type(pace), ringcopy.local_ranks(pace)

  def _host_columns(self, columns: dict[str, float]) -> dict[str, float]:
    extra = {}
    for name, value in columns.items():
      if isinstance(value, jax.Array) or not isinstance(value, int | float | np.number):
        raise TypeError(f"record({name}=...) takes a number of the host, not {type(value).__name__}: "
                        "reading a device value here would make the loop wait for the step.")
      if name in ASKED:
        self._causes.add(ASKED[name], int(value))
      else:
        extra[name] = float(value)
    return extra

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
        self._writer.set_ranks(ranks)
      self._watch_progress(rings, len(item.samples))
      self._writer.submit(Batch(rings, self._paced.plan, item.samples, item.extra, time.monotonic_ns()))

  def _watch_progress(self, rings: np.ndarray, calls: int) -> None:
    """Copies more often if `record` is not called for every step."""
    advance = self._progress.copied(ringcopy.newest(rings), calls)
    if advance is not None and advance > calls > 0:
      self._every = max(1, min(self._every, (rings.shape[-2] // 2) * calls // advance))

  def _terminate(self, writer: Writer) -> None:
    """A step boundary after SIGTERM: gets everything to the disk, then lets the process go the way it would have."""
    dying = writer.termination.raises_again
    if self._terminated and not (dying and self._patient):
      if time.monotonic() - self._copies.started_at >= _URGENT_SECONDS:
        self._copy()
      return
    # A whole iteration, in which the program can ask JAX for the step at which to stop.
    self._patient = writer.termination.may_be_asked and not self._terminated
    self._terminated = True
    dying = dying and not self._patient
    if dying:
      writer.ended_by = "SIGTERM"
    deadline = time.monotonic() + self._grace_seconds
    self._finish_copies(deadline)
    writer.flush(max(deadline - time.monotonic(), 0.1))
    if dying:
      writer.termination.raise_again()

  def _finish_copies(self, deadline: float | None) -> None:
    """Gets the copies under way and one of the latest ring, waiting until `deadline` if there is one."""
    if self._copies.full:
      self._hand_over(self._copies.awaited(deadline))
    if self._latest is not None and not ringcopy.deleted(self._latest):
      self._copy()
    self._hand_over(self._copies.awaited(deadline))

  def _at_exit(self) -> None:
    if self._writer is not None and self._writer.ended_by is None:
      error = getattr(sys, "last_value", None)  # the exception that ended the program, if one did
      self._writer.ended_by = in_a_line(error) if error else "the end of the program, without close()"
    self._close(in_trouble=True)

  def _close(self, in_trouble: bool) -> None:
    if self._closed or not self._opened:
      return
    self._closed = True
    writer = self._writer
    if writer is None or os.getpid() != self._pid:  # A forked child has no part in its parent's recording.
      return
    atexit.unregister(self._at_exit)
    self._causes.stop()
    try:
      if writer.stopped is None:
        lost = len(self._copies.samples) if self._latest is not None and ringcopy.deleted(self._latest) else 0
        # After an error the devices may never finish: a peer is dead, say.
        self._finish_copies(time.monotonic() + self._grace_seconds if in_trouble else None)
        if self._copies.failed:
          lost = len(self._copies.samples)
        lost += self._copies.steps
        if lost:
          writer.add_lost(lost, self._local_ranks)
    finally:  # Ctrl-C while waiting, say: what has come is written all the same.
      self._finish(writer)

  def _finish(self, writer: Writer) -> None:
    self._copies.forget()
    self._latest = None
    if writer.close(_CLOSE_SECONDS):
      self._unlock()
    else:
      _LOG.warning("%s has not taken the last rows within %.0f s: leaving them.", self.directory, _CLOSE_SECONDS)
    unfinished = writer.termination.received and writer.termination.raises_again
    if writer.not_copied and writer.stopped is None:
      _LOG.warning("%s lacks steps: %s.", self.directory, writer.not_copied.rstrip("."))
    elif writer.losses.lost_rows and writer.stopped is None:
      _LOG.warning("Recorded %s with losses: %s.", self.directory, writer.losses)
    if unfinished:
      writer.termination.raise_again()
    writer.termination.restore()
    writer.release()
