"""Collectives inside loops, branches and `jax.checkpoint`: timestamps are put around them.

A timestamp is a value that the step hands on; what runs many times per step has nowhere to leave
one. A mark (`jaxpace.core.ring_layout`) writes to memory of the host instead, so nothing is
threaded through a loop. The traced bodies stay as they are but for the timestamps: variables, name
stacks and contexts of all other equations are JAX's own.

What is held back is chosen as for timestamps (see `gates`): before a collective one operand, flat
and small if there is such a one, and after it its results, which are in memory and rounded. Sums of
half precision are left alone: XLA sums them in single precision, and elides the conversions around
that sum where nothing stands in between.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from jaxpace.core.plan import BACKWARD, COMPUTE, FORWARD, UPDATE, Collective, Loop, Untimed
from jaxpace.core.ring_layout import LAST_TAG
from jaxpace.core.varying import vary, varying
from jaxpace.instrumentation import primitives
from jaxpace.instrumentation.program import (
  Equation,
  Program,
  bodies,
  is_collective,
  levels,
  nested_collectives,
  size_bytes,
)
from jaxpace.instrumentation.script import Script, of_equations
from jaxpace.observation import phases, source_lines
from jaxpace.observation.clocks.operands import first_element

PutTimestamp = Callable[..., list[jax.Array]]
"""`mark(values, *waited, tag=)` -> the values, as `jaxpace.observation.clocks.native.mark` of one
program."""

_HALF = "inside {0}, a sum of half precision: a timestamp beside it would change its rounding"
_CONSTANT = "inside {0}, of constants alone: the compiler works it out ahead"
_BRANCHING = frozenset({"cond"})
_UNOPENED = frozenset({"shard_map"})
_OF_JAX = re.compile(r"rematted_computation|checkpoint|remat\d?|scan|while|cond|body|closed_call|"
                     r"branch_\d+_fun|")
_LOOPS = frozenset({"scan", "while"})


def timestamped(program: Program, axis: Sequence[str], mark: PutTimestamp,
                first_tag: int) -> tuple[Program, list[tuple[int, Collective]]]:
  """Puts timestamps around the collectives that bodies of the program's equations hold.

  Args:
    program: the flat step.
    axis: names of the data axes.
    mark: puts a timestamp in.
    first_tag: of the timestamps; tags are counted up from there.

  Returns:
    The program with timestamps: the same equations, in the same places, of which `hidden` are
    those without timestamps. And what the timestamps are of, in the order of the program's text,
    each with the index of the equation that it is within.
  """
  if not program.hidden:
    return program, []
  marker = _Marker(tuple(axis), mark, first_tag)
  equations = [marker.equation(index, equation) for index, equation in enumerate(program.equations)]
  return dataclasses.replace(program, equations=equations, hidden=marker.left), marker.found


@dataclasses.dataclass(frozen=True)
class _Where:
  """What lies around a body."""

  stack: str
  loops: tuple[Loop, ...]
  conditional: bool
  outermost: str
  """Primitive of the flat program's equation."""


