"""The traced step as a flat list of equations, its collectives and phases found.

A step is traced once to a jaxpr. Nested calls that hold a collective over the data axis, or
equations of more than one phase, are opened; all other calls stay as they are. Values are numbered,
so that a body that is called twice (the same jaxpr object both times) gives distinct values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jaxpace.core.plan import Untimed
from jaxpace.instrumentation import primitives
from jaxpace.observation import phases

COPIED_FREELY = 1 << 16
"""Bytes. To hold back an input of the step XLA may have to copy it; up to this, nobody notices."""


Ref = int | Literal
"""An equation's input: the number of a value, or a constant that is written into it."""


@dataclasses.dataclass(frozen=True)
class Equation:
  """One equation of the flat program."""

  primitive: Any
  params: Mapping[str, Any]
  inputs: tuple[Ref, ...]
  outputs: tuple[int, ...]
  stack: str
  """Name stack, joined with those of all enclosing calls."""
  context: Any
  collective: bool
  """Whether it is a collective over the data axis."""
  holds_some: bool = False
  """Whether there are such in its body."""

  def reads(self) -> Iterator[int]:
    return (ref for ref in self.inputs if not isinstance(ref, Literal))


@dataclasses.dataclass(frozen=True)
class Program:
  """A step, flat. `avals[i]` is the abstract value of value number `i`."""

  inputs: tuple[int, ...]
  constants: dict[int, Any]
  equations: list[Equation]
  outputs: tuple[Ref, ...]
  avals: list[Any]
  hidden: list[Untimed]

  # What is known of its values.

  @functools.cached_property
  def maker(self) -> dict[int, int]:
    """By value, which equation makes it; inputs and constants have none."""
    return {o: i for i, e in enumerate(self.equations) for o in e.outputs}

  @functools.cached_property
  def constant(self) -> frozenset[int]:
    """Values made of constants alone.

    XLA computes them ahead, and sums them over the ranks by multiplying. The gradients of unused
    parameters are such. No timestamp may wait for them or for their sums: they are always there.
    """
    found: set[int] = set()
    for equation in self.equations:
      if equation.collective and len(equation.inputs) == len(equation.outputs):
        # One operand, one result.
        found.update(o for ref, o in zip(equation.inputs, equation.outputs, strict=True)
                     if isinstance(ref, Literal) or ref in found)
      elif found.issuperset(equation.reads()) and not equation.primitive.name.endswith("callback"):
        found.update(equation.outputs)
    return frozenset(found)

  @functools.cached_property
  def plain(self) -> frozenset[int]:
    """Small arrays that have XLA's default layout for sure: nothing near is transposed or
    multiplied."""
    small = {v for v in range(len(self.avals)) if self.size(v) <= COPIED_FREELY}
    found = small.difference(self.maker)
    for equation in self.equations:
      name = equation.primitive.name
      kept = name in primitives.ELEMENTWISE and found.issuperset(equation.reads())
      if primitives.reduces(name) or kept:
        found |= small.intersection(equation.outputs)
    return frozenset(found)

  def size(self, value: int) -> int:
    """Bytes on one rank."""
    return size_bytes(self.avals[value])

  def flat(self, value: int) -> bool:
    """Whether a value has fewer than two axes, and so one layout."""
    return len(getattr(self.avals[value], "shape", ())) < 2

  def primitive(self, value: int) -> str | None:
    """Name of what makes a value; None for inputs and constants."""
    index = self.maker.get(value)
    return None if index is None else self.equations[index].primitive.name

  def source(self, value: int) -> int | None:
    """The first value that the maker of a value reads, if it reads any."""
    return next(iter(self.equations[self.maker[value]].reads()), None)

  # What depends on what.

  def behind(self, equations: Iterable[int], values: Iterable[int] = ()) -> set[int]:
    """Equations that must run for some equations, themselves included, and for some values."""
    found, needed = set(equations), set(values)
    for index in range(len(self.equations) - 1, -1, -1):
      equation = self.equations[index]
      if index in found or needed.intersection(equation.outputs):
        found.add(index)
        needed.update(equation.reads())
    return found

  def after(self, equations: Iterable[int]) -> set[int]:
    """Equations that run after some equations, themselves included: they need what these make."""
    found, made = set(equations), set[int]()
    for index, equation in enumerate(self.equations):
      if index in found or made.intersection(equation.reads()):
        found.add(index)
        made.update(equation.outputs)
    return found

  # How much work there is.

  @functools.cached_property
  def costs(self) -> tuple[float, ...]:
    """Operations of each equation; none for collectives, and for what is made of constants."""
    return tuple(0.0 if e.collective or self.constant.issuperset(e.outputs) else
                 work(e.primitive.name, e.params, [self.avals[v] for v in e.reads()],
                      [self.avals[o] for o in e.outputs]) for e in self.equations)

  @functools.cached_property
  def significant(self) -> frozenset[int]:
    """Equations whose order in time matters: a thousandth of the step's work or more, or opaque."""
    return self._of_share(1e-3)

  @functools.cached_property
  def major(self) -> frozenset[int]:
    """Equations that are never overlooked: a fiftieth of the step's work or more, or opaque."""
    return self._of_share(0.02)

  def _of_share(self, share: float) -> frozenset[int]:
    bar = max(share * sum(c for c in self.costs if c != math.inf), 1.0)
    return frozenset(i for i, c in enumerate(self.costs) if c >= bar)


