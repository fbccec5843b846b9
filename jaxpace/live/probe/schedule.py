"""Which process sends to which, in which round: every ordered pair once, each process in one pair a
round. Pure."""

from __future__ import annotations

import random

Round = tuple[tuple[int, int], ...]
"""Pairs (sender, receiver); no process is in two of them."""


def rounds(ends: int, at_once: bool = True, seed: int = 0) -> list[Round]:
  """Every ordered pair of `ends`, in rounds of disjoint pairs, in an order that covers all evenly
  if it is cut short.

  A tournament by the circle method: one end stays, the others turn. Each of its rounds is played
  twice, once each way.

  Args:
    ends: how many there are, at least 2.
    at_once: whether pairs may be measured at the same time; otherwise each has a round of its own.
    seed: of the order.

  >>> sorted(pair for one in rounds(3) for pair in one)
  [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
  >>> len(rounds(4)), len(rounds(4, at_once=False))
  (6, 12)
  """
  seats = list(range(ends)) + ([-1] if ends % 2 else [])
  found: list[Round] = []
  for _ in range(len(seats) - 1):
    pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
    pairs = [pair for pair in pairs if -1 not in pair]
    found += [tuple(pairs), tuple((b, a) for a, b in pairs)]
    seats = [seats[0], seats[-1], *seats[1:-1]]
  if not at_once:
    found = [(pair,) for one in found for pair in one]
  random.Random(seed).shuffle(found)
  return found