class _Marker:

  def __init__(self, axis: tuple[str, ...], mark: PutTimestamp, first_tag: int):
    self.axis, self.mark, self.next_tag = axis, mark, first_tag
    self.found: list[tuple[int, Collective]] = []
    self.left: list[Untimed] = []
    self.loops = 0
    self.at = 0

  def equation(self, index: int, equation: Equation) -> Equation:
    """An equation of the flat program, its bodies with timestamps."""
    if equation.collective:
      return equation
    self.at = index
    where = _Where(equation.stack, (), False, equation.primitive.name)
    return dataclasses.replace(
        equation, params=self.params(equation.primitive.name, equation.params, where))

  def params(self, name: str, params: Mapping[str, Any], where: _Where) -> Mapping[str, Any]:
    """Parameters of an equation, the jaxprs among them with timestamps; itself where there are
    none."""
    if not any(True for body in bodies(params)
               for _ in nested_collectives(body, self.axis, where.stack)):
      return params
    if name in _UNOPENED:
      for body in bodies(params):
        for inner, stack in nested_collectives(body, self.axis, where.stack):
          self.leave(inner, stack, primitives.NOT_STAMPED[name])
      return params
    if name in _LOOPS:
      trips = params.get("length") if name == "scan" else None
      loop = Loop(f"{name}.{self.loops}", int(trips) if isinstance(trips, int) else None)
      self.loops += 1
      where = dataclasses.replace(where, loops=(*where.loops, loop))
    if name in _BRANCHING:
      where = dataclasses.replace(where, conditional=True)
    return {key: self.parameter(value, where) for key, value in params.items()}

  def parameter(self, value: Any, where: _Where) -> Any:
    if isinstance(value, tuple | list):
      return type(value)(self.parameter(item, where) for item in value) if any(
          hasattr(getattr(item, "jaxpr", item), "eqns") for item in value) else value
    inner = getattr(value, "jaxpr", value)
    if not hasattr(inner, "eqns"):
      return value
    new = self.body(inner, where)
    if new is inner:
      return value
    return value.replace(jaxpr=new) if inner is not value else new

  def body(self, jaxpr: Any, where: _Where) -> Any:
    """A jaxpr with timestamps; itself where it has no collective."""
    together = _together(jaxpr, self.axis)
    constant = _constant(jaxpr)
    group_of: dict[tuple[Any, ...], int] = {}
    equations: list[Any] = []
    changed = False
    for place, eqn in enumerate(jaxpr.eqns):
      stack = phases.join(where.stack, str(eqn.source_info.name_stack))
      if place not in together:
        inner = self.params(eqn.primitive.name, eqn.params,
                            dataclasses.replace(where, stack=stack))
        changed |= inner is not eqn.params
        equations.append(eqn if inner is eqn.params else eqn.replace(params=dict(inner)))
        continue
      around = self.around(eqn, stack, where, constant)
      if around is None:
        equations.append(eqn)
        continue
      changed = True
      equations += around
      self.note(eqn, stack, where, group_of, together[place])
    return jaxpr.replace(eqns=equations) if changed else jaxpr

  def around(self, eqn: Any, stack: str, where: _Where, constant: set[Any]
             ) -> list[Any] | None:
    """A collective between its timestamps; None where it can't have any."""
    sums = eqn.primitive.name in primitives.SUMS
    read = [v for v in eqn.invars
            if not isinstance(v, jex_core.Literal) and v not in constant and size_bytes(v.aval)]
    # "_" is what nobody reads.
    results = [v for v in eqn.outvars if size_bytes(v.aval) and str(v) != "_"]
    holdable = [v for v in read if _exact(v.aval, sums)]
    kept = [v for v in results if _exact(v.aval, sums)]
    if not read or not holdable or not kept or self.next_tag + 2 > LAST_TAG:
      reason = _CONSTANT if not read else _HALF
      self.leave(eqn, stack, reason.format(_name(where)))
      return None
    gate = min(holdable, key=lambda v: (len(v.aval.shape) > 1, size_bytes(v.aval)))
    before, held = _before(eqn, gate, [v for v in dict.fromkeys(read) if v is not gate],
                           self.mark, self.next_tag)
    late, after = _after(held, kept, [v for v in results if v not in kept],
                         self.mark, self.next_tag + 1)
    return [*before, late, *after]

  def note(self, eqn: Any, stack: str, where: _Where, group_of: dict[tuple[Any, ...], int],
           level: int) -> None:
    """Takes down a collective that has timestamps; one that XLA combines with another joins
    that."""
    enter, leave = self.next_tag, self.next_tag + 1
    self.next_tag += 2
    one = _described(eqn, stack, where, self.axis, enter, leave)
    if eqn.primitive.name not in primitives.SUMS:
      self.found.append((self.at, one))
      return
    key = level, one.dtypes, one.axes, one.index_groups, str(eqn.params.get("axes"))
    if key in group_of:
      at, other = self.found[group_of[key]]
      self.found[group_of[key]] = at, _joined(other, one)
    else:
      group_of[key] = len(self.found)
      self.found.append((self.at, one))

  def leave(self, eqn: Any, stack: str, reason: str) -> None:
    self.left.append(Untimed(
        name=stack or eqn.primitive.name, primitive=eqn.primitive.name,
        bytes=sum(size_bytes(var.aval) for var in eqn.invars), reason=reason))


# Equations with timestamps, made by tracing the timestamps alone and putting their equations in.


def _before(eqn: Any, gate: Any, waited: Sequence[Any], mark: PutTimestamp, tag: int
            ) -> tuple[list[Any], Any]:
  """What precedes a collective, and the collective that reads it."""
  traced = _traced([gate], waited, mark, tag)
  given = dict(zip(traced.invars, [gate, *waited], strict=True))
  (held,) = traced.outvars
  return (
      [one.replace(invars=[_put(given, v) for v in one.invars]) for one in traced.eqns],
      eqn.replace(invars=[held if v is gate else v for v in eqn.invars]))


def _after(eqn: Any, kept: Sequence[Any], waited: Sequence[Any], mark: PutTimestamp,
           tag: int) -> tuple[Any, list[Any]]:
  """A collective whose results are new variables, and what makes its own ones of them."""
  traced = _traced(kept, waited, mark, tag)
  # The collective gives what the timestamps read; what they give has the names it had.
  early = dict(zip(kept, traced.invars, strict=False))
  given = dict(zip(traced.invars[len(kept):], waited, strict=True))
  final = dict(zip(traced.outvars, kept, strict=True))
  equations = [one.replace(invars=[_put(given, v) for v in one.invars],
                           outvars=[final.get(v, v) for v in one.outvars]) for one in traced.eqns]
  return eqn.replace(outvars=[early.get(v, v) for v in eqn.outvars]), equations


def _put(given: Mapping[Any, Any], atom: Any) -> Any:
  return atom if isinstance(atom, jex_core.Literal) else given.get(atom, atom)


