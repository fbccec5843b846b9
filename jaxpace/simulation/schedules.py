"""The messages of an all-reduce, round by round, for four algorithms; and how long they take on a fabric.

A round's messages start together and the round ends with the last of them: its latency plus its bytes at the rate that
max-min sharing leaves it. On a fabric where nothing is shared the totals are the closed forms of
`jaxpace.simulation.allreduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.simulation.fabric import Fabric, FabricError
from jaxpace.simulation.sharing import max_min


class Round(NamedTuple):
  """Messages that start together."""

  sources: np.ndarray  # [F] int, ranks
  targets: np.ndarray  # [F] int, ranks
  bytes: float  # of each message
  times: int = 1  # the round is repeated so often, each time after the last
  hops: int = 1  # latencies that one pass takes: a pipeline is filled hop by hop


class Load(NamedTuple):
  """What an all-reduce does to a fabric."""

  seconds: float  # it takes on a quiet fabric
  usage: np.ndarray  # [L] share of what each link has for it that it takes meanwhile, on average
  flows: np.ndarray  # [L] most of its messages that are on each link at once
  busy: np.ndarray  # [R] s for which each rank of the fabric has messages on the way between nodes, both ways added up


def ring(ranks: Sequence[int], size: float) -> list[Round]:
  """Reduce-scatter and all-gather around a ring: 2 (P - 1) rounds of size / P bytes to the next rank."""
  at = np.asarray(ranks)
  if len(at) < 2:
    return []
  return [Round(at, np.roll(at, -1), size / len(at), 2 * (len(at) - 1))]


def recursive_doubling(ranks: Sequence[int], size: float) -> list[Round]:
  """log2(P) exchanges of everything; ranks beyond a power of two first hand theirs to one that takes part."""
  at, folded, unfolded = _fold(ranks, size)
  return [*folded, *(Round(at, at[np.arange(len(at)) ^ (1 << k)], size) for k in range(_bits(len(at)))), *unfolded]


def halving_doubling(ranks: Sequence[int], size: float) -> list[Round]:
  """Recursive halving, then doubling (Rabenseifner): 2 log2(P) exchanges, of half as much each further one."""
  at, folded, unfolded = _fold(ranks, size)
  count = _bits(len(at))
  halving = [Round(at, at[np.arange(len(at)) ^ (len(at) >> (k + 1))], size / 2 ** (k + 1)) for k in range(count)]
  return [*folded, *halving, *reversed(halving), *unfolded]


def double_tree(ranks: Sequence[int], size: float) -> list[Round]:
  """Two binary trees, each for half of the bytes, in which every rank but one is a leaf of one: up, then down.

  Pipelined in many small pieces: it takes the latency of the deepest way up and down once, and every link carries its
  bytes all along. (Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
  2009.)
  """
  at = np.asarray(ranks)
  count = len(at)
  if count < 2:
    return []
  edges = _tree(count)
  # The second tree is the first, mirrored (even numbers of ranks) or shifted by one (odd): leaves become inner nodes.
  other = count - 1 - edges if count % 2 == 0 else (edges + 1) % count
  both = np.concatenate([edges, other])
  children, parents = at[both[:, 0]], at[both[:, 1]]
  depth = _bits(count)  # of an in-order tree: a test counts it
  return [Round(children, parents, size / 2, hops=depth), Round(parents, children, size / 2, hops=depth)]


def hierarchical(ranks: Sequence[int], size: float, group: int) -> list[Round]:
  """Reduce-scatter in each group, ring all-reduces across groups of the pieces, all-gather in each group.

  Args:
    ranks: in order; each `group` of them is a node.
    size: bytes.
    group: ranks of a node; it divides their number.
  """
  at = np.asarray(ranks)
  if len(at) % group:
    raise FabricError(f"group={group} must divide the number of ranks, {len(at)}.")
  grid = at.reshape(-1, group)
  nodes = len(grid)
  inner = Round(grid.ravel(), np.roll(grid, -1, axis=1).ravel(), size / group, group - 1)
  outer = Round(grid.ravel(), np.roll(grid, -1, axis=0).ravel(), size / (group * nodes), 2 * (nodes - 1))
  return [r for r in (inner, outer, inner) if r.times and len(at) > 1]


ALGORITHMS: dict[str, Callable[[Sequence[int], float], list[Round]]] = {
    "ring": ring, "recursive_doubling": recursive_doubling, "halving_doubling": halving_doubling,
    "double_tree": double_tree}
"""Those that need no more than the ranks; `hierarchical` needs the size of a node too."""
NAMES = (*ALGORITHMS, "hierarchical")


def rounds(algorithm: str, ranks: Sequence[int], size: float, per_node: int) -> list[Round]:
  """The rounds of one all-reduce.

  Raises:
    FabricError: there is no such algorithm.
  """
  if algorithm == "hierarchical":
    return hierarchical(ranks, size, per_node)
  if algorithm not in ALGORITHMS:
    raise FabricError(f"algorithm={algorithm!r} must be one of {', '.join(NAMES)}.")
  return ALGORITHMS[algorithm](ranks, size)


def load(schedule: Sequence[Round], fabric: Fabric, background: np.ndarray | None = None) -> Load:
  """Plays the rounds on a fabric that carries nothing else, or steady traffic of others.

  Args:
    schedule: rounds, one after the other.
    fabric: what they run on.
    background: [L] share of each link that others' traffic takes throughout, 0 to below 1; none by default.

  Returns:
    How long they take and what they use. Links without a limit count as unused.
  """
  capacities = fabric.capacities()
  if background is not None:
    capacities = capacities * (1 - np.asarray(background))
  carried, most = np.zeros(len(capacities)), np.zeros(len(capacities), np.int64)
  busy = np.zeros(fabric.ranks)
  seconds = 0.0
  for part in schedule:
    paths = fabric.paths(part.sources, part.targets)
    rates = max_min(paths, capacities)
    transfer = np.where(np.isfinite(rates), part.bytes / rates, 0.0)
    latency = part.hops * fabric.latencies(part.sources, part.targets)
    seconds += part.times * float((latency + transfer).max())
    away = np.where(part.sources // fabric.per_node != part.targets // fabric.per_node, part.times * transfer, 0.0)
    for ends in (part.sources, part.targets):
      busy += np.bincount(ends, away, minlength=fabric.ranks)
    crossing = np.bincount(paths[paths >= 0].ravel(), minlength=len(capacities))
    carried += crossing * part.bytes * part.times
    most = np.maximum(most, crossing)
  room = np.where(np.isfinite(capacities), capacities, 0) * seconds
  usage = np.divide(carried, room, out=np.zeros_like(carried), where=room > 0)
  return Load(seconds, usage, most, busy)


def _fold(ranks: Sequence[int], size: float) -> tuple[np.ndarray, list[Round], list[Round]]:
  """The largest power of two of the ranks, and the rounds by which the others hand in and get back."""
  at = np.asarray(ranks)
  core = 1 << _bits(len(at))
  extra = len(at) - core
  if not extra:
    return at, [], []
  return at[:core], [Round(at[core:], at[:extra], size)], [Round(at[:extra], at[core:], size)]


def _tree(count: int) -> np.ndarray:
  """An in-order binary tree over 0 .. count - 1: [count - 1, 2] (child, parent). Even numbers are its leaves."""
  edges = []

  def grow(low: int, high: int) -> int | None:
    if low >= high:
      return None
    # The highest power of two that leaves a multiple of it inside: inner nodes are odd, leaves even.
    step = 1 << (high - low).bit_length()
    while True:
      step >>= 1
      root = low + step - 1
      if root < high:
        break
    for child in (grow(low, root), grow(root + 1, high)):
      if child is not None:
        edges.append((child, root))
    return root

  grow(0, count)
  return np.asarray(edges, np.int64).reshape(-1, 2)


def _bits(count: int) -> int:
  """log2, rounded down."""
  return count.bit_length() - 1
