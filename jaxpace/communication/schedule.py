"""The order in which a step is re-evaluated: stages between collectives, runs of one phase inside each stage.

Collectives that depend on none of each other form one group: XLA combines them, and a rank enters them together.
Groups are formed from the end (a gradient's psum that only feeds the update belongs to the last group, whatever
layer it comes from), and everything that a group does not feed comes before it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxpace.communication import phases, primitives
from jaxpace.communication.program import Equation, Program, bodies, constant_values, size_bytes
from jaxpace.core.plan import BACKWARD, COMPUTE, FORWARD, UPDATE


@dataclasses.dataclass
class PhaseRun:
  """Equations of one stage that belong to one phase, in program order."""

  phase: str
  equations: list[int]


@dataclasses.dataclass
class Stage:
  """What is computed between two groups of collectives: its runs, then the group that ends it (none in the last)."""

  runs: list[PhaseRun]
  group: list[int]


def work(equation: Equation, program: Program) -> float:
  """A rough count of operations of an equation; infinite where it can't be told."""
  name = equation.primitive.name
  if name in primitives.UNKNOWN_WORK:
    return math.inf
  if name in primitives.WEIGHTLESS:
    return 0.0
  outputs = sum(_elements(program.avals[o]) for o in equation.outputs)
  inputs = sum(_elements(program.avals[i]) for i in equation.reads())
  if name == "dot_general":
    (contract, _), _ = equation.params["dimension_numbers"]
    shape = _shape(program, equation, 0)
    return 2.0 * outputs * math.prod(shape[d] for d in contract)
  if name == "conv_general_dilated":
    kernel = _shape(program, equation, 1)
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * outputs * math.prod(kernel) / max(features, 1)
  nested = [float(_nested(body)) for body in bodies(equation.params)]
  return max([inputs + outputs, *nested])


def _nested(jaxpr: object) -> float:
  total = 0.0
  for eqn in jaxpr.eqns:  # type: ignore[attr-defined]
    if eqn.primitive.name in primitives.UNKNOWN_WORK:
      return math.inf
    total += sum(_elements(v.aval) for v in eqn.outvars)
    if eqn.primitive.name == "dot_general":
      (contract, _), _ = eqn.params["dimension_numbers"]
      total += 2.0 * _elements(eqn.outvars[0].aval) * math.prod(eqn.invars[0].aval.shape[d] for d in contract)
    total += sum(_nested(body) for body in bodies(eqn.params))
  return total


def _shape(program: Program, equation: Equation, index: int) -> tuple[int, ...]:
  ref = equation.inputs[index]
  return tuple(program.avals[ref].shape) if isinstance(ref, int) else tuple(getattr(ref.value, "shape", ()))


def _elements(aval: object) -> int:
  return math.prod(getattr(aval, "shape", ()) or ())


MAJOR = 0.02
"""Share of a step's work that is never overlooked."""


def heavy(program: Program, share: float = 1e-3) -> frozenset[int]:
  """Indices of the equations whose order in time matters: this share of the step's work or more, or opaque."""
  free = constant_values(program)
  costs = [0.0 if e.collective or free.issuperset(e.outputs) else work(e, program) for e in program.equations]
  total = sum(c for c in costs if c != math.inf)
  bar = max(total * share, 1.0)
  return frozenset(i for i, c in enumerate(costs) if c >= bar)


def groups(program: Program) -> list[list[int]]:
  """Groups of collectives, first to last; indices into `program.equations`."""
  height: dict[int, int] = {}  # value -> most collectives on a path from it to the end
  level: dict[int, int] = {}
  for index in range(len(program.equations) - 1, -1, -1):
    equation = program.equations[index]
    own = max((height.get(o, 0) for o in equation.outputs), default=0)
    if equation.collective:
      level[index] = own
      own += 1
    for value in equation.reads():
      height[value] = max(height.get(value, 0), own)
  if not level:
    return []
  top = max(level.values())
  return [sorted(i for i, h in level.items() if h == top - g) for g in range(top + 1)]


