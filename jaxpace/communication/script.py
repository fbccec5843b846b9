"""What to do in which order: the step's equations with the stamps between them. Static, decided at trace time."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from jaxpace.communication import gates, phases, primitives, schedule, sharing
from jaxpace.communication.program import Equation, Program, axes_of, size_bytes
from jaxpace.communication.sharing import Carrier
from jaxpace.core.plan import COMPUTE, DELAY, GAP, SYNC, UPDATE, Collective, Mark, Unstamped
from jaxpace.core.ring import MAX_PHASE_MARKS

_MOST_WAITED = 8  # values a phase boundary waits for


@dataclasses.dataclass
class Segment:
  """A run of equations, and the stamp that holds it back and is taken before it."""

  equations: list[int]
  phase: str
  waits_for: list[int]
  """Values that the boundary stamp before this run waits for. Empty for the first run of a stage."""
  gated: list[int]
  """Values that this run sees only after the stamp before it."""
  boundary: bool
  """Whether there is a stamp of its own before this run."""


@dataclasses.dataclass
class Section:
  """A stage: its segments, then its group of collectives."""

  segments: list[Segment]
  group: list[int]
  slot: int | None
  gate: int | None
  """Value, read by the group, that is held back by the entry stamp; None: an operand of our own is, if any."""
  extra: Carrier | None
  """An all-reduce of this group that an operand of ours can join."""
  enters: list[int] = dataclasses.field(default_factory=list)
  """Operands of the group, which the entry stamp waits for."""
  result: int = -1
  """Result of the group that the exit stamp waits for, where what it waits for must be little."""
  results: list[int] = dataclasses.field(default_factory=list)
  """All of them: where XLA makes several collectives of a group, the last to come ends it."""
  held_after: list[int] = dataclasses.field(default_factory=list)
  """Scalar inputs of the step that what follows sees only after the exit stamp."""
  last: bool = False
  """Whether it has the step's last collectives."""


@dataclasses.dataclass
class Script:
  """The whole step."""

  program: Program
  sections: list[Section]
  carrier: Carrier | None
  marks: tuple[Mark, ...]
  collectives: tuple[Collective, ...]
  unstamped: tuple[Unstamped, ...]
  overflow: int
  notices: list[str]


