"""Which mode is best, by pairs of blocks with and without it on the running job. Pure: no clock, no
collector.

Every mode but "alone" is a candidate with a trial of its own against "alone"
(`jaxpace.coordination.trial`, the same that `jaxpace.guard` judges pacers by). The step of a trial
is a *unit* here: as many training steps as lie between two collections of the interpreter's own, or
`every`, if that is more. A block of a trial is two units.

Every return to "alone" comes right after a collection on all processes (that of the last unit
aligned, or that which thaws). So the interpreter's own begin together there and spread out only
after a while: "alone" looks better than it would in the long run, and what a mode gains is
underestimated.

The next pair goes to the candidate that looks best so far, each having had a few; one that looks
worse than "alone" is put off, which takes less evidence than to be dropped for good and keeps what
evidence there is. The one with the largest gain of those that have been shown to gain is in force
between trials; where there is none, "alone" is.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any, NamedTuple

from jaxpace.coordination import plain, trial
from jaxpace.live.housekeeping.modes import ALIGNED, ALONE, FROZEN, IN_SLACK

CANDIDATES = (FROZEN, ALIGNED, IN_SLACK)
LEVEL = 0.05
"""Chance that any candidate is ever chosen, or dropped, that does nothing."""

_PAIRS, _ON = 0, 1  # modes of a trial
_LAG = 1  # blocks: the next one is published while the one before it is done
_BLOCK = 2  # units
_FEWEST = 2  # pairs each candidate has before they are compared
_MORE = 8  # pairs another may still have once one has been shown to gain
_PATIENCE = 64  # pairs
_RETRY = 1000  # units; also for a candidate put off, twice as long each time
_WORSE = 2.0  # standard errors by which a candidate looks worse than "alone" when it is put off
_LONGEST_UNIT = 8  # times `every`


class Situation(NamedTuple):
  """What process 0 knows at the end of a block."""

  automatic: int  # full collections that the interpreter has begun by itself so far
  pause: float | None  # s that a collection takes; None until one was asked for
  # s by which the earliest rank is early in nine steps of ten; None where arrivals aren't shared
  slack: float | None


@dataclasses.dataclass
class _Entry:
  """One unit of one trial: the tag it was run under, and how long a step took once that is
  known."""

  tag: int
  seconds: float = math.nan


class _Contest:
  """One candidate's trial. Its updates are each given the step time of the unit before the last."""

  def __init__(self, mode: str, key: int):
    self.mode = mode
    self._trials = trial.trials(block=_BLOCK, key=key, level=LEVEL / len(CANDIDATES), settle=0,
                                patience=_PATIENCE, retry=_RETRY, lag=_LAG, xp=plain)
    # Every mode does something: no pair is void.
    self.state = self._trials.init()._replace(useful=True)
    self._entries: collections.deque[_Entry] = collections.deque()
    self._begun = False
    self._next: trial.Trial | None = None
    self.put_off_until = 0  # units
    self._off_for = _RETRY
    self.finding: tuple[float | None, float | None, float | None] = (None, None, None)

  def put_off(self, now: int) -> None:
    """Gives it no pair for a while."""
    self.put_off_until, self._off_for = now + self._off_for, 2 * self._off_for

  def peek(self) -> trial.Trial:
    """Returns the state with which the next unit would be run."""
    if not self._begun:
      return self.state
    if self._next is None:
      given = self._entries[0] if len(self._entries) > _LAG else _Entry(0)
      self._next = self._trials.update(given.seconds, given.tag, bool(given.tag & trial.ON),
                                       self.state)
    return self._next

  def recorded(self) -> None:
    """An entry may have got its time."""
    self._next = None

  def advance(self) -> _Entry:
    """Moves on to the next unit and returns its entry, to be filled with its time."""
    self.state, self._begun, self._next = self.peek(), True, None
    mean, low, high = (_known(value, None) for value in trial.effect(self.state, plain))
    # When it is tried again, there is no interval for a while.
    if high is not None or self.finding[2] is None:
      self.finding = mean, low, high
    if len(self._entries) > _LAG:
      self._entries.popleft()
    self._entries.append(_Entry(self.state.tag))
    return self._entries[-1]

  @property
  def shown(self) -> bool:
    """Whether it has been shown to gain, and need not be shown again yet."""
    return self.state.mode == _ON and self.peek().mode == _ON

  @property
  def pairs(self) -> int:
    return 0 if self.state.fresh else self.state.pairs

  @property
  def mean(self) -> float:
    """(on - off) / off of the step time; 0 where nothing is known of this round."""
    return (0.0 if self.state.fresh
            and not self.shown else _known(trial.effect(self.state, plain)[0], 0.0))

  @property
  def low(self) -> float:
    return (-math.inf if self.state.fresh
            and not self.shown else _known(trial.effect(self.state, plain)[1], -math.inf))

  @property
  def looks_worse(self) -> bool:
    """Whether so far it seems to make steps longer."""
    if self.pairs < _FEWEST:
      return False
    error = math.sqrt(self.state.squares / (self.pairs - 1) / self.pairs)
    return bool(self.state.mean > _WORSE * error)


class Proposal(NamedTuple):
  """A block to come."""

  mode: str
  entries: tuple[_Entry, ...]  # that its step time goes to
  steps: int


