"""Timestamps where JAX compiles: in the programs of observed functions, or in every program with
collectives of a process, whoever calls it.

One handler gets all that is compiled. A call of an observed function runs in a context of JAX's
that is a part of the key of its caches: so its programs have a place of their own there, and the
handler learns whose they are. What instrumented steps leave to it comes first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpace.core.observed import (
  InstrumentedFunction,
  ObservedFunction,
  ObservedPlan,
  ObservedProgram,
)
from jaxpace.core.plan import Plan
from jaxpace.observation import comparing, phases, programs
from jaxpace.observation.clocks import host_ring
from jaxpace.observation.comparing import in_a_line
from jaxpace.observation.partitioned import compiling, program

_LOG = logging.getLogger("jaxpace")

ONE_DEVICE = "it runs on one device, so there is nobody to wait for."
_SERIALIZED = ("it was loaded from a serialized executable, and timestamps go in where JAX "
               "compiles. Compile it in this process to record it.")
_MOST_LEFT = 64
"""Programs that run unmodified of which the run says so, at most."""


class Watcher(ObservedFunction):
  """Gets what is compiled, and compiles it with timestamps: the one way from a program to its
  timestamps, of a step that is named and of those that are found. These differ in what they leave
  alone, in what they make of the outcome, and in when processes must agree."""

  def __init__(self, warn: Callable[[str], None], exact: bool, title: str = ""):
    if not isinstance(exact, bool):
      raise ValueError(f"exact={exact!r}: it is True, or left out.")
    self.exact = exact
    # Empty where programs go by their own names.
    self.title, self._warn = title, warn
    self._warned: set[str] = set()

  def leaves(self, request: compiling.Request) -> bool:
    """Whether a program is none of this watcher's business."""
    raise NotImplementedError

  def marked(self, made: ObservedProgram, request: compiling.Request) -> None:
    """Takes note of a program that is about to run with timestamps."""
    raise NotImplementedError

  def left(self, request: compiling.Request, reason: str) -> None:
    """Takes note of a program that runs unmodified; the reason is empty where it has no
    collectives."""
    raise NotImplementedError

  def agree(self, request: compiling.Request, made: bool, tried: bool, seconds: float) -> bool:
    """Whether the program may have timestamps as far as other processes are concerned.

    Args:
      made: whether this process has it with timestamps.
      tried: whether that was tried: a program without collectives needs no word.
      seconds: how long to wait for the others.
    """
    raise NotImplementedError

  def refused(self, made: ObservedProgram, reason: str, known: bool) -> None:
    """Takes note of a program that runs unmodified from now on, since first executions differ or
    can't be compared. See `comparing.Comparison`."""
    raise NotImplementedError

  def compile(self, request: compiling.Request) -> Any:
    """Compiles with timestamps what can have them, and everything else unmodified."""
    if self.leaves(request):
      return request.compile()
    reason, made = ONE_DEVICE, None
    if request.partitions > 1:
      try:
        reason, made = self.timestamped(request)
      except Exception as error:
        reason = in_a_line(error)
    executable = request.compile() if made is None else made[0]
    try:
      if made is None:
        self.left(request, reason)
      else:
        self.marked(made[1], request)
        if _recording is not None:
          _recording.begin()
    except Exception:
      # What goes wrong here is nothing to the program.
      _LOG.debug("observe", exc_info=True)
    return executable

  def name_of(self, request: compiling.Request) -> str:
    """By what a program goes."""
    return self.title or request.name

  def timestamped(self, request: compiling.Request
                  ) -> tuple[str, tuple[Any, ObservedProgram] | None]:
    """The program with timestamps, if all processes that must agree have one; else why there is
    none, empty where it has no collectives."""
    began, name = time.monotonic(), self.name_of(request)
    reason, made = "", None
    try:
      made = _compiled(request, name)
      if made is not None and self.exact:
        comparing.Comparison(name, request.devices, made[0], request.compile(),
                             functools.partial(self.refused, made[1]))
    except Exception as error:
      # Anything that goes wrong in a compiler: the program itself must run.
      _LOG.debug("observe", exc_info=True)
      reason, made = in_a_line(error), None
    # Compilers are not equally quick, nor do all hosts have the program in a cache.
    seconds = comparing.WAIT_SECONDS + 2 * (time.monotonic() - began)
    if not self.agree(request, made is not None, bool(made or reason),
                      seconds) and made is not None:
      reason, made = "another process of this job runs it unmodified, and says why.", None
    return reason, made

  def say(self, sentence: str) -> None:
    """Warns, of each thing once."""
    if sentence not in self._warned:
      self._warned.add(sentence)
      self._warn(sentence)