def write_script(program: Program, axis: Sequence[str], *, slots: int, delayed: bool,
                 phases_apart: bool = True) -> Script:
  """Decides where the stamps go.

  Args:
    program: the flat step.
    axis: names of the data axes.
    slots: most collectives (groups) that get stamps; the smallest are left out.
    delayed: whether a pacer may ask for a delay, so that the step's beginning has a `delay` mark.
    phases_apart: whether there are stamps between the phases, too, and not at the collectives alone.

  Returns:
    The script. Evaluating it gives the outputs of the program, bit for bit.
  """
  producers = gates.Producers(program)
  stages = schedule.stages(program, merge_runs_over=MAX_PHASE_MARKS if phases_apart else 0)
  significant, major = schedule.heavy(program), schedule.heavy(program, schedule.MAJOR)
  notices: list[str] = []
  order = _meeting_order(program, producers)
  told = _told(program, significant)
  behind = _behind(program)
  slot_of = _slots(program, [stage.group for stage in stages if stage.group], slots)

  sections: list[Section] = []
  for number, stage in enumerate(stages):
    segments: list[Segment] = []
    for run in stage.runs:
      if not segments:
        chosen, complete = gates.cover(program, producers, run.equations, significant, major)
        if number > 0:
          chosen = []  # the exit stamp holds back the collective's own results
        elif delayed and not complete:
          notices.append("Part of the step can start before its delay: no value there can be held back exactly.")
        segments.append(Segment(list(run.equations), run.phase, [], chosen, boundary=False))
        continue
      waits_for = _ends(program, producers, segments[-1].equations)
      chosen, complete = gates.cover(program, producers, run.equations, significant, major)
      if complete and waits_for:
        segments.append(Segment(list(run.equations), run.phase, waits_for, chosen, boundary=True))
      else:
        notices.append(f"The boundary between {segments[-1].phase} and {run.phase} can't be held without a risk to "
                       "the last bits of the results; both are reported as compute.")
        segments[-1].equations = segments[-1].equations + list(run.equations)
        segments[-1].phase = COMPUTE
    slot = slot_of.get(tuple(stage.group))
    extra = _joinable(program, stage.group, slot) if slot is not None else None
    gate = _gate(program, producers, stage.group) if slot is not None else None
    enters: list[int] = []
    held_after: list[int] = []
    result, results = -1, []
    if slot is not None:
      met = sorted(stage.group, key=lambda index: order.get(index, len(order)))
      enters = _operands(program, producers, met, told)
      results = _results(program, producers, met)
      latest = _latest(program, producers, results, behind)
      result = next((value for value in latest if _flat(program, value)), latest[0])
      held_after = _scalar_inputs(program, producers, stages[number + 1])
    last = bool(stage.group) and number == len(stages) - 2
    sections.append(Section(segments, stage.group, slot, gate, extra, enters, result, results, held_after, last))

  early = [section.slot for section in sections if section.slot is not None and _may_begin_early(section)]
  if early:
    several = len(early) > 1
    notices.append(f"Collective{'s' if several else ''} {', '.join(map(str, early))} can start before "
                   f"{'their entry stamps' if several else 'its entry stamp'}, which may then be late: none of "
                   f"{'their' if several else 'its'} operands can be held back without a risk to the last bits of the "
                   "results.")

  # The last that can: it has seen most of the step. If none can, the largest: it is named in the reason.
  joinable = [section for section in sections if section.extra is not None]
  able = [section for section in joinable if not sharing.refusal(section.extra, tuple(axis))]
  carrier = (able[-1] if able else max(joinable, key=lambda s: schedule.group_bytes(program, s.group))).extra \
      if joinable else None
  collectives = tuple(_describe(program, s, axis) for s in sections if s.slot is not None)
  overflow = sum(1 for s in sections if s.group and s.slot is None)
  unstamped = [Unstamped(h.name, h.primitive, h.bytes, h.reason) for h in program.hidden]
  unstamped += [Unstamped(program.equations[i].stack or program.equations[i].primitive.name,
                          program.equations[i].primitive.name,
                          schedule.group_bytes(program, [i]), "more collectives than slots")
                for s in sections if s.group and s.slot is None for i in s.group]
  return Script(program, sections, carrier, _marks(sections, delayed), collectives, tuple(unstamped), overflow, notices)


def _slots(program: Program, groups: list[list[int]], slots: int) -> dict[tuple[int, ...], int]:
  kept = set(sorted(range(len(groups)), key=lambda g: (-schedule.group_bytes(program, groups[g]), g))[:slots])
  return {tuple(groups[g]): slot for slot, g in enumerate(sorted(kept))}


def _bytes(program: Program, values: Sequence[int]) -> int:
  return sum(size_bytes(program.avals[v]) for v in values)


def _meeting_order(program: Program, producers: gates.Producers) -> dict[int, int]:
  """Position of each equation in the order in which XLA meets them, walking from the step's results.

  XLA combines all-reduces greedily in that order; stamps must not change it.
  """
  order: dict[int, int] = {}
  waiting = [(ref, False) for ref in reversed(program.outputs) if isinstance(ref, int)]
  opened: set[int] = set()
  while waiting:
    value, done = waiting.pop()
    index = producers.of(value)
    if index is None or index in order:
      continue
    if done:
      order[index] = len(order)
    elif index not in opened:
      opened.add(index)
      waiting.append((value, True))
      waiting += [(v, False) for v in reversed(list(program.equations[index].reads()))]
  return order


def _ends(program: Program, producers: gates.Producers, run: Sequence[int]) -> list[int]:
  """Values made by a run whose being ready tells that it is over.

  Only such as are in memory whatever XLA does: results of the step (the loss), operands of collectives (the
  loss again), results of opaque operations. One more reader of any other value could change what is fused.
  """
  made = {o for i in run for o in program.equations[i].outputs}
  kept = {ref for ref in program.outputs if isinstance(ref, int)}
  kept |= {v for e in program.equations if e.collective for v in e.reads()}
  kept |= {v for v in made if producers.opaque(v)}
  kept -= producers.constant
  return sorted(v for v in made & kept if size_bytes(program.avals[v]) and _flat(program, v))[-_MOST_WAITED:]


