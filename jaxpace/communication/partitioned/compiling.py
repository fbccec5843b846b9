"""The one place that reaches into how JAX compiles: it hands each module over before it is
compiled.

JAX has no public way to see what the partitioner made of a program, nor to compile something in its
place. `watching` puts a handler before `jax._src.compiler.compile_or_get_cached`, through which
every compilation goes, for the thread that asks; `watch_all` puts one there for all threads that
have none. A handler gets a `Request` and returns an executable. So a step's signature, donation,
callbacks and caches stay JAX's own.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpace.communication.partitioned import mlir

_NEEDED = ("backend", "computation", "compile_options", "host_callbacks", "executable_devices")


class _Handlers(threading.local):
  """What gets each thread's modules; None where nobody asks."""

  handler: Callable[[Request], Any] | None = None
  before: Any = None
  """(the handler before this one, what was `before` then), from the innermost outwards."""
  busy: bool = False
  """Whether a handler is at work: what it compiles itself is not handed to one again."""


_handlers = _Handlers()
_everywhere: Callable[[Request], Any] | None = None
"""What gets the modules of threads that have no handler."""
_lock = threading.Lock()
_installed = False


class Request:
  """A module that JAX is about to compile."""

  def __init__(self, compile_it: Callable[..., Any], bound: inspect.BoundArguments):
    self._compile_it, self._bound = compile_it, bound
    arguments = bound.arguments
    self.module: Any = arguments["computation"]
    """The program as it was lowered, in StableHLO."""
    self.devices: Sequence[Any] = list(arguments["executable_devices"])
    """Device of each partition."""
    self._options: Any = arguments["compile_options"]
    self._as_it_is: Any = None

  @property
  def partitions(self) -> int:
    return int(self._options.executable_build_options.num_partitions)

  @property
  def name(self) -> str:
    """Name of the function that was jitted."""
    said = mlir.text_attribute(self.module.operation, "sym_name")
    for prefix in ("jit_", "pmap_", "jit(", "pmap("):
      if said.startswith(prefix):
        return said[len(prefix):].removesuffix(")")
    return said

  def compile(self, module: Any | None = None) -> Any:
    """Compiles as JAX would, with its cache: this module, once, or another in its place."""
    if module is None:
      if self._as_it_is is None:
        self._as_it_is = self._compile_it(*self._bound.args, **self._bound.kwargs)
      return self._as_it_is
    bound = inspect.BoundArguments(self._bound.signature, self._bound.arguments.copy())
    bound.arguments["computation"] = module
    return self._compile_it(*bound.args, **bound.kwargs)

  def serialized(self) -> bytes:
    """What this module is compiled to, as bytes."""
    import jax
    if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
      # What was loaded from the cache is written without its kernels: it loads, and does not run.
      return bytes(self.compile_apart({}).serialize())
    try:
      return bytes(self.compile().serialize())
    except Exception:
      # What has run already, somewhere else in this process, may hold what can't be written:
      # comparators of sorts, in jaxlib 0.10.2.
      return bytes(self.compile_apart({}).serialize())

  def load(self, serialized: bytes) -> Any:
    """Loads a program from what an executable's `serialize()` returned, perhaps changed since."""
    arguments = self._bound.arguments
    return arguments["backend"].deserialize_executable(
        serialized, arguments["executable_devices"], self._options, arguments["host_callbacks"])

  def compile_apart(self, flags: Mapping[str, Any]) -> Any:
    """Compiles the module with more flags of XLA, past JAX's cache: it neither reads nor writes
    it."""
    from jax._src import compiler
    options = copy.deepcopy(self._options)
    options.env_option_overrides = [*options.env_option_overrides, *flags.items()]
    arguments = self._bound.arguments
    return compiler.backend_compile_and_load(
        arguments["backend"], self.module, arguments["executable_devices"], options,
        arguments["host_callbacks"])


def text_of(executable: Any) -> str:
  """The compiled program as text."""
  return str(executable.hlo_modules()[0].to_string())


def unavailable() -> str:
  """Returns empty where this JAX can be watched, else why not, in a sentence."""
  try:
    from jax._src import compiler, core
    names = inspect.signature(compiler.compile_or_get_cached).parameters
    assert callable(compiler.backend_compile_and_load)
    assert callable(core.trace_state_clean)
  except (ImportError, AttributeError, AssertionError, ValueError, TypeError) as error:
    return _moved(str(error))
  missing = [name for name in _NEEDED if name not in names]
  return _moved(f"it has no {', '.join(missing)}") if missing else ""


def _moved(what: str) -> str:
  import jax
  return (f"This jaxpace doesn't know how jax {jax.__version__} compiles ({what}): use a newer "
          "jaxpace, or jax 0.10 to 0.12.")


class watching:
  """Hands what this thread compiles meanwhile to `handler`, which returns the executable to use.

  Made once, and entered in every step, also while it is entered already.

  Raises:
    RuntimeError: this JAX can't be watched.
  """

  __slots__ = ("_handler",)

  def __init__(self, handler: Callable[[Request], Any]):
    if not _installed:
      _install()
    self._handler = handler

  def __enter__(self) -> None:
    before = _handlers.before
    _handlers.before = (_handlers.handler, before)
    _handlers.handler = self._handler

  def __exit__(self, *_: object) -> None:
    _handlers.handler, _handlers.before = _handlers.before


def watch_all(handler: Callable[[Request], Any] | None) -> None:
  """Hands what any thread compiles from now on to `handler`, except where `watching` has one; None
  ends that. Forked children have none.

  Raises:
    RuntimeError: this JAX can't be watched.
  """
  global _everywhere
  if handler is not None and not _installed:
    _install()
  _everywhere = handler


def tracing() -> bool:
  """Whether a transformation (jit, grad, vmap, ...) is under way in this thread."""
  return not _state()()


@functools.cache
def _state() -> Callable[[], bool]:
  """What tells that no transformation is under way; looked up once, since each step asks."""
  from jax._src import core
  return core.trace_state_clean


def settings() -> Any:
  """JAX's settings, for each choice of which it compiles anew; None where this JAX doesn't say."""
  try:
    from jax._src import config
    return config.trace_context()
  except (ImportError, AttributeError):
    return None


def _install() -> None:
  global _installed
  if _installed:
    return
  with _lock:
    if _installed:
      return
    if reason := unavailable():
      raise RuntimeError(reason)
    from jax._src import compiler
    compile_it = compiler.compile_or_get_cached
    signature = inspect.signature(compile_it)

    @functools.wraps(compile_it)
    def handed_over(*args: Any, **kwargs: Any) -> Any:
      handler = _handlers.handler or _everywhere
      if handler is None or _handlers.busy:
        return compile_it(*args, **kwargs)
      _handlers.busy = True
      try:
        return handler(Request(compile_it, signature.bind(*args, **kwargs)))
      finally:
        _handlers.busy = False

    if hasattr(os, "register_at_fork"):
      os.register_at_fork(after_in_child=lambda: watch_all(None))
    compiler.compile_or_get_cached = handed_over
    _installed = True


