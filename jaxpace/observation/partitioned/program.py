"""Gives a program that JAX is about to compile timestamps around its collectives, and compiles
that."""

from __future__ import annotations

import dataclasses
import re
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpace.core.observed import ObservedProgram
from jaxpace.core.plan import BACKWARD, COMPUTE, FORWARD, UPDATE, Collective, Plan, Untimed
from jaxpace.core.ring_layout import FIRST_TAG, slot_tags
from jaxpace.observation import phases
from jaxpace.observation.clocks.native.library import NOTE
from jaxpace.observation.partitioned import collectives, gpu_thunks, groups, thunks, wire
from jaxpace.observation.partitioned.compiling import Request, caller, compiled_code, program_of
from jaxpace.observation.partitioned.wire import TimestampError

_GRADIENT = b"transpose(jvp("
"""In the names of operations of a backward pass, as JAX writes them."""

_NOTED = re.compile(re.escape(wire.written([wire.text(28, NOTE)])) + rb".*?\bprogram = (\d+)",
                    re.DOTALL)
"""Where an instrumented step says what its pacer decided, and the number of its program."""


def timestamped(request: Request, number: Callable[[], int], name: str, ranks: Mapping[Any, int]
                ) -> tuple[Any, ObservedProgram] | None:
  """Compiles a program with timestamps.

  Args:
    request: what JAX is about to compile.
    number: returns the number of the program, which its timestamps carry; called where it gets
      timestamps.
    name: name of the function, which is looked up where this says nothing of it.
    ranks: rank of each device.

  Returns:
    The executable and what its timestamps mean, or None where the program has no collectives.

  Raises:
    TimestampError: it can't be given timestamps.
    Exception: whatever the compiler raises.
  """
  began = time.monotonic()
  data = program_of(request.compile())
  compiled = time.monotonic()
  program = collectives.Program(data)
  found = collectives.found_in(program, request.partitions, request.name)
  if not found:
    return None
  if collectives.is_nameless(name):
    name = collectives.function_of(program, caller()) or name
  own = number()
  marked, tagged = _marked(request, program, own, found)
  executable = request.load(marked)
  loaded = time.monotonic()
  noted = _NOTED.search(data)
  axes, devices = _mesh_of(request.module)
  rank_of = [ranks[device] for device in request.devices]
  return executable, ObservedProgram(
      number=own, name=name, origin=_origin(), ranks=tuple(rank_of), mesh_axes=dict(axes),
      collectives=_described(tagged, axes, devices, rank_of),
      clock="host" if _kind(request) is thunks else "stream", differentiated=_GRADIENT in data,
      paced=int(noted[1]) if noted else None, bare_compile_s=compiled - began,
      stamped_compile_s=loaded - compiled,
      unstamped=tuple(Untimed(one.name, one.kind, one.bytes, "no timestamp was left beside it")
                      for one in tagged if one.enter_tag < 0))


def _origin() -> str:
  """Line of the function that is compiled, of lambdas with the column: a line may have several."""
  code = compiled_code()
  if code is None:
    return ""
  line = collectives.source_line([collectives.Frame(code.co_filename, code.co_firstlineno)]) or ""
  places = [(row, column) for row, _, column, _ in code.co_positions() if row and column]
  return f"{line}:{min(places)[1]}" if places and "<" in code.co_name else line


def _kind(request: Request) -> types.ModuleType:
  """What puts timestamps into programs for the devices of this one."""
  return thunks if request.devices[0].platform == "cpu" else gpu_thunks


def nested(request: Request, data: bytes, plan: Plan, ranks: Sequence[int]
           ) -> list[tuple[int, Collective]]:
  """Puts timestamps around the collectives that an instrumented step leaves to its compiler: those
  in loops, branches and `jax.checkpoint`.

  Args:
    request: the program with the step; it stands for one with timestamps from then on.
    data: the compiled program, of `compiling.program_of`.
    plan: of the step, whose program the timestamps are of.
    ranks: of each partition.

  Returns:
    These collectives, in the order in which they run, each with the number of the step's slots
    before it. The compiler may have combined some of `jax.checkpoint` with a slot's.

  Raises:
    TimestampError: the program can't be given timestamps.
  """
  assert plan.program is not None, "the step has events"
  axes, devices = _mesh_of(request.module)
  first = len(plan.collectives)
  program = collectives.Program(data)
  found = [one for one in collectives.found_in(program, request.partitions)
           if phases.slots_before(one.operation or "", plan.program) is not None
           and _is_along(_axes(one, axes, devices), plan.axis)]
  if not found:
    return []
  marked, tagged = _marked(request, program, plan.program, found, slot_tags(first)[0], False)
  request.replace(marked)
  return [(phases.slots_before(one.operation or "", plan.program) or 0, one)
          for one in _described(tagged, axes, devices, ranks, first)]


