"""Which call of an observed function an execution is of, and what was decided for that beside the
function."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable, Mapping, Sequence

from jaxpace.core.observed import MOST_DECIDED, Decisions, ObservedFunction
from jaxpace.record.columns import StepCalls


def call_of(started: dict[int, int], program: int, execution: int) -> int:
  """Returns which call of an observed function an execution is of: the k-th execution of any of its
  programs is of the k-th call.

  Args:
    started: how many executions each of them has begun so far; brought up to date. Executions come
      in the order in which they began.
    program: number of the one executed.
    execution: how many of that began before.
  """
  started[program] = execution + 1
  return sum(started.values()) - 1


class DecidedSteps:
  """What was decided for steps beside them, by what was executed in each."""

  def __init__(self, started: Mapping[int, int]):
    """Begins; `started` is how many executions each program has begun so far."""
    self._before = started
    self._started: dict[ObservedFunction, dict[int, int]] = {}
    # By program, from which execution on what was decided.
    self._decided: dict[int, list[tuple[int, Decisions]]] = collections.defaultdict(list)

  def note(self, executions: Iterable[tuple[int, int]], functions: Sequence[ObservedFunction]
           ) -> None:
    """Takes note of executions, program and number of each, in the order in which they began."""
    deciding = {number: each for each in functions if each.decided and _counts_calls(each)
                for number in each.runs}
    if not deciding:
      return
    decided = {each: each.decided for each in deciding.values()}
    for program, number in executions:
      function = deciding.get(program)
      if function is None:
        continue
      if function not in self._started:
        self._started[function] = {each: self._before.get(each, 0) for each in function.runs}
      call = call_of(self._started[function], program, number)
      at = bisect.bisect_right(decided[function], call, key=_begins) - 1
      found = decided[function][at][1] if at >= 0 else {}
      noted = self._decided[program]
      if not noted or noted[-1][1] is not found:
        noted.append((number, found))
        del noted[:-MOST_DECIDED]

  def beside(self, steps: Sequence[StepCalls]) -> list[StepCalls]:
    """The same steps, with what was decided for each."""
    return [step._replace(decisions=self._of(step)) for step in steps]

  def _of(self, step: StepCalls) -> Decisions:
    for one in step.ranges:
      noted = self._decided.get(one.program, [])
      at = bisect.bisect_right(noted, one.begin, key=_begins) - 1
      if at >= 0 and noted[at][1]:
        return noted[at][1]
    return {}


def _counts_calls(function: ObservedFunction) -> bool:
  """Whether a function's calls are counted: not from the first one on that runs unmodified."""
  return function.plan is None or not any(one.bare for one in function.plan.programs)


def _begins(each: tuple[int, Decisions]) -> int:
  return each[0]
