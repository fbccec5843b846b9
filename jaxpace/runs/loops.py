"""The loops of a run, one after the other, such as pretraining and training; and which of them a
report is on."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T", bound=Hashable)
LEAST = 0.05
"""What computes gradients is training if it takes this fraction of the time of what takes most."""


def that_train(seconds: Mapping[T, float], differentiated: Set[T]) -> set[T]:
  """Those that compute gradients, and take some of the time.

  >>> that_train({"fit": 1.0, "forward": 20.0, "tune": 0.1}, {"fit", "tune"})
  {'fit'}

  Args:
    seconds: that each takes in all.
    differentiated: those that compute gradients.
  """
  most = max(seconds.values(), default=0.0)
  return {each for each in seconds.keys() & differentiated if seconds[each] >= LEAST * most}


@dataclasses.dataclass(frozen=True)
class Loop:
  """What ran in a loop, once or several times."""

  programs: tuple[str, ...]
  """Names of the programs that were its step, the one that takes most of the time first."""
  spans: tuple[tuple[int, int], ...]
  """Its steps, each time the first and the last one."""
  trains: bool = False
  """Whether its step computes gradients."""
  seconds: float = 0.0
  """From its first step's beginning to its last one's end, summed over the times."""

  @property
  def longest(self) -> tuple[int, int]:
    """The first and the last step of the time when it ran for most steps."""
    return max(self.spans, key=lambda span: span[1] - span[0])

  def holds(self, steps: np.ndarray) -> np.ndarray:
    """[n] bool, which of [n] step numbers are its own."""
    return np.any(list(self._times(steps)), axis=0)

  def timed(self, steps: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> Loop:
    """The same with its time, by when [n] steps began and ended on one rank."""
    return dataclasses.replace(self, seconds=1e-9 * sum(
        float(end_ns[own].max() - start_ns[own].min()) for own in self._times(steps) if own.any()))

  def _times(self, steps: np.ndarray) -> Iterator[np.ndarray]:
    return ((steps >= first) & (steps <= last) for first, last in self.spans)


def step_found(info: Mapping[str, Any]) -> Mapping[str, Any]:
  """What `run.json` says was found to be the step, last and in the loops before; empty where a
  function was instrumented or observed, whose name it may say.

  >>> step_found({"settings": {"step": {"programs": ["fit"]}}}), step_found({"settings": None})
  ({'programs': ['fit']}, {})
  >>> step_found({"settings": {"step": "train_step"}})
  {}
  """
  said = (info.get("settings") or {}).get("step")
  return said if isinstance(said, Mapping) else {}


def loops_in(info: Mapping[str, Any], last: int) -> list[Loop]:
  """The loops that `run.json` tells of; none where that is one alone.

  Args:
    info: `run.json`.
    last: the run's last step.
  """
  told = step_found(info)
  each = [*(told.get("before") or ()), told]
  # Between two a number is left out.
  ends = [*((one.get("first_step") or 0) - 2 for one in each[1:]), last]
  found: dict[frozenset[str], Loop] = {}
  for one, end in zip(each, ends, strict=True):
    programs, trains = tuple(one.get("programs") or ()), bool(one.get("trains"))
    loop = found.get(frozenset(programs), Loop(programs, (), trains))
    found[frozenset(programs)] = dataclasses.replace(
        loop, spans=(*loop.spans, (one.get("first_step") or 0, end)))
  return list(found.values()) if len(found) > 1 else []


def by_weight(loops: Iterable[Loop]) -> tuple[Loop, ...]:
  """Those that took any time, the one that a report is on first: what takes most of the time, of
  those that train where there are any.

  >>> by_weight([Loop(("pretrain",), (), True, 2.0), Loop(("fit",), (), True, 3.0),
  ...            Loop(("draw",), (), False, 9.0)])[0].programs
  ('fit',)
  """
  seconds = {loop: loop.seconds for loop in loops if loop.seconds > 0}
  training = that_train(seconds, {loop for loop in seconds if loop.trains})
  return tuple(sorted(seconds, key=lambda loop: (loop not in training, -loop.seconds)))
