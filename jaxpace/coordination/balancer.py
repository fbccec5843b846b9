"""Micro-batches by measured speed: a rank that is slower for good gets fewer of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.coordination import knobs
from jaxpace.coordination.apportion import apportion, even
from jaxpace.coordination.knobs import Knobs
from jaxpace.coordination.trial import either
from jaxpace.core import fields
from jaxpace.core.durations import all_known, valid
from jaxpace.core.types import Balancer, Observation

TOTAL = ", the total_micro_batches of all ranks of the job together"
"""Ends the sentence on a capacity that is out of range."""
_ZERO, _HALF, _ONE, _NAN = (np.float32(x) for x in (0, 0.5, 1, np.nan))
_EVERY = 4
"""Steps from one look to the next."""
_PRIOR = np.float32(0.002)
_DOUBT = np.float32(32)
"""Weight of the assumption that a step is its micro-batches and nothing else: at least, and for the
squared error of a window, so that a rest is a quarter of an even share, give or take."""
_FORGETS = np.float32(0.5)
"""What is left of earlier evidence on that after a change of the counts."""
_MEMORY = 8
"""Windows that a rank's slowness is averaged over, at most."""
_KEEPS = 2
"""Windows that what was known before a change of the counts is worth after it."""
_CHANGED = np.float32(2.5)
"""Standard errors by which a window differs from what was known, where the rank's speed has
changed."""
_SURE = np.float32(4)
"""Standard errors of a window's step time within which counts do not differ. With fewer, one bad
window of steps that hang together keeps a healthy job from going back to even counts."""


class SpeedShares(NamedTuple):
  """State of `share_by_speed`, the same on all ranks. R ranks, a window of W steps."""

  times: jax.Array  # [W, R] float32 s, arrivals of the last steps, in no order
  ran: jax.Array  # [W, R] int32, micro-batches that were run in those
  took: jax.Array  # [W] float32 s, the job's step times in those; below 0 where not known
  seen: jax.Array  # [] int32, steps seen since the start
  counts: jax.Array  # [R] int32, wanted
  since: jax.Array  # [] int32, steps seen since they were last changed
  was: jax.Array  # [R] float32 s, median arrivals before that change
  had: jax.Array  # [R] int32, counts before that change; 0 where there was none
  # [] float32, what a step took with those beyond the busy time of its last rank, in micro-batches
  # of the median rank
  beyond: jax.Array
  fixed: jax.Array  # [2] float32, sums that give the rest of a step, see `_learnt`
  # [R] float32, a rank's time for a micro-batch relative to the others', over some windows
  slowness: jax.Array
  error: jax.Array  # [R] float32, standard error of it in a single window, as a part of it
  # [R] float32, variance of windows about `slowness`, in parts of it squared
  between: jax.Array
  age: jax.Array  # [R] int32, looks since the rank's speed was last seen to change
  apart: jax.Array  # [R] bool, whether the last look took its speed for another than the others'
  # [] float32, predicted of the last look: 1 - step time with new counts / step time with these
  gain: jax.Array
  knobs: Knobs  # [] threshold: the least gain to act on, where it was changed while the job ran


