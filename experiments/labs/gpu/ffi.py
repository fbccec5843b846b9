"""The same stamp and delay as XLA FFI handlers in CUDA C++, to be measured beside jaxpace's own."""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.labs.gpu.bench import Bench
from experiments.labs.gpu.beside import measure

SOURCE = pathlib.Path(__file__).with_name("clock.cu")
_WORDS = jax.ShapeDtypeStruct((2,), jnp.uint32)


class NoCompilerError(Exception):
  """There is no nvcc, or it failed; the message says which."""


def build(folder: pathlib.Path, capability: str) -> pathlib.Path:
  """Compiles the handlers.

  Args:
    folder: where to put the library.
    capability: the GPU's, as in "9.0".

  Raises:
    NoCompilerError: there is none, or it refused.
  """
  nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
  if not pathlib.Path(nvcc).exists():
    raise NoCompilerError("there is no nvcc on the PATH")
  library = folder / "clock.so"
  architecture = f"-arch=sm_{capability.replace('.', '')}"
  command = [nvcc, "-shared", "-Xcompiler", "-fPIC", "-std=c++17", "-O2", "-w", architecture,
             "-I", jax.ffi.include_dir(), "-o", str(library), str(SOURCE)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300)
  if done.returncode:
    raise NoCompilerError(
        f"nvcc ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
  return library


class Handlers:
  """Stamp and delay with the signatures of a `jaxpace.execution.Clock`."""

  def __init__(self, library: pathlib.Path):
    """Registers them with XLA, once a process."""
    loaded = ctypes.cdll.LoadLibrary(str(library))
    for name in ("check_stamp", "check_delay"):
      jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="CUDA")

  def stamp(self, previous: jax.Array, *after: jax.Array) -> jax.Array:
    result: jax.Array = jax.ffi.ffi_call("check_stamp", _WORDS)(previous, *after)
    return result

  def delay(self, seconds: jax.Array, limit_s: float, previous: jax.Array, *after: jax.Array
            ) -> tuple[jax.Array, jax.Array]:
    before, end = jax.ffi.ffi_call("check_delay", (_WORDS, _WORDS))(
        previous, seconds, *after, limit_ns=np.int64(round(limit_s * 1e9)))
    return before, end


def run(bench: Bench) -> None:
  """Sections ffi, and with command buffers off ffi_no_graphs."""
  if bench.platform == "cpu":
    bench.note("The FFI handlers are for GPUs.")
    return
  with tempfile.TemporaryDirectory() as folder:
    try:
      handlers: Any = Handlers(build(pathlib.Path(folder),
                                     getattr(bench.device(), "compute_capability", "9.0")))
    except NoCompilerError as error:
      bench.note(f"The FFI handlers were not measured: {error}.")
      return
    bench.say("clock.cu is compiled and registered")
    measure(bench, handlers, "FFI handler")
