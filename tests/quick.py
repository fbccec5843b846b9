"""What keeps tests short: how their own process compiles, and what `make test` does less of.

Most tests run a program a few times, so that compiling it takes longer than anything else. XLA's
flags are read once a process, and those of one program can be given to `jax.jit` alone: that all
programs of a file are compiled alike, and each of them once, and many lowered in one context, takes
private functions of JAX. Where they are gone, or an option is, tests are slower and nothing else.
"""

import collections
import functools
import hashlib
import os
import threading
from typing import Any

import jax
import pytest

QUICK = os.environ.get("JAXPACE_QUICK_TESTS") == "1"
"""Whether a newcomer waits, who runs `make test`, and not CI: fewer steps, seconds and examples of
what is drawn, and most files marked `optimized` compile as the others do."""
OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1,
           "xla_cpu_use_onednn": False}
"""Loops written by the older, quicker emitters, and each program compiled by one thread."""
PROGRAMS = 100
"""Programs of a thread that are lowered in one MLIR context: it takes longer to make than most
programs take to lower, and keeps their constants."""
KEPT = 200
"""Compiled programs that are kept for the next test that comes to the same one."""
_compiled: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_compiled_here: list[Any] = []
"""What stands before JAX's own compile, once it does."""


def examples(number: int) -> int:
  """How many examples hypothesis tries of a costly property: `number`, and in `make test` a third
  of them."""
  return -(-number // 3) if QUICK else number


def long(*values: Any) -> list[Any]:
  """Parameters of a test that `make test` leaves out: tuples for several names."""
  return [pytest.param(*(value if type(value) is tuple else (value,)), marks=pytest.mark.long)
          for value in values]


def install() -> None:
  """Has programs compiled with `OPTIONS` while `jax_disable_most_optimizations` is on, and once, if
  this JAX can."""
  try:
    from jax._src import compiler  # noqa: TID251  # the public API has no such seam
    from jax._src.interpreters import mlir  # noqa: TID251
    options, compile_one = compiler.get_compile_options, compiler.compile_or_get_cached
    make_context = mlir.make_ir_context
  except (ImportError, AttributeError):
    return
  if not _compiled_here:
    if getattr(compile_one, "__globals__", {}).get("__name__", "").startswith("jaxpace"):
      raise RuntimeError("jaxpace.observe was called while tests were collected: all programs of "
                         "the tests would be compiled anew. Call it in a test or a fixture.")
    compiler.compile_or_get_cached = _once(compile_one)
    mlir.make_ir_context = _for_many(make_context)
    _compiled_here.append(compiler.compile_or_get_cached)
  if hasattr(options, "__wrapped__") or not known():
    return

  @functools.wraps(options)
  def quickly(*args: Any, **kwargs: Any) -> Any:
    made = options(*args, **kwargs)
    if jax.config.read("jax_disable_most_optimizations"):
      made.env_option_overrides = [*known().items(), *made.env_option_overrides]
    return made

  compiler.get_compile_options = quickly


def forget() -> None:
  """Lets go of all compiled programs."""
  _compiled.clear()
  jax.clear_caches()


def _for_many(make_context: Any) -> Any:
  """Makes a context of MLIR for every `PROGRAMS` programs of a thread, not for each."""
  of_thread = threading.local()

  @functools.wraps(make_context)
  def context() -> Any:
    of_thread.left = getattr(of_thread, "left", 0) - 1
    if of_thread.left < 0:
      of_thread.context, of_thread.left = make_context(), PROGRAMS - 1
    return of_thread.context

  return context


def _once(compile_one: Any) -> Any:
  """Compiles a program that has been compiled before, alike and for the same devices, no second
  time."""

  @functools.wraps(compile_one)
  def compiled(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any, *rest: Any,
               **more: Any) -> Any:
    # A program with callbacks calls the very functions it was compiled with; another backend may be
    # gone tomorrow.
    if len(callbacks) or backend.platform != "cpu":
      return compile_one(backend, module, devices, options, callbacks, *rest, **more)
    text = module.operation.get_asm(enable_debug_info=False)
    key = (hashlib.sha256(text.encode()).digest(), tuple(device.id for device in devices.flat),
           options.SerializeAsString())
    if key not in _compiled:
      _compiled[key] = compile_one(backend, module, devices, options, callbacks, *rest, **more)
      if len(_compiled) > KEPT:
        _compiled.popitem(last=False)
    _compiled.move_to_end(key)
    return _compiled[key]

  return compiled


@functools.cache
def known() -> dict[str, Any]:
  """Those of `OPTIONS` that this XLA has: newer ones have no emitters but the newer."""
  return {name: value for name, value in OPTIONS.items() if _has(name, value)}


def _has(name: str, value: Any) -> bool:
  try:
    jax.jit(lambda x: x + 1).lower(1).compile(compiler_options={name: value})
  except Exception:
    return False
  return True
