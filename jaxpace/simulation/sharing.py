"""Who gets how much of a link that several want: max-min fair shares, exact.

`max_min` is for messages on a fabric, in numpy, made once for each pattern of messages; `progress`
is for jobs inside a compiled loop. Both raise all rates together and fix those that meet a full
link (progressive filling; Bertsekas and Gallager, "Data Networks", 6.5.2).

`play` goes through an exchange message by message. A message begins once both of its ranks are done
with their rounds before it, takes its latency, then flows at the rate that max-min sharing among
all messages on the way leaves it; rates change whenever one begins or ends.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_CLOSE = 1e-12
"""Links whose fair share is this close to the smallest one's, as a share of it, are filled in the
same round."""


def max_min(paths: np.ndarray, capacities: np.ndarray) -> np.ndarray:
  """Shares links max-min fairly among messages.

  Args:
    paths: [F, H] int, links each message crosses; negative for none. A link twice in a path counts
      twice.
    capacities: [L] float64 bytes per second; may be infinite.

  Returns:
    [F] float64 bytes per second; infinite for a message that no finite link holds back.
  """
  paths, left = np.asarray(paths), np.asarray(capacities, np.float64).copy()
  links = np.where(paths >= 0, paths, len(left))
  rates = np.full(len(paths), np.inf)
  open_flows = np.ones(len(paths), bool)
  # One row beyond the last link takes what is no link.
  left = np.append(left, np.inf)
  while open_flows.any():
    crossing = np.bincount(links[open_flows].ravel(), minlength=len(left))[: len(left)]
    crossing[-1] = 0
    share = np.divide(left, crossing, out=np.full(len(left), np.inf), where=crossing > 0)
    least = share.min()
    if not np.isfinite(least):
      break  # nothing finite is left in the way of the others
    full = share <= least * (1 + _CLOSE)
    held = open_flows & full[links].any(axis=1)
    rates[held] = least
    taken = np.bincount(links[held].ravel(), minlength=len(left))[: len(left)] * least
    left = np.maximum(left - np.where(np.isfinite(left), taken, 0), 0)
    open_flows &= ~held
  return rates


def progress(usage: jax.Array, weights: jax.Array, sending: jax.Array) -> jax.Array:
  """How fast each job's collective goes, as a share of its speed on a quiet fabric.

  Speeds rise in proportion to the weights until a job has its full speed or meets a full link:
  weighted max-min. As many rounds as there are jobs suffice, each fixes one at least.

  Args:
    usage: [J, L] float32, the share of each link's capacity that a job takes at full speed; at most
      1.
    weights: [J] float32, positive.
    sending: [J] bool, who wants anything.

  Returns:
    [J] float32 from 0 to 1; 0 for those not sending.
  """
  one, zero = np.float32(1), np.float32(0)
  weights = jnp.where(sending, weights, zero)

  def turn(_: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    speed, fixed = state
    rising = jnp.where(fixed, zero, weights)
    room = jnp.maximum(one - jnp.sum(jnp.where(fixed, speed, zero)[:, None] * usage, axis=0), zero)
    wanted = jnp.sum(rising[:, None] * usage, axis=0)
    by_link = jnp.where(wanted > zero, room / jnp.where(wanted > zero, wanted, one),
                        np.float32(np.inf))
    own = jnp.where(rising > zero, one / jnp.where(rising > zero, rising, one), np.float32(np.inf))
    level = jnp.minimum(jnp.min(by_link), jnp.min(own))
    near = level * np.float32(1 + 1e-6)
    meets = jnp.any((usage > zero) & (by_link <= near)[None], axis=1) | (own <= near)
    newly = ~fixed & meets
    speed = jnp.where(newly, jnp.minimum(rising * level, one), speed)
    return speed, fixed | newly

  begin = jnp.zeros_like(weights), ~sending
  return jax.lax.fori_loop(0, usage.shape[0], turn, begin)[0]


_OVER_AT = 1e-7
"""Of a message, the share that is left when it counts as over: what rounding leaves; those that end
together do."""
_MOST_WORK = 6_000_000
"""Messages on the way times different rates among them, added up over the instants at which
something begins or ends, before `play` gives up: a few seconds."""


class Stretch(NamedTuple):
  """A piece of an exchange in which the same messages are on the way."""

  # s, on a quiet fabric
  seconds: float
  # [L] share that it takes of what each link has for it; 0 where a link has no limit
  usage: np.ndarray
  # [L] messages on each link
  flows: np.ndarray


_WAITING, _STARTING, _FLOWING, _OVER = range(4)


def play(sources: np.ndarray, targets: np.ndarray, rounds: np.ndarray, sizes: np.ndarray,
         latencies: np.ndarray, paths: np.ndarray, capacities: np.ndarray
         ) -> tuple[list[Stretch], np.ndarray] | None:
  """Plays an exchange of M messages in which all ranks begin together.

  Args:
    sources: [M] ranks that send.
    targets: [M] ranks that receive.
    rounds: [M] number of each one's round, from 0 up.
    sizes: [M] float64 bytes.
    latencies: [M] float64 s.
    paths: [M, H] links, negative for none.
    capacities: [L] float64 bytes per second; may be infinite.

  Returns:
    Its stretches, and [M] s for which each message flowed, its latency not counted; None where so
    many messages begin and end at instants of their own that playing them would take too long.
  """
  ranks = int(max(sources.max(), targets.max())) + 1
  count = int(rounds.max()) + 1
  # A row beyond the last round: ranks that are done stay there.
  pending = np.zeros((count + 1, ranks), np.int64)
  for ends in (sources, targets):
    np.add.at(pending, (rounds, ends), 1)
  pending[count] = 1
  stage = (pending > 0).argmax(axis=0)
  state = np.full(len(sizes), _WAITING)
  left = np.asarray(sizes, np.float64).copy()
  until, flowing = np.zeros(len(left)), np.zeros(len(left))
  stretches: list[Stretch] = []
  now, work = 0.0, 0
  while work <= _MOST_WORK:
    ready = ((state == _WAITING) & (stage[sources] == rounds)
             & (stage[targets] == rounds))
    until[ready] = now + latencies[ready]
    state[ready] = _STARTING
    state[(state == _STARTING) & (until <= now)] = _FLOWING
    on_way, starting = np.flatnonzero(state == _FLOWING), np.flatnonzero(state == _STARTING)
    if not len(on_way) and not len(starting):
      return stretches, flowing
    rates = max_min(paths[on_way], capacities)
    work += ranks + len(on_way) * len(np.unique(rates))
    needed = np.where(np.isfinite(rates), left[on_way] / rates, 0.0)
    # What is nearly over by then ends with it.
    wait = min(needed.min() if len(on_way) else np.inf,
               (until[starting] - now).min() if len(starting) else np.inf)
    if wait > 0:
      stretches.append(_stretch(wait, paths[on_way], rates, capacities))
    now += wait
    flowing[on_way] += wait
    state[starting[until[starting] <= now * (1 + 1e-12)]] = _FLOWING
    left[on_way] -= np.where(np.isfinite(rates), rates * wait, left[on_way])
    over = on_way[left[on_way] <= _OVER_AT * sizes[on_way]]
    state[over] = _OVER
    for ends in (sources, targets):
      np.subtract.at(pending, (rounds[over], ends[over]), 1)
    if len(over):
      touched = np.unique(np.concatenate([sources[over], targets[over]]))
      stage[touched] = (pending[:, touched] > 0).argmax(axis=0)
  return None


def _stretch(seconds: float, paths: np.ndarray, rates: np.ndarray,
             capacities: np.ndarray) -> Stretch:
  used = paths >= 0
  links = np.where(used, paths, len(capacities)).ravel()
  each = np.repeat(np.where(np.isfinite(rates), rates, 0.0), paths.shape[1])
  taken = np.bincount(links, each, minlength=len(capacities) + 1)[:-1]
  flows = np.bincount(links, minlength=len(capacities) + 1)[:-1]
  usage = np.divide(taken, capacities, out=np.zeros(len(capacities)), where=np.isfinite(capacities))
  return Stretch(float(seconds), usage, flows)
