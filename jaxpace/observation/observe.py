"""Times every collective of a jitted step, whatever it is made of: `jaxpace.observe`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import jax

from jaxpace.core.observed import ObservedFunction, ObservedPlan, ObservedProgram
from jaxpace.observation import comparing, everywhere, programs
from jaxpace.observation.everywhere import Watcher
from jaxpace.observation.partitioned import collectives, compiling

_LOG = logging.getLogger("jaxpace")

def observe(jitted: Callable[..., Any], *, exact: bool = False) -> Observed:
  """Times every collective of a jitted step: those in loops, under remat and FSDP included.

  The step is compiled as it is, and calls of a clock are put before and after every collective of
  what the compiler made: the same machine code, shardings, donation, and the same bits. Where that
  can't be done the step runs unmodified, and a warning says why.

  >>> import jax, jaxpace
  >>> step = jaxpace.observe(jax.jit(lambda state, batch: state + batch.mean()))
  >>> step(1.0, jax.numpy.ones(4)).item()
  2.0

  Args:
    jitted: what `jax.jit`, `jax.pmap`, `flax.nnx.jit` or `flax.nnx.pmap` returned; of a class, a
      method too.
    exact: True runs each program's first three executions twice, without timestamps and with them,
      on copies of what they were given, and compares results bit for bit. Where they differ the
      step runs unmodified, and a warning says so.

  Returns:
    A callable in place of `jitted`. Its `plan` says what was found, `print(step.plan)`.

  Raises:
    TypeError: `jitted` is no jitted function.
    ValueError: an option is not one of those above.
  """
  return Observed(jitted, exact=exact)


class Observed(Watcher):
  """An observed step; made by `observe`. A call of it is one of the jitted function, in a context
  of JAX's under which its programs are compiled with timestamps."""

  def __init__(self, jitted: Callable[..., Any], *, exact: bool):
    check_jitted(jitted)
    # With its own attributes, such as `jitted_fn` of nnx's: libraries copy those of what they wrap.
    functools.update_wrapper(self, jitted)
    self.__wrapped__ = getattr(jitted, "__wrapped__", jitted)
    self.jitted = jitted
    # The function's name; empty where it has none, as a lambda.
    name = str(getattr(jitted, "__name__", ""))
    super().__init__(functools.partial(_LOG.warning, "%s"), exact,
                     name if name.isidentifier() else "")
    self.plan: ObservedPlan = ObservedPlan()
    self.coming = collections.deque()
    self._agreed = self._named = self._counting = False
    # None where the step runs unmodified.
    self._token: Any = None
    self._context = everywhere.context()
    try:
      self._token = everywhere.watched(self)
    except Exception as error:
      _LOG.warning("The step runs unmodified: %s", comparing.in_a_line(error))

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs one step, as the jitted function does."""
    if self.coming and not compiling.tracing():
      self.coming.popleft()()
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
      # Each operation is a program of its own then: none of them is the step.
      self.say("Steps run without timestamps and are not recorded while jax_disable_jit is on.")
      return self.jitted(*args, **kwargs)
    with self._context(self._token):
      out = self.jitted(*args, **kwargs)
    if self._counting and not compiling.tracing():
      with _lock:
        self.calls += 1
    return out

  def lower(self, *args: Any, **kwargs: Any) -> ObservedLowered:
    """Lowers the step for such arguments; what its `compile()` returns has timestamps."""
    with self._context(self._token):
      lowered = self.jitted.lower(*args, **kwargs)  # type: ignore[attr-defined]
    return ObservedLowered(lowered, lambda: self._context(self._token))

  def settings_json(self) -> dict[str, Any]:
    """Returns how the step is observed, as plain JSON values."""
    return {"observed": True, "exact": self.exact}

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
    return functools.partial(observe, exact=self.exact), (self.jitted,)

  def __repr__(self) -> str:
    return f"<jaxpace.observe of {self.jitted!r}>"

  # Compiling.

  def leaves(self, request: compiling.Request) -> bool:
    """See `Watcher`: small programs that compute constants; a step compiled into another is that
    one's part."""
    return compiling.tracing()

  def _is_own(self, request: compiling.Request) -> bool:
    """Whether a program is the step's own, by its name: others cut its arguments up, say."""
    return self.title in ("", request.name) or collectives.is_nameless(request.name)

  def marked(self, made: ObservedProgram, request: compiling.Request) -> None:
    """See `Watcher`."""
    own = self._is_own(request)
    with _lock:
      if own and not self._named:
        self._named, self.runs = True, frozenset()
      if own or not self._named:
        self.runs |= {made.number}
      self._add(made)
      self._counting = not any(one.bare for one in self.plan.programs)
    programs.add(made)

  def left(self, request: compiling.Request, reason: str) -> None:
    """See `Watcher`: a warning where it could have had timestamps."""
    own = self._is_own(request)
    if not own and reason in ("", everywhere.ONE_DEVICE):
      return
    made = programs.bare(self.name_of(request), request.devices, reason or _ALONE)
    with _lock:
      self._add(made)
      self._counting = False
    said = f"{made.name} runs unmodified: {made.bare}"
    if reason:
      self.say(said)
    else:
      _LOG.info("%s", said)

  def agree(self, request: compiling.Request, made: bool, tried: bool, seconds: float) -> bool:
    """See `Watcher`; once all have agreed, they are taken to."""
    self._agreed = self._agreed or comparing.all_say(
        made, self.name_of(request), request.devices, seconds)
    return self._agreed

  def refused(self, made: ObservedProgram, reason: str, known: bool) -> None:
    """See `Watcher`."""
    if not known:
      reason = f"Results of the first steps can't be compared: {reason}"
    self.say(f"{reason} So the step runs unmodified.")
    with _lock:
      self.plan = ObservedPlan(tuple(
          dataclasses.replace(one, bare=reason) if one.number == made.number else one
          for one in self.plan.programs))
      self.runs, self._counting = self.runs - {made.number}, False
    programs.refuse(made.number, reason)

  def _add(self, made: ObservedProgram) -> None:
    self.plan = ObservedPlan((*self.plan.programs, made))


