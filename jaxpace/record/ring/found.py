"""Steps that nobody counts: the writer's thread finds them among what the devices executed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import msgspec

from jaxpace.core.observed import ObservedProgram
from jaxpace.core.plan import Collective
from jaxpace.hosts import distributed
from jaxpace.observation import programs
from jaxpace.record.columns import UNKNOWN, Range, StepCalls
from jaxpace.record.ring import finding
from jaxpace.record.ring.collect import Collector
from jaxpace.record.ring.finding import Step
from jaxpace.record.ring.observed import PlannedPrograms

_SURE_STEPS, _SURE_SECONDS = 8, 5.0
"""What repeats so often, and for so long, is the step. Until then executions wait."""
_ONLY_SECONDS = 60.0
"""After so long an evaluation, or what else computes no gradients, is the step, where there is
nothing else."""
_LONGER = 10
"""Times as long as the step has run, something else runs that takes its place."""
_LOOK_BACK = 4096
"""Executions that are looked at."""
_MOST_OF_TIME = 0.5
"""What takes this fraction of the time of all programs but evaluations is the step."""
_AGREE_SECONDS = 5.0
_ASK_SECONDS = 1.0
"""How often a process asks process 0 for the step: each answer is traffic on its link."""

Agree = Callable[[Step | None, bool, int], Step | None]
"""Takes what this process found, whether it can wait no longer, and the number of the first step;
returns what all take for the step from that on, None as long as that isn't known."""


def agreement(name: str, say: Callable[[str], None]) -> Agree:
  """Has process 0 decide which programs are the step; the others take its word. `name` is the
  recording's, the same on all processes; `say` takes what is found."""
  asked = -_ASK_SECONDS

  def agree(found: Step | None, last: bool, first: int) -> Step | None:
    nonlocal asked
    key = f"{name}/{first}"
    if jax.process_index() == 0:
      if found is not None:
        say(f"The step is {found.why}." if first == 0 else
            f"From step {first:,} on the step is {found.why}.")
        if jax.process_count() > 1:
          distributed.key_value_set(key, msgspec.json.encode(found).decode())
      return found
    if not last and time.monotonic() - asked < _ASK_SECONDS:
      return None
    asked = time.monotonic()
    with contextlib.suppress(TimeoutError, ConnectionError):
      text = (distributed.key_value_get(key, _AGREE_SECONDS) if last else
              distributed.key_value_directory(name).get(key))
      return msgspec.json.decode(text, type=Step) if text else None
    return found if last else None

  return agree


