"""An exchange message by message: each rank goes on to its next round when its own messages are
over.

A message begins once both of its ranks are done with their rounds before it, takes its latency,
then flows at the rate that max-min sharing among all messages on the way leaves it; rates change
whenever one begins or ends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.simulation.sharing import max_min

_CLOSE = 1e-7
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


class Messages(NamedTuple):
  """What is sent, M messages."""

  # [M] ranks
  sources: np.ndarray
  # [M] ranks
  targets: np.ndarray
  # [M] number of the round, from 0 up
  rounds: np.ndarray
  # [M] float64
  bytes: np.ndarray
  # [M] float64 s
  latencies: np.ndarray
  # [M, H] links, negative for none
  paths: np.ndarray


class PlayedExchange(NamedTuple):
  """An exchange from its begin to its end."""

  stretches: list[Stretch]
  # [M] s for which each message flowed, its latency not counted
  flowing: np.ndarray


_WAITING, _STARTING, _FLOWING, _OVER = range(4)


def play(sent: Messages, capacities: np.ndarray) -> PlayedExchange | None:
  """Plays an exchange in which all ranks begin together.

  Args:
    sent: the messages.
    capacities: [L] float64 bytes a second; may be infinite.

  Returns:
    What happened; None where so many messages begin and end at instants of their own that playing
    them would take too long.
  """
  ranks = int(max(sent.sources.max(), sent.targets.max())) + 1
  count = int(sent.rounds.max()) + 1
  # A row beyond the last round: ranks that are done stay there.
  pending = np.zeros((count + 1, ranks), np.int64)
  for ends in (sent.sources, sent.targets):
    np.add.at(pending, (sent.rounds, ends), 1)
  pending[count] = 1
  stage = (pending > 0).argmax(axis=0)
  state = np.full(len(sent.bytes), _WAITING)
  left = np.asarray(sent.bytes, np.float64).copy()
  until, flowing = np.zeros(len(left)), np.zeros(len(left))
  stretches: list[Stretch] = []
  now, work = 0.0, 0
  while work <= _MOST_WORK:
    ready = ((state == _WAITING) & (stage[sent.sources] == sent.rounds)
             & (stage[sent.targets] == sent.rounds))
    until[ready] = now + sent.latencies[ready]
    state[ready] = _STARTING
    state[(state == _STARTING) & (until <= now)] = _FLOWING
    on_way, starting = np.flatnonzero(state == _FLOWING), np.flatnonzero(state == _STARTING)
    if not len(on_way) and not len(starting):
      return PlayedExchange(stretches, flowing)
    rates = max_min(sent.paths[on_way], capacities)
    work += ranks + len(on_way) * len(np.unique(rates))
    needed = np.where(np.isfinite(rates), left[on_way] / rates, 0.0)
    # What is nearly over by then ends with it.
    wait = min(needed.min() if len(on_way) else np.inf,
               (until[starting] - now).min() if len(starting) else np.inf)
    if wait > 0:
      stretches.append(_stretch(wait, sent.paths[on_way], rates, capacities))
    now += wait
    flowing[on_way] += wait
    state[starting[until[starting] <= now * (1 + 1e-12)]] = _FLOWING
    left[on_way] -= np.where(np.isfinite(rates), rates * wait, left[on_way])
    over = on_way[left[on_way] <= _CLOSE * sent.bytes[on_way]]
    state[over] = _OVER
    for ends in (sent.sources, sent.targets):
      np.subtract.at(pending, (sent.rounds[over], ends[over]), 1)
    if len(over):
      touched = np.unique(np.concatenate([sent.sources[over], sent.targets[over]]))
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
