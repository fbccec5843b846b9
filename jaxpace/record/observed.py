"""Records a program that does not know of it: `jaxpace.observed`, and what `jaxpace run` starts.

A program is recorded without being changed or asked: its programs get timestamps where JAX compiles
them, and the writer's thread finds the steps among what the devices executed. Nothing is opened
before the first program with collectives is compiled, so processes that have none, such as a data
loader's workers, record nothing. No thread of the program ever waits.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import pathlib
import select
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import jax

from jaxpace.core.observed import ObservedProgram
from jaxpace.core.words import plural
from jaxpace.hosts.distributed import end_when_failed
from jaxpace.hosts.launch.environment import (
  EXACT,
  LAUNCH_ID,
  MATCH,
  RUN,
  UNNAMED,
  UNSEEN,
  started_together,
)
from jaxpace.observation import programs
from jaxpace.observation.everywhere import Everywhere
from jaxpace.record.recorder import Recorder, wait_for_dispatched
from jaxpace.record.recording import Recording, in_one_line
from jaxpace.record.ring.collect import Collector
from jaxpace.record.ring.finding import Step, is_jax
from jaxpace.record.ring.observed import buffers_of
from jaxpace.record.threads import BackgroundThread
from jaxpace.runs import rundir

_LOG = logging.getLogger("jaxpace")
_OPEN_SECONDS = 10.0
"""How long the end of a program waits for its recording to begin."""
_LOOK_SECONDS = 0.05
_MOST_UNREAD = 0.25
"""Fraction of the ring that waits for a program's recorder to open, at most."""
_MOST_NAMES = 12

_GIVES_WAY = "This program opens a recorder of its own: that alone records."

Say = Callable[[str], None]


class observed:
  """Records whatever trains inside: no function is named, none is wrapped.

      with jaxpace.observed("runs/demo"):
        model.fit(data)

  Every program with collectives over several devices that JAX compiles inside the block gets
  timestamps; the program that takes most of the time, or the sequence that repeats, is the step.
  `run.json` says what was taken for it. Programs compiled before the block run unmodified: enter it
  before the first step. All processes of a job do so.

  Attributes:
    step: what was taken for the step, of the loop that runs; None as long as nothing repeats.
  """

  def __init__(self, directory: str | os.PathLike[str], *, match: str = "",
               exact: bool = False, config: Any = None, hosts: bool | float = True,
               say: Say | None = None):
    """Prepares; nothing is touched before `with` or `open`.

    Args:
      directory: run directory; made if it is missing, once there is something to record.
      match: pattern of the names of the step's programs, such as "train*", where the step shall not
        be found.
      exact: whether a program keeps its timestamps only if its first three executions give the same
        bits as the unmodified program. Each of them runs twice: on copies of its arguments with
        timestamps, which is what is recorded, and without. All processes come to one decision.
      config: the program's configuration, kept in `run.json`; see `jaxpace.Recorder`.
      hosts: whether to sample the host's counters; see `jaxpace.Recorder`.
      say: takes a sentence on what happens; by default it is logged.
    """
    if not isinstance(match, str):
      raise TypeError(f"match={match!r} must be a pattern of names, such as 'train*'.")
    if say is not None and not callable(say):
      raise TypeError(f"say={say!r} must be a function that takes a sentence, such as print.")
    said = _safely(say) if say else None
    self._say, self._warn = said or _LOG.info, said or _LOG.warning
    self._programs = Everywhere(self._begin, self._warn, exact)
    self._recording = FoundRecorder(directory, self._programs, match, config, self._say,
                                     hosts)
    self._writer: threading.Thread | None = None
    self._over, self._tried = threading.Event(), threading.Event()
    self._lock = threading.Lock()
    self._pid = os.getpid()
    self._closed = False
    self.gives_way = False
    """Whether to record nothing where the program opens a recorder of its own."""

  @property
  def step(self) -> Step | None:
    """See above."""
    return self._recording.step

  def __enter__(self) -> Self:
    self.open()
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    self.close(error)

  def open(self) -> None:
    """Begins; trouble is a warning, no error."""
    if self._closed:
      self._warn("Nothing is recorded: `jaxpace.observed` records once. Make a new one for each "
                 "block.")
      return
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
      # Each operation is a program of its own then.
      self._warn("Nothing is recorded while jax_disable_jit is on: no program is the step.")
      self._closed = True
      return
    try:
      self._programs.start()
      # What gives way does so from here on: programs inside the block are this recorder's.
      Recording.opened |= not self.gives_way
      atexit.register(self._at_exit)
    except Exception as error:
      self._warn(f"Nothing is recorded: {in_one_line(error)}")

  def close(self, error: BaseException | None = None) -> None:
    """Waits for the steps under way and writes everything; `error` is what ended them early."""
    self._programs.stop()
    if self._closed or os.getpid() != self._pid:
      return
    self._closed = True
    atexit.unregister(self._at_exit)
    if self._writer is None:
      self._say_nothing("was compiled meanwhile")
      return
    self._over.set()
    self._tried.wait(_OPEN_SECONDS)
    self._recording.given_up.set()
    self._tried.wait(_OPEN_SECONDS)
    if not self._recording.anything:
      self._say_nothing("ran")
    self._recording.__exit__(type(error) if error else None, error, None)

  def give_way(self, unnamed: bool = False) -> None:
    """Has it record nothing where the program opens a recorder of its own, as process 0 sees it
    when the first program with timestamps runs; `unnamed`: nobody named its directory."""
    # Not all processes ask for a run under this name, so it is no other recording's.
    self.gives_way, self._recording.share_name = True, "jaxpace/run"
    self._recording.unnamed = unnamed

  def _say_nothing(self, happened: str) -> None:
    """Says that nothing was recorded, unless that has been said: what no program did."""
    which = "program with collectives over several devices"
    if self.gives_way and not Recording.opened:
      # The others may be waiting to hear which run this is.
      self._recording.decline(f"process 0, which says what is recorded, ran no {which}.")
    if self.gives_way and Recording.opened:
      self._say(_GIVES_WAY)
    elif self._programs.left_any:
      self._warn(f"Nothing was recorded: every {which} ran unmodified, for the reasons above.")
    elif not self._programs.none:
      # What this process has started, say, may be recorded there.
      whose = " of this process" if self._recording.is_there else ""
      self._warn(f"Nothing{whose} was recorded: no {which} {happened}.{_taken_for_a_job()}")

  def _begin(self) -> None:
    """Begins to look for timestamps, in a thread of its own: to open a recording is to wait for
    process 0, and the program must not."""
    with self._lock:
      if self._writer is not None or self._closed or os.getpid() != self._pid:
        return
      # Now: nothing with timestamps has run that is to be recorded.
      self._recording.begin(programs.known())
      self._writer = BackgroundThread(self._write, "writer")
      self._writer.start()

  def _write(self) -> None:
    """Opens the recording, and writes it: when a short program is over, Python 3.12 no longer
    starts a thread."""
    try:
      self._open()
    finally:
      self._tried.set()
    self._recording.write()

  def _open(self) -> None:
    """Opens the recording once a program with timestamps runs."""
    while not self._has_begun() and not self._over.wait(_LOOK_SECONDS):
      pass
    if not self._recording.anything:
      wait_for_dispatched()
    if self.gives_way and Recording.opened:
      self._closed = True
      self._recording.decline(_GIVES_WAY)
      self._say(_GIVES_WAY)
    elif self._recording.anything:
      self._recording.open()

  def _has_begun(self) -> bool:
    """Whether what runs is to be recorded. JAX's own programs place arrays before a loop begins,
    and so before its recorder opens."""
    ran = self._recording.anything
    return ran and (not self.gives_way or Recording.opened or self._recording.has_begun)

  def _at_exit(self) -> None:
    with contextlib.suppress(KeyboardInterrupt):
      self.close(getattr(sys, "last_value", None))