def _mesh_of(module: Any) -> tuple[list[tuple[str, int]], np.ndarray | None]:
  """The mesh that a lowered program's arrays are laid out over: the one with the most axes.

  Returns:
    Names and sizes of its axes, slowest first, () without a mesh; and its partitions in that order,
    None where they are counted up.
  """
  best: tuple[list[tuple[str, int]], np.ndarray | None] = [], None
  for op in module.body.operations:
    if op.operation.name.endswith(".mesh"):
      said = str(op.operation.attributes["mesh"])
      axes = [(name, int(size)) for name, size in re.findall(r'"([^"]+)"=(\d+)', said)]
      ids = re.search(r"device_ids=\[([\d, ]*)\]", said)
      if len(axes) > len(best[0]):
        best = axes, np.array(re.findall(r"\d+", ids[1]), int) if ids else None
  return best


def _is_along(axes: Sequence[str], wanted: str) -> bool:
  """Whether a collective is along one of some axes, as far as is known."""
  return not axes or not set(wanted.split(",")).isdisjoint(axes)


def _marked(request: Request, program: collectives.Program, number: int,
            found: Sequence[Collective], first_tag: int = FIRST_TAG, ends: bool = True
            ) -> tuple[bytes, list[Collective]]:
  """A program with timestamps, as `thunks.timestamped` puts them in, and its collectives with the
  tags of these; none for those that are not found."""
  if program.has_tokens:
    # XLA can't write such a program as bytes: it crashes (jaxlib 0.10.2).
    raise TimestampError("it has an ordered effect, such as io_callback(ordered=True)")
  marked, enter_tags = _kind(request).timestamped(
      request.serialized(), number, {one.name for one in found}, first_tag, ends)
  tags = {name: iter(each) for name, each in enter_tags.items()}

  def taken(name: str) -> int:
    return next(tags.get(name, iter(())), -1)

  own = [taken(one.name if one.name in tags else gpu_thunks.unnamed(one.kind)) for one in found]
  if max(own, default=-1) < 0:
    raise TimestampError("none of its collectives is found among what it runs")
  return marked, [dataclasses.replace(one, enter_tag=tag)
                  for one, tag in zip(found, own, strict=True)]


def _described(found: Sequence[Collective], mesh: Sequence[tuple[str, int]],
               devices: np.ndarray | None, ranks: Sequence[int], first: int = 0
               ) -> tuple[Collective, ...]:
  """Those that have timestamps, as a plan says of them."""
  timed = [one for one in found if one.enter_tag >= 0]
  phase_of = _phases([one.operation for one in timed])
  return tuple(dataclasses.replace(
      one, index=index, phase=phase, axes=_axes(one, mesh, devices),
      groups=tuple(tuple(ranks[place] for place in group) for group in one.groups),
      pairs=tuple((ranks[source], ranks[target]) for source, target in one.pairs),
      operation=one.operation and phases.without_nested(one.operation))
      for index, (one, phase) in enumerate(zip(timed, phase_of, strict=True), first))


def _axes(one: Collective, mesh: Sequence[tuple[str, int]], devices: np.ndarray | None
          ) -> tuple[str, ...]:
  return (groups.axes_of(one.groups, mesh, devices) if one.groups else
          groups.axes_of_pairs(one.pairs, mesh, devices))


def _phases(operations: Sequence[str | None]) -> list[str]:
  phases_of = [phases.classify(name) if name else phases.OTHER for name in operations]
  differentiated = any(phase in (FORWARD, BACKWARD) for phase in phases_of)
  last = max((place for place, phase in enumerate(phases_of) if phase in (FORWARD, BACKWARD)),
             default=-1)
  return [phase if phase != phases.OTHER else
          UPDATE if differentiated and place > last else COMPUTE
          for place, phase in enumerate(phases_of)]
