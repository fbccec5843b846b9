"""Collectives in loops, branches and `jax.checkpoint` of instrumented steps: they get timestamps
where the step is compiled.

The timestamps of an instrumented step are values that it hands on, and a loop has nowhere to leave
one for each iteration. So the step leaves collectives there alone, in a scope with the number of
its program (`phases.nested_scope`). The compiled program says what is in that scope.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref

from jaxpace.core.observed import InstrumentedFunction, ObservedProgram
from jaxpace.core.plan import Plan
from jaxpace.observation import phases
from jaxpace.observation.comparing import in_a_line
from jaxpace.observation.partitioned import compiling, program

_LOG = logging.getLogger("jaxpace")
UNTIMED = "Collectives in loops, branches and jax.checkpoint are not timed: {}"
"""A notice, of the reason."""
functions: weakref.WeakValueDictionary[int, InstrumentedFunction] = weakref.WeakValueDictionary()
"""Instrumented functions that write events, by the number of their program."""


def put_timestamps(request: compiling.Request) -> None:
  """Puts timestamps around the collectives that instrumented functions leave alone in a program, if
  there are any: the request stands for a program that has them from then on.

  Whatever fails, it stays as it is, and the function's plan says why.
  """
  wanting = [each for each in list(functions.items()) if each[1].left]
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
    _LOG.debug("nested", exc_info=True)
    notice = UNTIMED.format(in_a_line(error))
    _LOG.warning("%s", notice)
    function.note_compiled([], notice)


def with_decisions(made: ObservedProgram) -> ObservedProgram:
  """A program with the names of the columns that the pacer of an instrumented step in it has."""
  function = functions.get(made.paced or 0)
  return made if function is None or function.traced is None else dataclasses.replace(
      made, decisions=function.traced.decisions)
