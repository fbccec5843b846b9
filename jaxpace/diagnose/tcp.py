"""What the hosts' TCP counters say of slow transfers: whether it is the network, and whose link.

A connection is busy while it has data on the way that is not acknowledged. The kernel acknowledges,
whatever the receiving process does: busy time is the network's. A process that gets no processor
makes a transfer long and leaves its connections idle. In a ring every host sends over one
connection and receives over another, so that on a quiet fabric its connections are busy for at most
twice as long as the collective takes. A host whose link is slow both ways is busy for all that it
sends, and each of its partners for what it sends to that host: what it is busy longer is as much as
all its partners together, in a ring of four or more twice as much as either, and nothing on the
hosts beyond. Two hosts answer each other over one connection, where acknowledgements wait for data
to ride on: busy time then shows little by itself.

Round trips tell how long data queue on the way. A process that is late, stopped or without a
processor keeps few acknowledgements back, for some milliseconds: its partners' connections are busy
meanwhile, while the median round trip stays as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.diagnose.limits import BUSIER, FEWEST, MOST, PART, SHOWS, TWICE
from jaxpace.diagnose.mechanism import medians, per_window
from jaxpace.diagnose.modes.inputs import EvidenceInputs
from jaxpace.diagnose.selected_steps import medians_known

# Set looking at the fault lab's runs of seeds 0 to 3; measurements/fault_lab_seed4 is what they are
# worth on others.
WINDOWS = 24
"""Windows of the run in which busy times are compared, at most."""
_OF_TWO = 2.5
"""`TWICE`, of two hosts: each answers over the connection that it sends over, and beside a process
that stands still the other one is busy 2.3 times as long (measured)."""
LONGER = 1.6
"""Times as long as outside that round trips take in a stretch, all hosts together, if data queue
longer on the way. Healthy runs reach 1.3 between their halves, those in which a process is stopped
1.44 (measured)."""


class BusyConnections(NamedTuple):
  """How long each process's connections had data on the way, seconds per step. P processes, W
  windows."""

  processes: tuple[int, ...]
  edges: np.ndarray  # [W + 1] blocks
  seconds: np.ndarray  # [P, W]; NaN where not known
  carried: bool  # whether TCP carries the collectives at all
  trips: np.ndarray  # [P, W] median round trips, seconds; NaN where they were not sampled

  def within(self, begin: int, end: int) -> np.ndarray:
    """[W] bool, windows that lie between two blocks; those that touch them where there are none."""
    inside = (self.edges[:-1] >= begin) & (self.edges[1:] <= end)
    return inside if inside.any() else (self.edges[1:] > begin) & (self.edges[:-1] < end)

  def of(self, values: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """[P, w] busy times or round trips, [P, W], in the windows of several spans."""
    own = [values[:, self.within(*span)] for span in spans] if values.size else []
    return np.concatenate([values[:, :0], *own], axis=1)


class BusyLinks(NamedTuple):
  """Whose link it is that is busy."""

  busy: dict[int, float]  # seconds per step, by process
  slow: tuple[int, ...]  # processes whose link is the slow one
  excess: float  # part of the time theirs is busy that the least busy one does without
  everywhere: bool  # all about equally


def read(case: EvidenceInputs) -> BusyConnections:
  """Busy times of a run; no processes where they were not sampled, or all are on one host."""
  edges, found = per_window(case.run, case.selected, "tcp_busy_ns", WINDOWS)
  # Between processes of one host there is no network: those connections are busy while nobody has a
  # processor to read.
  processes = () if on_one_host(case) else tuple(sorted(found))
  unknown = np.full(len(edges) - 1, np.nan)
  shape = len(processes), len(unknown)
  seconds, trips = (1e-9 * np.array([own.get(p, unknown) for p in processes]).reshape(shape)
                    for own in (found, medians(case.run, case.selected, "tcp_rtt_ns", edges)))
  transfer = case.transfer[case.selected.mask]
  transfer = transfer[np.isfinite(transfer)]
  typical = medians_known(seconds)
  carried = bool(len(processes) > 1 and transfer.size and np.isfinite(typical).any()
                 and np.nanmedian(typical) >= PART * np.quantile(transfer, 0.25))
  return BusyConnections(processes, edges, seconds, carried, trips)


def on_one_host(case: EvidenceInputs) -> bool:
  """Whether all processes are known to be on the same host."""
  hosts = {p.host for p in case.run.processes}
  return len(hosts) == 1 and "" not in hosts


def says_slow(busy: BusyConnections, quiet: float, seconds: float) -> bool | None:
  """Whether the network makes transfers longer than `quiet` throughout.

  Args:
    quiet: what a transfer takes on a quiet fabric, s.
    seconds: by which the mean transfer is longer.

  Returns:
    None where the counters can't tell: there are none, TCP doesn't carry the collectives, or two
    hosts.
  """
  if not busy.carried or len(busy.processes) < FEWEST:
    return None
  return beyond(busy, quiet) >= MOST * seconds


def beyond(busy: BusyConnections, quiet: float) -> float:
  """Seconds per step by which a host's connections are busy longer than a quiet ring keeps two of
  them.

  By the median of windows: other load makes a few of them long.
  """
  typical = medians_known(busy.seconds)
  return float(np.nanmedian(typical)) - 2 * quiet if np.isfinite(typical).any() else 0.0


def says_slower(busy: BusyConnections, inside: Sequence[tuple[int, int]],
                outside: Sequence[tuple[int, int]]) -> bool:
  """Whether connections are busy longer, or round trips take longer, in some stretches, in nearly
  all windows of them; False where the counters can't tell."""
  if not busy.carried:
    return False
  enough = TWICE if len(busy.processes) >= FEWEST else _OF_TWO
  return any(_longer(busy.of(values, inside), busy.of(values, outside), least)
             for values, least in ((busy.trips, LONGER), (busy.seconds, enough)))


