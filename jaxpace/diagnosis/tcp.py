"""What the hosts' TCP counters say of slow transfers: whether it is the network, and whose link.

A connection is busy while it has data on the way that is not acknowledged. The kernel acknowledges,
whatever the receiving process does: busy time is the network's. A process that gets no processor
makes a transfer long and leaves its connections idle. In a ring every host sends over one
connection and receives over another, so that on a quiet fabric its connections are busy for at most
twice as long as the collective takes. A host whose link is slow both ways is busy for all that it
sends, and each of its partners for what it sends to that host: what it is busy longer is as much as
all its partners together, in a ring of four or more twice as much as either, and nothing on the
hosts beyond. Two hosts answer each other over one connection, where acknowledgements wait for data
to ride on: busy time then tells little by itself.

Round trips tell how long data queue on the way. A process that is late, stopped or without a
processor keeps few acknowledgements back, for some milliseconds: its partners' connections are busy
meanwhile, while the median round trip stays as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.counters import median_per_window, per_window
from jaxpace.diagnosis.modes.case import Case

# Set looking at the fault lab's runs of seeds 0 to 3; measurements/fault_lab_seed4 is what they are
# worth on others.
WINDOWS = 24
"""Windows of the run in which busy times are compared, at most."""
FEWEST_HOSTS = 3
"""Processes whose busy times tell by themselves whether the network is slow."""
AGREE = 0.5
"""Part of what transfers take longer that the connections are busy longer, at least, if the network
is why."""
BUSIER, HARDLY = 2.0, 1.2
"""Times as long as outside that connections are busy in a stretch if they show it to be contended,
all hosts together; and below which, on every host, they show that it isn't."""
OF_TWO = 2.5
"""The first, of two hosts."""
LONGER = 1.6
"""Times as long as outside that round trips take in a stretch, all hosts together, if data queue
longer on the way. Healthy runs reach 1.3 between their halves, those in which a process is stopped
1.44 (measured)."""
_PARTNERS = 1.4
"""Times as long as any other host, itself included, the partners of a late host are busy if it is
slow to take what they send. A crowded trunk keeps the hosts that send over it busy 1.25 times as
long as those they send to (measured)."""
_CARRIED = 0.3
"""Part of a quick transfer that connections are busy, at least, if TCP carries the collectives."""
_PAIR = 2.5
"""Of two hosts, one's link is the slow one if it is busy this many times as long as the other's."""
_SECOND, _OTHERS = 1.42, 1.5
"""Of more, if it is busy this many times as long as the next one's, which shares its slow
connection, and as long as the others' on the median ..."""
_LEAST, _MIDDLE = 2.0, 1.1
"""... or, of four or more, this many times as long as the least, and the next one's at most so many
times the mean of the two, as a ring has it; ..."""
_SHARE = 0.03
"""... and longer by this share of the step, ..."""
_OFTEN, _EVERYWHERE = 0.6, 0.5
"""... and the longest in this part of the windows."""