class Selection:
  """Proposes blocks and is told how they went, in the same order, one block late.

  Args:
    every: steps between two collections; all blocks are multiples of it.
    key: orders the blocks of each pair; 0 to 2^32 - 1.
  """

  def __init__(self, every: int, key: int = 0):
    self._every = every
    self._contests = {mode: _Contest(mode, (key + index) % 2**32)
                      for index, mode in enumerate(CANDIDATES)}
    self._under_way: collections.deque[Proposal] = collections.deque()
    self._unit: int | None = None  # steps, once the interpreter's own period is known
    self._observed = 0
    self._automatic: int | None = None
    self._slack_useful = False
    self._current: _Contest | None = None  # whose pair is under way
    self._units = 0  # proposed so far
    self._extra = 0  # pairs begun since a candidate was first shown to gain

  def propose(self) -> tuple[str, int]:
    """Returns the mode of the next block and its length in steps."""
    if self._unit is None:
      proposal = Proposal(ALONE, (), 2 * self._every)
    elif (contest := self._contest()) is not None:
      entry = contest.advance()
      proposal = Proposal(contest.mode if entry.tag & trial.ON else ALONE, (entry,), self._unit)
    else:
      proposal = self._between()
    self._units += self._unit is not None
    self._under_way.append(proposal)
    return proposal.mode, proposal.steps

  def record(self, seconds: float, situation: Situation) -> None:
    """Takes the mean step time of the oldest block proposed that was not recorded yet."""
    done = self._under_way.popleft()
    for entry in done.entries:
      entry.seconds = seconds
    for contest in self._contests.values():
      contest.recorded()
    # Slack that is shorter than a pause makes "in-slack" the same as "aligned".
    self._slack_useful = situation.slack is not None and situation.slack > 0 and (
        situation.pause is None or situation.slack >= situation.pause)
    if self._unit is None:
      self._observe(done.steps, situation.automatic)

  @property
  def chosen(self) -> str:
    """The mode in force between trials."""
    best = self._best()
    return ALONE if best is None else best.mode

  def summary(self) -> dict[str, Any]:
    """Returns what was found, as plain JSON values.

    Of each candidate the pairs since it was last tried again, the latest effect (on - off) / off of
    the mean step time with an interval, and that; null where nothing is known.
    """
    found: dict[str, Any] = {"chosen": self.chosen, "unit": self._unit,
                             "testing": self._current is not None}
    for mode, contest in self._contests.items():
      mean, low, high = contest.finding
      found[mode] = {"pairs": int(contest.state.pairs), "effect": mean, "interval": [low, high],
                     "shown": contest.shown}
    return found

  def _observe(self, steps: int, automatic: int) -> None:
    """Finds how far the interpreter's own pauses are apart: blocks must hold some of those as
    well."""
    if self._automatic is None:
      self._automatic = automatic  # The first block is still like the warm-up.
      return
    self._observed += steps
    seen = automatic - self._automatic
    if seen >= 2 or self._observed >= 2 * _LONGEST_UNIT * self._every:
      period = self._observed / seen if seen else math.inf
      self._unit = (self._every * max(1, min(_LONGEST_UNIT,
                                             math.ceil(min(period / self._every, _LONGEST_UNIT)))))

  def _best(self) -> _Contest | None:
    return min((one for one in self._contests.values() if one.shown), key=lambda one: one.mean,
               default=None)

  def _contest(self) -> _Contest | None:
    """Returns whose unit is next: the one whose pair is under way, else who is to have the next
    pair; None for none."""
    if self._current is not None:
      after = self._current.peek()
      if after.mode == _PAIRS and not _begins(after):
        return self._current
      if after.mode != _PAIRS:  # Decided: it is moved on with the others, between trials.
        self._current.advance()
      elif self._current.looks_worse:
        self._current.put_off(self._units)
      self._current = None
    best = self._best()
    if best is None:
      self._extra = 0
    waiting = [one for one in self._contests.values() if self._waits(one, best)]
    if not waiting:
      return None
    few = [one for one in waiting if one.pairs < _FEWEST]
    self._extra += best is not None
    self._current = (min(few, key=lambda one: one.pairs) if few
                     else min(waiting, key=lambda one: one.mean))
    return self._current

  def _waits(self, one: _Contest, best: _Contest | None) -> bool:
    """Whether a pair of it would tell something new."""
    if one.put_off_until > self._units or one.peek().mode != _PAIRS:
      return False
    if one.mode == IN_SLACK and not self._slack_useful:
      return False
    return best is None or (self._extra < _MORE * (len(CANDIDATES) - 1)
                            and one.low < best.mean and (
                                one.pairs < _FEWEST or one.mean < best.mean))

  def _between(self) -> Proposal:
    """A unit of the chosen mode. All trials that wait count it."""
    best = self._best()
    mode = ALONE if best is None else best.mode
    entries = []
    for contest in self._contests.values():
      if contest.peek().mode == _PAIRS:
        continue
      entry = contest.advance()
      if (contest.mode if entry.tag & trial.ON else ALONE) == mode:
        entries.append(entry)
    return Proposal(mode, tuple(entries), self._unit or self._every)


def _begins(state: trial.Trial) -> bool:
  return state.part == 0 and state.into == 0


def _known(value: float, otherwise: Any) -> Any:
  return float(value) if math.isfinite(value) else otherwise