def stages(program: Program, merge_runs_over: int) -> list[Stage]:
  """Orders the program: one stage for each group of collectives, and a last one.

  Args:
    program: the flat step.
    merge_runs_over: if the whole program has more runs than this (an unrolled accumulation loop, say), those of each
      stage that has several are merged into one of phase "compute"; a stage of one run keeps its phase.

  Returns:
    Stages in order of time; evaluating their runs' equations and groups in that order is a valid order.
  """
  ordered = groups(program)
  group_of = {index: g for g, group in enumerate(ordered) for index in group}
  feeding = _feeding(program)
  ready: dict[int, int] = {}  # value -> stage in which it can be computed
  members: list[list[int]] = [[] for _ in range(len(ordered) + 1)]
  for index, equation in enumerate(program.equations):
    if equation.collective:
      number = group_of[index] + 1
    elif index not in feeding and phases.classify(equation.stack) == phases.OTHER:
      number = len(ordered)  # part of the update that needs no gradient
    else:
      number = max((ready.get(value, 0) for value in equation.reads()), default=0)
    if not equation.collective:
      members[number].append(index)
    for output in equation.outputs:
      ready[output] = number
  significant, major = heavy(program), heavy(program, MAJOR)
  differentiated = any(phases.classify(e.stack) in (FORWARD, BACKWARD) for e in program.equations)
  result = [Stage(_runs(program, indices, significant, major, last=s == len(ordered), differentiated=differentiated),
                  ordered[s] if s < len(ordered) else [])
            for s, indices in enumerate(members)]
  if sum(len(stage.runs) for stage in result) > merge_runs_over:
    for stage in result:
      if len(stage.runs) > 1:
        stage.runs = [PhaseRun(COMPUTE, [i for run in stage.runs for i in run.equations])]
  return result


def _feeding(program: Program) -> set[int]:
  """Indices of the equations that some collective depends on."""
  needed: set[int] = set()
  found: set[int] = set()
  for index in range(len(program.equations) - 1, -1, -1):
    equation = program.equations[index]
    if equation.collective or needed.intersection(equation.outputs):
      if not equation.collective:
        found.add(index)
      needed.update(equation.reads())
  return found


def _runs(program: Program, indices: Sequence[int], significant: frozenset[int], major: frozenset[int], last: bool,
          differentiated: bool) -> list[PhaseRun]:
  """Splits a stage into runs. Only weighty equations start a run; light ones join the run they stand in."""
  runs: list[PhaseRun] = []
  pending: list[int] = []  # light equations whose run is not decided yet: before the first, or of another phase
  for index in indices:
    equation = program.equations[index]
    label = phases.classify(equation.stack)
    if label == phases.OTHER or last and index not in major:
      label = UPDATE if last else COMPUTE  # after the last collective, casting gradients is part of the update
    mixed = _mixed(equation)
    if mixed:
      label = COMPUTE
    # Clipping or casting gradients between backward and sync belongs to what it follows.
    if label == COMPUTE and not mixed and differentiated and runs and runs[-1].phase == BACKWARD:
      label = BACKWARD
    if index not in significant:
      if runs and not pending and label == runs[-1].phase:
        runs[-1].equations.append(index)
      else:
        pending.append(index)
      continue
    if not runs or runs[-1].phase != label:
      runs.append(PhaseRun(label, []))
    runs[-1].equations += [*pending, index]
    pending = []
  if not runs:
    return [PhaseRun(UPDATE if last else _light_label(program, indices), pending)]
  runs[-1].equations += pending
  return runs


def _light_label(program: Program, indices: Sequence[int]) -> str:
  """Phase of a stage without weighty equations: that of its last equation that has one."""
  for index in reversed(indices):
    label = phases.classify(program.equations[index].stack)
    if label != phases.OTHER:
      return label
  return COMPUTE


def _mixed(equation: Equation) -> bool:
  """Whether one equation holds both forward and backward (a scan over micro-batches): nobody can tell them apart."""
  found: set[str] = set()
  stack = [(body, equation.stack) for body in bodies(equation.params)]
  while stack:
    body, outer = stack.pop()
    for eqn in body.eqns:
      joined = phases.join(outer, str(eqn.source_info.name_stack))
      found.add(phases.classify(joined))
      stack.extend((inner, joined) for inner in bodies(eqn.params))
  return FORWARD in found and BACKWARD in found


def group_bytes(program: Program, group: Sequence[int]) -> int:
  """Bytes of all operands of a group on one rank."""
  return sum(size_bytes(program.avals[value]) for index in group for value in program.equations[index].reads())
