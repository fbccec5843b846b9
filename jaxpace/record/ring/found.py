"""Steps that nobody counts: the writer's thread finds them among what the devices executed."""

from __future__ import annotations

import collections
import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpace.core.observed import ObservedPlan, ObservedProgram
from jaxpace.core.recordable import ObservedFunction
from jaxpace.hosts import distributed
from jaxpace.observation.clocks import host_ring
from jaxpace.record.intake import Losses
from jaxpace.record.ring import finding
from jaxpace.record.ring.collect import Collector, ExecutionOrder
from jaxpace.record.ring.finding import Step
from jaxpace.record.ring.intake import ObservedIntake
from jaxpace.record.ring.table import DeviceSteps, Range, StepCalls
from jaxpace.runs.step_causes import Sample

_SURE_STEPS, _SURE_SECONDS = 8, 5.0
"""What repeats so often, and for so long, is the step. Until then executions wait."""
_ONLY_SECONDS = 60.0
"""After so long an evaluation is the step, where there is nothing else."""
_LONGER = 10
"""Times as long as the step has run, something else runs that takes its place."""
_LOOK_BACK = 4096
"""Executions that are looked at."""
_MOST_OF_TIME = 0.5
"""What takes this fraction of the time of all programs but evaluations is the step."""
_ALL = 1 << 62
_MOST_PAUSES = 256
"""Collections of garbage that are remembered."""
_UNKNOWN: Sample = (None, None, None, None, None)
_AGREE_SECONDS = 5.0
_ASK_SECONDS = 1.0
"""How often a process asks process 0 for the step: each answer is traffic on its link."""
_MOST_RECORDED = 65536
"""Calls of `record` that wait for their steps, at most."""

Agree = Callable[[Step | None, bool, int], Step | None]
"""Takes what this process found, whether it can wait no longer, and the number of the first step;
returns what all take for the step from that on, None as long as that isn't known."""


class Agreement:
  """Process 0 decides which programs are the step; the others take its word."""

  def __init__(self, key: str, say: Callable[[str], None]):
    """Prepares; `key` is the recording's, the same on all processes. `say` takes what is found."""
    self._key, self._say = key, say
    self._asked = -_ASK_SECONDS

  def __call__(self, found: Step | None, last: bool, first: int) -> Step | None:
    """See `Agree`. In the writer's thread."""
    key = f"{self._key}/{first}"
    if jax.process_index() == 0:
      if found is not None:
        self._say(f"The step is {found.why}." if first == 0 else
                  f"From step {first:,} on the step is {found.why}.")
        if jax.process_count() > 1:
          distributed.key_value_set(key, found.to_json())
      return found
    if not last and time.monotonic() - self._asked < _ASK_SECONDS:
      return None
    self._asked = time.monotonic()
    with contextlib.suppress(TimeoutError, ConnectionError):
      text = (distributed.key_value_get(key, _AGREE_SECONDS) if last else
              distributed.key_value_directory(self._key).get(key))
      return Step.from_json(text) if text else None
    return found if last else None


class Together(ObservedFunction):
  """Observed functions whose programs make up one step."""

  def __init__(self, observed: Sequence[ObservedFunction]):
    """Prepares."""
    self._observed = tuple(observed)

  @property
  def plan(self) -> ObservedPlan:  # type: ignore[override]
    """The programs of all."""
    return ObservedPlan(tuple(program for one in self._observed if one.plan is not None
                              for program in one.plan.programs))

  @property
  def runs(self) -> frozenset[int]:  # type: ignore[override]
    """See `Marked`."""
    return frozenset[int]().union(*(one.runs for one in self._observed))


class Executed:
  """What programs of this process have executed from now on. Made before the first of them runs."""

  def __init__(self, programs: ObservedFunction, earlier: Iterable[ObservedProgram]):
    """Begins; `programs` are all that have timestamps and run, `earlier` those that have run
    before."""
    self.programs, self.collector = programs, Collector()
    ranks = self.collector.ranks
    self.order = ExecutionOrder(self.collector, {
        one.number: [buffer for buffer, rank in enumerate(ranks) if rank in one.ranks]
        for one in earlier if not one.bare})
    self.host = HostUse()
    self._heads = host_ring.current().heads().tolist()

  @property
  def anything(self) -> bool:
    """Whether anything has been executed."""
    return bool(host_ring.current().heads().tolist() != self._heads)