class FoundRecorder(Recorder):
  """Records a program whose steps are found."""

  own_thread = False
  loop_calls = False
  share_name = "jaxpace/observed"

  def __init__(self, directory: str | os.PathLike[str], programs: Everywhere, match: str,
               config: Any, say: Say, hosts: bool | float = True):
    """Prepares; see `observed`."""
    super().__init__(directory, programs, config=config, hosts=hosts)
    self._match, self._say = match, say

  def begin(self, earlier: Iterable[ObservedProgram]) -> None:
    """Begins with what is executed from now on; `earlier` are programs that may have run before."""
    collector = Collector()
    self._begin(collector, {
        one.number: buffers_of(one, dict(enumerate(collector.ranks)))
        for one in earlier if not one.bare})

  @property
  def anything(self) -> bool:
    """Whether anything has been executed."""
    return self._collector is not None and self._collector.anything

  @property
  def has_begun(self) -> bool:
    """Whether a program has run that is none of JAX's own, or these fill the ring."""
    assert self._collector is not None
    return self._collector.unread > _MOST_UNREAD or any(
        programs.executions(one.number) and not is_jax(one.name)
        for one in self._source.plan.programs if not one.bare)

  @property
  def is_there(self) -> bool:
    """Whether this run, or any if this process has none, is in the directory."""
    assert self.directory is not None
    info = rundir.read_json(self.directory / rundir.RUN_FILE)
    return info is not None and self.run in (None, info.get("run"))

  @property
  def step(self) -> Step | None:
    """What was taken for the step, its programs by what people call them."""
    if self._finder is None or self._finder.found is None:
      return None
    found, shown = self._finder.found, self._recorded.shown()
    return dataclasses.replace(found, cut=shown.get(found.cut, found.cut), programs=tuple(
        shown.get(title, title) for title in found.programs))

  def closed(self) -> None:
    """See `Recording`."""
    super().closed()
    if self._intake is None or self._writer is None or self._writer.stopped is not None:
      return
    if jax.process_index() != 0:
      self._say_what_is_left_out()
      return
    recorded = f"Recorded {plural(self._intake.over, 'step')}"
    if not self.step:
      ran = "ran three times, and none spent its time in one loop of 20 iterations or more."
      names = list(dict.fromkeys(one.name for one in self.programs if not one.bare))
      self._say(f"{self.directory} has no steps: no program with collectives " + (
          f"whose name matches {self._match!r} {ran} There were: {', '.join(names[:_MOST_NAMES])}."
          if self._match else ran))
    elif not self.is_there:
      self._say(f"{recorded} in {self.directory}, which was moved or deleted meanwhile.")
    else:
      self._say(f"{recorded}: jaxpace report {shlex.quote(str(self.directory))}")
      self._say_who_is_away()

  def _say_who_is_away(self) -> None:
    """Says on process 0 whose part of the run is not where its own is."""
    assert self.directory is not None
    here = [one.process for one in rundir.read_processes(self.directory, self.run, [])]
    if away := rundir.left_nothing(jax.process_count(), here):
      self._say(away)

  def _say_what_is_left_out(self) -> None:
    """Says what a process ran that runs other programs than process 0, such as an actor's."""
    own = dict.fromkeys(one.title for one in self.programs if not one.bare and not is_jax(one.name))
    step = self._finder.found if self._finder else None
    if step and own and own.keys().isdisjoint(step.programs):
      self._say(f"Process {jax.process_index()} ran nothing of the step, "
                f"{' and '.join(step.programs)}: what it ran is not recorded, "
                f"{', '.join(list(own)[:_MOST_NAMES])}.")

  def _at_exit(self) -> None:
    """Nothing: `observed` closes it."""