def share_by_speed(total_micro_batches: int, capacity: int, least: int = 1, window: int = 16,
                   gain: float = 0.02, noise: float = 3.0) -> Balancer:
  """Gives each rank as many micro-batches as its measured speed allows, same global batch.

  A rank's arrival A is how long it was busy, waiting left out; so A / (n + f) is its time for one
  micro-batch, n being its count and f what else it does in a step, in micro-batches. Of each step
  they are taken relative to the median of the ranks, and of those, rank by rank, the mean of the
  middle half of `window` steps. Its mean over up to eight windows that share no step is the rank's
  slowness; where a window is off that by 2.5 standard errors the rank has changed, and earlier
  windows are forgotten. A window's standard error comes from its quartiles, or from how much its
  halves, or windows, differ where that is more: steps that hang together, as under a quota of a
  processor, say little together. f follows from what changes of the counts have changed (least
  squares over the ranks, the less the more windows scatter), and is 0 before the first; below 0
  where a step's first micro-batches take less time than the others.

  Every fourth step of a full window the counts that would end the step earliest are found (exactly,
  `jaxpace.coordination.apportion`). They are taken if they promise at least `gain`; where counts
  are uneven already, sqrt(2 ln R) standard errors more, for so much the last of many ranks is last
  by chance. What a step takes beyond the busy time of its last rank is assumed to stay the same
  with other counts. For the counts before the last change it is known: what was measured then
  counts, as far as it differs by more than chance, and they are taken again where they promise more
  than all others. A slow rank may be slow in its collectives, too, which only the whole step shows.
  So that noise does not move work, a rank counts as different from the median of all ranks only if
  it is so by `noise` + sqrt(2 ln R) standard errors; once it does, until it is within one: the way
  back to even counts needs evidence, too. Who stands out by z standard errors does so by chance,
  too, and is taken to differ by 1 / z^2 less (James and Stein); ranks that do not differ are all
  taken to have the median's speed. After a change a whole window passes before the next, and no
  count is more than doubled or halved at once.

  A step in which an arrival is missing (or is no duration), or in which a rank that should work ran
  nothing, is not looked at: the counts stay.

  >>> balancer = share_by_speed(total_micro_batches=32, capacity=16)
  >>> state, update = balancer.init(4), jax.jit(balancer.update)
  >>> counts = even(32, 4)
  >>> for step in range(40):
  ...   # The last is three times slower.
  ...   busy = jnp.array([1e-3, 1e-3, 1e-3, 3e-3]) * counts.astype(float)
  ...   seen = Observation(jnp.int32(step), jnp.int32(0), busy, jnp.zeros(4),
  ...                      *[jnp.zeros(1)] * 4, counts=counts)
  ...   counts, state = update(seen, state)
  >>> print(counts)
  [10 10  9  3]

  Args:
    total_micro_batches: of all ranks of the job together, in a step; what the counts add up to.
    capacity: most micro-batches that one rank has room for in its part of the batch.
    least: fewest micro-batches of a rank, from 0. A rank with none is not measured any more.
    window: steps that a speed is taken over: 8, 16 or 32.
    gain: least part of the step's time that a change must promise.
    noise: standard errors by which a rank must differ, beside those that chance alone brings about
      among so many ranks.

  Returns:
    A balancer, for `jaxpace.shares`.

  Raises:
    ValueError: an argument is out of range; or, when it is initialised, the ranks together have no
      room for all micro-batches, or there are too few for them.
  """
  total = fields.whole("total_micro_batches", total_micro_batches, 1, 1 << 24)
  most = fields.whole("capacity", capacity, 1, total, more=TOTAL)
  fewest = fields.whole("least", least, 0, most)
  width = knobs.steps("window", window, 8)
  if width not in (8, 16, 32):
    raise ValueError(f"window={window!r} must be 8, 16 or 32 steps.")
  worth = knobs.number("gain", gain, 0, 1, "a share of the step's time, 0.02 for 2 %")
  errors = float(knobs.number("noise", noise, 0, 1000, "standard errors"))
  rows = jnp.arange(width, dtype=jnp.int32)

  def init(ranks: int) -> SpeedShares:
    if ranks * most < total:
      raise ValueError(
          f"capacity={most} is too small: {ranks} ranks have room for {ranks * most} "
          f"micro-batches, and the global batch has {total}. It takes at least "
          f"{math.ceil(total / ranks)}, and room to spare is what a slow rank's work moves into: "
          "twice that, say.")
    if ranks * fewest > total:
      raise ValueError(f"least={fewest} is too many: the global batch has {total} micro-batches "
                       f"for {ranks} ranks.")
    none = jnp.zeros((), jnp.int32)
    return SpeedShares(
        times=jnp.zeros((width, ranks), jnp.float32), ran=jnp.zeros((width, ranks), jnp.int32),
        took=jnp.zeros((width,), jnp.float32),
        seen=none, counts=jnp.asarray(even(total, ranks)), since=none,
        was=jnp.zeros((ranks,), jnp.float32), had=jnp.zeros((ranks,), jnp.int32),
        beyond=jnp.zeros((), jnp.float32),
        fixed=jnp.zeros((2,), jnp.float32), slowness=jnp.zeros((ranks,), jnp.float32),
        error=jnp.zeros((ranks,), jnp.float32), between=jnp.zeros((ranks,), jnp.float32),
        age=jnp.zeros((ranks,), jnp.int32), apart=jnp.zeros((ranks,), jnp.bool_),
        gain=jnp.zeros((), jnp.float32), knobs=knobs.init())

  def update(observation: Observation, state: SpeedShares) -> tuple[jax.Array, SpeedShares]:
    ran = observation.counts
    if isinstance(ran, tuple):
      return state.counts, state
    if ran.shape != state.counts.shape:
      raise ValueError(f"The counts are of {ran.shape[0]} ranks, and the balancer of "
                       f"{state.counts.shape[0]}: they are of another mesh. Make its state anew.")
    seen = observation.arrivals
    # Who should have worked and ran nothing (somebody else chose the counts) was not measured.
    measured = jnp.all((ran > np.int32(0)) | (state.counts == np.int32(0)))
    known = all_known(seen, observation.delays) & jnp.all(seen > _ZERO) & measured
    place = (rows == state.seen % np.int32(width))[:, None] & known
    one, took = known.astype(jnp.int32), observation.job_step_time
    state = state._replace(
        times=jnp.where(place, seen, state.times), ran=jnp.where(place, ran, state.ran),
        took=jnp.where(place[:, 0], jnp.where(valid(took), took, -_ONE), state.took),
        seen=state.seen + one, since=state.since + one)
    full = known & (state.seen >= np.int32(width)) & (state.since >= np.int32(width))
    due = full & (state.since % np.int32(_EVERY) == np.int32(0))
    state = either(due, lambda: look(state), lambda: state)
    return state.counts, state

  def look(state: SpeedShares) -> SpeedShares:
    """Estimates speeds, and changes the counts where that pays."""
    ranks = state.counts.shape[0]
    now = _middle_of(state.times, state.ran, state.counts, width)
    state = state._replace(fixed=_learnt(state, now, np.int32(width)))
    fixed = _rest(state, total / ranks)
    # [W, R]. A rank that ran nothing says nothing: as the median of the others.
    each = state.times / jnp.maximum(state.ran.astype(jnp.float32) + fixed, _HALF)
    # What befalls all ranks in a step alike, such as a wait for the host, is no difference between
    # them.
    common = jax.vmap(_median)(each, state.ran > 0)
    took = jnp.where(state.took < _ZERO, _NAN, state.took)
    relative = jnp.roll(
        jnp.column_stack([each, took]) / jnp.where(common > _ZERO, common, _ONE)[:, None],
        -(state.seen % np.int32(width)), axis=0)
    # The first and the last half, each in order, and then the whole.
    halves = _sorted(relative, width // 2)
    ordered = _merged(halves, width // 2)
    first, last, whole = (_inner(jnp.stack(lines)) for lines in (
        halves[:width // 2], halves[width // 2:], ordered))
    quartiles = ordered[3 * width // 4] - ordered[width // 4 - 1]
    works = state.counts > 0
    # Normal: a standard deviation is 0.74 quartile distances, that of a mean of the middle half is
    # 1.09 / sqrt(W) of it. Halves differ by more where steps hang together.
    error = jnp.maximum(np.float32(0.7413 * 1.0911 / math.sqrt(width)) * quartiles,
                        _HALF * jnp.abs(first - last))
    middle, took, error, unsure = whole[:-1], whole[-1], error[:-1], error[-1]
    state, relative = _followed(state, middle, works, width // _EVERY,
                                jnp.where(middle > _ZERO, error / middle, _ZERO))
    middle = state.slowness
    typical, error = _median(middle, works), relative * middle
    uneven = state.counts != jnp.asarray(even(total, ranks))
    wanted = np.float32(errors + math.sqrt(2 * math.log(max(ranks, 2))))
    limit, away = jnp.where(state.apart, _ONE, wanted) * error, middle - typical
    differs = works & (jnp.abs(away) > limit)
    # Who stands out does so by chance, too: shrunk as by the positive part of James and Stein.
    speed = typical + jnp.where(differs, away - error * error / away, _ZERO)

    low = jnp.maximum(np.int32(fewest), (state.counts + np.int32(1)) // np.int32(2))
    high = jnp.minimum(np.int32(most), jnp.maximum(np.int32(2) * state.counts, np.int32(1)))
    counts = apportion(speed, fixed, total, low, high, state.counts)
    longest, shortest, earlier = (jnp.max(speed * (n.astype(jnp.float32) + fixed))
                                  for n in (state.counts, counts, state.had))
    beyond = jnp.where(valid(took), jnp.maximum(took - longest, _ZERO), _ZERO)
    # With the counts before it was what it is now, and what it differed by beyond chance.
    more, chance = state.beyond - beyond, _SURE * unsure
    earlier += beyond + jnp.where(valid(took), more - jnp.clip(more, -chance, chance), _ZERO)
    returns = jnp.all(counts == state.had) | (
        jnp.any(state.had > np.int32(0)) & (earlier < shortest + beyond))
    counts = jnp.where(returns, state.had, counts)
    after = jnp.where(returns, earlier, shortest + beyond)
    promised = _ONE - after / (longest + beyond)
    # The last of many ranks whose speeds differ is the one that noise has made the last.
    by_chance = (np.float32(math.sqrt(2 * math.log(max(ranks, 2)))) * _median(relative, works)
                 * longest / (longest + beyond))
    enough = (knobs.chosen(state.knobs.threshold, worth)
              + jnp.where(jnp.any(uneven), by_chance, _ZERO))
    changes = (valid(longest) & (typical > _ZERO) & (promised >= enough)
               & jnp.any(counts != state.counts))
    return state._replace(
        apart=differs, gain=promised, counts=jnp.where(changes, counts, state.counts),
        since=jnp.where(changes, np.int32(0), state.since),
        # One window more is entered at the next look.
        age=jnp.where(changes,
                      jnp.minimum(state.age, np.int32((_KEEPS + 1) * (width // _EVERY) - 1)),
                      state.age),
        was=jnp.where(changes, now, state.was),
        had=jnp.where(changes, state.counts, state.had),
        beyond=jnp.where(changes, beyond, state.beyond))

  return Balancer(init, update, total)


def _followed(state: SpeedShares, middle: jax.Array, works: jax.Array, looks: int, alone: jax.Array
              ) -> tuple[SpeedShares, jax.Array]:
  """Enters a window's middles into what is known of the ranks' slowness.

  Where a rank's is as it was, within noise, it is averaged over windows that share no step, up to
  `_MEMORY` of them; where it is not, the rank has changed, and what was known is forgotten. The
  error of one window is known from itself, and from how much windows have differed where that is
  more: under a quota of a processor, say, steps hang together.

  Args:
    state: what is known.
    middle: [R] float32, of the window.
    works: [R] bool, ranks that have micro-batches.
    looks: looks from a window to the next one that shares no step with it.
    alone: [R] float32, its standard errors by the window alone, as a part of it.

  Returns:
    The state, and [R] float32: standard errors of its `slowness`, as a part of it.
  """
  known, per = state.age > 0, np.int32(looks)
  before, spread = _errors(state, works, looks)
  differs = jnp.abs(middle - state.slowness) > _CHANGED * state.slowness * jnp.sqrt(before + spread)
  anew = jnp.logical_not(known) | differs
  replaces = anew | (state.age < per)
  enters = jnp.logical_not(replaces) & (state.age % per == per - np.int32(1))
  windows = jnp.minimum((state.age + np.int32(1)) // per, np.int32(_MEMORY)).astype(jnp.float32)
  weight = jnp.where(replaces, _ONE, jnp.where(enters, _ONE / jnp.maximum(windows, _ONE), _ZERO))
  away = (middle - state.slowness) / jnp.where(state.slowness > _ZERO, state.slowness, _ONE)
  between = jnp.where(replaces, _ZERO, (_ONE - weight) * (state.between + weight * away * away))
  follows = (_ONE / jnp.minimum(state.age + np.int32(1),
                                np.int32(_MEMORY * looks)).astype(jnp.float32))
  error = jnp.where(anew, alone, state.error + (alone - state.error) * follows)
  state = state._replace(
      slowness=state.slowness + weight * (middle - state.slowness), error=error, between=between,
      age=jnp.where(anew, np.int32(1), jnp.minimum(state.age + np.int32(1), np.int32(1 << 20))))
  return state, jnp.sqrt(_errors(state, works, looks)[0])


def _errors(state: SpeedShares, works: jax.Array, looks: int) -> tuple[jax.Array, jax.Array]:
  """Squared standard errors of what is known, and of a window, as parts of it: both [R]
  float32."""
  windows = jnp.clip(state.age // np.int32(looks), 1, _MEMORY).astype(jnp.float32)
  alone = jnp.maximum(state.error, _median(state.error, works))
  unbiased = windows / jnp.maximum(windows - _ONE, _ONE)
  single = jnp.maximum(alone * alone, unbiased * state.between)
  return single / windows, single


def _learnt(state: SpeedShares, now: jax.Array, width: np.int32) -> jax.Array:
  """Enters what the last change of the counts has shown of the rest of a step: [2] float32 sums.

  Of a rank's arrivals a at n micro-batches and a' at n' comes f = (a n' - a' n) / (a' - a), if a
  is in proportion to n + f. Over all ranks, by least squares: sum of x y over sum of x^2, with
  x = (a' - a) / a and y = n' - n (1 + x). Once, when a window has passed since the change.
  `now` is [R] float32 s, the window's median arrivals at the counts.
  """
  then = state.was
  due = (state.since >= width) & (state.since < width + np.int32(_EVERY)) & (now > _ZERO) & (
      then > _ZERO) & (state.had > 0) & (state.counts > 0) & (state.had != state.counts)
  x = jnp.where(due, now / jnp.where(due, then, _ONE) - _ONE, _ZERO)
  y = jnp.where(due, state.counts.astype(jnp.float32) - state.had.astype(jnp.float32) * (_ONE + x),
                _ZERO)
  sums = jnp.stack([jnp.sum(x * y), jnp.sum(x * x)])
  return jnp.where(jnp.any(due), _FORGETS * state.fixed + sums, state.fixed)


def _rest(state: SpeedShares, even_share: float) -> jax.Array:
  """The rest of a step in micro-batches: [] float32, from a quarter of an even share below 0 to an
  even share.

  Ridge regression: a rest is 0 by so much as windows are noisy. It is below 0 where the first
  micro-batches of a step come cheaper, as under a quota of a processor that is whole again after
  waiting.
  """
  noise = _median(state.error, state.counts > 0)
  weight = _PRIOR + _DOUBT * noise * noise
  return jnp.clip(state.fixed[0] / (state.fixed[1] + weight), np.float32(-0.25 * even_share),
                  np.float32(even_share))


def _inner(ordered: jax.Array) -> jax.Array:
  """The mean of the middle half of ordered values: [n, R] -> [R]."""
  return jnp.mean(ordered[len(ordered) // 4:3 * len(ordered) // 4], axis=0)


def _middle_of(times: jax.Array, ran: jax.Array, counts: jax.Array, width: int) -> jax.Array:
  """[R] median of the arrivals of steps that ran these counts; 0 where there were few of them."""
  same = ran == counts
  number = jnp.sum(same, axis=0, dtype=jnp.int32)
  ordered = jnp.stack(_sorted(jnp.where(same, times, np.float32(np.inf)), width))
  place = jnp.maximum(number - np.int32(1), np.int32(0)) // np.int32(2)
  middle = jnp.take_along_axis(ordered, place[None], axis=0)[0]
  return jnp.where(number >= np.int32(width // 2), middle, _ZERO)


def _sorted(values: jax.Array, length: int) -> list[jax.Array]:
  """Sorts every `length` lines, a power of two, by Batcher's odd-even merging: [W, R] -> W of [R].

  Minima and maxima alone: XLA's own sort compares one by one.
  """
  lines, span = list(values), 1
  while span < length:
    lines, span = _merged(lines, span), 2 * span
  return lines


def _merged(lines: list[jax.Array], span: int) -> list[jax.Array]:
  """Merges every two neighbouring runs of `span` ordered lines."""
  lines, step = list(lines), span
  while step >= 1:
    for begin in range(step % span, len(lines) - step, 2 * step):
      for i in range(begin, min(begin + step, len(lines) - step)):
        if i // (2 * span) == (i + step) // (2 * span):
          lines[i], lines[i + step] = (jnp.minimum(lines[i], lines[i + step]),
                                       jnp.maximum(lines[i], lines[i + step]))
    step //= 2
  return lines


def _median(values: jax.Array, among: jax.Array) -> jax.Array:
  """The lower median of some values: [R] float32, [R] bool -> []; 0 if there are none."""
  number = jnp.sum(among, dtype=jnp.int32)
  ordered = jnp.sort(jnp.where(among, values, np.float32(np.inf)))
  middle = ordered[jnp.maximum(number - np.int32(1), np.int32(0)) // np.int32(2)]
  return jnp.where(number > 0, middle, _ZERO)
