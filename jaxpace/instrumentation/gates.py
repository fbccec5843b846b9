"""Which values a timestamp may hold back, and what it can wait for, without changing a bit of the
results.

On CPU nothing but dataflow orders the compiled step, so a timestamp holds something back
(`jaxpace.observation.clocks.gate`). Which value matters: holding one in the middle of a fused
kernel would cut that kernel in two, and products and sums that were contracted into fused
multiply-adds no longer are, or conversions to bfloat16 and back that were elided are made. So only
values are held that are in memory whatever XLA does, or at which nothing is rounded.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxpace.instrumentation import primitives
from jaxpace.instrumentation.program import COPIED_FREELY, Program

_MOST_WAITED = 8
"""Values a phase boundary waits for."""


def exact(program: Program, value: int) -> bool:
  """Whether holding this value back can change no result."""
  dtype = getattr(program.avals[value], "dtype", None)
  if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
    return False
  name = program.primitive(value)
  if name is None:
    # An input of the step: in memory, rounded.
    return True
  if name in primitives.TRANSPARENT:
    source = program.source(value)
    return source is not None and exact(program, source)
  if jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_):
    return True
  # Half precision: a conversion back to float32 may be elided. A matrix may not be in default
  # layout.
  in_memory = name in primitives.IN_MEMORY | primitives.COLLECTIVES
  return program.flat(value) and dtype in (jnp.float32, jnp.float64) and in_memory


def _whole(program: Program, value: int) -> bool:
  """Whether a matrix product, convolution or opaque operation makes it, perhaps transposed."""
  name = program.primitive(value)
  if name in primitives.TRANSPARENT or name == "transpose":
    source = program.source(value)
    return source is not None and _whole(program, source)
  return name in primitives.IN_MEMORY | primitives.PRODUCTS


# What a timestamp holds back.


def cover(program: Program, segment: Sequence[int]) -> tuple[list[int], bool]:
  """Chooses the values to gate so that no significant equation of a segment starts before a
  timestamp: the smallest that do. And says whether they hold back every major equation; a cast of
  parameters here and there may start early."""
  held: set[int] = set()
  # Made of constants alone: no work of the step.
  free: set[int] = set()
  chosen: list[int] = []
  complete = True
  # By value that light equations of this segment make, the values it is made from.
  behind: dict[int, set[int]] = {}
  for index in segment:
    equation = program.equations[index]
    reads = set(equation.reads()) - free
    if not reads:
      free |= set(equation.outputs)
      continue
    sources = reads.union(*(behind.get(value, ()) for value in reads))
    if index in program.significant and not reads & held:
      able = [v for v in sources if exact(program, v)]
      if able:
        # Small values, then large ones.
        best = min(able, key=lambda v: (program.size(v) > COPIED_FREELY, program.size(v), v))
        chosen.append(best)
        held |= _descendants(program, segment, index, best)
      elif index in program.major:
        complete = False
    if reads & held:
      held |= set(equation.outputs)
    elif index not in program.significant:
      behind.update((output, sources) for output in equation.outputs)
  return chosen, complete


def _descendants(program: Program, segment: Sequence[int], before: int, root: int) -> set[int]:
  """`root` and what equations of the segment before `before` make of it."""
  found = {root}
  for index in segment:
    if index >= before:
      break
    equation = program.equations[index]
    if found.intersection(equation.reads()):
      found |= set(equation.outputs)
  return found


def gate(program: Program, bucket: Sequence[int], behind: Mapping[int, int]) -> int | None:
  """The operand that the entry timestamp holds back: of the float32 ones with the most products
  behind them the smallest, else such an integer.

  XLA starts the collectives of a bucket one after the other, beside the products that make the
  operands of the next. The loss is small, and held, it would keep all of them until the last one.

  None if there is none. A half-precision operand is never held back: XLA reduces it in float32 and
  elides the conversion before it. `behind` tells by value the products behind it, from
  `dependencies`; nothing where collectives run beside none.
  """
  candidates = []
  for index in bucket:
    for value in program.equations[index].reads():
      dtype = getattr(program.avals[value], "dtype", None)
      if (dtype in (jnp.float32, jnp.float64, jnp.int32, jnp.uint32)
          and value not in program.constant
          and (program.flat(value) or value in program.plain)):
        products = behind.get(value, 0).bit_count()
        candidates.append((dtype != jnp.float32, -products, program.size(value), value))
  return min(candidates)[-1] if candidates else None


def scalar_inputs(program: Program, following: Iterable[int]) -> list[int]:
  """Scalar inputs of the step that the equations after a bucket read.

  They are its step count, a learning rate. Adam's corrections and learning rate schedules come from
  the step count, so holding back these four bytes holds back every kernel of such an update. No
  more than scalars: holding back biases was seen to change results.
  """
  read = {v for i in following for v in program.equations[i].reads()}
  return [v for v in program.inputs
          if v in read and program.avals[v].shape == () and exact(program, v)]


# What a timestamp waits for.


def ends(program: Program, segment: Sequence[int]) -> list[int]:
  """Values made by a segment whose being ready shows that it is over.

  Only such as are in memory whatever XLA does: results of the step (the loss), operands of
  collectives (the loss again), results of opaque operations. One more reader of any other value
  could change what is fused.
  """
  made = {o for i in segment for o in program.equations[i].outputs}
  kept = {ref for ref in program.outputs if isinstance(ref, int)}
  kept |= {v for e in program.equations if e.collective for v in e.reads()}
  # XLA fuses nothing around a loop, a branch or a call.
  kept |= {v for v in made if program.primitive(v) in primitives.IN_MEMORY}
  kept -= program.constant
  return sorted(v for v in made & kept
                if program.size(v) and program.flat(v))[-_MOST_WAITED:]


def meeting_order(program: Program) -> dict[int, int]:
  """Position of each equation in the order in which XLA meets them.

  It walks from the step's results. XLA combines all-reduces greedily in that order; timestamps must
  not change it.
  """
  order: dict[int, int] = {}
  waiting = [(ref, False) for ref in reversed(program.outputs) if isinstance(ref, int)]
  opened: set[int] = set()
  while waiting:
    value, done = waiting.pop()
    index = program.maker.get(value)
    if index is None or index in order:
      continue
    if done:
      order[index] = len(order)
    elif index not in opened:
      opened.add(index)
      waiting.append((value, True))
      waiting += [(v, False) for v in reversed(list(program.equations[index].reads()))]
  return order


def operands(program: Program, bucket: Sequence[int], behind: Mapping[int, int]) -> list[int]:
  """Operands of a bucket that its entry timestamp waits for.

  All flat ones; of matrices those that are results of whole kernels, of which an element can be
  read without another one being computed anew. Where those don't tell that every significant
  equation is done (gradients that were cast, clipped or decayed), the fewest others that do: their
  element may be computed anew, but from what is done.

  Args:
    bucket: indices of its collectives, in the order in which XLA meets them.
    behind: by value, the significant equations behind it, from `dependencies`.
  """
  values = [v for v in dict.fromkeys(v for i in bucket for v in program.equations[i].reads())
            if program.size(v) and v not in program.constant]
  chosen = {v for v in values if program.flat(v) or _whole(program, v)}
  done = _all_behind(chosen, behind)
  for value in sorted(set(values) - chosen, key=lambda v: (-behind.get(v, 0).bit_count(), v)):
    if behind.get(value, 0) & ~done:
      chosen.add(value)
      done |= behind[value]
  return [v for v in values if v in chosen] or values


def results(program: Program, bucket: Sequence[int]) -> list[int]:
  """The results of a bucket that can tell that it is over, in the order in which XLA meets them.

  Where a timestamp should be given little, it waits for the first flat one. A gradient can't be
  held back between all-reduce and update: an opaque operation would ask for a layout, an arithmetic
  one would change which products the compiler contracts with which sums. But XLA runs what becomes
  ready in order, and the first result's readers are ready first; and see `scalar_inputs`.
  """
  found = [o for i in bucket for o in program.equations[i].outputs if program.size(o)]
  return [v for v in found if v not in program.constant] or found


def latest(program: Program, found: Sequence[int], behind: Mapping[int, int]) -> int:
  """Of a bucket's results one whose operands come after the most collectives, flat if any is.

  XLA moves an operand that is ready early into an earlier all-reduce of the same kind: with batch
  norm over all ranks the last layer's biases into that of the layer before. Only what depends on
  all the others' results can't be moved.

  Args:
    found: the results, from `results`.
    behind: by value, the collectives behind it, from `dependencies`.
  """
  def after(value: int) -> int:
    index = program.maker.get(value)
    assert index is not None, "a collective's"
    equation = program.equations[index]
    each = len(equation.inputs) == len(equation.outputs)
    reads = [equation.inputs[equation.outputs.index(value)]] if each else equation.reads()
    return _all_behind((v for v in reads if isinstance(v, int)), behind).bit_count()

  counts = [after(value) for value in found]
  late = [value for value, count in zip(found, counts, strict=True) if count == max(counts)]
  return next((value for value in late if program.flat(value)), late[0])


def dependencies(program: Program, equations: Iterable[int]) -> dict[int, int]:
  """By value, which of these equations must be done before it is there: one bit each."""
  bit = {index: 1 << place for place, index in enumerate(sorted(equations))}
  found: dict[int, int] = {}
  for index, equation in enumerate(program.equations):
    mask = bit.get(index, 0) | _all_behind(equation.reads(), found)
    found.update(dict.fromkeys(equation.outputs, mask))
  return found


def _all_behind(values: Iterable[int], behind: Mapping[int, int]) -> int:
  return functools.reduce(operator.or_, (behind.get(v, 0) for v in values), 0)
