"""A reference for `jaxpace simulate`, by brute force: every message of every rank, event by event.
No code of jaxpace.

Each rank computes, then goes through the rounds of its all-reduce; in a round it sends and
receives, and goes on when its own messages of that round are over. A message begins when both of
its ranks have come to it, takes its latency, then flows at the rate that max-min sharing of the
links among all messages on the way leaves it. Jobs meet on the links alone. Slow, and meant to be.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Link = tuple[Any, ...]
"""What a link is, such as ("up", 1)."""
_SAME = 1e-12
"""Seconds, and share of a message, below which two things are one."""


class Message(NamedTuple):
  """From one rank to another."""

  source: int
  target: int
  bytes: float


class Job(NamedTuple):
  """Ranks that go through the same rounds, step by step."""

  ranks: tuple[int, ...]
  rounds: tuple[tuple[Message, ...], ...]
  compute: Sequence[Mapping[int, float]]  # of each step, s of each rank
  start: float = 0.0


class Fabric:
  """Nodes of `per_node` ranks with a card each, racks of `rack` nodes, an uplink for each rack,
  each way."""

  def __init__(self, *, nodes: int, per_node: int = 1, node_rate: float = 300e9, card_rate: float,
               rack: int = 0, uplink_rate: float = 0.0, node_latency: float = 0.0,
               rack_latency: float = 0.0, spine_latency: float = 0.0, cards: int = 1):
    if cards != per_node:
      raise ValueError("The reference knows fabrics with a card for each rank alone.")
    self.ranks, self.per_node, self.rack = nodes * per_node, per_node, rack or nodes
    self.rates: dict[str, float] = {"port": node_rate, "card": card_rate,
                                    "trunk": uplink_rate or float("inf")}
    self.latency = node_latency, rack_latency, spine_latency

  def route(self, source: int, target: int) -> tuple[float, tuple[Link, ...]]:
    """Latency, and links."""
    here, there = source // self.per_node, target // self.per_node
    if here == there:
      return self.latency[0], (("port", "out", source), ("port", "in", target))
    near, far = here // self.rack, there // self.rack
    ends = ("card", "out", source), ("card", "in", target)
    if near == far:
      return self.latency[1], ends
    return self.latency[2], (ends[0], ("trunk", "up", near), ("trunk", "down", far), ends[1])

  def rate(self, link: Link) -> float:
    """Bytes a second."""
    return self.rates[link[0]]


def ring(ranks: Sequence[int], size: float) -> tuple[tuple[Message, ...], ...]:
  count = len(ranks)
  once = tuple(Message(r, ranks[(i + 1) % count], size / count) for i, r in enumerate(ranks))
  return (once,) * (2 * (count - 1)) if count > 1 else ()


def _exchanges(ranks: Sequence[int], distances: Iterable[tuple[int, float]], size: float
               ) -> tuple[tuple[Message, ...], ...]:
  """As MPICH does it: of as many pairs of neighbours as there are ranks beyond a power of two, the
  first hands its values to the second and gets the result last."""
  beyond = len(ranks) - (1 << (len(ranks).bit_length() - 1))
  taking_part, inward, outward = [], (), ()
  for i, rank in enumerate(ranks):
    if i < 2 * beyond and i % 2 == 0:
      inward += (Message(rank, ranks[i + 1], size),)
      outward += (Message(ranks[i + 1], rank, size),)
    else:
      taking_part.append(rank)
  middle = tuple(tuple(Message(rank, taking_part[i ^ d], b) for i, rank in enumerate(taking_part))
                 for d, b in distances)
  return tuple(part for part in (inward, *middle, outward) if part)


def recursive_doubling(ranks: Sequence[int], size: float) -> tuple[tuple[Message, ...], ...]:
  bits = len(ranks).bit_length() - 1
  return _exchanges(ranks, [(1 << k, size) for k in range(bits)], size)


def halving_doubling(ranks: Sequence[int], size: float) -> tuple[tuple[Message, ...], ...]:
  bits = len(ranks).bit_length() - 1
  down = [(1 << (bits - 1 - k), size / 2 ** (k + 1)) for k in range(bits)]
  return _exchanges(ranks, [*down, *reversed(down)], size)


def hierarchical(ranks: Sequence[int], size: float,
                 per_node: int) -> tuple[tuple[Message, ...], ...]:
  """Rings inside the nodes, rings over the nodes, one for each place in them, rings inside the
  nodes."""
  nodes = [list(ranks[i:i + per_node]) for i in range(0, len(ranks), per_node)]
  count = len(nodes)
  inner = tuple(Message(node[g], node[(g + 1) % per_node], size / per_node) for node in nodes
                for g in range(per_node))
  outer = tuple(Message(nodes[n][g], nodes[(n + 1) % count][g], size / len(ranks))
                for n in range(count) for g in range(per_node))
  inside = (inner,) * (per_node - 1) if per_node > 1 else ()
  return (*inside, *((outer,) * (2 * (count - 1)) if count > 1 else ()), *inside)


class _Wires:
  """Messages on the way: their latency, then a fluid."""

  def __init__(self, fabric: Fabric):
    self.fabric, self.now = fabric, 0.0
    self.left: dict[Any, float] = {}
    self.size: dict[Any, float] = {}
    self.path: dict[Any, tuple[Link, ...]] = {}
    self.rate: dict[Any, float] = {}
    self.calls: list[tuple[float, int, str, Any]] = []
    self._number = 0

  def at(self, when: float, what: str, key: Any) -> None:
    self._number += 1
    heapq.heappush(self.calls, (when, self._number, what, key))

  def send(self, key: Any, message: Message) -> None:
    latency, path = self.fabric.route(message.source, message.target)
    self.size[key], self.path[key] = message.bytes, path
    self.at(self.now + latency, "flow", key)

  def share(self) -> None:
    """Water-filling: the link whose fair share is least fixes its messages, again and again."""
    on: dict[Link, set[Any]] = defaultdict(set)
    for key in self.left:
      for link in self.path[key]:
        on[link].add(key)
    room = {link: self.fabric.rate(link) for link in on}
    self.rate = {}
    while on:
      tight = min(on, key=lambda link: room[link] / len(on[link]))
      fair = room[tight] / len(on[tight])
      for key in list(on[tight]):
        self.rate[key] = fair
        for link in self.path[key]:
          if link in on:
            on[link].discard(key)
            room[link] -= fair
      on = defaultdict(set, {link: keys for link, keys in on.items() if keys})

  def turn(self) -> tuple[list[Any], list[Any]]:
    """To the next instant at which something is over: (messages that are, others' calls that are
    due)."""
    self.share()
    wait = min((self.left[key] / self.rate[key] for key in self.left), default=float("inf"))
    if self.calls:
      wait = min(wait, self.calls[0][0] - self.now)
    wait = max(wait, 0.0)
    self.now += wait
    for key in self.left:
      self.left[key] -= wait * self.rate[key]
    over = [key for key, left in self.left.items()
            if left <= max(_SAME * self.size[key], self.rate[key] * _SAME)]
    for key in over:
      del self.left[key]
    due = []
    while self.calls and self.calls[0][0] <= self.now + _SAME:
      _, _, what, key = heapq.heappop(self.calls)
      if what == "flow":
        self.left[key] = self.size[key]
      else:
        due.append(key)
    return over, due

  def busy(self) -> bool:
    return bool(self.left or self.calls)


def play(fabric: Fabric, jobs: Sequence[Job]) -> list[list[dict[int, float]]]:
  """Plays jobs that share the fabric.

  Returns:
    Of each job and step, the instant at which each rank was done, s.
  """
  wires = _Wires(fabric)
  place: dict[tuple[int, int], list[int]] = {}
  needs: list[list[dict[int, list[int]]]] = []
  left: dict[tuple[int, int], int] = {}
  done: list[list[dict[int, float]]] = [[{} for _ in job.compute] for job in jobs]
  for j, job in enumerate(jobs):
    own: list[dict[int, list[int]]] = []
    for part in job.rounds:
      mine: dict[int, list[int]] = defaultdict(list)
      for m, message in enumerate(part):
        mine[message.source].append(m)
        mine[message.target].append(m)
      own.append(mine)
    needs.append(own)
    for rank in job.ranks:
      place[j, rank] = [0, -1]  # step, round
      wires.at(job.start + job.compute[0][rank], "compute", (j, rank))
  arrived: dict[tuple[int, int, int, int], int] = defaultdict(int)

  def advance(j: int, rank: int) -> None:
    """To the next round that the rank has part in, and into it."""
    job, at = jobs[j], place[j, rank]
    while True:
      at[1] += 1
      if at[1] == len(job.rounds):
        step = at[0]
        done[j][step][rank] = wires.now
        place[j, rank] = [step + 1, -1]
        if step + 1 < len(job.compute):
          wires.at(wires.now + job.compute[step + 1][rank], "compute", (j, rank))
        return
      if rank in needs[j][at[1]]:
        break
    mine = needs[j][at[1]][rank]
    left[j, rank] = len(mine)
    for m in mine:
      key = j, at[0], at[1], m
      arrived[key] += 1
      if arrived[key] == 2:
        del arrived[key]
        wires.send(key, job.rounds[at[1]][m])

  while wires.busy():
    over, due = wires.turn()
    for j, _, number, m in over:
      message = jobs[j].rounds[number][m]
      for rank in (message.source, message.target):
        left[j, rank] -= 1
        if not left[j, rank]:
          advance(j, rank)
    for j, rank in due:
      advance(j, rank)
  return done
