"""What collectives cost in the alpha-beta model, in closed form: t = a·α + b·m·β.

α is the seconds a message takes, β the seconds a byte, m the bytes of the whole vector. The numbers
are those of the messages that the algorithms send, for any number of ranks: a test counts them.
Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005); Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
(2009); Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan" (2009); Bruck et al., "Efficient algorithms for all-to-all communications in multiport
message-passing systems" (1997).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

_T = TypeVar("_T", float, np.ndarray)
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, SHIFT = KINDS = ("all_reduce", "reduce_scatter",
                                                         "all_gather", "shift")
RING, TREE, DOUBLING, HALVING = "ring", "tree", "doubling", "halving"


def coefficients(kind: str, algorithm: str, ranks: int) -> tuple[float, float]:
  """Returns (a, b) of t = a·α + b·m·β.

  Args:
    kind: one of `KINDS`. The m of a shift is a rank's part: it is sent once.
    algorithm: of an all-reduce, with log2 rounded down and two more exchanges of everything (each α
      + m β) where doubling and halving meet a number of ranks that is no power of two: `ring` 2 (P
      - 1) (α + m β / P); `tree`, the pipelined double tree, 2 log2(P) α + 2 m β (with two ranks m
      β: neither has two children); `doubling`, recursive, log2(P) (α + m β); `halving`, then
      doubling, 2 log2(P) α + 2 (P - 1) / P m β (Rabenseifner). A reduce-scatter or all-gather takes
      P - 1 messages round a ring, else log2(P), rounded up, by Bruck's algorithm (halving or
      doubling on powers of two); (P - 1) / P m bytes either way.
    ranks: P; one alone sends nothing.

  Raises:
    ValueError: there is no such kind or algorithm.

  >>> coefficients("all_reduce", "ring", 4), coefficients("all_gather", "tree", 4)
  ((6, 1.5), (2, 0.75))
  >>> coefficients("all_reduce", "doubling", 8), coefficients("all_reduce", "doubling", 9)
  ((3, 3), (5, 5))
  """
  if kind not in KINDS or algorithm not in (RING, TREE, DOUBLING, HALVING):
    raise ValueError(f"There is no {kind} by {algorithm}: kinds are {', '.join(KINDS)}, algorithms "
                     f"{', '.join((RING, TREE, DOUBLING, HALVING))}.")
  if ranks < 2:
    return 0.0, 0.0
  if kind == SHIFT:
    return 1.0, 1.0
  levels = ranks.bit_length() - 1
  if kind != ALL_REDUCE:
    return (ranks - 1 if algorithm == RING else (ranks - 1).bit_length()), (ranks - 1) / ranks
  if algorithm == RING:
    return 2 * (ranks - 1), 2 * (ranks - 1) / ranks
  if algorithm == TREE:
    return 2 * levels, 2.0 if ranks > 2 else 1.0
  core = 1 << levels
  folding = 0 if core == ranks else 2
  if algorithm == DOUBLING:
    return levels + folding, levels + folding
  return 2 * levels + folding, 2 * (core - 1) / core + folding


def seconds(kind: str, algorithm: str, ranks: int, size: float, alpha: _T, beta: _T) -> _T:
  """Seconds of a collective of `size` bytes; alpha and beta as above, or arrays of them."""
  a, b = coefficients(kind, algorithm, ranks)
  return a * alpha + b * size * beta