class BusyConnections(NamedTuple):
  """How long each process's connections had data on the way, seconds a step. P processes, W
  windows."""

  processes: tuple[int, ...]
  edges: np.ndarray  # [W + 1] blocks
  seconds: np.ndarray  # [P, W]; NaN where not known
  carried: bool  # whether TCP carries the collectives at all
  # [P, W] median round trips, seconds; None where they were not sampled
  trips: np.ndarray | None = None

  def within(self, begin: int, end: int) -> np.ndarray:
    """[W] bool, windows that lie between two blocks; those that touch them where there are none."""
    inside = (self.edges[:-1] >= begin) & (self.edges[1:] <= end)
    return inside if inside.any() else (self.edges[1:] > begin) & (self.edges[:-1] < end)

  def of(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """[P, w] the windows of several spans."""
    return self._windows(self.seconds, spans)

  def trips_of(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """[P, w] round trips in the windows of several spans; no windows where they were not
    sampled."""
    return self._windows(self.trips if self.trips is not None
                         else np.empty((len(self.processes), 0)), spans)

  def _windows(self, values: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    if not values.shape[1]:
      return values
    return np.concatenate([values[:, :0], *(values[:, self.within(*span)] for span in spans)],
                          axis=1)


class BusyLinks(NamedTuple):
  """Whose link it is that is busy."""

  busy: dict[int, float]  # seconds a step, by process
  slow: tuple[int, ...]  # processes whose link is the slow one
  excess: float  # part of the time theirs is busy that the least busy one does without
  everywhere: bool  # all about equally


def read(case: Case) -> BusyConnections:
  """Busy times of a run; no processes where they were not sampled, or all are on one host."""
  edges, found = per_window(case.run, case.selected, "tcp_busy_ns", WINDOWS)
  # Between processes of one host there is no network: those connections are busy while nobody has a
  # processor to read.
  processes = () if on_one_host(case) else tuple(sorted(found))
  seconds = (1e-9 * np.array([found[p] for p in processes]) if processes
             else np.empty((0, len(edges) - 1)))
  transfer = case.transfer[case.selected.mask]
  transfer = transfer[np.isfinite(transfer)]
  typical = _medians(seconds)
  carried = bool(len(processes) > 1 and transfer.size and np.isfinite(typical).any()
                 and np.nanmedian(typical) >= _CARRIED * np.quantile(transfer, 0.25))
  trips = median_per_window(case.run, case.selected, "tcp_rtt_ns", edges)
  unknown = np.full(len(edges) - 1, np.nan)
  return BusyConnections(processes, edges, seconds, carried,
                         1e-9 * np.array([trips.get(p, unknown) for p in processes]) if processes
                         and trips else None)


def on_one_host(case: Case) -> bool:
  """Whether all processes are known to be on the same host."""
  hosts = {p.host for p in case.run.processes}
  return len(hosts) == 1 and "" not in hosts


def says_slow(busy: BusyConnections, quiet: float, seconds: float) -> bool | None:
  """Whether the network makes transfers longer than `quiet` throughout.

  Args:
    busy: of the run.
    quiet: what a transfer takes on a quiet fabric, s.
    seconds: by which the mean transfer is longer.

  Returns:
    None where the counters can't tell: there are none, TCP doesn't carry the collectives, or two
    hosts.
  """
  if not busy.carried or len(busy.processes) < FEWEST_HOSTS:
    return None
  return beyond(busy, quiet) >= AGREE * seconds


def beyond(busy: BusyConnections, quiet: float) -> float:
  """Seconds a step by which a host's connections are busy longer than a quiet ring keeps two of
  them.

  By the median of windows: other load makes a few of them long.
  """
  typical = _medians(busy.seconds)
  return float(np.nanmedian(typical)) - 2 * quiet if np.isfinite(typical).any() else 0.0


def says_slower(busy: BusyConnections, inside: Sequence[tuple[int, int]],
                outside: Sequence[tuple[int,
                                        int]]) -> bool | None:
  """Whether connections are busy longer, or round trips take longer, in some stretches, in nearly
  all windows of them.

  Returns:
    None where the counters can't tell.
  """
  if not busy.carried:
    return None
  if trips_longer(busy, inside, outside):
    return True
  within, without = busy.of(inside), busy.of(outside)
  level, usual = _medians(within), _medians(without)
  known = np.isfinite(level) & np.isfinite(usual) & (usual > 0)
  if known.sum() < 2:
    return None
  if (level[known] < HARDLY * usual[known]).all():
    return False
  now, then = (together[np.isfinite(together)]
               for together in (own[known].mean(axis=0) for own in (within, without)))
  apart = bool(now.size and then.size and np.quantile(now, 0.25) >= np.quantile(then, 0.75))
  least = BUSIER if len(busy.processes) >= FEWEST_HOSTS else OF_TWO
  return True if apart and level[known].sum() >= least * usual[known].sum() else None


def trips_longer(busy: BusyConnections, inside: Sequence[tuple[int, int]],
                 outside: Sequence[tuple[int, int]]) -> bool:
  """Whether data queue longer on the way in some stretches than in others, in nearly all windows of
  them."""
  level, usual = _medians(busy.trips_of(inside)), _medians(busy.trips_of(outside))
  known = np.isfinite(level) & np.isfinite(usual)
  if known.sum() < 2 or level[known].sum() < LONGER * usual[known].sum():
    return False
  now, then = (together[np.isfinite(together)] for together in (
      busy.trips_of(spans)[known].mean(axis=0) for spans in (inside, outside)))
  return bool(now.size and then.size and np.quantile(now, 0.25) >= np.quantile(then, 0.75))


def typical_trips(busy: BusyConnections, inside: Sequence[tuple[int, int]],
                  outside: Sequence[tuple[int, int]]
                  ) -> tuple[np.ndarray, np.ndarray]:
  """Median round trips in some stretches and in others, s, of the processes that sampled them in
  both."""
  level, usual = _medians(busy.trips_of(inside)), _medians(busy.trips_of(outside))
  known = np.isfinite(level) & np.isfinite(usual)
  return level[known], usual[known]


def whose(case: Case, busy: BusyConnections, inside: Sequence[tuple[int, int]]) -> BusyLinks:
  """Tells one host's slow link from a fabric that is slow for all.

  Args:
    case: the run.
    busy: its connections.
    inside: blocks in which transfers are slow, (first, one past the last).
  """
  windows = busy.of(inside)
  level = dict(zip(busy.processes, _medians(windows).tolist(), strict=True))
  known = {p: value for p, value in level.items() if np.isfinite(value)}
  if len(known) < 2:
    return BusyLinks(known, (), 0.0, False)
  order = sorted(known, key=lambda p: -known[p])
  top, rest = known[order[0]], [known[p] for p in order[1:]]
  longest = np.where(np.isfinite(windows), windows, -1.0).argmax(axis=0)
  often = float((longest == busy.processes.index(order[0])).mean())
  slow = (often >= _OFTEN and top - float(np.median(rest)) >= _SHARE * case.step_time
          and _stands_out([top, *rest]))
  return BusyLinks(known, (order[0],) if slow else (), 1 - rest[-1] / top if slow else 0.0,
                   rest[-1] >= _EVERYWHERE * top)


def taken_slowly(links: BusyLinks, late: Collection[int]) -> bool:
  """Whether it is a late process that is slow to take what it is sent: others' connections are
  busier than its own.

  A slow link keeps its own host the busiest, a crowded trunk all hosts. A process that stands still
  now and then keeps those waiting that send to it and that it sends to: its partners in the ring,
  and nobody else.
  """
  own = [links.busy[p] for p in late if p in links.busy]
  top = max(links.busy.values(), default=0.0)
  if len(own) != 1 or len(links.busy) < 2 or links.slow:
    return False
  order = sorted(links.busy)
  place = next(i for i, p in enumerate(order) if p in late)
  partners = {order[place - 1], order[(place + 1) % len(order)]}
  others = [value for p, value in links.busy.items() if p not in partners]
  # In a ring of four two hosts have the same partners: the one that takes slowly is not idle beside
  # the other.
  if (min(links.busy[p] for p in partners) >= _PARTNERS * max(others)
      and own[0] >= _EVERYWHERE * max(others)):
    return True
  return (len(links.busy) > FEWEST_HOSTS and not links.everywhere
          and _EVERYWHERE * top <= own[0] < top)


def waits_for(links: BusyLinks, late: Collection[int]) -> bool:
  """Whether, of two hosts, the link that seems slow is that of the one which waits for the late
  one.

  An acknowledgement waits for data to ride on, and a process that stands still sends none: what the
  other one sent last counts as on its way meanwhile. A link between two hosts that is slow keeps
  both busy.
  """
  return (len(links.busy) == 2 and len(links.slow) == 1 and len(late) == 1
          and not set(links.slow) & set(late))


def _stands_out(level: list[float]) -> bool:
  """Whether the first of falling busy times is that of the host with the slow link."""
  top, *rest = level
  if len(rest) == 1:
    return top >= _PAIR * rest[0]
  if top >= _SECOND * rest[0] and top >= _OTHERS * float(np.median(rest)):
    return True
  return len(rest) >= 3 and top >= _LEAST * rest[-1] and rest[0] <= _MIDDLE * (top + rest[-1]) / 2


def _medians(values: np.ndarray) -> np.ndarray:
  """[P] medians over windows, NaN where nothing is known."""
  known = np.isfinite(values).any(axis=1) if values.size else np.zeros(len(values), bool)
  found = np.full(len(values), np.nan)
  if known.any():
    found[known] = np.nanmedian(values[known], axis=1)
  return found