def _flat(program: Program, value: int) -> bool:
  return len(getattr(program.avals[value], "shape", ())) < 2


def _operands(program: Program, producers: gates.Producers, group: Sequence[int], told: Mapping[int, int]
              ) -> list[int]:
  """Operands of a group that its entry stamp waits for.

  All flat ones; of matrices those that are results of whole kernels, of which an element can be read without
  another one being computed anew. Where those don't tell that every weighty equation is done (gradients that
  were cast, clipped or decayed), the fewest others that do: their element may be computed anew, but from what is done.
  """
  values = [v for v in dict.fromkeys(v for i in group for v in program.equations[i].reads())
            if size_bytes(program.avals[v]) and v not in producers.constant]
  chosen = {v for v in values if _flat(program, v) or producers.whole(v)}
  done = functools.reduce(operator.or_, (told.get(v, 0) for v in chosen), 0)
  for value in sorted(set(values) - chosen, key=lambda v: (-told.get(v, 0).bit_count(), v)):
    if told.get(value, 0) & ~done:
      chosen.add(value)
      done |= told[value]
  return [v for v in values if v in chosen] or values


def _told(program: Program, significant: frozenset[int]) -> dict[int, int]:
  """By value, the weighty equations that must be done before it is there: one bit each."""
  bit = {index: 1 << place for place, index in enumerate(sorted(significant))}
  behind: dict[int, int] = {}
  for index, equation in enumerate(program.equations):
    mask = functools.reduce(operator.or_, (behind.get(v, 0) for v in equation.reads()), bit.get(index, 0))
    behind.update(dict.fromkeys(equation.outputs, mask))
  return behind


def _joinable(program: Program, group: Sequence[int], slot: int) -> Carrier | None:
  """The largest sum-reduction of a group: its dtype and axes are those an operand of ours must have to join it."""
  sizes: dict[tuple[str, tuple[str, ...]], int] = {}
  for index in group:
    equation = program.equations[index]
    if equation.primitive.name not in primitives.SUMS or equation.params.get("axis_index_groups") is not None:
      continue
    axes = axes_of(equation.primitive, equation.params)
    if len(axes) != len(equation.params["axes"]):
      continue  # also sums over an array dimension
    for value in equation.reads():
      dtype = str(program.avals[value].dtype)
      sizes[dtype, axes] = sizes.get((dtype, axes), 0) + size_bytes(program.avals[value])
  if not sizes:
    return None
  dtype, axes = max(sizes, key=lambda key: (sizes[key], key))
  return Carrier(slot, dtype, axes)


def _gate(program: Program, producers: gates.Producers, group: Sequence[int]) -> int | None:
  """The operand that the entry stamp holds back: the smallest float32 or integer one, None if there is none.

  A half-precision operand is never held back: XLA reduces it in float32 and elides the conversion before it.
  """
  candidates = []
  for index in group:
    for value in program.equations[index].reads():
      dtype = getattr(program.avals[value], "dtype", None)
      if (dtype in (jnp.float32, jnp.float64, jnp.int32, jnp.uint32) and value not in producers.constant
          and (_flat(program, value) or producers.plain(value))):
        candidates.append((dtype != jnp.float32, size_bytes(program.avals[value]), value))
  return min(candidates)[2] if candidates else None


def _results(program: Program, producers: gates.Producers, group: Sequence[int]) -> list[int]:
  """The results of a group that can tell that it is over, in the order in which XLA meets them.

  Where a stamp should be given little, it waits for the first flat one.
  A gradient can't be held back between all-reduce and update: an opaque operation would ask for a layout, an
  arithmetic one would change which products the compiler contracts with which sums. But XLA runs what becomes
  ready in order, and the first result's readers are ready first; and see `_scalar_inputs`.
  """
  results = [o for i in group for o in program.equations[i].outputs if size_bytes(program.avals[o])]
  return [v for v in results if v not in producers.constant] or results


