"""Steps of ranks that go their own ways, with bounded staleness or parameter servers: each rank's,
since its own start.

No step is the job's: rank r's step k ends when it may begin the next one. What is not compute,
pause or update in it went into sending, fetching, and waiting for its turn or for the slowest.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.simulation.strategies import timeline
from jaxpace.simulation.strategies.cluster import Cluster, DrawnSteps, draw, messages, service
from jaxpace.simulation.strategies.schedule import PlayedSteps, Served, bounded, served
from jaxpace.simulation.strategies.settings import BoundedStaleness, ParameterServer


class OwnSteps(NamedTuple):
  """What ranks did, each by itself. K steps at most, R ranks; seconds; rows from `taken` on mean
  nothing."""

  begin: np.ndarray  # [K, R] float64 since the start
  end: np.ndarray  # [K, R] float64; the next one's begin
  compute: np.ndarray  # [K, R]
  gap: np.ndarray  # [K, R] pauses included, without the update
  caused: dict[str, np.ndarray]  # [K, R] of the gap, what has a cause
  taken: np.ndarray  # [R] steps of each rank

  def known(self) -> np.ndarray:
    """[K, R] bool, the rows that mean something."""
    return np.arange(len(self.begin))[:, None] < self.taken

  def lengths(self) -> np.ndarray:
    """[N] s, all steps of all ranks."""
    return (self.end - self.begin)[self.known()]


def play_own(strategy: BoundedStaleness | ParameterServer, cluster: Cluster, exchange: float,
             gap: float, key: jax.Array, ranks: int, steps: int, causes: tuple[str, ...] = (),
             together: int = 1) -> OwnSteps:
  """Plays a strategy without steps of the job.

  Args:
    strategy: which one.
    cluster: what it runs on.
    exchange: s that a rank takes to send and fetch with bounded staleness, on a quiet fabric;
      parameter servers take what `cluster` says.
    gap: s between steps, without pauses.
    key: of the run.
    ranks: R.
    steps: of each rank; of parameter servers as many updates as if each took these.
    causes, together: as for `jaxpace.simulation.noise.sample_causes`.
  """
  number = steps if isinstance(strategy, BoundedStaleness) else 2 * steps
  drawn, played = _compiled(strategy, ranks, number, steps * ranks, causes, together)(
      cluster, key, np.float32(exchange), np.float32(gap))
  drawn = jax.tree.map(np.asarray, drawn)
  if isinstance(played, PlayedSteps):
    begin, end = timeline.spans(played)
    following = np.concatenate([begin[1:], end[-1:]])
    return OwnSteps(begin, following, drawn.compute, drawn.pauses + np.float32(gap), drawn.caused,
                    np.full(ranks, steps))
  updates = timeline.updates(played)
  count = np.bincount(updates.rank, minlength=ranks)
  rows = int(count.max())
  end = np.zeros((rows, ranks))
  for rank in range(ranks):
    end[:count[rank], rank] = updates.time[updates.rank == rank]
  begin = np.concatenate([np.zeros((1, ranks)), end[:-1]])
  cut = jax.tree.map(lambda values: values[:rows], drawn)
  return OwnSteps(begin, end, cut.compute, cut.pauses + np.float32(gap), cut.caused, count)


@functools.lru_cache(maxsize=8)
def _compiled(strategy: Any, ranks: int, number: int, updates: int, causes: tuple[str, ...],
              together: int) -> Any:
  def play(cluster: Cluster, key: jax.Array, exchange: jax.Array,
           gap: jax.Array) -> tuple[DrawnSteps, PlayedSteps | Served]:
    drawn = draw(cluster, key, ranks, number, causes, together)
    work = drawn.work(cluster.update) + gap
    if isinstance(strategy, BoundedStaleness):
      return drawn, bounded(strategy.staleness, work, exchange)
    return drawn, served(work + jnp.asarray(messages(strategy, cluster, ranks).seconds,
                                            jnp.float32),
                         service(strategy, cluster), updates)

  return jax.jit(play)