def size_bytes(aval: Any) -> int:
  """Bytes of a value on one rank; 0 for what has no size (tokens)."""
  shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
  if shape is None or dtype is None:
    return 0
  return int(np.prod(shape, dtype=np.int64)) * int(getattr(dtype, "itemsize", 4))


def work(name: str, params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]
         ) -> float:
  """A rough count of operations of a primitive on values or abstract values, what it calls counted
  within; infinite where it is unknown."""
  if name in primitives.UNKNOWN_WORK:
    return math.inf
  if name in primitives.WEIGHTLESS:
    return 0.0
  made = float(sum(map(_elements, outputs)))
  if name == "dot_general":
    (contract, _), _ = params["dimension_numbers"]
    return 2.0 * made * math.prod(inputs[0].shape[d] for d in contract)
  if name == "conv_general_dilated":
    kernel = inputs[1].shape
    features = kernel[params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * made * math.prod(kernel) / max(features, 1)
  called = [sum(work(eqn.primitive.name, eqn.params, [v.aval for v in eqn.invars],
                     [v.aval for v in eqn.outvars]) for eqn in body.eqns)
            for body in bodies(params)]
  return max([made + sum(map(_elements, inputs)), *called])


def _elements(value: Any) -> int:
  return math.prod(getattr(value, "shape", ()))


def axes_of(primitive: Any, params: Mapping[str, Any]) -> tuple[str, ...]:
  """Names of the mesh axes that an equation's own collective runs over, () if it is none."""
  if primitive.name in primitives.LOCAL:
    return ()
  for key in ("axes", "axis_name"):
    if key not in params:
      continue
    axes = params[key]
    several = axes if isinstance(axes, (tuple, list)) else (axes,)
    names = tuple(a for a in several if isinstance(a, str))
    if names:
      return names
  return ()


def is_collective(primitive: Any, params: Mapping[str, Any], axis: Sequence[str]) -> bool:
  """Whether an equation exchanges data over one of the `axis` names."""
  return any(name in axis for name in axes_of(primitive, params))


def bodies(params: Mapping[str, Any]) -> Iterator[Any]:
  """Jaxprs among an equation's parameters, closed ones opened."""
  for value in params.values():
    for item in value if isinstance(value, (tuple, list)) else (value,):
      inner = getattr(item, "jaxpr", item)
      if hasattr(inner, "eqns"):
        yield inner


def walk(jaxpr: Any, outer: str = "") -> Iterator[tuple[Any, str]]:
  """Every equation of a body and of all bodies in it, each with its joined name stack."""
  for eqn in jaxpr.eqns:
    stack = phases.join(outer, str(eqn.source_info.name_stack))
    yield eqn, stack
    for body in bodies(eqn.params):
      yield from walk(body, stack)


def nested_collectives(jaxpr: Any, axis: Sequence[str], outer: str) -> Iterator[tuple[Any, str]]:
  """The collectives among them."""
  return ((eqn, stack) for eqn, stack in walk(jaxpr, outer)
          if is_collective(eqn.primitive, eqn.params, axis))


def nested_phases(jaxpr: Any, outer: str) -> set[str]:
  """The phases that they belong to."""
  return {phases.classify(stack) for _, stack in walk(jaxpr, outer)}


class _Flattener:

  def __init__(self, axis: Sequence[str]):
    self.axis = axis
    self.avals: list[Any] = []
    self.constants: dict[int, Any] = {}
    self.equations: list[Equation] = []
    self.hidden: list[Untimed] = []

  def number(self, aval: Any) -> int:
    self.avals.append(aval)
    return len(self.avals) - 1

  def constant(self, value: Any, aval: Any) -> int:
    number = self.number(aval)
    self.constants[number] = value
    return number

  def body(self, jaxpr: Any, inputs: Sequence[Ref], constants: Sequence[Ref], outer: str
           ) -> list[Ref]:
    env: dict[Any, Ref] = {}
    env.update(zip(jaxpr.constvars, constants, strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(var: Any) -> Ref:
      return var if isinstance(var, Literal) else env[var]

    for eqn in jaxpr.eqns:
      stack = phases.join(outer, str(eqn.source_info.name_stack))
      refs = tuple(read(var) for var in eqn.invars)
      inner = self.openable(eqn, stack)
      if inner is not None:
        closed, consts = inner
        numbers = [self.constant(value, var.aval)
                   for var, value in zip(closed.constvars, consts, strict=True)]
        env.update(zip(eqn.outvars, self.body(closed, refs, numbers, stack), strict=True))
        continue
      outputs = tuple(self.number(var.aval) for var in eqn.outvars)
      env.update(zip(eqn.outvars, outputs, strict=True))
      collective, known = is_collective(eqn.primitive, eqn.params, self.axis), len(self.hidden)
      if not collective:
        self.note_untimed(eqn, stack)
      self.equations.append(Equation(
          eqn.primitive, eqn.params, refs, outputs, stack, eqn.ctx, collective,
          len(self.hidden) > known))
    return [read(var) for var in jaxpr.outvars]

  def openable(self, eqn: Any, stack: str) -> tuple[Any, Sequence[Any]] | None:
    key = primitives.OPENABLE.get(eqn.primitive.name)
    body = eqn.params.get(key) if key else None
    if body is None:
      return None
    jaxpr, consts = (body.jaxpr, body.consts) if hasattr(body, "consts") else (body, ())
    if len(jaxpr.invars) != len(eqn.invars):
      return None
    needed = (any(True for _ in nested_collectives(jaxpr, self.axis, stack))
              or len(nested_phases(jaxpr, stack) - {phases.OTHER}) > 1)
    return (jaxpr, consts) if needed else None

  def note_untimed(self, eqn: Any, stack: str) -> None:
    for body in bodies(eqn.params):
      for inner, inner_stack in nested_collectives(body, self.axis, stack):
        self.hidden.append(Untimed(
            name=inner_stack or inner.primitive.name,
            primitive=inner.primitive.name,
            bytes=sum(size_bytes(var.aval) for var in inner.invars),
            reason=primitives.NOT_STAMPED.get(eqn.primitive.name, f"inside {eqn.primitive.name}")))


def flatten(closed: Any, axis: Sequence[str]) -> Program:
  """Flattens a traced step, its closed jaxpr from `jax.make_jaxpr`; evaluating the program's
  equations in order computes what that computes."""
  flattener = _Flattener(axis)
  inputs = tuple(flattener.number(var.aval) for var in closed.jaxpr.invars)
  constants = [flattener.constant(value, var.aval)
               for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)]
  outputs = tuple(flattener.body(closed.jaxpr, inputs, constants, ""))
  return Program(inputs, flattener.constants, flattener.equations, outputs, flattener.avals,
                 flattener.hidden)


def evaluate(equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
  """Binds one equation again on `inputs`, its name stack and context kept.

  Returns its outputs, in a list.
  """
  params = equation.primitive.get_bind_params(equation.params)
  scope = jax.named_scope(equation.stack) if equation.stack else contextlib.nullcontext()
  # An equation remembers the configuration it was traced under (matmul precision aside, which is a
  # parameter): compute_on, and the like.
  with scope, equation.context.manager:
    out = equation.primitive.bind(*inputs, **params)
  return out if equation.primitive.multiple_results else [out]
