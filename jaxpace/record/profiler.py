"""Records steps that are plain `jit` over sharded arrays, now and then, by JAX's profiler."""

from __future__ import annotations

import collections
import json
import logging
import os
import pathlib
import queue
import shutil
import tempfile
import threading
import time
from typing import Any

import jax

from jaxpace.core.fields import is_whole
from jaxpace.core.observed import ObservedFunction, ObservedPlan, ObservedProgram, Recordable
from jaxpace.files import UserError
from jaxpace.hosts import distributed
from jaxpace.observation.comparing import in_a_line
from jaxpace.record import traces
from jaxpace.record.columns import DeviceSteps, Range, StepCalls
from jaxpace.record.recording import CLOSE_SECONDS, Recording
from jaxpace.record.ring.executions import Executions
from jaxpace.record.ring.intake import StepTables
from jaxpace.record.ring.observed import PlannedPrograms
from jaxpace.record.threads import BackgroundThread
from jaxpace.record.writer import Writer
from jaxpace.runs import rundir

_LOG = logging.getLogger("jaxpace")
_SHARE_SECONDS = 60.0


_Session = tuple[str, int, list[StepCalls]]
"""One whose steps are done: folder of its trace, which is ended and read by the thread, while the
loop goes on; its end on the host's monotonic clock, since what begins later is of no session; and
its steps."""


class _ProfiledIntake(StepTables):
  """Sessions on the writer's side."""

  ranks: list[int] = []  # noqa: RUF012

  def __init__(self, process: int, attempt: int, programs: PlannedPrograms):
    super().__init__(process, attempt, detail=1)
    self._programs = programs
    self.ready: collections.deque[
        tuple[list[StepCalls], dict[int, dict[int, Executions]]]] = collections.deque()
    """Sessions' steps, and what ran by rank and program; filled by the thread that reads the
    traces, emptied by the writer's."""
    self._ran: dict[int, dict[int, Executions]] = {}

  def poll(self) -> None:
    while self.ready:
      steps, self._ran = self.ready.popleft()
      self.ranks = list(self._ran)
      self._programs.meet()
      self.add(self._programs.plan_of(steps, self._detail), steps)
      self._make_rows()

  def devices(self, steps: list[StepCalls]) -> dict[int, DeviceSteps]:
    return {rank: self._programs.device(steps, executions, rank)
            for rank, executions in self._ran.items()}


