"""Finds the step of a program that nobody described, from what its devices executed. Pure.

A training loop repeats itself: the step is the program that takes most of the time, of those that
compute gradients where there are any, or the sequence of programs that repeats around it.
Evaluation, initialization and checkpoints run now and then, and stand beside it.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import re
import types
from collections.abc import Mapping, Sequence, Set

import jax

from jaxpace.core.observed import function_of
from jaxpace.runs.loops import that_train

_BESIDE = re.compile(
    r"(?:^|_)(?:eval\w*|valid\w*|test|predict\w*|infer\w*|sample|generate|init\w*|save|restore|"
    r"checkpoint\w*|load|metrics?)(?:_|$)", re.IGNORECASE)
"""Names of programs that are not the step, as long as there are others."""
_MOVES = ("_identity_fn", "_multi_slice", "reshard")
"""Names of programs by which JAX moves arrays between devices."""
_CONTROL = ("scan", "while", "cond")
"""Primitives of JAX's that run what a user wrote."""
_STEP = re.compile(r"(?:^|_)(?:(?:pre|re)?train|step|fine_?tune)", re.IGNORECASE)
"""Where a name says this first, it is of the step all the same: `train_step_with_metrics`."""
_UPDATE = re.compile(r"update|apply|optim|adam|sgd", re.IGNORECASE)
"""Names of programs that end a step of several executions of the main one: after so many gradients.
One that computes gradients does, too, such as a generator's after so many of its discriminator's.
Any other that runs once in so many may as well be an evaluation."""
_COPY = re.compile(r"target|teacher|polyak|averag|(?:^|_)ema(?:_|$)", re.IGNORECASE)
"""Unless it updates a copy of the parameters that steps update, every so many of them."""
_PART = 0.05
"""A program that takes less than this fraction of the main one's time, each time, is no part of the
step unless it ends it: small programs cut arguments up and average losses."""
_REGULAR = 0.9
"""Fraction of iterations in which a program runs equally often, if it is a part of the step."""
MOST_REPEATS = 64
"""Executions of the main program in one step at most, as in gradient accumulation. A program that
runs more rarely than once in so many is beside the step."""
_AS_THEY_ARE: Mapping[str, str] = types.MappingProxyType({})
FEWEST = 3
"""Executions of the main program without which nothing repeats."""


@dataclasses.dataclass(frozen=True)
class Step:
  """What was taken for the step: programs by name, and where one step ends and the next begins."""

  programs: tuple[str, ...]
  """Titles, as `ObservedProgram` has them: that of what takes most of the time first."""
  cut: str
  """The program at which steps are cut; it runs once per step. Empty where an execution of any of
  them is a step."""
  after: bool
  """Whether a step ends with that program; else it begins with it."""
  why: str
  """What it is and why, for people: "train_step, which takes ..."."""
  fraction: float = 1.0
  """Of the time of all programs that may be the step, what these take."""

  def steps(self, order: Sequence[str], last: bool = False) -> tuple[list[tuple[int, int]], int]:
    """Cuts executions into steps.

    >>> Step(("micro", "update"), "update", True, "").steps(["micro", "eval", "update", "micro"])
    ([(0, 3)], 3)

    Args:
      order: names of the programs executed, in order.
      last: whether nothing follows, so that the last step may be over.

    Returns:
      Place of each step's first execution and of the one after its last, and how many executions
      are dealt with. Some between these may be of programs that are beside the step. What runs
      without the main program, such as what places the parameters or another batch, is no step.
    """
    if not self.cut:
      return [(at, at + 1) for at, name in enumerate(order) if name in self.programs], len(order)
    places, done = self._pieces(order, last)
    return [(begin, end) for begin, end in places if self.programs[0] in order[begin:end]], done

  def _pieces(self, order: Sequence[str], last: bool) -> tuple[list[tuple[int, int]], int]:
    if self.after:
      ends = [at + 1 for at, name in enumerate(order) if name == self.cut]
      return list(zip([0, *ends], ends, strict=False)), ends[-1] if ends else 0
    begins = [at for at, name in enumerate(order) if name == self.cut]
    if len(self.programs) == 1:
      return [(at, at + 1) for at in begins], len(order)
    if last and begins and set(self.programs) <= set(order[begins[-1]:]):
      begins.append(len(order))
    return list(zip(begins, begins[1:], strict=False)), begins[-1] if begins else len(order)


