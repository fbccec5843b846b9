"""Which values a stamp may hold back, and what it can wait for, without changing a bit of the results.

On CPU nothing but dataflow orders the compiled step, so a stamp holds something back (`jaxpace.execution.hold`). Which
value matters: holding one in the middle of a fused kernel would cut that kernel in two, and products and
sums that were contracted into fused multiply-adds no longer are, or conversions to bfloat16 and back that were
elided are made. So only values are held that are in memory whatever XLA does, or at which nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from jaxpace.communication import primitives
from jaxpace.communication.program import Program, constant_values, size_bytes

_COPIED_FREELY = 1 << 16
"""Bytes. To hold back an input of the step XLA may have to copy it; up to this size nobody notices."""


class Producers:
  """Which equation makes a value; step inputs and constants have none."""

  def __init__(self, program: Program):
    self.program = program
    self.constant = constant_values(program)
    self._maker = {o: i for i, e in enumerate(program.equations) for o in e.outputs}
    self._plain = self._plain_values()

  def of(self, value: int) -> int | None:
    return self._maker.get(value)

  def primitive(self, value: int) -> str | None:
    index = self.of(value)
    return None if index is None else self.program.equations[index].primitive.name

  def exact(self, value: int) -> bool:
    """Whether holding this value back can change no result."""
    dtype = getattr(self.program.avals[value], "dtype", None)
    if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
      return False
    name = self.primitive(value)
    if name is None:
      return True  # an input of the step: in memory, rounded
    if name in primitives.TRANSPARENT:
      source = next(iter(self.program.equations[self._maker[value]].reads()), None)
      return source is not None and self.exact(source)
    if jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_):
      return True
    # Half precision: a conversion back to float32 may be elided. A matrix may not be in default layout.
    flat = len(self.program.avals[value].shape) < 2
    return flat and dtype in (jnp.float32, jnp.float64) and name in primitives.IN_MEMORY | primitives.COLLECTIVES

  def cost(self, value: int) -> tuple[int, int]:
    """What to hold back first: small values, then large ones."""
    size = size_bytes(self.program.avals[value])
    return (int(size > _COPIED_FREELY), size)

  def whole(self, value: int) -> bool:
    """Whether the value is the result of a matrix product, convolution or opaque operation, perhaps transposed."""
    name = self.primitive(value)
    if name in primitives.TRANSPARENT or name == "transpose":
      source = next(iter(self.program.equations[self._maker[value]].reads()), None)
      return source is not None and self.whole(source)
    return name in primitives.IN_MEMORY | primitives.PRODUCTS

  def plain(self, value: int) -> bool:
    """Whether a small array has XLA's default layout for sure: nothing near it is transposed or multiplied."""
    return value in self._plain

  def _plain_values(self) -> frozenset[int]:
    small = {v for v, aval in enumerate(self.program.avals) if size_bytes(aval) <= _COPIED_FREELY}
    found = small.difference(self._maker)
    for equation in self.program.equations:
      name = equation.primitive.name
      if primitives.reduces(name) or (name in primitives.ELEMENTWISE and found.issuperset(equation.reads())):
        found |= small.intersection(equation.outputs)
    return frozenset(found)

  def opaque(self, value: int) -> bool:
    """Whether the value comes from a loop, a branch or a call: XLA fuses nothing into or after those."""
    return self.primitive(value) in primitives.IN_MEMORY


def cover(program: Program, producers: Producers, run: Sequence[int], significant: Iterable[int], major: Iterable[int]
          ) -> tuple[list[int], bool]:
  """Chooses the values to gate so that no weighty equation of a run can start before a stamp.

  Args:
    program: the flat step.
    producers: of that program.
    run: indices of the run's equations, in order.
    weighty: indices of the equations to hold back.
    major: those of them that must be; a cast of parameters here and there may start early.

  Returns:
    The values to gate within this run, the smallest that do, and whether they hold back every major equation.
  """
  heavy, decisive = set(significant), set(major)
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
      exact = [v for v in sources if producers.exact(v)]
      if exact:
        best = min(exact, key=lambda v: (producers.cost(v), v))
        chosen.append(best)
        held |= _descendants(program, run, index, best)
      elif index in decisive:
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
