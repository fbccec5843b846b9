"""Steps that nobody counts: the writer's thread finds them among what the devices executed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import jax
import msgspec

from jaxpace.core.observed import ObservedProgram, function_of
from jaxpace.core.plan import Collective
from jaxpace.hosts import distributed
from jaxpace.observation import programs
from jaxpace.record.columns import UNKNOWN, Range, StepCalls
from jaxpace.record.ring import finding
from jaxpace.record.ring.collect import Collector
from jaxpace.record.ring.finding import Step
from jaxpace.record.ring.observed import PlannedPrograms
from jaxpace.runs.loops import LEAST

_SURE_STEPS, _SURE_SECONDS = 8, 5.0
"""What repeats so often, and for so long, is the step. Until then executions wait."""
_LOOK_BACK = 4096
"""Executions that are looked at, and of those beside the step that are kept."""
_MOST_OF_TIME = 0.5
"""What takes this fraction of the time of all programs but evaluations is the step."""
_OWN = "programs of JAX's own"
_AGREE_SECONDS = 5.0
_ASK_SECONDS = 1.0
"""How often a process asks process 0 for the step: each answer is traffic on its link."""

Agree = Callable[[Step | None, bool, int], Step | None]
"""Takes what this process found, whether it can wait no longer, and how often it was settled
before; returns what all take for the step, None as long as that isn't known."""


