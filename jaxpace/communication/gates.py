"""Where a stamp can hold back what comes after it, and what it can wait for, without changing a bit of the results.

On CPU nothing but dataflow orders the compiled step, so a stamp gates (`jaxpace.execution.gate`): some value of what
follows becomes available only after it. Which value matters. A multiplication whose result feeds an addition
becomes a fused multiply-add if both end in one kernel, and a conversion to bfloat16 and back is elided; a gate
in between would undo that and change the last bits. So only values are gated at which no such thing can happen:
integers, inputs of the step, and results of operations that end a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from jaxpace.communication.program import Equation, Program, bodies, size_bytes

# Results that are in memory anyway, or that are no product (of a fused multiply-add the sum is the end, not the
# product): exact to gate in float32.
_NO_PRODUCT = frozenset({
    "dot_general", "conv_general_dilated", "reduce_max", "reduce_min", "max", "min", "select_n", "gather", "neg", "abs",
    "add", "sub", "add_any", "reduce_sum", "argmax", "argmin", "sort", "cumsum", "dynamic_slice", "concatenate", "pad", "psum", "psum_invariant",
    "all_gather", "scatter-add", "scatter", "scan", "while", "cond", "custom_call", "ffi_call", "pure_callback",
    "io_callback"})
# Same values in another shape or type of varying: safe if what they come from is.
_TRANSPARENT = frozenset({"pvary", "pcast", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose",
                          "slice", "rev", "stop_gradient", "copy", "device_put"})
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})
# Whole kernels by themselves: an element of their result can't be computed without computing all of it.
_MATERIALISED = frozenset({"dot_general", "conv_general_dilated", "psum", "psum_invariant", "all_gather", "scan",
                           "while", "cond", "sort", "pure_callback", "io_callback", "ffi_call", "custom_call"})


class Producers:
  """Which equation makes a value; step inputs and constants have none."""

  def __init__(self, program: Program):
    self.program = program
    self._maker = {o: i for i, e in enumerate(program.equations) for o in e.outputs}

  def of(self, value: int) -> int | None:
    return self._maker.get(value)

  def primitive(self, value: int) -> str | None:
    index = self.of(value)
    return None if index is None else self.program.equations[index].primitive.name

  def exact(self, value: int) -> bool:
    """Whether gating this value can change no result."""
    aval = self.program.avals[value]
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
      return False
    name = self.primitive(value)
    if name is None:
      return True  # an input of the step: already in memory, already rounded
    if jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_):
      return True
    if dtype != jnp.float32:
      return False  # half precision: a conversion back to float32 may be elided
    if name in _TRANSPARENT:
      source = next(iter(self.program.equations[self._maker[value]].reads()), None)
      return source is not None and self.exact(source)
    return _no_product(self.program.equations[self._maker[value]], value)

  def materialised(self, value: int) -> bool:
    """Whether the value is in memory as a whole, so that waiting for one element of it waits for all of it."""
    name = self.primitive(value)
    if name is None or name in _MATERIALISED:
      return True
    if name in _TRANSPARENT:
      source = next(iter(self.program.equations[self._maker[value]].reads()), None)
      return source is not None and self.materialised(source)
    return False


def _no_product(equation: Equation, value: int) -> bool:
  """Whether a float32 result can't be one factor's product; looks into calls (`relu` is a call that ends in `max`)."""
  name = equation.primitive.name
  if name not in _CALLS:
    return name in _NO_PRODUCT
  place = equation.outputs.index(value)
  body = next(bodies(equation.params), None)
  while body is not None and len(body.outvars) > place:
    result = body.outvars[place]
    maker = next((eqn for eqn in body.eqns if any(out is result for out in eqn.outvars)), None)
    if maker is None:
      return False  # handed through, or a constant
    if maker.primitive.name not in _CALLS:
      return maker.primitive.name in _NO_PRODUCT
    place = next(i for i, out in enumerate(maker.outvars) if out is result)
    body = next(bodies(maker.params), None)
  return False


def cover(program: Program, producers: Producers, run: Sequence[int], weighty: Iterable[int],
          allowed: Callable[[int], bool]) -> tuple[list[int], bool]:
  """Chooses the values to gate so that no weighty equation of a run can start before a stamp.

  Args:
    program: the flat step.
    producers: of that program.
    run: indices of the run's equations, in order.
    weighty: indices of weighty equations.
    allowed: False for values that must not be gated for another reason.

  Returns:
    The values to gate within this run, the smallest that do, and whether they hold back every weighty equation.
  """
  heavy = set(weighty)
  held: set[int] = set()
  free: set[int] = set()  # made of constants alone: no work of the step
  chosen: list[int] = []
  complete = True
  behind: dict[int, set[int]] = {}  # value made in this run by light equations -> values it is made from
  for index in run:
    equation = program.equations[index]
    reads = set(equation.reads()) - free
    if not reads:
      free |= set(equation.outputs)
      continue
    sources = reads.union(*(behind.get(value, ()) for value in reads))
    if index in heavy and not reads & held:
      exact = [v for v in sources if producers.exact(v) and allowed(v)]
      if exact:
        best = min(exact, key=lambda v: (size_bytes(program.avals[v]), v))
        chosen.append(best)
        held |= _descendants(program, run, index, best)
      else:
        complete = False
    if reads & held:
      held |= set(equation.outputs)
    elif index not in heavy:
      behind.update((output, sources) for output in equation.outputs)
  return chosen, complete


def _descendants(program: Program, run: Sequence[int], before: int, root: int) -> set[int]:
  """`root` and what equations of the run before `before` make of it."""
  found = {root}
  for index in run:
    if index >= before:
      break
    equation = program.equations[index]
    if found.intersection(equation.reads()):
      found |= set(equation.outputs)
  return found
