"""What an all-reduce costs in the alpha-beta model, in closed form.

P ranks, m bytes, a latency of `alpha` seconds a message and `beta` seconds a byte: Thakur, Rabenseifner, Gropp,
"Optimization of Collective Communication Operations in MPICH" (2005); Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations" (2009). A single rank needs none.
"""

from __future__ import annotations

import math


def ring(ranks: int, size: float, alpha: float, beta: float) -> float:
  """2 (P - 1) (alpha + m beta / P); for many ranks 2 m beta.

  >>> round(ring(512, 20e9, 0.0, 1 / 50e9), 3)  # 10 B parameters in fp16 at 50 GB/s
  0.798
  """
  return 2 * (ranks - 1) * (alpha + size * beta / ranks)


def recursive_doubling(ranks: int, size: float, alpha: float, beta: float) -> float:
  """log2(P) (alpha + m beta), for powers of two; else 2 more exchanges."""
  return (math.floor(math.log2(ranks)) + _folding(ranks)) * (alpha + size * beta)


def halving_doubling(ranks: int, size: float, alpha: float, beta: float) -> float:
  """2 log2(P) alpha + 2 (P - 1) / P m beta (Rabenseifner), for powers of two; else 2 more exchanges of m bytes."""
  core = 1 << (ranks.bit_length() - 1)
  inner = 2 * math.log2(core) * alpha + 2 * (core - 1) / core * size * beta
  return inner + _folding(ranks) * (alpha + size * beta)


def double_tree(ranks: int, size: float, alpha: float, beta: float) -> float:
  """2 log2(P) alpha + 2 m beta, pipelined in pieces small enough; with 2 ranks half of the bytes go each way."""
  if ranks < 2:
    return 0.0
  sent = size if ranks > 2 else size / 2  # with two, neither rank has two children in a tree
  return 2 * math.ceil(math.log2(ranks)) * alpha + 2 * sent * beta


def hierarchical(group: int, nodes: int, size: float, inner: tuple[float, float], outer: tuple[float, float]) -> float:
  """2 (g - 1) (a1 + m b1 / g) + 2 (n - 1) (a2 + m b2 / (g n)).

  Args:
    group: g, ranks of a node.
    nodes: n.
    size: m, bytes.
    inner, outer: (alpha, beta) inside a node, and of one rank's way to its counterpart in the next node.
  """
  return (2 * (group - 1) * (inner[0] + size * inner[1] / group)
          + 2 * (nodes - 1) * (outer[0] + size * outer[1] / (group * nodes)))


def _folding(ranks: int) -> int:
  return 0 if ranks & (ranks - 1) == 0 else 2
