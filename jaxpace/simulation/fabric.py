"""A cluster's links, and which of them a message between two ranks crosses. Pure numpy, made once
before a simulation.

Ranks are numbered node by node, nodes rack by rack. Inside a node every rank has a port of its own
(NVLink or the like); to leave the node it goes through its own path to the network card (PCIe), the
card, and, to another rack, one uplink of each of the two racks. All links are full duplex: each
direction is a link.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jaxpace.core.detail import mixed
from jaxpace.core.fields import SettingsError, choice, is_number, is_whole, whole

NONE = -1
"""Stands for no link in a path."""
_HOPS = 6
ROUTINGS = ("even", "hash")
MAX_RANKS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Fabric:
  """Two tiers of switches above the nodes. Rates in bytes per second each way, latencies in seconds
  per message.

  Attributes:
    nodes: machines.
    per_node: ranks of each.
    node_rate: of each rank's port to the others of its node.
    card_rate: of each network card.
    cards: network cards of a node; its ranks are dealt to them in blocks.
    path_rate: of each rank's path to its card; 0 for no limit.
    slow_paths: rank -> factor below 1 on its path (and on its share of the card where the path has
      no limit): a card on the other socket, a link trained to fewer lanes.
    rack: nodes below one switch; 0 for all.
    uplinks: links from each such switch to the spine.
    uplink_rate: of each; 0 for as much as the cards below need (no oversubscription).
    routing: "even" spreads every message over all uplinks, "hash" sends each pair of ranks over
      one, drawn by `seed`.
    node_latency, rack_latency, spine_latency: of a message that stays in its node, in its rack, or
      crosses the spine.
    seed: of the hashed routes.
  """

  nodes: int
  per_node: int = 8
  node_rate: float = 300e9
  card_rate: float = 50e9
  cards: int = 1
  path_rate: float = 0.0
  slow_paths: Mapping[int, float] = dataclasses.field(default_factory=dict)
  rack: int = 0
  uplinks: int = 1
  uplink_rate: float = 0.0
  routing: str = "even"
  node_latency: float = 3e-6
  rack_latency: float = 8e-6
  spine_latency: float = 12e-6
  seed: int = 0

  def __post_init__(self) -> None:
    for name in ("nodes", "per_node", "cards"):
      whole(name, getattr(self, name), 1)
    whole("rack", self.rack, 0)
    whole("seed", self.seed, 0)
    if self.nodes * self.per_node > MAX_RANKS:
      raise SettingsError(f"nodes={self.nodes:,} of per_node={self.per_node:,} ranks each are more "
                          f"than the {MAX_RANKS:,} ranks that a fabric may have.")
    whole("uplinks", self.uplinks, 1, MAX_RANKS)
    for names, hint in ((("node_rate", "card_rate"), "bytes per second, above 0"),
                        (("path_rate", "uplink_rate"), "bytes per second, from 0 (no limit) up"),
                        (("node_latency", "rack_latency", "spine_latency"), "seconds, from 0 up")):
      for name in names:
        value = getattr(self, name)
        if not is_number(value, 0) or (hint.endswith("above 0") and not value):
          raise SettingsError(f"{name}={value!r} must be {hint}.")
    if self.per_node % self.cards:
      raise SettingsError(
          f"cards={self.cards} must divide per_node={self.per_node}: every card serves as "
          "many ranks.")
    if self.rack and self.nodes % self.rack and self.nodes > self.rack:
      raise SettingsError(
          f"rack={self.rack} must divide nodes={self.nodes}, or be 0 for a single rack.")
    choice("routing", self.routing, ROUTINGS)
    for rank, factor in self.slow_paths.items():
      if not is_whole(rank, 0, self.ranks - 1):
        raise SettingsError(
            f"slow_paths names rank {rank!r}; the fabric has ranks 0 to {self.ranks - 1}.")
      if not is_number(factor, 0, 1) or not factor:
        raise SettingsError(f"slow_paths[{rank}]={factor!r} must be a factor above 0, at most 1: "
                            "0.5 for half the rate. (0 would cut the rank off: a "
                            "disconnected fabric.)")

  @property
  def ranks(self) -> int:
    """Of all nodes."""
    return self.nodes * self.per_node

  @property
  def racks(self) -> int:
    """Groups of nodes below one switch; the last may be smaller."""
    return math.ceil(self.nodes / self.rack) if self.rack else 1

  @property
  def oversubscription(self) -> float:
    """What the cards of a rack can send over what its uplinks carry; 1 with a single rack or
    without a limit."""
    if self.racks == 1 or not self.uplink_rate:
      return 1.0
    return self.rack * self.cards * self.card_rate / (self.uplinks * self.uplink_rate)

  def capacities(self) -> np.ndarray:
    """[L] float64 bytes per second, in the order in which `paths` numbers links."""
    path = np.full(self.ranks, self.path_rate or math.inf)
    for rank, factor in self.slow_paths.items():
      own = self.path_rate or self.card_rate * self.cards / self.per_node
      path[rank] = own * factor
    uplink = (self.uplink_rate or math.inf) * (self.uplinks if self.routing == "even" else 1)
    counts = self._counts()
    rates = [np.full(counts[0], self.node_rate), np.tile(path, 2),
             np.full(counts[2], self.card_rate), np.full(counts[3], uplink)]
    return np.concatenate(rates)

  def paths(self, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The links that messages from ranks to others cross: [F] int, [F] int -> [F, 6] int, links in
    order, `NONE` where a path is shorter."""
    sources, targets = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
    if (sources == targets).any():
      raise SettingsError("A message from a rank to itself crosses no link.")
    ranks, cards = self.ranks, self.nodes * self.cards
    starts = np.concatenate([[0], np.cumsum(self._counts())])
    nodes = sources // self.per_node, targets // self.per_node
    at = tuple(node * self.cards + (rank % self.per_node) * self.cards // self.per_node
               for node, rank in zip(nodes, (sources, targets), strict=True))
    inside, across = nodes[0] == nodes[1], self._rack_of(nodes[0]) != self._rack_of(nodes[1])
    result = np.full((len(sources), _HOPS), NONE, np.int64)
    off = ~inside
    result[:, 0] = np.where(inside, sources, starts[1] + sources)
    result[:, 1] = np.where(inside, ranks + targets, starts[2] + at[0])
    result[off, 4] = starts[2] + cards + at[1][off]
    result[off, 5] = starts[1] + ranks + targets[off]
    width = 1 if self.routing == "even" else self.uplinks
    lanes = (np.zeros(len(sources), np.int64) if width == 1
             else _hashed(sources, targets, self.seed) % width)
    result[across, 2] = (starts[3] + self._rack_of(nodes[0]) * width + lanes)[across]
    result[across, 3] = (starts[3] + (self.racks + self._rack_of(nodes[1])) * width + lanes)[across]
    return result

  def latencies(self, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """[F] float64 s, of a message from each source to its target."""
    nodes = np.asarray(sources) // self.per_node, np.asarray(targets) // self.per_node
    far = np.where(self._rack_of(nodes[0]) == self._rack_of(nodes[1]), self.rack_latency,
                   self.spine_latency)
    return np.where(nodes[0] == nodes[1], self.node_latency, far)

  def _rack_of(self, nodes: np.ndarray) -> np.ndarray:
    return nodes // (self.rack or self.nodes)

  def _counts(self) -> tuple[int, int, int, int]:
    width = 1 if self.routing == "even" else self.uplinks
    return 2 * self.ranks, 2 * self.ranks, 2 * self.nodes * self.cards, 2 * self.racks * width


def _hashed(sources: np.ndarray, targets: np.ndarray, seed: int) -> np.ndarray:
  """A fixed draw for each pair, as switches hash addresses."""
  with np.errstate(over="ignore"):
    pairs = sources.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + targets.astype(np.uint64)
    pairs += np.uint64(seed) * np.uint64(0xD1B54A32D192ED03)
  return (mixed(pairs) >> np.uint64(1)).astype(np.int64)
