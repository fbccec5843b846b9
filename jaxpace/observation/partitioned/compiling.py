"""The one place that reaches into how JAX compiles: it hands each module over before it is
compiled.

JAX has no public way to see what the partitioner made of a program, nor to compile something in its
place. `watch` puts a handler before `jax._src.compiler.compile_or_get_cached`, through which every
compilation of every thread goes. It gets a `Request` and returns an executable. So a step's
signature, donation, callbacks and caches stay JAX's own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import sys
import threading
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.mlir import ir

from jaxpace.observation.clocks.native.library import MARK

_NEEDED = ("backend", "computation", "compile_options", "host_callbacks", "executable_devices")


_busy = threading.local()
"""Has `now` where the handler works in a thread: what it compiles is not handed to it again."""
_handler: Callable[[Request], Any] | None = None
"""What gets all modules; None where nobody asks."""
_loaded: Callable[[str, Sequence[Any]], None] | None = None
_lock = threading.Lock()
_installed = False


MACHINERY = ("jax", "jaxlib", "jaxpace")
"""Packages whose calls say nothing of a program."""


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
    # What it is compiled to, as bytes: without any timestamps, then with those that it stands for.
    self._bytes: list[bytes] = []
    self._key: str | None = None

  @property
  def partitions(self) -> int:
    return int(self._options.executable_build_options.num_partitions)

  @property
  def name(self) -> str:
    """Name of the function that was jitted."""
    attributes = self.module.operation.attributes
    return function_name(str(ir.StringAttr(attributes["sym_name"]).value)
                         if "sym_name" in attributes else "")

  def compile(self, module: Any | None = None) -> Any:
    """Compiles as JAX would, with its cache: this module, once, or another in its place."""
    if module is None:
      if self._as_it_is is None:
        # Before: a compiler may change the module.
        self._key = self._cache_key() if self.partitions > 1 else None
        self._as_it_is = self._compile_it(*self._bound.args, **self._bound.kwargs)
      return self._as_it_is
    bound = inspect.BoundArguments(self._bound.signature, self._bound.arguments.copy())
    bound.arguments["computation"] = module
    return self._compile_it(*bound.args, **bound.kwargs)

  def serialized(self) -> bytes:
    """What this module is compiled to, as bytes."""
    if not self._bytes:
      try:
        executable = self.compile()
        # What was loaded from the cache is written without its kernels: it loads, and does not run.
        self._bytes = [self._from_cache() or bytes(executable.serialize())]
      except Exception:
        # What has run already, somewhere else in this process, may hold what can't be written:
        # comparators of sorts, in jaxlib 0.10.2.
        self._bytes = [bytes(self.compile_apart({}).serialize())]
    return self._bytes[-1]

  def replace(self, marked: bytes) -> None:
    """Has `compile` and `serialized` return what was made of the program from now on."""
    self._as_it_is = self.load(marked)
    self._bytes.append(marked)

  def _cache_key(self) -> str | None:
    """The module's key in JAX's compilation cache; None where that isn't used, empty where it isn't
    known."""
    import jax
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
      return None
    try:
      from jax._src import compiler, config
      if (config.share_binary_between_hosts.value or config.enable_pgle.value
          or config.compilation_cache_expect_pgle.value):
        return ""
      arguments = self._bound.arguments
      return compiler._get_cache_key(self._options, arguments["backend"], self.module,
                                     arguments["devices"])
    except Exception:
      return ""

  def _from_cache(self) -> bytes | None:
    """What JAX's compilation cache holds of this module; None where it holds nothing.

    Raises:
      LookupError: it isn't known under what.
    """
    if not self._key:
      if self._key is None:
        return None
      raise LookupError("JAX's compilation cache")
    from jax._src import compilation_cache
    cache = compilation_cache._get_cache(self._bound.arguments["backend"])
    kept = None if cache is None else cache.get(self._key)
    return None if kept is None else bytes(compilation_cache.extract_executable_and_time(
        compilation_cache.decompress_executable(kept))[0])

  def load(self, marked: bytes) -> Any:
    """Loads what was made of `serialized()`.

    Where the program serializes that, the unmodified one is written: what is loaded can't be, and
    another process may know no timestamps.
    """
    arguments = self._bound.arguments
    executable = arguments["backend"].deserialize_executable(
        marked, arguments["executable_devices"], self._options, arguments["host_callbacks"])
    _install_serializing()
    _unmodified[id(executable)] = zlib.compress(self._bytes[0], 1)
    return executable

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


def caller() -> tuple[str, int]:
  """File and line of the call outside of JAX and of this package that has something compiled."""
  *_, frame = _up_to_caller()
  return frame.f_code.co_filename, frame.f_lineno


def compiled_code() -> types.CodeType | None:
  """Code of the function that the user had compiled by calling it; None where that isn't known, as
  of one that was lowered before."""
  *inner, _ = _up_to_caller()
  function = next((frame.f_locals.get("fun") for frame in inner
                   if frame.f_code.co_name == "cache_miss"), None)
  if function is None:
    return None
  function = inspect.unwrap(function)
  while isinstance(function, functools.partial):
    function = inspect.unwrap(function.func)
  code = getattr(getattr(function, "__func__", function), "__code__", None)
  return code if isinstance(code, types.CodeType) else None


def _up_to_caller() -> Iterator[types.FrameType]:
  """Frames of JAX and of this package from here outwards, and the one that called them."""
  frame = sys._getframe(1)
  while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in MACHINERY:
    yield frame
    frame = frame.f_back
  yield frame


def function_name(module: str) -> str:
  """Name of the function that was jitted, given its module's."""
  for prefix in ("jit_", "pmap_", "jit(", "pmap("):
    if module.startswith(prefix):
      return module[len(prefix):].removesuffix(")")
  return module