def _safely(say: Say) -> Say:
  """Says a sentence; what goes wrong with that is nothing to the program."""
  def said(sentence: str) -> None:
    try:
      say(sentence)
    except Exception:
      _LOG.debug("It could not be said: %s", sentence, exc_info=True)

  return said


def attach(environment: Mapping[str, str]) -> None:
  """Records this process as `environment` asks for; without the variable it does nothing."""
  directory = environment.get(RUN)
  if not directory or _attached:
    return
  worker = _is_a_worker()
  if unseen := environment.get(UNSEEN):
    with contextlib.suppress(OSError):
      if not worker:
        os.unlink(unseen)
      elif os.path.exists(unseen):
        pathlib.Path(unseen).write_text("worker")
  if worker:
    return
  _attached.append(observed(pathlib.Path(directory), match=environment.get(MATCH, ""),
                            exact=environment.get(EXACT, "0") not in ("", "0"), say=_print))
  _attached[0].give_way(environment.get(UNNAMED) == "1")
  _LOG.addHandler(_Unheard(logging.WARNING))
  if LAUNCH_ID in environment:
    # One failure ends the job; before the recording, so that this is closed first.
    end_when_failed()
  _attached[0].open()


def _taken_for_a_job() -> str:
  """What a process needs to be told that is one of several and has not joined them; else empty."""
  count = started_together(os.environ)
  if count < 2 or jax.process_count() > 1:
    return ""
  return (f" This process of {count} takes itself for the whole job: call "
          "jaxpace.distributed.initialize() (or jax.distributed.initialize()) first.")


def _is_a_worker() -> bool:
  """Whether this process is a child of `multiprocessing`, such as a data loader's."""
  # As long as it imports its parent's main module, it has no parent yet.
  starting = getattr(multiprocessing.current_process(), "_inheriting", False)
  return starting or multiprocessing.parent_process() is not None


_attached: list[observed] = []


class _Unheard(logging.Handler):
  """Says whose warnings are where the program keeps no log: Python writes them without a name."""

  def emit(self, record: logging.LogRecord) -> None:
    """See `logging.Handler`."""
    if not logging.getLogger().handlers:
      _print(self.format(record))


def _print(sentence: str) -> None:
  """Says a sentence on standard error, if it can be said: the program ends as it would without."""
  line = f"jaxpace: {sentence}\n"
  # Without standard error `print` writes to the program's standard output.
  with contextlib.suppress(Exception):
    sys.stderr.flush()
    own = sys.__stderr__
    if own is None or sys.stderr is not own:
      sys.stderr.write(line)
      sys.stderr.flush()
      return
    # What could not be written would stay in a buffer, and be the program's exit status, 120; and a
    # pipe without a reader ends it at once, if it asked for that.
    broken = select.poll()
    broken.register(own, 0)
    if not broken.poll(0):
      os.write(own.fileno(), line.encode(own.encoding, "backslashreplace"))