class ProfiledRecorder(Recording, Recordable):
  """Writes entries and exits of collectives to a run directory, without any change to the step.

      with jaxpace.ProfiledRecorder("runs/demo", every=100, steps=4) as recorder:
        for batch in batches:
          state, metrics = step(state, batch)
          recorder.record(metrics)

  For a step in which nothing can be timestamped, since the compiler puts the collectives in: plain
  `jax.jit` over sharded arrays. Every `every` steps JAX's profiler runs for `steps` steps; a thread
  ends it, reads its trace and hands on when each device entered and left each collective. The
  tables and `jaxpace report` are those of `jaxpace.Recorder`; what they hold is a sample. At both
  ends of a session the loop waits for the devices.

  What it can't give: phases (forward, backward), sizes of collectives, pacing, sharing. Where the
  program itself is being profiled at that moment, a session is left out.
  """

  def __init__(self, directory: str | os.PathLike[str] | None, *, every: int = 100, steps: int = 4,
               axis: str = "data", first_step: int = 0, **options: Any):
    """Prepares; nothing is touched before `with` or `open`.

    Args:
      directory: run directory, see `jaxpace.Recorder`. None: off.
      every: steps from the beginning of one session to the next.
      steps: steps in a session, at least 2: arrivals are measured from the exit of the step before.
      axis: name of the data axis, for the record.
      first_step: number of the first step, where a run is resumed.
      **options: options of `jaxpace.Recorder`: `resume`, `config`, `grace_seconds`,
        `handle_sigterm`, `hosts`.

    Raises:
      ValueError: there is no room for a session between two.
    """
    if not (is_whole(steps, 2) and is_whole(every, steps + 1)):
      raise ValueError(f"every={every!r} and steps={steps!r} must be whole numbers with 2 <= steps "
                       "< every: a session of `steps` steps, `every` so many.")
    super().__init__(directory, self, **options)
    self.sessions = 0
    self._period, self._length, self._axis = every, steps, axis
    self._step = first_step
    self._began: int | None = None  # first step of the session under way
    self._folder = ""
    self._steps: list[StepCalls] = []  # of that session
    self._queue: queue.SimpleQueue[_Session | None] = queue.SimpleQueue()
    self._reader = BackgroundThread(self._read, "profile-reader")
    self._free = threading.Event()
    self._free.set()
    self._traced = ObservedFunction()
    self._known: dict[tuple[str, tuple[str, ...]], ObservedProgram] = {}
    self._ranks: list[int] | None = None
    self._intake: _ProfiledIntake | None = None
    self._told: set[str] = set()
    self._checked = False  # whether `record` was given arrays, the first time

  def settings_json(self) -> dict[str, Any]:
    """Returns where the timestamps come from, as plain JSON values."""
    return {"clock": traces.CLOCK, "pacer": None, "source": "jax.profiler",
            "every": self._period, "steps": self._length}

  def prepare(self, identity: rundir.RunIdentity) -> StepTables:
    """See `Recording`.

    Raises:
      UserError: the devices are GPUs. Their traces can't be read; and to take CUDA's profiler down
        while kernels are launched has killed a job (H200, driver 580).
    """
    if jax.default_backend() == "gpu":
      raise UserError("kernels in traces of GPUs do not say which execution they belong to. "
                      "jaxpace.observe times every step, on NVIDIA's.")
    self._intake = _ProfiledIntake(
        jax.process_index(), identity.attempt, PlannedPrograms([self._traced]))
    traces.make_types()
    self._reader.start()
    return self._intake

  def record(self, result: Any, **host_columns: float) -> None:
    """Counts a step, and begins or ends a session when it is due. Call it after every step, on
    every process.

    Args:
      result: anything the step returned that has arrays of the devices in it: a session waits for
        them. It may be donated afterwards.
      **host_columns: numbers of the host to keep with this step, see `jaxpace.Recorder.record`.

    Raises:
      TypeError: `result` holds no array of a device, or a host column is not a number.
      RuntimeError: the recorder is not open.
    """
    writer = self.takes()
    if writer is None:
      return
    if not self._checked:
      _waitable(result)
      self._checked = True
    extra, sample = self._host_columns(host_columns), self._causes.sample()
    self._step += 1
    if self._began is not None:
      self._steps.append(StepCalls(self._step - 1, (), sample, extra))
      if self._step == self._began + self._length:
        jax.block_until_ready(_waitable(result))
        self._end()
    if writer.termination.received:
      self.terminate(writer)
    elif self._began is None and self._step % self._period == 0:
      jax.block_until_ready(_waitable(result))
      self._begin_session()

  def _begin_session(self) -> None:
    if not self._free.is_set():
      self._say(
          "A sample was left out, the trace before it has not been written yet: a larger `every` "
          "avoids that.")
      return
    self._folder = ""
    try:
      self._folder = tempfile.mkdtemp(prefix="jaxpace-profile-")
      options = jax.profiler.ProfileOptions()
      options.python_tracer_level = 0  # Python's calls are of no use here and cost most
      jax.profiler.start_trace(self._folder, profiler_options=options)
      with jax.profiler.TraceAnnotation(f"{traces.ANCHOR}{time.monotonic_ns()}"):
        pass
    except Exception as error:
      shutil.rmtree(self._folder, ignore_errors=True)
      self._say(f"A sample was left out, the profiler can't be started: {in_a_line(error)}")
      return
    self._began, self._steps = self._step, []

  def _end(self) -> None:
    """Hands the session under way to the thread: to end a trace takes tens of milliseconds."""
    self._began = None
    self._free.clear()
    self._queue.put((self._folder, time.monotonic_ns(), self._steps))

  def _abandon(self) -> None:
    """Ends the session under way in the loop, if there is one, and forgets it."""
    if self._began is None:
      return
    self._began = None
    try:
      jax.profiler.stop_trace()
    except Exception as error:
      _LOG.debug("The profiler could not be stopped", exc_info=error)
    shutil.rmtree(self._folder, ignore_errors=True)

  def bring_in(self, writer: Writer, deadline: float | None, last: bool) -> None:
    """See `Recording`."""
    self._abandon()
    if last:
      self._queue.put(None)
      self._reader.join(CLOSE_SECONDS if deadline is None
                        else max(deadline - time.monotonic(), 0.0))

  # Below runs in the reader's own thread.

  def _read(self) -> None:
    while (session := self._queue.get()) is not None:
      folder, end_ns, steps = session
      try:
        try:
          jax.profiler.stop_trace()
        finally:
          self._free.set()
        self._take_in(folder, end_ns, steps)
        self.sessions += 1
      except Exception as error:
        self._say(f"A sample was left out: {in_a_line(error)}")
        _LOG.debug("A profile could not be read", exc_info=error)
      finally:
        shutil.rmtree(folder, ignore_errors=True)

  def _take_in(self, folder: str, end_ns: int, steps: list[StepCalls]) -> None:
    files = sorted(pathlib.Path(folder).glob("**/*.xplane.pb"))
    if not files:
      raise traces.ProfileError("the profiler has written no trace")
    found = traces.operations(jax.profiler.ProfileData.from_file(str(files[-1])))
    program, by_device = traces.executions(found, self._length, end_ns)
    rank_of = traces.ranks_of(list(by_device),
                                  [(d.id, d.local_hardware_id) for d in jax.local_devices()],
                                  [device.id for device in jax.devices()])
    ordinals, ranks = sorted(rank_of, key=rank_of.__getitem__), sorted(rank_of.values())
    if not ranks:
      raise traces.ProfileError(
          f"{program} ran on devices {sorted(by_device)}, which are none of this process's")
    if self._ranks is None:
      self._ranks = ranks
    if ranks != self._ranks:
      raise traces.ProfileError(f"{program} ran on other devices than what was recorded before")
    one = self._program(program, [execution for own in by_device.values() for execution in own],
                        ranks)
    each = len(by_device[ordinals[0]]) // self._length
    steps = [step._replace(ranges=(Range(one.number, at * each, (at + 1) * each),))
             for at, step in enumerate(steps)]
    ran = {rank: {one.number: traces.events(by_device[ordinal], one)}
           for ordinal, rank in zip(ordinals, ranks, strict=True)}
    writer, intake = self._writer, self._intake
    if writer is not None and intake is not None and writer.stopped is None:
      intake.ready.append((steps, ran))
      writer.poke()

  def _program(self, name: str, ran: list[traces.Execution], ranks: list[int]
               ) -> ObservedProgram:
    """What a program is taken for, with all of its collectives; process 0 says which they are."""
    own = traces.iterations(ran)
    key, number = (name, tuple(sorted(own))), len(self._known)
    if key not in self._known:
      text = distributed.share_string(f"profiled/{number}", json.dumps(own), _SHARE_SECONDS)
      several = jax.process_count() > 1
      everyone = {*ranks, *range(len(ranks) * jax.process_count() if several else 0)}
      self._known[key] = traces.program(number, name, json.loads(text) if text else own,
                                            self._axis, sorted(everyone))
      self._traced.plan = ObservedPlan(tuple(self._known.values()))
    return self._known[key]

  def _say(self, sentence: str) -> None:
    """Warns, once for each kind of trouble."""
    if sentence not in self._told:
      self._told.add(sentence)
      _LOG.warning("%s Training goes on; the next failure like this is not logged.", sentence)


def _waitable(result: Any) -> list[jax.Array]:
  """The arrays in what a step returned.

  Raises:
    TypeError: there are none, so nothing says when the devices are done.
  """
  arrays = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]
  if not arrays:
    raise TypeError(
        "record(...) takes what the step returned, the arrays themselves (its loss, say): a sample "
        f"waits for them, and a {type(result).__name__} without any can't be waited for.")
  return arrays