class StandIn:
  """Has JAX execute something else wherever it would execute an executable, until `leave`. As long
  as that is so, and where another is chosen for good, calls go through Python."""

  def __init__(self, executable: Any, other: Any):
    """Begins, before the executable first runs; `other` has its `execute_sharded`.

    Raises:
      RuntimeError: this JAX executes programs in another way.
    """
    _install_stand_ins()
    self.now = other
    self._executable = executable
    self._calls: list[tuple[Any, bool]] = []
    _stand_ins[id(executable)] = self

  def begin(self, call: Any) -> None:
    """Takes the executable's place in what JAX calls."""
    self._calls.append((call, call.has_unordered_effects))
    # What has effects is not called past Python: that would be the executable itself.
    call.xla_executable, call.has_unordered_effects = self.now, True

  def leave(self, chosen: Any) -> None:
    """Leaves the place to an executable: that which was there, or another."""
    self.now, own = chosen, chosen is self._executable
    for call, had_effects in self._calls:
      call.xla_executable, call.has_unordered_effects = chosen, had_effects or not own
    self._calls.clear()
    if own:
      _stand_ins.pop(id(chosen), None)


_stand_ins: dict[int, StandIn] = {}
"""By the number of what they stand in for, which each keeps."""


def _install_stand_ins() -> None:
  from jax._src.interpreters import pxla
  calls: Any = getattr(pxla, "ExecuteReplicated", None)
  if not all(hasattr(calls, name) for name in ("xla_executable", "has_unordered_effects")):
    raise RuntimeError(_moved("how it executes programs"))

  def begun(made: Callable[..., None], call: Any, executable: Any, *args: Any, **kwargs: Any
            ) -> None:
    made(call, executable, *args, **kwargs)
    if other := _stand_ins.get(id(executable)):
      other.begin(call)

  _wrap(calls, "__init__", begun)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
  """Puts `around` in the place of what an object of JAX's has by a name, once, if it has that:
  `around` gets it, and its arguments."""
  with _lock:
    inner = getattr(owner, name, None)
    if inner is None or hasattr(inner, "jaxpace"):
      return

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
      return around(inner, *args, **kwargs)

    outer.jaxpace = True  # type: ignore[attr-defined]
    setattr(owner, name, outer)


_unmodified: dict[int, bytes] = {}
"""What programs with timestamps are serialized as, by the executable's number: nothing can tell
that one is gone, but that another one has its number."""


def _install_serializing() -> None:
  from jax.experimental import serialize_executable

  def written(write: Callable[..., Any], pickler: Any, obj: Any) -> Any:
    said, unmodified = write(pickler, obj), _unmodified.get(id(obj))
    if unmodified is None or said[0] != "exec" or MARK.encode() not in said[1]:
      return said
    return "exec", zlib.decompress(unmodified)

  _wrap(getattr(serialize_executable, "_JaxPjrtPickler", None), "persistent_id", written)


def _install_loading() -> None:
  """Has `_loaded` hear of what is loaded by `serialize_executable.deserialize_and_load`."""
  from jax.experimental import serialize_executable

  def read(load: Callable[..., Any], unpickler: Any, pid: Any) -> Any:
    found = load(unpickler, pid)
    if pid[0] == "exec" and _loaded is not None:
      with contextlib.suppress(Exception):
        _loaded(function_name(found.hlo_modules()[0].name), found.local_devices())
    return found

  _wrap(getattr(serialize_executable, "_JaxPjrtUnpickler", None), "persistent_load", read)


def program_of(executable: Any) -> bytes:
  """The compiled program as XLA writes it, an `HloModuleProto`."""
  return bytes(executable.hlo_modules()[0].as_serialized_hlo_module_proto())


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


def watch(handler: Callable[[Request], Any] | None,
          loaded: Callable[[str, Sequence[Any]], None] | None = None) -> None:
  """Hands what any thread compiles from now on to `handler`, which returns the executable to use;
  None ends that. Forked children have none.

  Args:
    loaded: gets the name and devices of what a program loads that was compiled and serialized
      before.

  Raises:
    RuntimeError: this JAX can't be watched.
  """
  global _handler, _loaded
  if handler is not None and not _installed:
    _install()
  _handler, _loaded = handler, loaded


def tracing() -> bool:
  """Whether a transformation (jit, grad, vmap, ...) is under way in this thread."""
  return not _state()()


@functools.cache
def _state() -> Callable[[], bool]:
  """What shows that no transformation is under way; looked up once, since each step asks."""
  from jax._src import core
  return core.trace_state_clean


def _install() -> None:
  global _installed
  if reason := unavailable():
    raise RuntimeError(reason)
  from jax._src import compiler
  _wrap(compiler, "compile_or_get_cached", _handed_over)
  if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: watch(None))
  _installed = True
  with contextlib.suppress(Exception):
    _install_loading()


def _handed_over(compile_it: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
  """Compiles, by the handler if there is one."""
  handler = _handler
  if handler is None or hasattr(_busy, "now"):
    return compile_it(*args, **kwargs)
  _busy.now = True
  try:
    return handler(Request(compile_it, inspect.signature(compile_it).bind(*args, **kwargs)))
  finally:
    del _busy.now