class StepFinder:
  """Cuts what devices execute into steps, once it is found what the step is."""

  def __init__(self, source: PlannedPrograms, collector: Collector, match: str, agree: Agree,
               first_step: int = 0):
    """Begins.

    Args:
      source: the programs.
      collector: has what was executed.
      match: pattern of the names of the step's programs; empty where they are to be found.
      agree: settles among all processes which step it is.
      first_step: number of the first step.
    """
    self._source, self._collector, self._match, self._agree = source, collector, match, agree
    self._order: list[tuple[int, int]] = []
    self._since: float | None = None
    self._ran = 0.0
    self._others: list[tuple[int, int]] = []
    self._taken: list[dict[str, Any]] = []
    self._next = first_step
    # Not where the steps are a guess.
    self._final = True
    # By program, the one that stands for the iterations of its loop.
    self._iteration_of: dict[int, ObservedProgram] = {}
    self.found: Step | None = None
    """What is taken for the step, once that is known."""

  def cut(self, fresh: list[tuple[int, int]], last: bool) -> list[StepCalls]:
    """Takes in what was executed, and returns the steps that are over; `last` says that nothing
    will be executed any more."""
    # Iterations that were taken for executions come as such, too.
    iterations = {one.number for one in self._iteration_of.values()}
    fresh = [each for each in fresh if each[0] not in iterations]
    self._order += fresh
    if self._order and self._since is None:
      self._since = time.monotonic()
    if self.found is None:
      found = self._find(self._order, last)
      if found is None and last and self._iterate():
        found = self._find(self._order, last)
      self._take(self._agree(found, last, self._next if self._taken else 0))
    open_already = self.found is None
    steps = self._note_others(fresh)
    if self.found is None:
      return steps if open_already else steps + self.cut([], last)
    steps += self._cut(last)
    if self._is_over_for_good():
      steps += self._cut(True)
      if self._take(self._agree(self._find(self._others, last), False, self._next)):
        self._order, self._others = self._others, []
        steps += self._cut(last)
    self._leave_others()
    return steps

  def guess(self, source: PlannedPrograms, collector: Collector) -> list[StepCalls]:
    """The steps that are over, if nothing followed, as long as it isn't sure what the step is: of
    this process alone, and nothing is settled by it."""
    other = StepFinder(source, collector, self._match,
                       lambda found, last, _first: found if last else None, self._next)
    other._final, other._iteration_of = False, self._iteration_of
    other._taken = list(self._taken)
    return other.cut(list(self._order), True)

  def _take(self, found: Step | None) -> bool:
    """Takes programs for the step from now on; none, if there are none."""
    if found is None:
      return False
    self.found, self._ran = found, time.monotonic()
    self._taken.append({"programs": list(found.programs), "why": found.why,
                        "first_step": self._next})
    self._source.tell_step({**self._taken[-1], "before": self._taken[:-1]})
    return True

  def _iterate(self) -> bool:
    """Where training is one program, which ran once or twice or is under way, takes the iterations
    of its outermost loop for what was executed; says whether it does. A program that is called a
    step is one."""
    numbers = {number for number, _ in self._order} | self._collector.under_way
    numbers &= self._source.by_number.keys()
    if not numbers:
      return False
    likely = finding.likely({self._name(number) for number in numbers})
    main = self._name(max((number for number in numbers if self._name(number) in likely),
                          key=self._collector.spent))
    if "step" in main:
      return False
    # It may have been compiled twice, for what it is given first and for what it returns.
    order = [each for number in sorted(numbers) if self._name(number) == main
             for each in self._iterations(self._source.by_number[number].program)]
    self._order = order or self._order
    return bool(order)

  def _iterations(self, program: ObservedProgram) -> list[tuple[int, int]]:
    """The iterations of a program's loop as executions of another program; [] where it has none
    that is training."""
    inside = _in_a_loop(program)
    if not inside:
      return []
    if program.number not in self._iteration_of:
      self._iteration_of[program.number] = dataclasses.replace(
          program, number=programs.next_number(), name=f"an iteration of {program.name}",
          collectives=tuple(dataclasses.replace(one, loops=one.loops[1:]) for one in inside))
      programs.add(self._iteration_of[program.number])
    number = self._iteration_of[program.number].number
    # What runs once in an iteration, or else as often in each: the last time is its end.
    last = min(reversed(inside), key=lambda one: _times(one) or math.inf)
    count = self._collector.iterate(program.number, last.exit_tag, _times(last), number)
    if count:
      self._source.meet()
    return [(number, at) for at in range(count)]

  def _cut(self, last: bool) -> list[StepCalls]:
    assert self.found is not None
    names = [self._name(number) for number, _ in self._order]
    places, done = self.found.steps(names, last)
    steps = [self._step(begin, end, names) for begin, end in places]
    self._order = self._order[done:]
    return steps

  def _note_others(self, fresh: list[tuple[int, int]]) -> list[StepCalls]:
    """Notes what was executed since the step last was. Where that computes gradients and what was
    taken for the step doesn't, training begins only now, and it is open again what the step is: all
    processes come to that at the same execution. Returns the steps until then."""
    if self.found is None:
      return []
    known = self._match or self._trains(self.found)
    for at, (program, number) in enumerate(fresh, 1):
      if self._name(program) in self.found.programs:
        self._others, self._ran = [], time.monotonic()
      else:
        self._others.append((program, number))
      if not known and self._begins_training(program):
        rest = fresh[at:]
        del self._order[len(self._order) - len(rest):]
        steps = self._cut(True)
        self.found, self._order, self._others = None, self._others + rest, []
        return steps
    return []

  def _begins_training(self, program: int) -> bool:
    """Whether a program computes gradients, and has run so often since the step did that it is no
    part of it."""
    return (self._source.by_number[program].program.differentiated
            and not finding.is_beside(self._name(program))
            and [number for number, _ in self._others].count(program) >= _SURE_STEPS)

  def _trains(self, step: Step) -> bool:
    return any(each.program.differentiated for each in self._source.by_number.values()
               if each.program.name in step.programs)

  def _is_over_for_good(self) -> bool:
    """Whether what was taken for the step has run for a while, and something else for much longer
    since: it was a warm-up. Processes but the first wait for that to say so."""
    if self._match or len(self._others) < _SURE_STEPS or self._since is None:
      return False
    ran = max(self._ran - self._since, _SURE_SECONDS)
    return jax.process_index() > 0 or time.monotonic() - self._ran > _LONGER * ran

  def _find(self, order: list[tuple[int, int]], last: bool) -> Step | None:
    """The step, as far as this process can tell; None as long as it isn't sure."""
    names = [self._name(number) for number, _ in order[-_LOOK_BACK:]]
    lasted = time.monotonic() - (self._since or time.monotonic())
    if not last and (len(names) < _SURE_STEPS or lasted < _SURE_SECONDS):
      return None
    seconds: dict[str, float] = collections.defaultdict(float)
    for number in {number for number, _ in order}:
      seconds[self._name(number)] += self._collector.seconds(number)
    differentiated = {each.program.name for each in self._source.by_number.values()
                      if each.program.differentiated}
    found = finding.find(names, seconds, self._match, differentiated)
    if found is not None and not self._final and finding.is_jax(found.programs[0]):
      return None
    if found is None or last:
      return found
    often = names.count(found.programs[0]) >= _SURE_STEPS
    # One execution of something else took longer: that may be the first step of all.
    most = found.fraction >= _MOST_OF_TIME
    named = finding.is_beside(found.programs[0]) and (self.found or lasted < _ONLY_SECONDS)
    # A loss may be evaluated at length before the first step, by whatever name.
    if not self._trains(found):
      named = named or (self._trains(self.found) if self.found else lasted < _ONLY_SECONDS)
    # Values are gathered before the first step as well.
    named = named or finding.is_jax(found.programs[0])
    return found if often and (self._match or (most and not named)) else None

  def _name(self, number: int) -> str:
    return self._source.by_number[number].program.name

  def _step(self, begin: int, end: int, names: list[str]) -> StepCalls:
    assert self.found is not None
    ranges: list[Range] = []
    for (program, number), name in zip(self._order[begin:end], names[begin:end], strict=True):
      if name not in self.found.programs:
        continue
      if ranges and ranges[-1].program == program and ranges[-1].end == number:
        ranges[-1] = ranges[-1]._replace(end=number + 1)
      else:
        ranges.append(Range(program, number, number + 1))
    self._next += 1
    return StepCalls(self._next - 1, tuple(ranges), UNKNOWN, {})

  def _leave_others(self) -> None:
    """Forgets the timestamps of programs that were never the step, but those since it last ran."""
    steps = {name for one in self._taken for name in one["programs"]}
    kept: dict[int, int] = {}
    for number, execution in self._others:
      kept.setdefault(number, execution)
    for number in self._source.runs:
      if number in self._source.by_number and self._name(number) not in steps:
        for buffer in range(self._collector.buffers):
          self._collector.take(buffer, number, kept.get(number, math.inf))


def _in_a_loop(program: ObservedProgram) -> list[Collective]:
  """A program's collectives in its outermost loop, where some of them run equally often in each
  iteration; [] where it has none, or several: those are of a step, forward and backward through
  layers."""
  inside = [one for one in program.collectives if one.loops]
  one_loop = len({one.loops[0].name for one in inside}) == 1
  return inside if one_loop and any(map(_times, inside)) else []


def _times(one: Collective) -> int:
  """How often it runs in each iteration of the outermost loop that it is in; 0 where that differs,
  or isn't known."""
  return 0 if one.conditional else math.prod(loop.trips or 0 for loop in one.loops[1:])