def find(order: Sequence[str], seconds: Mapping[str, float], match: str = "",
         differentiated: Set[str] = frozenset(), shown: Mapping[str, str] = _AS_THEY_ARE
         ) -> Step | None:
  """Decides what the step is; None where nothing has repeated yet.

  >>> find(["init", *["train_step"] * 4, "evaluate"], {"train_step": 3.0, "evaluate": 9.0}).programs
  ('train_step',)
  >>> print(find(["loss", "update"] * 4, {"loss": 3.0, "update": 1.0}).why)
  loss and update, which repeat in turn and take 100 % of the time of 2 programs with collectives
  >>> find(["fit", "forward"] * 4, {"fit": 1.0, "forward": 20.0}, differentiated={"fit"}).programs
  ('fit', 'forward')

  Args:
    order: titles of the programs executed so far, in order.
    seconds: time that executions of each took in all.
    match: pattern of the names of the step's programs, such as "train*"; empty where the step is to
      be found.
    differentiated: titles of programs that compute gradients.
    shown: what people call them, where that is less.
  """
  candidates = _candidates(set(order), match)
  counts = collections.Counter(name for name in order if name in candidates)
  own = candidates if match else likely(candidates)
  repeated = {name for name in own if counts[name] >= FEWEST}
  trains = that_train({name: seconds.get(name, 0.0) for name in repeated}, differentiated)
  main = max(repeated if match else trains or repeated,
             key=lambda name: (seconds.get(name, 0.0), name), default=None)
  if main is None:
    return None
  rare = {name: every for name in counts if name != main
          and (match or name in trains or is_update(name))
          and 1 < (every := _repeats(order, name, main)) <= MOST_REPEATS}
  once = min(rare, key=lambda name: (rare[name], name)) if rare else main
  least = _PART * seconds.get(main, 0.0) / counts[main]
  others = [name for name in counts if name not in (main, once)
            and (match or seconds.get(name, 0.0) >= least * counts[name])]
  times = {name: every for name in dict.fromkeys((main, once, *others))
           if (every := _repeats(order, once, name)) > 0}
  ran = _first_whole([name for name in order if name in times], times)
  after = times[ran[0]] > 1
  cut = ran[0] if not after else ran[-1] if times[ran[-1]] == 1 else once
  programs = tuple(dict.fromkeys((main, *ran)))
  if programs == (main,) and (any_of := _any_of(order, main, trains, seconds)):
    names = ", ".join(shown.get(name, name) for name in any_of)
    return Step(any_of, "", False, f"any of {names}, none of which takes half the time")
  spent, whole = (sum(seconds.get(name, 0.0) for name in some) for some in (
      programs, {*programs, *(trains if main in trains else candidates)}))
  return Step(programs, cut, after, _why([
      shown.get(name, name) + (f" ({times[name]} times)" if times[name] > 1 else "")
      for name in programs],
      spent, seconds, match), spent / whole if whole else 1.0)


def ended_by(step: Step, update: str, times: int, shown: Mapping[str, str] = _AS_THEY_ARE) -> Step:
  """The step of one program where another ends it after so many executions."""
  main, last = (shown.get(name, name) for name in (step.cut, update))
  return Step((*step.programs, update), update, True,
              f"{main} ({times} times) and {last}, which repeat in turn", step.fraction)


def likely(names: Set[str]) -> set[str]:
  """Names of programs that may be the step, of some: those that aren't beside it, and of these
  those that aren't JAX's own, where there are any."""
  candidates = _candidates(set(names), "")
  return {name for name in candidates if not is_jax(name)} or candidates


