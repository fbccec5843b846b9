"""Times every collective of a jitted step, whatever it is made of: `jaxpace.observe`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import jax

from jaxpace.communication.partitioned import compiling, program
from jaxpace.core.observed import ObservedPlan, ObservedProgram
from jaxpace.core.recordable import Marked
from jaxpace.execution import marks
from jaxpace.step import agreeing, comparing, everywhere
from jaxpace.step.dispatched import Dispatched, look_of
from jaxpace.step.jitted import check_jitted

_LOG = logging.getLogger("jaxpace")

Different = Literal["bare", "marked", "raise"]
ObserveClock = Literal["auto", "stream"]


def observe(jitted: Callable[..., Any], *, check: bool | None = None,
            different: Different = "bare", clock: ObserveClock = "auto") -> Observed:
  """Times every collective of a jitted step: those in loops, under remat and FSDP included.

  The step is compiled as it is, and on CPUs calls of a clock are put before and after every
  collective of what the compiler made: the same machine code, shardings, donation, and the same
  bits. Where that can't be done the step runs as it was, and a warning says why.

  >>> import jax, jaxpace
  >>> step = jaxpace.observe(jax.jit(lambda state, batch: state + batch.mean()))
  >>> step(1.0, jax.numpy.ones(4)).item()
  2.0

  Args:
    jitted: what `jax.jit`, `jax.pmap`, `flax.nnx.jit` or `flax.nnx.pmap` returned; of a class, a
      method too.
    check: True runs the first call twice, without marks and with them, on copies of its arguments
      where they are donated, and compares results bit for bit. By default the compiled programs'
      collectives are compared: kind, number, groups, operands, loops.
    different: what to do where a comparison finds a difference: "bare" runs the step as it was,
      "marked" runs it with marks all the same, "raise" raises an error. All but the last warn.
    clock: "auto" marks steps on CPUs; steps on other devices run as they were. "stream" marks steps
      on NVIDIA GPUs, with kernels that have been compiled for them and have not run on one yet.

  Returns:
    A callable in place of `jitted`. Its `plan` says what was found, `print(step.plan)`.

  Raises:
    TypeError: `jitted` is no jitted function.
    ValueError: an option is not one of those above.
  """
  return Observed(jitted, check=check, different=different, clock=clock)


class DifferentError(RuntimeError):
  """With timestamps a step is not the same program, or gives other numbers."""


class Observed(Marked):
  """An observed step; made by `observe`."""

  def __init__(self, jitted: Callable[..., Any], *, check: bool | None, different: Different,
               clock: ObserveClock = "auto"):
    check_jitted(jitted)
    if different not in get_args(Different):
      raise ValueError(f"different={different!r}: it is one of {', '.join(get_args(Different))}.")
    if clock not in get_args(ObserveClock):
      raise ValueError(f"clock={clock!r}: it is one of {', '.join(get_args(ObserveClock))}.")
    if check not in (None, True, False):
      raise ValueError(f"check={check!r}: it is True, or left out.")
    # With its own attributes, such as `jitted_fn` of nnx's: libraries copy those of what they wrap.
    functools.update_wrapper(self, jitted)
    self.__wrapped__ = getattr(jitted, "__wrapped__", jitted)
    self.jitted = jitted
    self.check, self.different, self.clock = bool(check), different, clock
    self.plan: ObservedPlan = ObservedPlan()
    self._context: Any = _context()
    # Programs with marks have a place of their own in JAX's caches.
    self._token: Any = ("jaxpace.observe", next(_tokens))
    self._unwatched = compiling.unavailable()
    if self._unwatched:
      _LOG.warning("The step runs unmodified: %s", self._unwatched)
    else:
      self._watching = compiling.watching(self._compile)
    self._check_due = self.check and not self._unwatched
    self._agreed = False
    self._warned: set[str] = set()
    # By thread, while a call compiles: what came of it, and whether to warn where it is bare.
    self._compiled: dict[int, list[tuple[ObservedProgram, bool]]] = {}
    self._dispatched = Dispatched()

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs one step, as the jitted function does.

    Raises:
      DifferentError: with `different="raise"`, the program with marks is not the same.
    """
    if compiling.tracing():
      return self.jitted(*args, **kwargs)
    one_by_one = jax.config.jax_disable_jit  # type: ignore[attr-defined]
    if one_by_one:
      # Each operation is a program of its own then: none of them is the step.
      self._warn("Steps run without timestamps and are not recorded while jax_disable_jit is on.")
    if self._unwatched or one_by_one:
      self._count(marked=False)
      return self.jitted(*args, **kwargs)
    if self._check_due:
      return self._checked(args, kwargs)
    return self._run(self.jitted, args, kwargs)

  def lower(self, *args: Any, **kwargs: Any) -> ObservedLowered:
    """Lowers the step for such arguments; what its `compile()` returns has marks."""
    with self._context(self._token):
      lowered = self.jitted.lower(*args, **kwargs)  # type: ignore[attr-defined]
    return ObservedLowered(self, lowered, look_of(args, kwargs))

  def settings_json(self) -> dict[str, Any]:
    """Returns how the step is observed, as plain JSON values."""
    return {"observed": True, "check": self.check, "different": self.different,
            "marks": self.clock}

  def __getattr__(self, name: str) -> Any:
    # Whatever else the jitted function has: `trace`, `clear_cache`, `eval_shape`.
    if name == "jitted":
      raise AttributeError(name)
    return getattr(self.jitted, name)

  def __get__(self, instance: Any, owner: Any = None) -> Any:
    # In a class it is a method, as a jitted function is.
    return self if instance is None else types.MethodType(self, instance)

  def __reduce__(self) -> Any:
    # Copied and pickled where the jitted function is, and observed anew.
    options: Any = {"check": self.check, "different": self.different, "clock": self.clock}
    return functools.partial(observe, **options), (self.jitted,)

  def __repr__(self) -> str:
    return f"<jaxpace.observe of {self.jitted!r}>"

  # Running.

  def _run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
      with self._context(self._token), self._watching:
        out = call(*args, **kwargs)
    finally:
      if self._compiled:
        with _harmless():
          self._learn(args, kwargs)
    marked = True
    if self._dispatched.some_bare:
      with _harmless():
        marked = self._dispatched.marked(look_of(args, kwargs))
    self._count(marked)
    return out

  def _count(self, marked: bool) -> None:
    """Counts a call; threads may run steps at the same time."""
    with _lock:
      if marked:
        self.calls += 1
      else:
        self.bare_calls += 1

  def _learn(self, args: Any, kwargs: Any) -> None:
    """Remembers whether such calls run marks, if this thread or another is compiling."""
    mine = threading.get_ident()
    if mine in self._compiled:
      with _lock:
        try:
          if self._compiled[mine]:
            self._dispatched.learn(look_of(args, kwargs), self._settle(self._compiled[mine]))
        finally:
          del self._compiled[mine]
      return
    look = look_of(args, kwargs)
    # Of two threads with new arguments that are alike one compiles, and is about to come here.
    while self._compiled and not self._dispatched.knows(look):
      time.sleep(_MOMENT)

  def _checked(self, args: Any, kwargs: Any) -> Any:
    """The first call: with marks on copies of the arguments, then without; both compared.

    What is returned, and what is changed in place, is the unmodified step's.
    """
    self._check_due = False
    copies: Any = None
    unknown = different = ""
    try:
      copies = comparing.copied((args, kwargs))
    except Exception as error:
      unknown = everywhere.in_a_line(error)
    # Before anything runs on them: then all processes do, or none.
    if not self._all_say(copies is not None, "copied", (args, kwargs)):
      self._forget_marks(self._not_compared(unknown))
      return self.jitted(*args, **kwargs)
    try:
      marked = self._run(self.jitted, *copies)
    except DifferentError:
      raise
    except Exception as error:
      unknown = everywhere.in_a_line(error)
    out = self.jitted(*args, **kwargs)
    if not unknown:
      try:
        different = comparing.differences((out, (args, kwargs)), (marked, copies))
      except Exception as error:
        unknown = everywhere.in_a_line(error)
    if self._all_say(not (different or unknown), "checked", (out, args, kwargs)):
      return out
    if unknown:
      self._forget_marks(self._not_compared(unknown))
      return out
    different = different or "With timestamps results of the first step differ on another process."
    self._say_different([different])
    if self.different != "marked":
      self._forget_marks(different)
    return out

  def _all_say(self, yes: bool, what: str, arrays: Any) -> bool:
    return agreeing.all_say(yes, f"{self._title()}, {what}", comparing.devices(arrays),
                            _WAIT_SECONDS)

  def _not_compared(self, why: str) -> str:
    said = ("Results of the first step can't be compared: "
            f"{why or 'arguments of another process can not be copied.'}")
    self._warn(f"{said} So the step runs unmodified.")
    return said

  # Compiling.

  def _compile(self, request: compiling.Request) -> Any:
    """Compiles with marks what can have them, and everything else as it is."""
    compiled = self._compiled.setdefault(threading.get_ident(), [])
    reason, made = _ONE_DEVICE, None
    if request.partitions > 1:
      reason, made = self._agreed_on(request)
    if made is not None:
      with _harmless():
        self._note_marked(made.program, compiled)
      return made.executable
    executable = request.compile()
    with _harmless():
      compiled.append((self._bare_program(request, reason or _ALONE), bool(reason)))
    return executable

  def _note_marked(self, made: ObservedProgram,
                   compiled: list[tuple[ObservedProgram, bool]]) -> None:
    with _lock:
      self._add(made)
    everywhere.add(made)
    compiled.append((made, True))
    if not self.check:
      for notice in made.notices:
        if program.ROUNDING in notice:
          self._warn(f"{made.name}: {notice}")

  def _bare_program(self, request: compiling.Request, reason: str) -> ObservedProgram:
    ranks = marks.ranks()
    return ObservedProgram(
        number=0, name=self._title() or request.name,
        ranks=tuple(ranks.get(device, 0) for device in request.devices), mesh_axes={},
        collectives=(), bare=reason)

  def _agreed_on(self, request: compiling.Request) -> tuple[str, program.Stamped | None]:
    """What `_try` returns, if it is alike on all processes that run the program.

    Raises:
      DifferentError: the user asked for it; the other processes know by then.
    """
    began, refused = time.monotonic(), None
    try:
      reason, made = self._try(request)
    except DifferentError as error:
      reason, made, refused = str(error), None, error
    except Exception as error:
      # Anything that goes wrong in a compiler: the step itself must run.
      _LOG.debug("observe", exc_info=True)
      reason, made = everywhere.in_a_line(error), None
    if not self._agreed:
      # Compilers are not equally quick, nor do all hosts have the program in a cache.
      self._agreed = agreeing.all_say(made is not None, self._title() or request.name,
                                      request.devices,
                                      _WAIT_SECONDS + 2 * (time.monotonic() - began))
      if not self._agreed and made is not None:
        reason, made = "another process of this job runs it unmodified, and says why.", None
    if refused is not None:
      raise refused
    return reason, made

  def _title(self) -> str:
    """The function's name; empty where it has none, as a lambda."""
    name = str(getattr(self.jitted, "__name__", ""))
    return name if name.isidentifier() else ""

  def _settle(self, compiled: list[tuple[ObservedProgram, bool]]) -> bool:
    """Whether the program that was compiled during a call has marks.

    Small programs may have been compiled before it, while the step was traced, and after it, to cut
    its arguments up: the step's own is the last of those that run on most devices.
    """
    marked = [one for one, _ in compiled if not one.bare]
    if marked:
      self.runs |= {marked[-1].number}
      return True
    last = max(reversed(compiled), key=lambda one: len(one[0].ranks))[0]
    self._add(dataclasses.replace(last, number=marks.next_program()))
    said = f"{last.name} runs unmodified: {last.bare}"
    if compiled[-1][1]:
      self._warn(said)
    else:
      _LOG.info("%s", said)
    return False

  def _try(self, request: compiling.Request) -> tuple[str, program.Stamped | None]:
    """The program with marks; or why there is none, empty where it has no collectives."""
    if reason := marks.unavailable(self.clock):
      return reason, None
    put = program.ON_STREAM if self.clock == "stream" else program.ON_HOST
    made = program.stamped(request, everywhere.numbered, self._title() or request.name,
                           marks.ranks(), put)
    if made is None or not made.differences:
      return "", made
    self._say_different(made.differences)
    return ("", made) if self.different == "marked" else (made.differences[0], None)

  def _add(self, made: ObservedProgram) -> None:
    self.plan = ObservedPlan((*self.plan.programs, made))

  def _say_different(self, said: Sequence[str]) -> None:
    if self.different == "raise":
      raise DifferentError(f"{said[0]} different=\"bare\" runs the step unmodified, \"marked\" "
                           "runs it with timestamps anyway.")
    then = "it runs unmodified" if self.different == "bare" else "it runs with timestamps anyway"
    self._warn(f"{said[0]} So {then} (different={self.different!r}).")

  def _forget_marks(self, reason: str) -> None:
    """From now on the step runs as it was."""
    self.plan = ObservedPlan(tuple(
        dataclasses.replace(one, bare=one.bare or reason) for one in self.plan.programs))
    self._unwatched = reason

  def _warn(self, said: str) -> None:
    if said not in self._warned:
      self._warned.add(said)
      _LOG.warning("%s", said)