def _latest(program: Program, producers: gates.Producers, results: Sequence[int], behind: Mapping[int, int]
            ) -> list[int]:
  """Those results of a group whose operands come after the most collectives.

  XLA moves an operand that is ready early into an earlier all-reduce of the same kind: with batch norm over all ranks
  the last layer's biases into that of the layer before. Only what depends on all the others' results can't be moved.
  """
  def after(value: int) -> int:
    index = producers.of(value)
    assert index is not None, "a collective's"
    equation = program.equations[index]
    each = len(equation.inputs) == len(equation.outputs)
    reads = [equation.inputs[equation.outputs.index(value)]] if each else equation.reads()
    return functools.reduce(operator.or_, (behind.get(v, 0) for v in reads if isinstance(v, int)), 0).bit_count()

  counts = [after(value) for value in results]
  return [value for value, count in zip(results, counts, strict=True) if count == max(counts)]


def _behind(program: Program) -> dict[int, int]:
  """By value, the collectives that must be over before it is there: one bit each."""
  return _told(program, frozenset(i for i, equation in enumerate(program.equations) if equation.collective))


def _scalar_inputs(program: Program, producers: gates.Producers, following: schedule.Stage) -> list[int]:
  """Scalar inputs of the step that the stage after a collective reads: its step count, a learning rate.

  Adam's corrections and learning rate schedules come from the step count, so holding back these four bytes holds
  back every kernel of such an update. No more than scalars: holding back biases was seen to change results.
  """
  read = {v for run in following.runs for i in run.equations for v in program.equations[i].reads()}
  return [v for v in program.inputs if v in read and program.avals[v].shape == () and producers.exact(v)]


def _describe(program: Program, section: Section, axis: Sequence[str]) -> Collective:
  equations = [program.equations[i] for i in section.group]
  largest = max(equations, key=lambda e: sum(size_bytes(program.avals[v]) for v in e.reads()))
  operands = [v for e in equations for v in e.reads()]
  phase = section.segments[-1].phase
  return Collective(
      slot=section.slot if section.slot is not None else -1,
      name=phases.collective_name(largest.stack) or largest.primitive.name.removesuffix("_invariant"),
      primitives=tuple(sorted({e.primitive.name for e in equations})),
      axis=",".join(_axes(equations, axis)),
      bytes=_bytes(program, operands),
      operands=len(operands),
      dtypes=tuple(sorted({str(program.avals[v].dtype) for v in operands})),
      phase=phase,
      pairs=_pairs(equations),
      index_groups=_index_groups(equations),
      may_begin_early=_may_begin_early(section))


def _may_begin_early(section: Section) -> bool:
  """Whether nothing holds a section's collectives back until their entry stamp is taken."""
  return bool(section.group) and section.gate is None and not (section.last and section.extra)


def _axes(equations: Sequence[Equation], axis: Sequence[str]) -> Sequence[str]:
  """Axes that the collectives of a slot go over: those of the step, unless all of them name the same others."""
  named = {tuple(axes_of(e.primitive, e.params)) for e in equations}
  own = named.pop() if len(named) == 1 else ()
  return own if own and set(own) != set(axis) else axis


def _pairs(equations: Sequence[Equation]) -> tuple[tuple[int, int], ...]:
  """Sources and targets where all of the slot's collectives are point-to-point transfers; else none."""
  if any(e.primitive.name != "ppermute" for e in equations):
    return ()
  return tuple(sorted({(int(source), int(target)) for e in equations for source, target in e.params.get("perm", ())}))


def _index_groups(equations: Sequence[Equation]) -> tuple[tuple[int, ...], ...]:
  """Groups along the axis where all of the slot's collectives have the same ones; else none."""
  told = {tuple(tuple(map(int, group)) for group in e.params.get("axis_index_groups") or ()) for e in equations}
  return told.pop() if len(told) == 1 else ()


def _marks(sections: Sequence[Section], delayed: bool) -> tuple[Mark, ...]:
  """Lists the stamps in order; a mark's segment names the time before it."""
  marks = [Mark("start", GAP)]
  if delayed:
    marks.append(Mark("delay", DELAY))
  current = COMPUTE
  for section in sections:
    for segment in section.segments:
      if segment.boundary:
        marks.append(Mark("phase", current))
      current = segment.phase
    if section.group and section.slot is not None:
      marks.append(Mark("enter", current, section.slot))
      marks.append(Mark("exit", SYNC, section.slot))
  marks.append(Mark("end", current if sections[-1].segments else UPDATE))
  return tuple(marks)