class HostUse:
  """What the process did between the ends of its steps, though it says nothing: the native clock
  reads what it has used whenever its first device ends a program, and the collector calls back.

  Of one device, since they share the process: a column says what the process did in all.
  """

  def __init__(self) -> None:
    """Begins."""
    self._usage = host_ring.Usage()
    self._read: list[np.ndarray] = []
    self._before: np.void | None = None
    self._collecting = 0
    self._collected: collections.deque[tuple[int, int]] = collections.deque(maxlen=_MOST_PAUSES)
    gc.callbacks.append(self._on_gc)

  def close(self) -> None:
    """Leaves the garbage collector alone again."""
    with contextlib.suppress(ValueError):
      gc.callbacks.remove(self._on_gc)

  def keep(self) -> None:
    """Takes over what the native clock has read, before it is written over."""
    self._read.append(self._usage.take())

  def samples(self, end_ns: np.ndarray, whole: np.ndarray) -> list[Sample]:
    """What the process did in successive steps, each from the end of the one before.

    Args:
      end_ns: [K] when each ended on the first device; all at or after those of the last call.
      whole: [K] whether that is known.
    """
    self.keep()
    read = np.concatenate(self._read)
    found: list[Sample] = []
    for end, known in zip(end_ns.tolist(), whole.tolist(), strict=True):
      at = int(np.searchsorted(read["ns"], end))
      now = read[at] if known and at < len(read) and read["ns"][at] == end else None
      found.append(self._between(self._before, now))
      self._before = now
    last = end_ns[whole].max(initial=0)
    self._read = [read[read["ns"] > last]]
    return found

  def _between(self, before: np.void | None, now: np.void | None) -> Sample:
    if before is None or now is None:
      return _UNKNOWN
    begin, end = int(before["ns"]), int(now["ns"])
    collected = sum(max(0, min(end, last) - max(begin, first))
                    for first, last in tuple(self._collected))
    return (int(now["cpu_ns"] - before["cpu_ns"]), int(now["switches"] - before["switches"]),
            collected, None, None)

  def _on_gc(self, phase: str, _info: dict[str, int]) -> None:
    now = time.monotonic_ns()
    if phase == "start":
      self._collecting = now
    elif self._collecting:
      self._collected.append((self._collecting, now))


