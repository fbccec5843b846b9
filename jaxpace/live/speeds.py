"""Counts of an observed step by what all ranks know of how long each was busy in its calls.

Every process reads its own devices' busy times from the ring on the host. Every few steps a small
compiled program beside the step gathers them on all processes, four steps later the balancer is
asked on what came, and four later still its counts are taken: nobody waits for either. While counts
stay as they are that happens less and less often, down to once in some ten seconds, since the
exchange costs every rank some milliseconds. The step's own program stays as it is.

The exchange leaves with a call of the step, in its thread: so it has the same place among the job's
programs on all processes, whenever counts are asked for. These may be asked for four steps ahead,
from another thread too.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpace.coordination import trial
from jaxpace.core import own_context
from jaxpace.core.observed import Decisions, ObservedFunction
from jaxpace.core.types import Balancer
from jaxpace.live.asked import MOST, NAN, AskedBalancer, ShareState, restored
from jaxpace.live.busy_times import BusyTimes
from jaxpace.live.control_file import ControlRequest
from jaxpace.live.gathered import TOLD, Gathered
from jaxpace.observation.clocks import host_ring

_LOG = logging.getLogger("jaxpace")
EVERY, _RAREST = 4, 1024
"""Steps from one exchange to the next, at least and at most."""
_MOST_AHEAD = 2 * EVERY
"""Steps that counts are asked for ahead of the step's calls, at most and rounded up."""
RARELY = 10.0
"""Seconds from one exchange to the next, at most, once counts have stayed for long: an exchange
costs some 10 ms where four gloo processes share two cores, and is to cost a thousandth."""
_PATIENT = 4
"""Exchanges that change nothing, after which they are half as frequent."""
_SAYS_SO = 60
"""Seconds without a call of the step for which counts that are asked for too early wait, until a
warning says so, once."""
Known = tuple[np.ndarray, Any]
"""The counts in force, and the balancer's state."""


