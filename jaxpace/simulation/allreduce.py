"""What an all-reduce costs in the alpha-beta model: `jaxpace.alpha_beta` by the names that schedules have.

P ranks, m bytes, a latency of `alpha` seconds a message and `beta` seconds a byte. A single rank needs none.
"""

from __future__ import annotations

from jaxpace import alpha_beta
from jaxpace.alpha_beta import ALL_REDUCE


def ring(ranks: int, size: float, alpha: float, beta: float) -> float:
  """2 (P - 1) (alpha + m beta / P); for many ranks 2 m beta.

  >>> round(ring(512, 20e9, 0.0, 1 / 50e9), 3)  # 10 B parameters in fp16 at 50 GB/s
  0.798
  """
  return alpha_beta.seconds(ALL_REDUCE, alpha_beta.RING, ranks, size, alpha, beta)


def recursive_doubling(ranks: int, size: float, alpha: float, beta: float) -> float:
  """log2(P) (alpha + m beta), for powers of two; else 2 more exchanges."""
  return alpha_beta.seconds(ALL_REDUCE, alpha_beta.DOUBLING, ranks, size, alpha, beta)


def halving_doubling(ranks: int, size: float, alpha: float, beta: float) -> float:
  """2 log2(P) alpha + 2 (P - 1) / P m beta (Rabenseifner), for powers of two; else 2 more exchanges of m bytes."""
  return alpha_beta.seconds(ALL_REDUCE, alpha_beta.HALVING, ranks, size, alpha, beta)


def double_tree(ranks: int, size: float, alpha: float, beta: float) -> float:
  """2 log2(P), rounded down, alpha + 2 m beta, in pieces small enough; with 2 ranks half of the bytes go each way."""
  return alpha_beta.seconds(ALL_REDUCE, alpha_beta.TREE, ranks, size, alpha, beta)


def hierarchical(group: int, nodes: int, size: float, inner: tuple[float, float], outer: tuple[float, float]) -> float:
  """2 (g - 1) (a1 + m b1 / g) + 2 (n - 1) (a2 + m b2 / (g n)).

  Args:
    group: g, ranks of a node.
    nodes: n.
    size: m, bytes.
    inner, outer: (alpha, beta) inside a node, and of one rank's way to its counterpart in the next node.
  """
  return ring(group, size, *inner) + ring(nodes, size / group, *outer)
