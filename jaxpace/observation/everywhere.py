"""Timestamps where JAX compiles: in the programs of observed functions, or in every program with
collectives of a process, whoever calls it.

One handler gets all that is compiled. A call of an observed function runs in a context of JAX's
that is a part of the key of its caches: so its programs have a place of their own there, and the
handler learns whose they are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import jax

from jaxpace.core.observed import ObservedPlan, ObservedProgram
from jaxpace.core.recordable import ObservedFunction
from jaxpace.observation import comparing
from jaxpace.observation.clocks import host_ring
from jaxpace.observation.comparing import in_a_line
from jaxpace.observation.partitioned import compiling, program

_LOG = logging.getLogger("jaxpace")
_NAMELESS = ("fun", "lambda", "<lambda>", "fn", "wrapped", "wrapper", "inner")
_lock = threading.Lock()
_programs: tuple[ObservedProgram, ...] = ()
"""All that this process compiled with timestamps: the ring is one per process, too."""


class Watcher(Protocol):
  """Gets what is compiled."""

  def compile(self, request: compiling.Request) -> Any:
    """Compiles, and returns the executable."""


_recording: Everywhere | None = None
"""What gets the programs that are of no observed function."""
_functions: weakref.WeakValueDictionary[int, Watcher] = weakref.WeakValueDictionary()
_tokens = itertools.count()


def watched(function: Watcher) -> Any:
  """Sees to it that `function` gets what is compiled in `context()` of what this returns.

  Raises:
    RuntimeError: this JAX can't be watched.
  """
  compiling.watch(_compile)
  token = next(_tokens)
  _functions[token] = function
  return "jaxpace.observe", token


@functools.cache
def context() -> Any:
  """A part of the key under which JAX keeps traced and compiled functions."""
  return jax.make_user_context(None)


def _compile(request: compiling.Request) -> Any:
  """Hands a program to those whose it is."""
  # A context is made with the first observed function: it is a part of the key of JAX's caches.
  value = context().value if _functions else None
  watcher: Watcher | None = _functions.get(value[1]) if isinstance(value, tuple) else None
  watcher = watcher or _recording
  return request.compile() if watcher is None else watcher.compile(request)


def with_timestamps(request: compiling.Request, name: str, clock: str = "auto"
                    ) -> program.Timestamped | None:
  """A program compiled with timestamps, by a name; None where it has no collectives.

  Raises:
    Exception: it can't have timestamps; says why.
  """
  if reason := host_ring.unavailable(clock):
    raise RuntimeError(reason)
  put = program.ON_STREAM if clock == "stream" else program.ON_HOST
  return program.timestamped(request, numbered, name, host_ring.ranks(), put)


def add(made: ObservedProgram) -> None:
  """Takes note of a program that has timestamps."""
  global _programs
  with _lock:
    _programs = (*_programs, made)


def refuse(number: int, reason: str) -> None:
  """Takes note that a program runs without its timestamps from now on."""
  global _programs
  with _lock:
    _programs = tuple(dataclasses.replace(one, bare=reason) if one.number == number else one
                      for one in _programs)


class Everywhere(ObservedFunction):
  """The programs of a process, as a recorder records them. From `start` to `stop` every program
  with collectives over several devices is compiled with timestamps; all others are left alone.

  No thread ever waits for another process here, unless first executions are compared: programs with
  and without timestamps run the same collectives in the same order. Whatever fails, the program
  runs unmodified.
  """

  def __init__(self, marked: Callable[[], None], warn: Callable[[str], None],
               exact: bool = False):
    """Prepares.

    Args:
      marked: called once there is a program with timestamps, before it runs, in the thread that
        compiles it.
      warn: takes a sentence on what can't be recorded, and why.
      exact: whether each program must give the same bits as the unmodified one at first; see
        `comparing`.
    """
    self._marked, self._warn, self._exact = marked, warn, exact
    self._warned: set[str] = set()
    # Of programs that were there before and have not run since: how often they had.
    self._earlier: dict[int, int] = {}

  @property
  def known(self) -> tuple[ObservedProgram, ...]:
    """All programs of this process that have timestamps, those that don't run any more included."""
    return _programs

  @property
  def plan(self) -> ObservedPlan:  # type: ignore[override]
    """See `Marked`; without programs that have not run since `start`, such as another job's."""
    self._earlier = {number: times for number, times in self._earlier.items()
                     if _executions(number) == times}
    return ObservedPlan(tuple(one for one in _programs if one.number not in self._earlier))

  @property
  def runs(self) -> frozenset[int]:  # type: ignore[override]
    """See `Marked`."""
    return frozenset(one.number for one in _programs if not one.bare)

  def settings_json(self) -> dict[str, Any]:
    """Returns how steps are observed, as plain JSON values."""
    return {"observed": True, "everywhere": True, "exact": self._exact, "marks": "auto"}

  def start(self) -> None:
    """Begins to watch what is compiled.

    Raises:
      RuntimeError: this JAX can't be watched.
    """
    self._earlier = {one.number: _executions(one.number) for one in _programs}
    global _recording
    compiling.watch(_compile)
    _recording = self
    if self.runs:
      self._begin()

  def stop(self) -> None:
    """Leaves what is compiled from now on alone."""
    global _recording
    if _recording is self:
      _recording = None

  def compile(self, request: compiling.Request) -> Any:
    """Compiles with timestamps what can have them, and everything else unmodified."""
    began, made, reason = time.monotonic(), None, ""
    try:
      made = self._with_timestamps(request)
    except Exception as error:
      # Whatever goes wrong, the program must run.
      _LOG.debug("everywhere", exc_info=True)
      reason = in_a_line(error)
    # A program that all processes leave alone, such as one without collectives, needs no word.
    if self._exact and (made or reason):
      wait = comparing.WAIT_SECONDS + 2 * (time.monotonic() - began)
      if not comparing.all_say(made is not None, request.name, request.devices, wait):
        reason = reason or "another process runs it so, and says why."
        if made is not None:
          refuse(made.program.number, reason)
          made = None
    if made is None:
      if reason:
        self._say(f"{request.name} runs unmodified and is not recorded: {reason}")
      return request.compile()
    self._begin()
    return made.executable

  def _begin(self) -> None:
    try:
      self._marked()
    except Exception as error:
      _LOG.debug("everywhere", exc_info=True)
      self._say(f"Nothing is recorded: {in_a_line(error)}")

  def _with_timestamps(self, request: compiling.Request) -> program.Timestamped | None:
    """The program with timestamps; None where it is to run unmodified."""
    if request.partitions < 2:
      return None
    if reason := host_ring.unavailable():
      self._say(f"Nothing is recorded: {reason}")
      return None
    made = with_timestamps(request, request.name)
    if made is None or made.differences:
      return None
    made = made._replace(program=_named(made.program))
    add(made.program)
    if self._exact:
      comparing.Comparison(request.name, request.devices, made.executable, request.compile(),
                           functools.partial(self._keeps, made.program))
    return made

  def _keeps(self, made: ObservedProgram, reason: str, _known: bool) -> bool:
    """See `comparing.Comparison`."""
    refuse(made.number, reason)
    self._say(f"{made.name} runs unmodified from now on and is not recorded: {reason}")
    return False

  def _say(self, sentence: str) -> None:
    if sentence not in self._warned:
      self._warned.add(sentence)
      self._warn(sentence)


def _executions(number: int) -> int:
  """How often a program has started on the devices of this process, all together."""
  return sum(host_ring.executions(buffer, number) for buffer in range(jax.local_device_count()))


def is_nameless(name: str) -> bool:
  """Whether a program's name is not its function's own, as under `pmap`."""
  return name.strip("_") in _NAMELESS


def _named(made: ObservedProgram) -> ObservedProgram:
  """The same by a name that no other program has: what JAX calls all functions under `pmap`, and
  those without a name, gets the line of its largest collective."""
  if not is_nameless(made.name):
    return made
  largest = max((one for one in made.collectives if one.source),
                key=lambda one: one.bytes or 0, default=None)
  return made if largest is None else dataclasses.replace(
      made, name=f"{made.name} ({largest.source})")


def numbered() -> int:
  """A number for a program that gets timestamps.

  Raises:
    ValueError: there is none left.
  """
  number = host_ring.next_program()
  if number >= host_ring.MOST_PROGRAMS:
    raise ValueError(f"this process has more than {host_ring.MOST_PROGRAMS - 1} observed programs.")
  return number