def is_beside(title: str) -> bool:
  """Whether a program's name says that it is no step.

  >>> [is_beside(name) for name in ("init_train_state", "evaluate (train.py:9)", "train_step_test")]
  [True, True, False]
  """
  name = function_of(title)
  beside, step = _BESIDE.search(name), _STEP.search(name)
  return beside is not None and (step is None or beside.start() < step.start())


def is_update(title: str) -> bool:
  """Whether a program's name says that it ends a step, after so many executions of the main one.

  >>> [is_update(name) for name in ("apply_gradients", "train_step", "update_target")]
  [True, False, False]
  """
  name = function_of(title)
  return _UPDATE.search(name) is not None and _COPY.search(name) is None


def is_jax(title: str) -> bool:
  """Whether a program's name is one of JAX's own functions, which it compiles by themselves: what
  gathers values of all processes, moves arrays, or computes outside of any `jit`.

  >>> [is_jax(name) for name in ("_identity_fn", "_psum", "_mean", "_reduce_all", "train_step")]
  [True, True, True, True, False]
  """
  name = function_of(title)
  said = name.removeprefix("_")
  return name in _MOVES or hasattr(jax.numpy, said.removeprefix("reduce_")) or (
      said not in _CONTROL and hasattr(jax.lax, f"{said}_p"))


def _candidates(names: set[str], match: str) -> set[str]:
  if match:
    return {name for name in names if match in name
            or any(fnmatch.fnmatchcase(one, match) for one in (name, function_of(name)))}
  beside = {name for name in names if is_beside(name)}
  return names - beside if any(not is_jax(name) for name in names - beside) else names


def _any_of(order: Sequence[str], main: str, trains: Set[str], seconds: Mapping[str, float]
            ) -> tuple[str, ...]:
  """Programs any of which may be the next step, as tasks or buckets of lengths; () where one takes
  most of the time, or each has its loop, one after the other."""
  if main not in trains or seconds[main] >= 0.5 * sum(seconds[name] for name in trains):
    return ()
  at = {name: [place for place, each in enumerate(order) if each == name] for name in trains}
  together = [name for name in trains if at[name][0] < at[main][-1] and at[main][0] < at[name][-1]]
  return tuple(sorted(together, key=lambda name: -seconds[name])) if len(together) > 1 else ()


def _repeats(order: Sequence[str], each: str, other: str) -> int:
  """How often `other` runs between two executions of `each`; 0 where that differs, or never."""
  if each == other:
    return 1
  at = [place for place, name in enumerate(order) if name == each]
  if len(at) < FEWEST:
    return 0
  counts = collections.Counter(
      sum(name == other for name in order[begin:end])
      for begin, end in zip(at, at[1:], strict=False))
  often, times = counts.most_common(1)[0]
  return often if times >= _REGULAR * (len(at) - 1) else 0


def _first_whole(order: Sequence[str], times: Mapping[str, int]) -> Sequence[str]:
  """The first executions that make a step, given how often each program runs in one; the very
  first ones where none do."""
  length = sum(times.values())
  lots = (order[at:at + length] for at in range(len(order) - length + 1))
  return next((lot for lot in lots if collections.Counter(lot) == times), order[:length])


def _why(programs: Sequence[str], spent: float, seconds: Mapping[str, float], match: str) -> str:
  one = len(programs) == 1
  names = programs[0] if one else f"{', '.join(programs[:-1])} and {programs[-1]}"
  if match:
    return f"{names}, which {'matches' if one else 'match'} {match!r}"
  part = spent / total if (total := sum(seconds.values())) else 1.0
  if len(seconds) < 2:
    return f"{names}, the only program with collectives"
  repeat = "takes" if one else "repeat in turn and take"
  return (f"{names}, which {repeat} {100 * part:.0f} % of the time of {len(seconds)} programs "
          "with collectives")
