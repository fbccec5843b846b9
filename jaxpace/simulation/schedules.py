"""The messages of an all-reduce, round by round, for five algorithms; and how long they take on a
fabric.

All ranks begin together; from then on each goes to its next round when its own messages are over. A
message takes its latency, then its bytes at the rate that max-min sharing leaves it. On a fabric
where nothing is shared the totals are the closed forms of `jaxpace.costs.alpha_beta`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.core.fields import SettingsError
from jaxpace.simulation.fabric import Fabric
from jaxpace.simulation.sharing import Stretch, max_min, play


class MessageRound(NamedTuple):
  """Messages that start together where nothing holds a rank back."""

  # [F] int, ranks
  sources: np.ndarray
  # [F] int, ranks
  targets: np.ndarray
  # of each message
  bytes: float
  # the round is repeated so often, each time after the last
  times: int = 1
  # messages that a byte takes, one after the other: with more than 1 it goes on in pieces, beside
  # the rounds next to it that do, too
  hops: int = 1


class Load(NamedTuple):
  """What an all-reduce does to a fabric."""

  # it takes on a quiet fabric
  seconds: float
  # [L] share of what each link has for it that it takes meanwhile, on average
  usage: np.ndarray
  # [R] s for which each rank of the fabric has messages on the way between nodes, both ways added
  # up
  busy: np.ndarray
  # its stretches, in order, which add up to `seconds`: what it takes of each link in each of them
  stretches: tuple[Stretch, ...]


def ring(ranks: Sequence[int], size: float) -> list[MessageRound]:
  """Reduce-scatter and all-gather around a ring: 2 (P - 1) rounds of size / P bytes to the next
  rank."""
  at = np.asarray(ranks)
  if len(at) < 2:
    return []
  return [MessageRound(at, np.roll(at, -1), size / len(at), 2 * (len(at) - 1))]


def recursive_doubling(ranks: Sequence[int], size: float) -> list[MessageRound]:
  """log2(P) exchanges of everything; ranks beyond a power of two first hand theirs to a neighbour
  that takes part."""
  at, folded, unfolded = _fold(ranks, size)
  return [*folded, *(MessageRound(at, at[np.arange(len(at)) ^ (1 << k)], size)
                     for k in range(_bits(len(at)))), *unfolded]


def halving_doubling(ranks: Sequence[int], size: float) -> list[MessageRound]:
  """Recursive halving, then doubling (Rabenseifner): 2 log2(P) exchanges, of half as much each
  further one."""
  at, folded, unfolded = _fold(ranks, size)
  count = _bits(len(at))
  halving = [MessageRound(at, at[np.arange(len(at)) ^ (len(at) >> (k + 1))], size / 2 ** (k + 1))
             for k in range(count)]
  return [*folded, *halving, *reversed(halving), *unfolded]


def double_tree(ranks: Sequence[int], size: float) -> list[MessageRound]:
  """Two binary trees, each for half of the bytes, in which every rank but one is a leaf of one: up,
  then down.

  Pipelined, up and down at once, in as many pieces as make it quickest:
  `filling`. (Sanders, Speck, Träff, "Two-tree algorithms for full
  bandwidth broadcast, reduction and scan", 2009.)
  """
  at = np.asarray(ranks)
  count = len(at)
  if count < 2:
    return []
  edges = _tree(count)
  # The second tree is the first, mirrored (even numbers of ranks) or shifted by one (odd): leaves
  # become inner nodes.
  other = count - 1 - edges if count % 2 == 0 else (edges + 1) % count
  both = np.concatenate([edges, other])
  children, parents = at[both[:, 0]], at[both[:, 1]]
  depth = _bits(count)  # of an in-order tree: a test counts it
  return [MessageRound(children, parents, size / 2, hops=depth),
          MessageRound(parents, children, size / 2, hops=depth)]


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


def hierarchical(ranks: Sequence[int], size: float, group: int) -> list[MessageRound]:
  """Reduce-scatter in each group, a node's ranks, ring all-reduces across groups of the pieces,
  all-gather in each group."""
  at = np.asarray(ranks)
  if len(at) % group:
    raise SettingsError(f"group={group} must divide the number of ranks, {len(at)}.")
  grid = at.reshape(-1, group)
  nodes = len(grid)
  inner = MessageRound(grid.ravel(), np.roll(grid, -1, axis=1).ravel(), size / group, group - 1)
  outer = MessageRound(grid.ravel(), np.roll(grid, -1, axis=0).ravel(), size / (group * nodes),
                       2 * (nodes - 1))
  return [r for r in (inner, outer, inner) if r.times and len(at) > 1]


ALGORITHMS: dict[str, Callable[[Sequence[int], float], list[MessageRound]]] = {
    "ring": ring, "recursive_doubling": recursive_doubling, "halving_doubling": halving_doubling,
    "double_tree": double_tree}
"""Those that need no more than the ranks; `hierarchical` needs the size of a node too."""
NAMES = (*ALGORITHMS, "hierarchical")


def rounds(algorithm: str, ranks: Sequence[int], size: float, per_node: int) -> list[MessageRound]:
  """The rounds of one all-reduce; SettingsError, if there is no such algorithm."""
  if algorithm == "hierarchical":
    return hierarchical(ranks, size, per_node)
  if algorithm not in ALGORITHMS:
    raise SettingsError(f"algorithm={algorithm!r} must be one of {', '.join(NAMES)}.")
  return ALGORITHMS[algorithm](ranks, size)


def load(schedule: Sequence[MessageRound], fabric: Fabric) -> Load:
  """Plays the rounds, one after the other, on a fabric that carries nothing else: how long they
  take and what they use. Links without a limit count as unused.

  Rounds that are repeated or pipelined begin and end for all ranks together, others don't: see
  `jaxpace.simulation.sharing`. Where that has too many instants of its own they, too, end for all
  ranks together.
  """
  capacities = fabric.capacities()
  busy = np.zeros(fabric.ranks)
  stretches: list[Stretch] = []
  everyone = (np.unique(np.concatenate([np.concatenate([p.sources, p.targets]) for p in schedule]))
              if schedule else ())
  for (repeated, pipelined), parts in itertools.groupby(
      schedule, key=lambda part: (part.times > 1, part.hops > 1)):
    here = list(parts)
    if pipelined:
      stretches.append(_pipeline(here, fabric, capacities, busy))
      continue
    alike = repeated or all(_alike(part, fabric, capacities, len(everyone)) for part in here)
    played = None if alike else _played(here, fabric, capacities, busy)
    stretches += (played or [piece for part in here
                             for piece in _together(part, fabric, capacities, busy)])
  seconds = sum(piece.seconds for piece in stretches)
  usage = sum((piece.usage * piece.seconds for piece in stretches), start=np.zeros(len(capacities)))
  return Load(seconds, usage / seconds if seconds else usage, busy, tuple(stretches))


def _alike(part: MessageRound, fabric: Fabric, capacities: np.ndarray, ranks: int) -> bool:
  """Whether all ranks are in a round and none of its messages takes longer than another."""
  if (len(part.sources) != ranks or len(np.unique(part.sources)) != ranks
      or len(np.unique(part.targets)) != ranks):
    return False
  transfer, latency, _ = _alone(part, fabric, capacities)
  return bool(transfer.min() >= transfer.max() * (1 - 1e-9) and np.ptp(latency) == 0)


def _played(parts: list[MessageRound], fabric: Fabric, capacities: np.ndarray,
            busy: np.ndarray) -> list[Stretch] | None:
  """Rounds in which each rank waits for its own messages alone; None where that takes too long to
  play."""
  sources, targets = (np.concatenate([getattr(part, end) for part in parts])
                      for end in ("sources", "targets"))
  counts = [len(part.sources) for part in parts]
  played = play(
      sources, targets, np.repeat(np.arange(len(parts)), counts),
      np.repeat([part.bytes for part in parts], counts), fabric.latencies(sources, targets),
      fabric.paths(sources, targets), capacities)
  if played is None:
    return None
  stretches, flowing = played
  _count_busy(busy, sources, targets, flowing, fabric)
  return stretches


def _together(part: MessageRound, fabric: Fabric, capacities: np.ndarray,
              busy: np.ndarray) -> list[Stretch]:
  """A round that begins and ends for all ranks together: latency, then transfer; of a repeated one
  their mean."""
  transfer, latency, flows = _alone(part, fabric, capacities)
  _count_busy(busy, part.sources, part.targets, part.times * transfer, fabric)
  seconds = part.times * float((latency + transfer).max())
  if part.times > 1:
    return [_mean(seconds, part.bytes * part.times, flows, capacities)]
  waiting = float(latency[(latency + transfer).argmax()])
  idle = Stretch(waiting, np.zeros(len(capacities)), np.zeros(len(capacities), np.int64))
  both = idle, _mean(seconds - waiting, part.bytes, flows, capacities)
  return [piece for piece in both if piece.seconds > 0]


def _pipeline(parts: list[MessageRound], fabric: Fabric, capacities: np.ndarray,
              busy: np.ndarray) -> Stretch:
  """Rounds of as many hops and bytes each, through which everything goes in pieces, all at once."""
  sources, targets = (np.concatenate([getattr(part, end) for part in parts])
                      for end in ("sources", "targets"))
  every = MessageRound(sources, targets, parts[0].bytes)
  transfer, latency, flows = _alone(every, fabric, capacities)
  _count_busy(busy, sources, targets, transfer, fabric)
  hops = sum(part.hops for part in parts)
  slowest = int((hops * latency + transfer).argmax())
  least, longest = float(latency[slowest]), float(transfer[slowest])
  seconds = hops * least + longest + filling(hops // len(parts), least, longest)
  return _mean(seconds, every.bytes, flows, capacities)


def _alone(part: MessageRound, fabric: Fabric,
           capacities: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Of a round that has the fabric to itself: [F] s of transfer, [F] s of latency, [L] messages on
  each link."""
  paths = fabric.paths(part.sources, part.targets)
  rates = max_min(paths, capacities)
  transfer = np.where(np.isfinite(rates), part.bytes / rates, 0.0)
  flows = np.bincount(paths[paths >= 0].ravel(), minlength=len(capacities))
  return transfer, fabric.latencies(part.sources, part.targets), flows


def _mean(seconds: float, sent: float, flows: np.ndarray, capacities: np.ndarray) -> Stretch:
  """So many bytes of every message in so many seconds."""
  room = np.where(np.isfinite(capacities), capacities, 0) * seconds
  return Stretch(seconds, np.divide(flows * sent, room, out=np.zeros(len(capacities)),
                                    where=room > 0), flows)


def _count_busy(busy: np.ndarray, sources: np.ndarray, targets: np.ndarray, seconds: np.ndarray,
                fabric: Fabric
                ) -> None:
  away = np.where(sources // fabric.per_node != targets // fabric.per_node, seconds, 0.0)
  for ends in (sources, targets):
    busy += np.bincount(ends, away, minlength=fabric.ranks)


def _fold(ranks: Sequence[int], size: float
          ) -> tuple[np.ndarray, list[MessageRound], list[MessageRound]]:
  """The largest power of two of the ranks, and the rounds by which the others hand in and get
  back.

  Neighbours fold, as in MPICH: of the first ranks each second one takes part for the one before it,
  which as a rule is in the same rack.
  """
  at = np.asarray(ranks)
  extra = len(at) - (1 << _bits(len(at)))
  if not extra:
    return at, [], []
  out, into = at[:2 * extra:2], at[1:2 * extra:2]
  return (np.concatenate([into, at[2 * extra:]]), [MessageRound(out, into, size)],
          [MessageRound(into, out, size)])


def _tree(count: int) -> np.ndarray:
  """An in-order binary tree over 0 .. count - 1: [count - 1, 2] (child, parent). Even numbers are
  its leaves."""
  edges = []

  def grow(low: int, high: int) -> int | None:
    if low >= high:
      return None
    # The highest power of two that leaves a multiple of it inside: inner nodes are odd, leaves
    # even.
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
