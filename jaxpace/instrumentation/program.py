"""The traced step as a flat list of equations, its collectives and phases found.

A step is traced once to a jaxpr. Nested calls that hold a collective over the data axis, or
equations of more than one phase, are opened; all other calls stay as they are. Values are numbered,
so that a body that is called twice (the same jaxpr object both times) gives distinct values.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from jaxpace.core.plan import Untimed
from jaxpace.instrumentation import primitives
from jaxpace.observation import phases


@dataclasses.dataclass(frozen=True)
class Literal:
  """A constant written into an equation."""

  value: Any


Ref = int | Literal
"""An equation's input: the number of a value, or a constant."""


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


@dataclasses.dataclass
class Program:
  """A step, flat. `avals[i]` is the abstract value of value number `i`."""

  inputs: tuple[int, ...]
  constants: dict[int, Any]
  equations: list[Equation]
  outputs: tuple[Ref, ...]
  avals: list[Any]
  hidden: list[Untimed]


def size_bytes(aval: Any) -> int:
  """Bytes of a value on one rank; 0 for what has no size (tokens)."""
  shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
  if shape is None or dtype is None:
    return 0
  return int(np.prod(shape, dtype=np.int64)) * int(getattr(dtype, "itemsize", 4))


def constant_values(program: Program) -> frozenset[int]:
  """Values made of constants alone.

  XLA computes them ahead, and sums them over the ranks by multiplying. The gradients of unused
  parameters are such. No timestamp may wait for them or for their sums: they are always there.
  """
  found: set[int] = set()
  for equation in program.equations:
    if equation.collective and len(equation.inputs) == len(equation.outputs):
      # One operand, one result.
      found.update(o for ref, o in zip(equation.inputs, equation.outputs, strict=True)
                   if isinstance(ref, Literal) or ref in found)
    elif found.issuperset(equation.reads()) and not equation.primitive.name.endswith("callback"):
      found.update(equation.outputs)
  return frozenset(found)


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


def levels(equations: Sequence[tuple[Iterable[Any], Iterable[Any], bool]]) -> dict[int, int]:
  """By place of each collective, how many others follow it on a path to the end at most.

  Those of the same level depend on none of each other.

  Args:
    equations: of each what it reads, what it makes, and whether it is a collective.
  """
  height: dict[Any, int] = {}
  level: dict[int, int] = {}
  for place in range(len(equations) - 1, -1, -1):
    reads, makes, collective = equations[place]
    own = max((height.get(value, 0) for value in makes), default=0)
    if collective:
      level[place] = own
      own += 1
    for value in reads:
      height[value] = max(height.get(value, 0), own)
  return level


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
      return Literal(var.val) if isinstance(var, jex_core.Literal) else env[var]

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
          eqn.primitive, eqn.params, refs, outputs, stack, getattr(eqn, "ctx", None), collective,
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
  """Flattens a traced step.

  Args:
    closed: the step's closed jaxpr, from `jax.make_jaxpr`.
    axis: names of the data axes.

  Returns:
    The flat program; evaluating its equations in order computes what `closed` computes.
  """
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
  bind = equation.primitive.get_bind_params(equation.params)
  # jax 0.4 to 0.10: ([callables], params); later: params alone.
  functions, params = bind if isinstance(bind, tuple) else ((), bind)
  scope = jax.named_scope(equation.stack) if equation.stack else contextlib.nullcontext()
  with scope, _manager(equation.context):
    out = equation.primitive.bind(*functions, *inputs, **params)
  return out if equation.primitive.multiple_results else [out]


def _manager(context: Any) -> Any:
  # An equation remembers the configuration it was traced under (matmul precision aside, which is a
  # parameter): compute_on, and the like.
  return getattr(context, "manager", None) or contextlib.nullcontext()
