"""Who comes last, by how long each rank's kernels ran: all that dumps without times tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.trace.nccl.jobs import Key, Members
from jaxpace.trace.nccl.records import Record


class RankWaits(NamedTuple):
  """A rank in all collectives of which every rank's time is known."""

  rank: int
  host: str
  collectives: int
  last: int
  """Of these, in how many it came last, alone or with others: its kernel ran shortest."""
  waited: float
  """Seconds that it waited for later ranks: beyond the shortest kernel."""


def by_duration(records: Sequence[Record], who: Members) -> list[RankWaits]:
  """Adds up who waited.

  A kernel runs from when its rank arrives until the collective is done, at nearly the same time on
  all ranks: the last rank's runs shortest, and what the others run longer they have waited.

  Returns:
    A row a rank, that which came last most often first.
  """
  took: dict[tuple[Key, int], dict[int, float]] = defaultdict(dict)
  sizes: dict[str, int] = {}
  for record in records:
    rank = who.ranks.get((record.communicator, record.rank))
    if rank is not None:
      took[(record.communicator, record.kind), record.number][rank] = record.exec_us / 1e6
      sizes[record.communicator] = record.ranks
  number: dict[int, int] = defaultdict(int)
  last: dict[int, int] = defaultdict(int)
  waited: dict[int, list[float]] = defaultdict(list)
  for (key, _), seconds in took.items():
    if len(seconds) < 2 or len(seconds) != sizes[key[0]]:
      continue
    shortest = min(seconds.values())
    for rank, value in seconds.items():
      number[rank] += 1
      waited[rank].append(value - shortest)
      last[rank] += value == shortest
  rows = [RankWaits(rank, who.process[rank][0] if rank in who.process else "", number[rank],
                    last[rank], float(np.sum(waited[rank]))) for rank in sorted(number)]
  return sorted(rows, key=lambda row: (-row.last, row.waited, row.rank))