class ObservedLowered:
  """A lowered step whose `compile()` puts timestamps in; everything else is
  `jax.stages.Lowered`'s."""

  def __init__(self, lowered: Any, context: Callable[[], contextlib.AbstractContextManager[Any]]):
    self._lowered, self._context = lowered, context

  def compile(self, *args: Any, **kwargs: Any) -> Any:
    """Compiles with timestamps; arguments are those of `jax.stages.Lowered.compile`."""
    with self._context():
      return self._lowered.compile(*args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("_"):
      raise AttributeError(name)
    return getattr(self._lowered, name)


def check_jitted(jitted: Any) -> None:
  """Checks that this is what `observe` takes.

  Raises:
    TypeError: it is not jitted, or is observed, lowered or compiled already.
  """
  if isinstance(jitted, ObservedFunction):
    raise TypeError("jaxpace.observe was given a step that is observed already.")
  if isinstance(jitted, (jax.stages.Lowered, jax.stages.Compiled)):
    kind = type(jitted).__name__.lower()
    raise TypeError(
        f"jaxpace.observe was given a step that is {kind} already: timestamps go in before that. "
        "Give it the jitted function, `observed = jaxpace.observe(step)`, and lower and compile "
        "what it returns: `observed.lower(state, batch).compile()`.")
  if not callable(jitted) or not _jits(jitted):
    raise TypeError(
        f"jaxpace.observe takes a jitted function, not {jitted!r}: `jaxpace.observe(jax.jit("
        "train_step, ...))`. For a per-device function under shard_map, jit what "
        "shard_map returns.")


def _jits(function: Any, deep: int = 0) -> bool:
  """Whether a function is jitted, or wraps one that is, as what `nnx.pmap` returns does."""
  while isinstance(function, functools.partial):
    function = function.func
  if hasattr(function, "lower"):
    return True
  if deep == _DEEPEST or not (deep or hasattr(function, "__wrapped__")):
    return False
  cells = getattr(function, "__closure__", None) or ()
  held = [getattr(cell, "cell_contents", None) for cell in cells]
  return any(_jits(value, deep + 1) for value in held if callable(value))


_DEEPEST = 3
"""Functions around a jitted one, each in what the next closes over."""
_lock = threading.Lock()
"""Held for a moment where threads that compile at once would lose what the other wrote."""
_ALONE = "it has no collectives, so there is nobody to wait for."