_recording: Everywhere | None = None
"""What gets the programs that are of no observed function."""
_functions: weakref.WeakValueDictionary[int, Watcher] = weakref.WeakValueDictionary()
_tokens = itertools.count()


def watched(function: Watcher) -> Any:
  """Sees to it that `function` gets what is compiled in `context()` of what this returns.

  Raises:
    RuntimeError: this JAX can't be watched.
  """
  watch()
  token = next(_tokens)
  _functions[token] = function
  return "jaxpace.observe", token


def watch() -> None:
  """Sees to it that what is compiled from now on is handed to those whose it is.

  Raises:
    RuntimeError: this JAX can't be watched.
  """
  compiling.watch(_compile, _loaded)


@functools.cache
def context() -> Any:
  """A part of the key under which JAX keeps traced and compiled functions."""
  return jax.make_user_context(None)


def called() -> Watcher | None:
  """The observed function that is called here: traced, compiled or run."""
  # A context is made with the first observed function: it is a part of the key of JAX's caches.
  value = context().value if _functions else None
  return _functions.get(value[1]) if isinstance(value, tuple) else None


def _compile(request: compiling.Request) -> Any:
  """Hands a program to those whose it is."""
  _put_nested(request)
  watcher = called() or _recording
  return request.compile() if watcher is None else watcher.compile(request)


def _loaded(name: str, devices: Sequence[Any]) -> None:
  """Tells whoever records everything of a program that is not compiled here."""
  if _recording is not None and (len(devices) > 1 or jax.process_count() > 1):
    _recording.leave(name, devices, _SERIALIZED)


def _compiled(request: compiling.Request, name: str) -> tuple[Any, ObservedProgram] | None:
  """A program compiled with timestamps; None where it has no collectives.

  Raises:
    Exception: it can't have timestamps; says why.
  """
  if reason := host_ring.unavailable():
    raise RuntimeError(reason)
  made = program.timestamped(request, programs.next_number, name, host_ring.ranks())
  return None if made is None else (made[0], _with_decisions(made[1]))