class FoundIntake(ObservedIntake):
  """Steps with timestamps: executions of what is the step, or was found to be. `over`, `underway`
  and `recorded` are for other threads.
  """

  def __init__(self, executed: Executed, directory: Any, run: str, process: int, attempt: int,
               ranks: int, losses: Losses, match: str, agree: Agree, detail: int | str = "auto",
               first_step: int = 0, each: bool = False):
    """Begins; see `ObservedIntake`.

    Args:
      executed: what has been executed since the recording began.
      directory, run, process, attempt, ranks, losses, detail: as there.
      match: pattern of the names of the step's programs; empty where they are to be found.
      agree: settles among all processes which step it is.
      first_step: number of the first step.
      each: each execution is a step, whichever program it is of: nothing is to be found.
    """
    self._executed, self._each = executed, each
    super().__init__(executed.collector, executed.programs, directory, run, process, attempt,
                     ranks, losses, detail)
    self._match, self._agree, self._host = match, agree, executed.host
    self.recorded: collections.deque[tuple[Sample, dict[str, float]]] = collections.deque()
    """What the loop has recorded of each step; filled by it, emptied here."""
    self._recorded, self._follows = 0, True
    self._pending: list[StepCalls] = []
    self._order: list[tuple[int, int]] = []
    self._since: float | None = None
    self._ran = 0.0
    self._others: list[tuple[int, int]] = []
    self._taken: list[dict[str, Any]] = []
    self._first = self._next = first_step
    self.found: Step | None = Step(("",), "", False, "") if each else None
    """What is taken for the step, once that is known."""
    self.last = False
    """Set by another thread: nothing will be executed any more."""

  @property
  def underway(self) -> bool:
    """Whether something has begun that is not over, or not taken in."""
    return any(host_ring.executions(buffer, number) > self._collector.passed(buffer, number)
               for number, buffers in self._buffers().items() for buffer in buffers)

  def reached(self, handed: int) -> bool:
    """Whether as many steps as the loop has recorded are over, and no other is under way."""
    return not self.underway and (self._over >= handed or not self._observed.runs)

  def finish(self) -> None:
    """Says that nothing will be executed any more."""
    self.last = True

  def record(self, sample: Sample, extra: dict[str, float]) -> None:
    """Takes what the loop says of its next step."""
    if len(self.recorded) < _MOST_RECORDED:
      self.recorded.append((sample, extra))
    else:
      self._follows = False

  def _finish(self) -> list[StepCalls]:
    """Takes out the steps that are over on all devices of this process, with what they ran."""
    steps = self._cut_steps(self._executed.order.settle(self._buffers()))
    self._over += len(steps)
    return self._as_recorded(steps)

  def _as_recorded(self, steps: list[StepCalls]) -> list[StepCalls]:
    """With what the loop has recorded of them. As long as it records each, one that it has not
    recorded yet waits."""
    self._pending += steps
    # The loop records a step before it dispatches the next.
    self._follows = self._follows and self._over <= self._recorded + len(self.recorded) + 1
    count = len(self._pending)
    if self._follows and not self.last:
      count = min(count, len(self.recorded))
    for place in range(count):
      with contextlib.suppress(IndexError):
        sample, extra = self.recorded.popleft()
        self._recorded += 1
        if self._follows:
          self._pending[place] = self._pending[place]._replace(sample=sample, extra=extra)
    taken, self._pending = self._pending[:count], self._pending[count:]
    return taken

  def _cut_steps(self, fresh: list[tuple[int, int]]) -> list[StepCalls]:
    """Takes in what was executed, and returns the steps that are over."""
    self._order += fresh
    self._host.keep()
    if self._order and self._since is None:
      self._since = time.monotonic()
    if self.found is None:
      self._take(self._agree(self._find(self._order), self.last, 0))
    self._note_others(fresh)
    if self.found is None:
      return []
    steps = self._cut(self.last)
    if self._is_over_for_good():
      steps += self._cut(True)
      if self._take(self._agree(self._find(self._others), False, self._next)):
        self._order, self._others = self._others, []
        steps += self._cut(self.last)
    self._leave_others()
    return steps

  def _take(self, found: Step | None) -> bool:
    """Takes programs for the step from now on; none, if there are none."""
    if found is None:
      return False
    self.found, self._ran = found, time.monotonic()
    self._taken.append({"programs": list(found.programs), "why": found.why,
                        "first_step": self._next})
    self._programs.tell_step({**self._taken[-1], "before": self._taken[:-1]})
    return True

  def _cut(self, last: bool) -> list[StepCalls]:
    assert self.found is not None
    names = [self._name(number) for number, _ in self._order]
    places, done = self.found.steps(names, last)
    steps = [self._step(begin, end, names) for begin, end in places]
    self._order = self._order[done:]
    return steps

  def _note_others(self, fresh: list[tuple[int, int]]) -> None:
    """Notes what was executed since the step last was."""
    if self.found is None:
      return
    for program, number in fresh:
      if self._name(program) in self.found.programs:
        self._others, self._ran = [], time.monotonic()
      else:
        self._others.append((program, number))

  def _is_over_for_good(self) -> bool:
    """Whether what was taken for the step has run for a while, and something else for much longer
    since: it was a warm-up. Processes but the first wait for that to say so."""
    if self._match or len(self._others) < _SURE_STEPS or self._since is None:
      return False
    ran = max(self._ran - self._since, _SURE_SECONDS)
    return self._process > 0 or time.monotonic() - self._ran > _LONGER * ran

  def _find(self, order: list[tuple[int, int]]) -> Step | None:
    """The step, as far as this process can tell; None as long as it isn't sure."""
    names = [self._name(number) for number, _ in order[-_LOOK_BACK:]]
    lasted = time.monotonic() - (self._since or time.monotonic())
    if not self.last and (len(names) < _SURE_STEPS or lasted < _SURE_SECONDS):
      return None
    seconds: dict[str, float] = collections.defaultdict(float)
    for number in {number for number, _ in order}:
      seconds[self._name(number)] += self._collector.seconds(number)
    found = finding.find(names, seconds, self._match)
    if found is None or self.last:
      return found
    often = names.count(found.programs[0]) >= _SURE_STEPS
    # One execution of something else took longer: that may be the first step of all.
    most = found.fraction >= _MOST_OF_TIME
    named = finding.is_beside(found.programs[0]) and (self.found or lasted < _ONLY_SECONDS)
    return found if often and (self._match or (most and not named)) else None

  def _name(self, number: int) -> str:
    return "" if self._each else self._programs.by_number[number].program.name

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
    return StepCalls(self._next - 1, tuple(ranges), _UNKNOWN, {})

  def _samples(self, steps: list[StepCalls], devices: list[DeviceSteps]) -> list[Sample]:
    native = self._host.samples(devices[0].end_ns, devices[0].whole)
    return [own if step.sample is _UNKNOWN else step.sample
            for step, own in zip(steps, native, strict=True)]

  def _leave_others(self) -> None:
    """Forgets the timestamps of programs that were never the step, but those since it last ran."""
    if self._each:
      return
    steps = {name for one in self._taken for name in one["programs"]}
    kept: dict[int, int] = {}
    for number, execution in self._others:
      kept.setdefault(number, execution)
    for number in self._observed.runs:
      if number in self._programs.by_number and self._name(number) not in steps:
        for buffer in range(self._collector.buffers):
          self._collector.take(buffer, number, kept.get(number, _ALL))
