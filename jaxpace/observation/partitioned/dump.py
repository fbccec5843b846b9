"""Reads what the partitioner made of a program from the compiler's own dump."""

from __future__ import annotations

import pathlib
import tempfile
import time
from typing import Any, NamedTuple

from jax.extend import mlir as extended
from jax.extend.mlir import ir

from jaxpace.observation.partitioned import collectives, mlir, wire
from jaxpace.observation.partitioned.collectives import Found, TimestampError
from jaxpace.observation.partitioned.compiling import Request, text_of

_PASS = "spmd-partitioning"
_FLAGS = {
    "xla_dump_hlo_pass_re": _PASS,
    "xla_dump_hlo_as_proto": True,
    "xla_dump_hlo_as_text": True,
    # Only code generation is made cheap; passes over the program are the same ones.
    "xla_backend_optimization_level": 0,
}


class Partitioned(NamedTuple):
  """A program as one partition runs it."""

  module: Any
  """In StableHLO, in the context of the module it was made of."""
  met: tuple[Found, ...]
  """Its collectives, as the dump's text has them."""
  compiled: str
  """Text of the program compiled unmodified."""
  seconds: float
  """What compiling it took."""


def partitioned(request: Request) -> Partitioned:
  """Compiles a program as it is, without much optimization of machine code, and reads the dump.

  Raises:
    TimestampError, WireError: the compiler left no dump that can be read.
  """
  began = time.monotonic()
  with tempfile.TemporaryDirectory(prefix="jaxpace-", ignore_cleanup_errors=True) as folder:
    executable = request.compile_apart({"xla_dump_to": folder, **_FLAGS})
    seconds = time.monotonic() - began
    found = sorted(pathlib.Path(folder).glob(f"*after_{_PASS}*.hlo.pb"))
    if not found:
      raise TimestampError("the compiler left no program of a single partition")
    data = found[-1].read_bytes()
    written = found[-1].with_name(found[-1].name.removesuffix(".hlo.pb") + ".txt").read_text()
  module = ir.Module.parse(
      extended.hlo_to_stablehlo(wire.first(wire.read(data), 1)), request.module.context)
  mlir.drop_copies(module)
  met = tuple(collectives.found_in(written, request.partitions))
  return Partitioned(module, met, text_of(executable), seconds)