def _longer(within: np.ndarray, without: np.ndarray, least: float) -> bool:
  """Whether [P, w] values of some windows are so many times those of others, all processes
  together, and longer in nearly all windows."""
  level, usual = medians_known(within), medians_known(without)
  known = np.isfinite(level) & np.isfinite(usual) & (usual > 0)
  if known.sum() < 2 or level[known].sum() < least * usual[known].sum():
    return False
  now, then = (together[np.isfinite(together)]
               for together in (own[known].mean(axis=0) for own in (within, without)))
  return bool(now.size and then.size and np.quantile(now, 0.25) >= np.quantile(then, 0.75))


def typical_trips(busy: BusyConnections, inside: Sequence[tuple[int, int]],
                  outside: Sequence[tuple[int, int]]) -> tuple[float, float] | None:
  """Typical round trips in some stretches and in others, s, of the processes that sampled them in
  both; None: of none."""
  level, usual = (medians_known(busy.of(busy.trips, spans)) for spans in (inside, outside))
  known = np.isfinite(level) & np.isfinite(usual)
  return (float(np.median(level[known])), float(np.median(usual[known]))) if known.any() else None


def whose(case: EvidenceInputs, busy: BusyConnections,
          inside: Sequence[tuple[int, int]]) -> BusyLinks:
  """Tells one host's slow link from a fabric that is slow for all."""
  windows = busy.of(busy.seconds, inside)
  level = dict(zip(busy.processes, medians_known(windows).tolist(), strict=True))
  known = {p: value for p, value in level.items() if np.isfinite(value)}
  if len(known) < 2:
    return BusyLinks(known, (), 0.0, False)
  order = sorted(known, key=lambda p: -known[p])
  top, rest = known[order[0]], [known[p] for p in order[1:]]
  longest = np.where(np.isfinite(windows), windows, -1.0).argmax(axis=0)
  often = float((longest == busy.processes.index(order[0])).mean())
  slow = (often >= MOST and top - float(np.median(rest)) >= SHOWS * case.mean_step
          and _stands_out([top, *rest]))
  return BusyLinks(known, (order[0],) if slow else (), 1 - rest[-1] / top if slow else 0.0,
                   rest[-1] >= MOST * top)


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
  if (min(links.busy[p] for p in partners) >= BUSIER * max(others)
      and own[0] >= MOST * max(others)):
    return True
  return (len(links.busy) > FEWEST and not links.everywhere
          and MOST * top <= own[0] < top)


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
  return top >= (_OF_TWO if len(rest) == 1 else BUSIER) * rest[0]
