"""What an all-reduce costs in the alpha-beta model: `jaxpace.costs.alpha_beta` by the names that
schedules have.

P ranks, m bytes, a latency of `alpha` seconds a message and `beta` seconds a byte. A single rank
needs none.
"""

from __future__ import annotations

from jaxpace.costs import alpha_beta
from jaxpace.costs.alpha_beta import ALL_REDUCE


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
  """2 log2(P) alpha + 2 (P - 1) / P m beta (Rabenseifner), for powers of two; else 2 more exchanges
  of m bytes."""
  return alpha_beta.seconds(ALL_REDUCE, alpha_beta.HALVING, ranks, size, alpha, beta)


def double_tree(ranks: int, size: float, alpha: float, beta: float) -> float:
  """2 h alpha + 2 m beta and what filling costs, h = log2(P) rounded down; with 2 ranks half of the
  bytes go each way.

  Up and down the trees at once, piece by piece: see `filling`.
  """
  plain = alpha_beta.seconds(ALL_REDUCE, alpha_beta.TREE, ranks, size, alpha, beta)
  hops = ranks.bit_length() - 1
  return plain + filling(hops, alpha, plain - 2 * hops * alpha)


def filling(hops: int, latency: float, transfer: float) -> float:
  """s that a pipeline up and down trees of `hops` hops takes beyond its latency on the way and its
  bytes.

  In k pieces, 3/4 ((h - 1) transfer / k + (k - 1) latency): the ways of the first piece, on which
  links idle, and the latencies of the others, in part hidden behind one another; k is what makes it
  least. The form is that of Sanders, Speck and Träff (2009), the factor fits pipelines played piece
  by piece, to 5 % of the whole from 4 ranks on (docs/measurements/simulation_accuracy.md).

  Args:
    hops: h, messages from the deepest leaf to the root.
    latency: s, of a piece on one hop.
    transfer: s of all bytes through the busiest link.

  >>> round(filling(6, 10e-6, 16e-3) * 1e3, 2), filling(1, 10e-6, 16e-3)
  (1.33, 0.0)
  """
  if hops <= 1 or transfer <= 0 or latency <= 0:
    return 0.0
  few = max(1, int(((hops - 1) * transfer / latency) ** 0.5))
  return 0.75 * min((hops - 1) * transfer / k + (k - 1) * latency for k in (few, few + 1))


def hierarchical(group: int, nodes: int, size: float, inner: tuple[float, float],
                 outer: tuple[float, float]) -> float:
  """2 (g - 1) (a1 + m b1 / g) + 2 (n - 1) (a2 + m b2 / (g n)).

  Args:
    group: g, ranks of a node.
    nodes: n.
    size: m, bytes.
    inner, outer: (alpha, beta) inside a node, and of one rank's way to its counterpart in the next
      node.
  """
  return ring(group, size, *inner) + ring(nodes, size / group, *outer)