def _traced(values: Sequence[Any], waited: Sequence[Any], mark: PutTimestamp, tag: int) -> Any:
  """A jaxpr of variables of its own: a timestamp that hands `values` on."""
  count = len(values)

  def around(*given: jax.Array) -> list[jax.Array]:
    with jax.named_scope("jaxpace"):
      kept = given[:count]
      others = [one if one.ndim < 2 else first_element(one) for one in given[count:]]
      axes = frozenset[str]().union(*(varying(one) for one in given))
      held = mark([vary(one, axes) for one in kept],
                  *(vary(one, axes) for one in others), tag=tag)
      return [vary(new, varying(old)) for new, old in zip(held, kept, strict=True)]

  jaxpr = jax.make_jaxpr(around)(*(v.aval for v in [*values, *waited])).jaxpr
  assert not jaxpr.constvars, "marks read no constants"
  return jaxpr


# What is known of a body.


def _exact(aval: Any, sums: bool) -> bool:
  """Whether a value beside a collective can be handed through a timestamp without another
  rounding."""
  dtype = aval.dtype
  if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
    return False
  return not (sums and jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits < 32)


def _constant(jaxpr: Any) -> set[Any]:
  """Variables made of nothing that comes into the body."""
  found: set[Any] = set()
  for eqn in jaxpr.eqns:
    made = all(isinstance(v, jex_core.Literal) or v in found for v in eqn.invars)
    if made and not eqn.effects and eqn.primitive.name not in ("axis_index", "ffi_call"):
      found.update(eqn.outvars)
  return found


def _together(jaxpr: Any, axis: Sequence[str]) -> dict[int, int]:
  """The level of each collective of a body by its place, see `levels`."""
  return levels([([v for v in eqn.invars if not isinstance(v, jex_core.Literal)], eqn.outvars,
                  is_collective(eqn.primitive, eqn.params, axis)) for eqn in jaxpr.eqns])


def _described(eqn: Any, stack: str, where: _Where, axis: Sequence[str], enter: int, leave: int
               ) -> Collective:
  avals = [v.aval for v in eqn.invars if not isinstance(v, jex_core.Literal)]
  return Collective(
      index=0, name=_called(stack, eqn.primitive.name), phase=_phase(stack), loops=where.loops,
      conditional=where.conditional, enter_tags=(enter,), exit_tags=(leave,),
      source=source_lines.innermost(_frames(eqn)), **of_equations([eqn], avals, axis))


def _called(stack: str, primitive: str) -> str:
  """The name given to a collective or that of the module it stands in; else the primitive's."""
  parts = [part for part in phases.collective_name(stack).split("/")
           if part and not _OF_JAX.fullmatch(part)]
  return "/".join(parts) or primitive.removesuffix("_invariant")


def _frames(eqn: Any) -> list[tuple[str, int]]:
  """File and line of each call that led to an equation, innermost first; [] where JAX kept none."""
  traceback = getattr(eqn.source_info, "traceback", None)
  return [(frame.file_name, frame.line_num) for frame in getattr(traceback, "frames", ())]


def placed(made: Sequence[tuple[int, Collective]], written: Script
           ) -> tuple[tuple[Collective, ...], tuple[int, ...]]:
  """The collectives with timestamps, each with a name and an index of its own, behind those of the
  step itself; and the indices of all, in the order in which the step comes to them."""
  stage_of = {index: stage for stage, each in enumerate(written.stages)
              for segment in each.segments for index in segment.equations}
  before = [0, *itertools.accumulate(int(stage.timestamps is not None) for stage in written.stages)]
  names = collections.Counter([*(one.name for _, one in made),
                               *(one.name for one in written.collectives)])
  first = len(written.collectives)
  found = tuple(dataclasses.replace(
      one, index=first + place, name=f"{one.name}.{place}" if names[one.name] > 1 else one.name)
      for place, (_, one) in enumerate(made))
  after = [before[stage_of[index]] for index, _ in made]
  return found, tuple(sorted(range(first + len(found)), key=lambda index: (
      (index, 1) if index < first else (after[index - first], 0))))


def _phase(stack: str) -> str:
  phase = phases.classify(stack)
  return phase if phase in (FORWARD, BACKWARD, UPDATE) else COMPUTE


def _joined(one: Collective, other: Collective) -> Collective:
  """Two collectives that XLA combines, under the name of the larger one."""
  name = one.name if (one.bytes or 0) >= (other.bytes or 0) else other.name
  return dataclasses.replace(
      one, name=name, primitives=tuple(sorted({*one.primitives, *other.primitives})),
      bytes=(one.bytes or 0) + (other.bytes or 0), operands=one.operands + other.operands,
      enter_tags=one.enter_tags + other.enter_tags, exit_tags=one.exit_tags + other.exit_tags)


def _name(where: _Where) -> str:
  return ("a loop" if where.loops else "jax.lax.cond" if where.conditional else
          "jax.checkpoint" if where.outermost in primitives.REMAT else where.outermost)


__all__ = ["placed", "timestamped"]