class ObservedLowered:
  """A lowered step whose `compile()` puts marks in; everything else is `jax.stages.Lowered`'s."""

  def __init__(self, observed: Observed, lowered: Any, look: Any):
    self._observed, self._lowered, self._look = observed, lowered, look

  def compile(self, *args: Any, **kwargs: Any) -> ObservedCompiled:
    """Compiles with marks; arguments are those of `jax.stages.Lowered.compile`."""
    observed = self._observed
    try:
      with observed._context(observed._token), compiling.watching(observed._compile):
        compiled = self._lowered.compile(*args, **kwargs)
    finally:
      with _lock, _harmless():
        if found := observed._compiled.pop(threading.get_ident(), []):
          observed._dispatched.learn(self._look, observed._settle(found))
    # JAX compiles nothing a second time: a call may have done so, for arguments that look so.
    return ObservedCompiled(observed, compiled, observed._dispatched.marked(self._look))

  def __getattr__(self, name: str) -> Any:
    if name.startswith("_"):
      raise AttributeError(name)
    return getattr(self._lowered, name)


class ObservedCompiled:
  """A compiled step with marks; everything but the call is `jax.stages.Compiled`'s."""

  def __init__(self, observed: Observed, compiled: Any, marked: bool):
    self._observed, self._compiled, self._marked = observed, compiled, marked

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    out = self._compiled(*args, **kwargs)
    if not compiling.tracing():
      self._observed._count(self._marked)
    return out

  def __getattr__(self, name: str) -> Any:
    if name.startswith("_"):
      raise AttributeError(name)
    return getattr(self._compiled, name)


_tokens = itertools.count()
_lock = threading.Lock()
"""Held for a moment where threads that run steps at once would lose what the other wrote."""
_ONE_DEVICE = "it runs on one device, so there is nobody to wait for."
_ALONE = "it has no collectives, so there is nobody to wait for."
_WAIT_SECONDS = 120.0
"""How long processes wait for one another to agree, beside what compiling took them."""
_MOMENT = 1e-3
"""Seconds between two looks whether another thread is done."""


@functools.cache
def _context() -> Any:
  """A part of the key under which JAX keeps traced and compiled functions."""
  return jax.make_user_context(None)


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
  """What goes wrong here is nothing to the step."""
  try:
    yield
  except Exception:
    _LOG.debug("observe", exc_info=True)