def agreement(name: str) -> Agree:
  """Has process 0 decide which programs are the step; the others take its word. `name` is the
  recording's, the same on all processes."""
  asked = -_ASK_SECONDS

  def agree(found: Step | None, last: bool, before: int) -> Step | None:
    nonlocal asked
    key = f"{name}/{before}"
    if jax.process_index() == 0:
      if found is not None and jax.process_count() > 1:
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
  """Cuts what devices execute into steps, once it is found what the step is.

  A program may have several loops, one after the other: it pretrains, say, and then trains. The
  step of each is found, and the reader of the run decides which of them the report is on. All
  processes come to the next loop at the same execution, whenever they see it.
  """

  def __init__(self, source: PlannedPrograms, collector: Collector, match: str, agree: Agree,
               say: Callable[[str], None] = lambda sentence: None, first_step: int = 0):
    """Begins.

    Args:
      source: the programs.
      collector: has what was executed.
      match: pattern of the names of the step's programs; empty where they are to be found.
      agree: settles among all processes which step it is.
      say: takes a sentence on what is found.
      first_step: number of the first step.
    """
    self._source, self._collector, self._match = source, collector, match
    self._agree, self._say = agree, say
    # Executions that nothing is known of yet, and when the first and the last of them came.
    self._fresh: list[tuple[int, int]] = []
    self._since: float | None = None
    self._latest = 0.0
    # Of the step's programs, those since the last step ended.
    self._order: list[tuple[int, int]] = []
    # Those since the step last ran, how often each program has since, and the step in its loop.
    self._others: collections.deque[tuple[int, int]] = collections.deque(maxlen=_LOOK_BACK)
    self._times: collections.Counter[str] = collections.Counter()
    self._ran = 0
    # By program that may end steps, how often the step had run each time.
    self._ended: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    self._taken: list[dict[str, Any]] = []
    self._settled = 0
    self._beside: set[str] = set()  # titles of what runs between steps
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
    self._fresh += fresh
    if fresh:
      self._latest = time.monotonic()
    steps: list[StepCalls] = []
    before = self.found
    while self.found is not None or self._settle(last):
      steps += self._follow(last)
      if self.found is not None:
        break
    if self.found is before is not None:
      self._leave_others()
    return steps

  def guess(self, source: PlannedPrograms, collector: Collector) -> list[StepCalls]:
    """The steps that are over, if nothing followed, as long as it isn't sure what the step is: of
    this process alone, and nothing is settled by it."""
    other = StepFinder(source, collector, self._match,
                       lambda found, last, _before: found if last else None, first_step=self._next)
    other._final, other._iteration_of = False, self._iteration_of
    other._taken, other._settled = list(self._taken), self._settled
    other._beside = set(self._beside)
    return other.cut(self._fresh, True)

  def _settle(self, last: bool) -> bool:
    """Settles among all processes what the step is from here on; says whether it is."""
    if self._fresh and self._since is None:
      self._since = self._latest
    found = self._find(last)
    if found is None and last and self._iterate():
      found = self._find(last)
    self.found = self._agree(found, last, self._settled)
    if self.found is None:
      return False
    self._settled += 1
    self._take(self.found)
    return True

  def _take(self, found: Step) -> None:
    """Notes for what programs are the step from now on, where that is another than before."""
    programs, why, before = list(found.programs), found.why, self._taken
    if self._goes_on(found):
      return
    # What follows another step is not measured from its end: a number is left out between them.
    self._next += bool(before)
    why += " since then" * bool(before)
    self._ran = 0
    self._ended.clear()
    if jax.process_index() == 0:
      self._say(f"From step {self._next:,} on the step is {why}." if before else
                f"The step is {why}.")
    self._taken = [*before, {"programs": programs, "why": why, "trains": self._trains(programs),
                             "first_step": self._next}]
    self._tell()

  def _tell(self) -> None:
    self._source.tell_step({**self._taken[-1], "before": self._taken[:-1],
                            "beside": sorted(self._beside - set(self._taken[-1]["programs"]))})

  def _goes_on(self, found: Step) -> bool:
    """Whether that was the step before, too."""
    return any({*one["programs"]} == {*found.programs} for one in self._taken[-1:])

  def _follow(self, last: bool) -> list[StepCalls]:
    """Goes through what was executed, up to where something takes the step's place; returns the
    steps that are over."""
    assert self.found is not None
    fresh, self._fresh = self._fresh, []
    steps: list[StepCalls] = []
    for at, each in enumerate(fresh, 1):
      name = self._title(each[0])
      if name in self.found.programs:
        self._order.append(each)
        if self._ran and self._times:  # what runs before the first step initializes
          self._note_beside(self._times.keys())
        self._ran += name == self.found.programs[0]
        self._forget_others()
        continue
      self._others.append(each)
      self._times[name] += 1
      if longer := self._ended_by(name):
        steps += self._cut(True)
        self.found = longer
        self._take(longer)
      elif self._takes_place(name):
        steps += self._cut(True)
        self.found, self._since, self._order = None, None, []
        self._fresh = [*self._others, *fresh[at:]]
        self._forget_others()
        return steps
    return steps + self._cut(last)

  def _forget_others(self) -> None:
    self._others.clear()
    self._times.clear()

  def _ended_by(self, name: str) -> Step | None:
    """The step, where a program ends it after all: one that accumulates for long had not ended when
    it was settled what it is."""
    assert self.found is not None
    if self._match or len(self.found.programs) > 1 or not finding.is_update(name):
      return None
    ran = self._ended[name] = [*self._ended[name][-finding.FEWEST:], self._ran]
    every = {later - earlier for earlier, later in itertools.pairwise(ran)}
    regular = len(ran) > finding.FEWEST and len(every) == 1
    return finding.ended_by(self.found, name, times, self._source.shown()) if regular and (
        1 < (times := every.pop()) <= finding.MOST_REPEATS) else None

  def _takes_place(self, name: str) -> bool:
    """Whether a program has run so often since the step did that another loop has begun. It is as
    likely to be a step as that, or the step is rare beside it. What is taken for a loop in vain
    does no harm, but loops that alternate shall not be cut for ever: each takes twice as long to
    tell as the one before."""
    assert self.found is not None
    step, times = self.found.programs[0], self._times[name]
    if self._match or not self._ran or times < _SURE_STEPS << self._settled - 1:
      return False
    return self._is_as_likely(name, step) or (
        self._ran < LEAST * times and not finding.is_jax(name) and not finding.is_beside(name))

  def _is_as_likely(self, name: str, step: str) -> bool:
    """Whether a program is no less likely to be a step than another."""
    return (not finding.is_jax(name) and finding.is_beside(name) <= finding.is_beside(step)
            and self._trains([name]) >= self._trains([step]))

  def _iterate(self) -> bool:
    """Where training is one program, which ran once or twice or is under way, takes the iterations
    of its outermost loop for what was executed; says whether it does. A program that is called a
    step is one."""
    numbers = {number for number, _ in self._fresh} | self._collector.under_way
    numbers &= self._source.by_number.keys()
    if not numbers:
      return False
    likely = finding.likely({self._title(number) for number in numbers})
    main = self._title(max((number for number in numbers if self._title(number) in likely),
                          key=self._collector.spent))
    if "step" in function_of(main):
      return False
    # It may have been compiled twice, for what it is given first and for what it returns.
    order = [each for number in sorted(numbers) if self._title(number) == main
             for each in self._iterations(self._source.by_number[number].program)]
    self._fresh = order or self._fresh
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
    names = [self._title(number) for number, _ in self._order]
    places, done = self.found.steps(names, last)
    steps = [self._step(begin, end) for begin, end in places]
    self._order = self._order[done:]
    return steps

  def _trains(self, names: Iterable[str]) -> bool:
    return not self._differentiated.isdisjoint(names)

  @property
  def _differentiated(self) -> set[str]:
    """Titles of programs that compute gradients."""
    return {each.program.title for each in self._source.by_number.values()
            if each.program.differentiated}

  def _note_beside(self, names: Set[str]) -> None:
    """Says of those programs that are no step's that they run between steps; JAX's own have names
    that say nothing."""
    names = {_OWN if finding.is_jax(name) else name for name in names} - self._beside
    if names:
      self._beside |= names
      self._tell()

  def _find(self, last: bool) -> Step | None:
    """The step, as far as this process can tell; None as long as it isn't sure."""
    names = [self._title(number) for number, _ in self._fresh[-_LOOK_BACK:]]
    # Not while nothing runs: the first step compiles for minutes, after an evaluation.
    lasted = self._latest - (self._since or self._latest)
    if not last and (len(names) < _SURE_STEPS or lasted < _SURE_SECONDS):
      return None
    seconds: dict[str, float] = collections.defaultdict(float)
    for number in {number for number, _ in self._fresh}:
      seconds[self._title(number)] += self._collector.seconds(number)
    found = self._first(names, seconds)
    if found is not None and not self._final and finding.is_jax(found.programs[0]):
      return None
    if found is None or last:
      return found
    often = names.count(found.programs[0]) >= _SURE_STEPS
    # One execution of something else took longer: that may be the first step of all. Values are
    # gathered before it as well.
    likely = found.fraction >= _MOST_OF_TIME and not finding.is_jax(found.programs[0])
    return found if often and (self._match or likely) else None

  def _first(self, names: list[str], seconds: Mapping[str, float]) -> Step | None:
    """The step of the first loop among some executions; what it was before, if that goes on after
    something else."""
    found = finding.find(names, {name: seconds[name] for name in {*names}}, self._match,
                         self._differentiated, self._source.shown())
    if found is None or self._match or self._goes_on(found):
      return found
    before = list(itertools.takewhile(lambda name: name not in found.programs, names))
    often = [name for name, times in collections.Counter(before).items() if times >= _SURE_STEPS]
    earlier = any(self._is_as_likely(name, found.programs[0]) for name in often)
    return self._first(before, seconds) if earlier else found

  def _title(self, number: int) -> str:
    return self._source.by_number[number].program.title

  def _step(self, begin: int, end: int) -> StepCalls:
    ranges: list[Range] = []
    for program, number in self._order[begin:end]:
      if ranges and ranges[-1].program == program and ranges[-1].end == number:
        ranges[-1] = ranges[-1]._replace(end=number + 1)
      else:
        ranges.append(Range(program, number, number + 1))
    self._next += 1
    return StepCalls(self._next - 1, tuple(ranges), UNKNOWN, {})

  def _leave_others(self) -> None:
    """Forgets the timestamps of programs that are not the step, but those since it last ran. The
    steps of another loop are rows by now."""
    assert self.found is not None
    kept: dict[int, int] = {}
    for number, execution in self._others:
      kept.setdefault(number, execution)
    for number in self._source.runs & self._source.by_number.keys():
      if self._title(number) not in self.found.programs:
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
