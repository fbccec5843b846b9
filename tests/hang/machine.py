"""A machine that runs programs with collectives rank by rank, one operation after the other: what
hangs is known."""

import dataclasses

import numpy as np

from jaxpace.core import ring_layout
from jaxpace.core.observed import ObservedPlan, ObservedProgram
from jaxpace.core.plan import Loop
from tests.record.ring import programs

MS = 1_000_000


def collective(index, groups, *, name=None, loops=(), kind="all-reduce", pairs=(),
               axes=("data",)):
  return dataclasses.replace(
      programs.collective(index, name=name, loops=loops, kind=kind, pairs=tuple(pairs),
                          groups=tuple(map(tuple, groups))), axes=axes)


def program(collectives, ranks, number=3, name="train_step"):
  return ObservedProgram(number, name, tuple(range(ranks)), {"data": ranks}, tuple(collectives))


def script(of):
  """(place, turn) in the order in which a rank runs them; loops of the same name side by side are
  one loop."""
  def body(places, depth, iterations):
    at = 0
    while at < len(places):
      loops = of.collectives[places[at]].loops
      if len(loops) <= depth:
        yield places[at], iterations
        at += 1
        continue
      inside = [places[at]]
      while at + len(inside) < len(places):
        other = of.collectives[places[at + len(inside)]].loops
        if len(other) <= depth or other[depth] != loops[depth]:
          break
        inside.append(places[at + len(inside)])
      for iteration in range(loops[depth].trips):
        yield from body(inside, depth + 1, iterations * loops[depth].trips + iteration)
      at += len(inside)
  return list(body(range(len(of.collectives)), 0, 0))


class Machine:
  """Ranks that run `calls` calls of a program until nothing moves any more.

  Args:
    of: the program.
    ranks: number of ranks.
    calls: calls that each rank makes.
    stop: operations before which a rank stops for ever, by rank: (call, operation), operation -1
      before the call.
    orders: operations of a call in another order, by rank.
    dead: meetings that nobody leaves: (call, place, turn, group).
  """

  def __init__(self, of, ranks, calls, stop=None, orders=None, dead=()):
    self.program, self.ranks, self.dead = of, ranks, set(dead)
    self.stop, common = stop or {}, script(of)
    self.scripts = {rank: (orders or {}).get(rank, common) for rank in range(ranks)}
    self.events = {rank: [] for rank in range(ranks)}
    self.time = 0
    self.at = dict.fromkeys(range(ranks), (0, -1))
    self.inside = dict.fromkeys(range(ranks))
    self.entered = {}
    while sum(self._advance(rank, calls) for rank in range(ranks)):
      pass

  def group(self, rank, place):
    each = self.program.collectives[place]
    found = next((g for g in each.groups if rank in g), None)
    if found is None and each.pairs:
      found, grew = {rank}, True
      while grew:
        more = {r for pair in each.pairs if found & set(pair) for r in pair} - found
        found, grew = found | more, bool(more)
    return tuple(sorted(found or range(self.ranks)))

  def mark(self, rank, tag, ns=None):
    self.time += MS
    self.events[rank].append((self.time if ns is None else ns, self.program.number << 20 | tag))

  def _advance(self, rank, calls):
    call, operation = self.at[rank]
    if call >= calls or self.stop.get(rank) == (call, operation):
      return False
    if operation == -1:
      self.mark(rank, ring_layout.NUMBER, call)
      self.mark(rank, ring_layout.START_TAG)
      self.at[rank] = call, 0
      return True
    if operation == len(self.scripts[rank]):
      self.mark(rank, ring_layout.END_TAG)
      self.at[rank] = call + 1, -1
      return True
    place, iteration = self.scripts[rank][operation]
    each = self.program.collectives[place]
    if self.inside[rank] is None:
      self.mark(rank, each.enter_tag)
      self.inside[rank] = call, place, iteration, self.group(rank, place)
      self.entered.setdefault(self.inside[rank], set()).add(rank)
      return True
    meeting = self.inside[rank]
    if meeting in self.dead or self.entered[meeting] != set(meeting[3]):
      return False
    self.mark(rank, each.exit_tag)
    self.inside[rank] = None
    self.at[rank] = call, operation + 1
    return True

  @property
  def plan(self):
    return ObservedPlan((self.program,))

  def tag_ns(self, rank):
    rows = np.array(self.events[rank], np.int64).reshape(-1, 2)
    return rows[:, 1].astype(np.uint32), rows[:, 0]

  def write(self, path, ranks, *, process=0, run="run", attempt=0, alive=None, closed=0,
            capacity=1024, wall=0):
    """Writes these ranks' ring as a process leaves it; `alive` is seconds after the last event of
    all."""
    where = ring_layout.layout(len(ranks), capacity)
    data = bytearray(where.size)
    header, blocks, events = ring_layout.views(data, where)
    header["magic"], header["lanes"], header["capacity"] = ring_layout.MAGIC, len(ranks), capacity
    header["process"], header["attempt"], header["run"], header["closed"] = (
        process, attempt, run.encode(), closed)
    header["wall_ns"] = wall
    header["alive_ns"] = 0 if alive is None else self.time + round(alive * 1e9)
    for buffer, rank in enumerate(ranks):
      blocks["rank"][buffer], blocks["head"][buffer] = rank, len(self.events[rank])
      for index, (ns, tag) in enumerate(self.events[rank]):
        events[buffer, index % capacity] = ns, tag, (index + 1) % 2**32
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


LOOP = Loop("while.12", 4)