class Everywhere(Watcher):
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
    super().__init__(warn, exact)
    self._marked = marked
    # Of programs that were there before and have not run since: how often they had.
    self._earlier: dict[int, int] = {}
    self._left: tuple[ObservedProgram, ...] = ()
    self.none = False
    """Whether no program can have timestamps, which has been said."""

  @property
  def left_any(self) -> bool:
    """Whether a program with collectives runs unmodified, which has been said."""
    return bool(self._left)

  @property
  def plan(self) -> ObservedPlan:  # type: ignore[override]
    """See `ObservedFunction`; without programs that have not run since `start`, such as another
    job's."""
    self._earlier = {number: times for number, times in self._earlier.items()
                     if programs.executions(number) == times}
    return ObservedPlan((
        *(one for one in programs.known() if one.number not in self._earlier), *self._left))

  @property
  def runs(self) -> frozenset[int]:  # type: ignore[override]
    """See `ObservedFunction`."""
    return frozenset(one.number for one in programs.known() if not one.bare)

  @property
  def functions(self) -> Sequence[ObservedFunction]:
    """See `ObservedFunction`: all that are observed by name."""
    return [each for reference in _functions.valuerefs() if (each := reference()) is not None]

  def settings_json(self) -> dict[str, Any]:
    """Returns how steps are observed, as plain JSON values."""
    return {"observed": True, "everywhere": True, "exact": self.exact}

  def start(self) -> None:
    """Begins to watch what is compiled.

    Raises:
      RuntimeError: this JAX can't be watched.
    """
    self._earlier = {one.number: programs.executions(one.number) for one in programs.known()}
    global _recording
    watch()
    _recording = self
    if self.runs:
      self.begin()

  def stop(self) -> None:
    """Leaves what is compiled from now on alone."""
    global _recording
    if _recording is self:
      _recording = None

  def leaves(self, request: compiling.Request) -> bool:
    """See `Watcher`."""
    if request.partitions < 2:
      return True
    try:
      reason = host_ring.unavailable()
    except Exception as error:
      reason = in_a_line(error)
    self.none = bool(reason)
    if reason:
      self.say(f"Nothing is recorded: {reason}")
    return self.none

  def marked(self, made: ObservedProgram, request: compiling.Request) -> None:
    """See `Watcher`."""
    programs.add(programs.named(made))

  def left(self, request: compiling.Request, reason: str) -> None:
    """See `Watcher`."""
    if reason:
      self.leave(request.name, request.devices, reason)

  def leave(self, name: str, devices: Sequence[Any], reason: str) -> None:
    """Says that a program runs unmodified, here and in the run."""
    said = f"{name} runs unmodified and is not recorded: {reason}"
    if said not in self._warned and len(self._left) < _MOST_LEFT:
      self._left = (*self._left, programs.bare(name, devices, reason))
    self.say(said)

  def begin(self) -> None:
    """Says that there is a program with timestamps, of an observed function or another."""
    try:
      self._marked()
    except Exception as error:
      _LOG.debug("everywhere", exc_info=True)
      self.say(f"Nothing is recorded: {in_a_line(error)}")

  def agree(self, request: compiling.Request, made: bool, tried: bool, seconds: float) -> bool:
    """See `Watcher`; nobody waits unless first executions are compared."""
    return not (self.exact and tried) or comparing.all_say(
        made, self.name_of(request), request.devices, seconds)

  def refused(self, made: ObservedProgram, reason: str, known: bool) -> None:
    """See `Watcher`."""
    programs.refuse(made.number, reason)
    name = programs.named(made).name
    self.say(f"{name} runs unmodified from now on and is not recorded: {reason}")


# Collectives in loops, branches and `jax.checkpoint` of instrumented steps get timestamps where the
# step is compiled. The timestamps of an instrumented step are values that it hands on, and a loop
# has nowhere to leave one for each iteration. So the step leaves collectives there alone, in a
# scope with the number of its program (`phases.nested_scope`), which the compiled program shows.

UNTIMED = "Collectives in loops, branches and jax.checkpoint are not timed: {}"
"""A notice, of the reason."""
instrumented: weakref.WeakValueDictionary[int, InstrumentedFunction] = weakref.WeakValueDictionary()
"""Instrumented functions that write events, by the number of their program."""


def _put_nested(request: compiling.Request) -> None:
  """Puts timestamps around the collectives that instrumented functions leave alone in a program, if
  there are any: the request stands for a program that has them from then on.

  Whatever fails, it stays as it is, and the function's plan says why.
  """
  wanting = [each for each in list(instrumented.items()) if each[1].left]
  if not wanting:
    return
  executable, data = request.compile(), b""
  with contextlib.suppress(Exception):  # Another platform's compiler may not say.
    data = compiling.program_of(executable)
  for number, function in wanting:
    if phases.nested_scope(number).encode() in data and function.traced is not None:
      _put(request, data, function, function.traced)


def _put(request: compiling.Request, data: bytes, function: InstrumentedFunction, plan: Plan
         ) -> None:
  place_of = {device: place for place, device in enumerate(function.devices, function.first_place)}
  # Under pmap partitions are places, and other processes' devices have no place of their own.
  ranks = [place_of.get(device.id, place) for place, device in enumerate(request.devices)]
  try:
    function.note_compiled(program.nested(request, data, plan, ranks))
  except Exception as error:
    # What goes wrong here is nothing to the program.
    _LOG.debug("observe", exc_info=True)
    notice = UNTIMED.format(in_a_line(error))
    _LOG.warning("%s", notice)
    function.note_compiled([], notice)


def _with_decisions(made: ObservedProgram) -> ObservedProgram:
  """A program with the names of the columns that the pacer of an instrumented step in it has."""
  function = instrumented.get(made.paced or 0)
  return made if function is None or function.traced is None else dataclasses.replace(
      made, decisions=function.traced.decisions)