class SharedCounts:
  """The counts of each step of an observed step: decided beside it, alike on all ranks."""

  def __init__(self, mesh: Mesh, ranks: np.ndarray, balancer: Balancer, capacity: int):
    """Begins evenly, at step 0; `ranks` is the rank along the data axis of each device of the
    mesh."""
    self._shape, self._ranks = (balancer.micro_batches, capacity), ranks.reshape(-1)
    self._count = int(ranks.max()) + 1
    self._gathered = Gathered(mesh, 2 * MOST + 4)
    self._busy: BusyTimes | None = None
    self._warned = self._said = False
    self._asked = AskedBalancer(balancer, self._count)
    self._even = self._asked.even
    # What steers from which step on, in their order; the first of them is in force.
    self._steered: collections.deque[tuple[int, ControlRequest]] = collections.deque(
        [(0, ControlRequest())])
    places = host_ring.ranks()
    self._places = {places[device]: int(rank)
                    for device, rank in zip(mesh.devices.flat, self._ranks, strict=True)
                    if device.process_index == jax.process_index()}
    # As its digest; 0 from where it has failed, too.
    self._print = self._asked.digest
    self._begin(self._asked.fresh(0)[0])
    self._exchanges = True

  def _begin(self, state: ShareState) -> None:
    """Begins at a state, with nothing on its way."""
    self._number, self._counts = int(state.step), state.counts
    self._ran = state.ran.copy()
    # Steps that counts were asked for, and those of them that were called; of those that were not
    # the number, the counts and what was known before. Held where they change, and notified with
    # each call.
    self._asked_for = self._called = 0
    self._ahead: collections.deque[tuple[int, np.ndarray, Decisions, Known]] = collections.deque()
    self._calls = threading.Condition()
    # The thread that the step is called in; 0 where it isn't the one that asks for counts.
    self._thread = threading.main_thread().ident or 0
    self._inner = self._asked.tree(state.balancer)
    self._known: Known = self._counts, self._inner
    # Of the last steps: the number of the call, and the counts.
    self._recent: dict[int, tuple[int, np.ndarray]] = {}
    # Of the steps whose busy times were sent, room for `MOST`: their numbers, -1 where there is
    # none, and the counts [MOST, R] of each.
    self._sent: tuple[np.ndarray, np.ndarray] | None = None
    self._decided: Any = None
    # The call with which the next exchange is due, and how many have changed nothing.
    self._due, self._unchanged = 0, 0
    # A digest of the counts that this process decided on and not all others; 0 for none.
    self._refused = 0
    self._step_time = 0.0
    # What the guard has found, by the name of its column; and what is recorded of counts.
    self._judged: dict[str, float] = {}
    self._mode: float | None = None
    self._described: tuple[np.ndarray, Decisions] | None = None

  @property
  def state(self) -> ShareState:
    """What a checkpoint holds: of the first step that was not called yet, as if nobody had asked
    for its counts. How far ahead another thread asks differs between processes."""
    with self._calls:
      ahead = list(self._ahead)
      ran = self._ran - np.sum([each[1] for each in ahead], axis=0, dtype=np.int64)
      number, (counts, inner) = (
          (ahead[0][0], ahead[0][-1]) if ahead else (self._number, self._known))
    return ShareState(np.asarray(number), counts, ran,
                      tuple(map(own_context.fetch, jax.tree.leaves(inner))))

  def restore(self, state: Any) -> None:
    """Goes on from a checkpoint; of other ranks or another balancer only the step is kept, with a
    notice."""
    if self._asked_for:
      raise ValueError("feed.restore comes before the first feed.next: counts on their way would "
                       "be lost on this process alone. Make the feed anew, with jaxpace.shares.")
    self._begin(restored(state, self._asked.fresh, self._sound))

  def steer(self, request: ControlRequest, step: int) -> int:
    """Goes by other settings, and returns from which step on: every process says so before the same
    `step`, and how many steps after it were asked for by then differs."""
    begins = step + _MOST_AHEAD
    self._steered.append((begins, request))
    return begins

  def next(self, step: ObservedFunction) -> tuple[int, np.ndarray]:
    """Returns the number and the counts of the next step that comes. Raises ValueError where more
    than `EVERY` steps were asked for ahead of the step's calls, by the thread that calls it."""
    number, place = self._number, self._asked_for
    if place % EVERY == 0:
      # What the call four steps ago has asked the balancer, whenever this is.
      self._until_called(place - EVERY + 1)
      self._take()
    while len(self._steered) > 1 and self._steered[1][0] <= number:
      self._steered.popleft()
    steered = self._steered[0][1]
    counts = self._counts if steered.allows(number) else self._even
    decisions = self._decisions(counts)
    with self._calls:
      self._ran += counts
      self._number, self._asked_for = number + 1, place + 1
      self._ahead.append((number, counts, decisions, self._known))
      self._known = self._counts, self._inner
    if self._shape not in step.shared:
      step.shared |= {self._shape}
    asks = threading.get_ident()
    step.coming.append(functools.partial(self._called_with, step, asks, steered.threshold))
    return number, counts

  def _until_called(self, calls: int) -> None:
    """Waits until so many steps were called, in another thread."""
    if self._called >= calls:
      return
    said = (f"feed.next was called {self._asked_for + 1} times and the step {self._called} times: "
            "once a step, at most four ahead, with the function that the loop calls, and of one "
            "feed. A step that was lowered and compiled by hand, or is called inside another "
            "jitted function, is not seen; to skip steps, restore a feed.state() of a later one.")
    if self._thread == threading.get_ident():
      raise ValueError(said)
    waited, before = 0, self._called
    with self._calls:
      while not self._calls.wait_for(lambda: self._called >= calls, 1.0):
        if not threading.main_thread().is_alive():
          raise RuntimeError("feed.next waited for a call of the step, and the program ends.")
        # Steps may be long, or compiled for minutes.
        waited, before = waited + 1 if self._called == before else 0, self._called
        if waited > _SAYS_SO and not self._said:
          self._said = True
          _LOG.warning("%s It waits for the next call, in another thread.", said)

  def _called_with(self, step: ObservedFunction, asked_in: int, threshold: float | None) -> None:
    """What comes with a call of the step, just before it: the exchange, if it is due."""
    number, counts, decisions, _ = self._ahead.popleft()
    step.decide(decisions)
    if self._busy is None or self._busy.step is not step:
      self._busy = BusyTimes(step, self._gathered.own)
      self._recent.clear()
    place, here = self._called, threading.get_ident()
    self._thread = here if here == asked_in else 0
    if place == 0:
      self._gathered.begins(counts)
    if place % EVERY == 0 and self._exchanges:
      self._ask(threshold)
      if not self._exchanges:
        self._recent.clear()
      elif place >= self._due:
        self._send(number, place)
      elif place % MOST == 0:
        self._guarded(self._busy.keep_up)
    if self._exchanges:
      self._recent[number] = step.calls, counts
    with self._calls:
      self._called = place + 1
      self._calls.notify_all()

  def _decisions(self, counts: np.ndarray) -> Decisions:
    """What whoever records the step writes of its counts."""
    if self._described is None or self._described[0] is not counts:
      alike = {"work_uneven": float(np.any(counts != self._even)), **self._judged}
      self._described = counts, {
          "micro_batches": {place: int(counts[rank]) for place, rank in self._places.items()},
          **{name: dict.fromkeys(self._places, value) for name, value in alike.items()}}
    return self._described[1]

  def _take(self) -> None:
    """Takes the counts that were decided, if they can be, and all processes have decided them."""
    if not self._exchanges:
      self._counts = self._even
    decided, self._decided = self._decided, None
    if decided is None:
      return
    wanted, self._refused = self._wanted(decided), 0
    if not np.any(wanted != self._counts):
      self._unchanged += 1
    elif self._gathered.agree(self._number, wanted, self._step_time):
      self._counts, self._due, self._unchanged = wanted, 0, 0
    else:
      # The next exchange shows whether one came late, or decided otherwise and knows of nothing.
      self._refused, self._unchanged = _digest(wanted), self._unchanged + 1

  def _wanted(self, decided: Any) -> np.ndarray:
    """The counts that were decided, or those in force where these can't be."""
    if not self._print:
      return self._counts
    try:
      if isinstance(decided, Exception):
        raise decided
      counts, after = own_context.fetch(decided[0]), jax.block_until_ready(decided[1])
      self._note({name: float(own_context.fetch(value)) for name, value in decided[2].items()})
    except Exception as error:
      _LOG.warning("The balancer failed at step %d, so work is shared evenly from the next "
                   "exchange on: %s", self._number, str(error).strip().rpartition("\n")[2])
      self._print = 0.0
      return self._counts
    self._inner = after
    if self._sound(counts):
      return counts
    if not self._warned:
      self._warned = True
      _LOG.warning("The balancer asks for counts of %s (-1 is for NaN, or for no whole number), "
                   "which do not add up to %d with at most %d each: the counts stay.",
                   counts.tolist(), *self._shape)
    return self._counts

  def _note(self, found: dict[str, float]) -> None:
    """Takes note of what a guard has found, and says what it has decided."""
    mode, before = found.pop("mode", None), self._mode
    self._judged, self._described, self._mode = found, None, mode
    if mode == before or mode is None or before is None or mode == trial.PAIRS:
      return
    kept = mode == trial.KEPT
    _LOG.log(logging.INFO if kept else logging.WARNING,
             "Work shared by speed %s from step %d on. Effect on the mean step: %+.1f %% "
             "[%+.1f, %+.1f], of %d pairs of blocks, each clipped at 50 %%.",
             "stays" if kept else "is off", self._number,
             *(100 * found[name] for name in ("work_effect", "work_effect_low",
                                              "work_effect_high")), found["work_pairs"])

  def _ask(self, threshold: float | None) -> None:
    """Asks the balancer on what was gathered. Its answer takes its place behind the steps that were
    dispatched, so it is not waited for here."""
    sent, self._sent = self._sent, None
    rows = self._gathered.received()
    if sent is None or rows is None:
      return
    busy, took, (refused, ran, prints, coming) = (
        rows[:, :MOST], rows[:, MOST:-4].max(axis=0), rows[:, -4:].T)
    self._gathered.refuse_unequal(coming.astype(np.int64))
    # All processes see the same, and end together.
    agree, same, alike = (np.all(each == each[0]) for each in (prints, ran, refused))
    self._exchanges = bool(agree and same and alike and prints[0])
    if not self._exchanges:
      if not np.all(prints):
        if self._print:
          _LOG.warning("The balancer failed in another process of this job, which says why: work "
                       "is shared evenly.")
      elif not agree:
        _LOG.warning("The job's processes were given different balancers, or run different "
                     "versions of jax: their counts would differ, so work is shared evenly. Give "
                     "jaxpace.shares the same arguments in every process.")
      elif not alike:
        _LOG.warning("The job's processes decided on different counts before step %d: a balancer "
                     "answered differently on hosts that compute differently, or by what one "
                     "process alone knows. Work is shared evenly.", self._number)
      else:
        _LOG.warning("The job's processes ran different counts in steps up to %d: examples were "
                     "left out or trained on twice in them. From here on work is shared evenly.",
                     sent[0].max())
      return
    self._step_time = _typical(took, self._step_time)
    try:
      self._decided = self._asked(sent[0], self.by_rank(busy), took, sent[1], self._counts,
                                  self._inner, threshold)
    except Exception as error:
      self._decided = error

  def _send(self, number: int, place: int) -> None:
    """Has the busy times gathered of the last steps since the last time, but the very last, which
    may be under way."""
    over = sorted(each for each in self._recent if each < number - EVERY)
    if not over:
      return
    if not self._gathered.meets(number):
      self._exchanges = False
      return
    numbers = over[-MOST:]
    ran = [self._recent.get(each) for each in (*numbers, numbers[-1] + 1)]
    for each in over:
      del self._recent[each]
    # A call that ran without timestamps has counted no further.
    calls = [one[0] if one and after and one[0] < after[0] else None
             for one, after in itertools.pairwise(ran)]
    steps, counts = np.full(MOST, -1, np.int32), np.stack([self._counts] * MOST)
    steps[:len(numbers)] = numbers
    counts[:len(numbers)] = [one[1] for one in ran[:-1] if one]
    self._sent = steps, counts
    self._gathered.send(self._own_rows(calls, _digest(counts[:len(numbers)]), number))
    self._due = place + min(EVERY << min(self._unchanged // _PATIENT, 8),
                            _rarest(self._step_time))

  def _own_rows(self, calls: Sequence[int | None], digest: int, number: int) -> np.ndarray:
    """[own devices, 2 MOST + 4] float32: busy times in s and what steps took, NaN where nothing is
    known, whatever went wrong; digests of the counts that not all agreed to and of what steps ran,
    which balancer this process has, and which step it asks for next."""
    assert self._busy is not None, "made before the first exchange"
    rows = np.full((len(self._gathered.own), 2 * MOST + 4), NAN, np.float32)
    rows[:, -4], rows[:, -3], rows[:, -2] = self._refused, digest, self._print
    # How far ahead another thread asks differs from moment to moment.
    rows[:, -1] = (self._number if self._thread else number + 1) % TOLD
    found = self._guarded(self._busy.of, calls)
    if found is not None:
      rows[:, :-4].reshape(len(rows), 2, MOST)[:, :, :len(calls)] = found
    return rows

  @staticmethod
  def _guarded(reads: Callable[..., Any], *args: Any) -> Any:
    """What reading the ring gives; None, and the job goes on, whatever goes wrong."""
    try:
      return reads(*args)
    except Exception:
      _LOG.debug("shares", exc_info=True)
      return None

  def by_rank(self, rows: np.ndarray) -> np.ndarray:
    """The longest of each rank's devices, NaN if one is not known: [devices, steps] -> [steps,
    R]."""
    return np.stack([rows[self._ranks == rank].max(axis=0) for rank in range(self._count)], axis=1)

  def _sound(self, counts: np.ndarray) -> bool:
    return bool(counts.shape == (self._count,) and counts.min() >= 0
                and counts.sum() == self._shape[0] and counts.max() <= self._shape[1])


def _digest(counts: np.ndarray) -> int:
  """What tells counts from others: a whole number above 0 that float32 holds."""
  return 1 + zlib.crc32(counts.tobytes()) % (TOLD - 1)


def _typical(took: np.ndarray, before: float) -> float:
  """The median step, s, of those known, [steps] float32; what it was where none is."""
  known = took[~np.isnan(took)]
  return float(np.median(known)) if known.size else before


def _rarest(step_time: float) -> int:
  """Steps of so many s between exchanges that fill `RARELY` seconds, a power of two: the same on
  all processes."""
  return 1 << int(np.clip(RARELY / max(step_time, 1e-9), EVERY, _RAREST)).bit_length() - 1
