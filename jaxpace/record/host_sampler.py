"""Samples what the host does while a run is recorded: sockets, throttling, switches, GPU clocks.

One reading a second by default, on a thread of its own, which touches no device of JAX and needs no
privileges. Counters are cumulative, from 0 at the first sample on, so that a lost sample loses
nothing; round trips, clock and power are of the sample; what can't be known is null.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import logging
import os
import resource
import struct
import threading
import time
from collections.abc import Callable

import numpy as np

from jaxpace.hosts.locality import cards, host
from jaxpace.hosts.locality.host import Tree
from jaxpace.hosts.locality.read import Gauges
from jaxpace.record.threads import BackgroundThread
from jaxpace.runs import schema

_LOG = logging.getLogger("jaxpace")
_KEEP = 16384  # samples kept while nobody takes them
_WRITE_SECONDS = 5.0
_SHORTEST = 0.01
"""Seconds between two samples at least: reading them takes the interpreter from the loop."""
_NET = "/sys/class/net"
_INFINIBAND = "/sys/class/infiniband"
_ROUND_TRIPS = ("tcp_rtt_ns", "tcp_min_rtt_ns")
_GAUGES = ("gpu_clock_mhz", "gpu_power_w")

Values = dict[str, int | float | None]


class HostCounters:
  """Reads the counters. Which interfaces and control groups there are is looked up once."""

  def __init__(self, root: str | os.PathLike[str] = "/", *, gauges: Gauges | None = None,
               coordinator: int | None = None):
    """Looks up what to read.

    Args:
      root: folder that stands for "/".
      gauges: GPUs whose clock and power to read.
      coordinator: port of JAX's coordination service, whose connections don't count.
    """
    self._tree = Tree(root)
    self._interfaces, self._ports = find_interfaces(self._tree)
    self._group = host.chain(self._tree, "cpu")
    self._sockets = OwnSockets(coordinator) if self._tree.live else None
    self._gauges = gauges
    self._tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    self._first: Values | None = None

  def read(self) -> Values:
    """Values of the `hosts` table's columns: counters since the first reading, round trips since
    the last one."""
    values = self._sockets.read() if self._sockets else {}
    values["nic_rx_bytes"], values["nic_tx_bytes"], values["loopback_bytes"] = self._bytes()
    values["throttled_ns"] = host.throttled_ns(self._tree, *self._group)
    values["steal_ns"] = self._steal()
    values["nivcsw"] = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    if self._first is None:
      self._first = dict(values)
    first = self._first
    values = {name: value if value is None or name in _ROUND_TRIPS
              else value - (first.get(name) or 0) for name, value in values.items()}
    if self._gauges:
      values.update(zip(_GAUGES, self._gauges(), strict=True))
    return values

  def _bytes(self) -> tuple[int | None, int | None, int | None]:
    """Received and sent by the NICs, and received over loopback."""
    found = {}
    for line in (self._tree.text("/proc/net/dev") or "").splitlines():
      name, colon, rest = line.partition(":")
      numbers = rest.split()
      if colon and len(numbers) >= 9 and numbers[0].isdecimal() and numbers[8].isdecimal():
        found[name.strip()] = int(numbers[0]), int(numbers[8])
    counted = [found[name] for name in self._interfaces if name in found]
    for port in self._ports:
      received = self._tree.number(f"{port}/counters/port_rcv_data")
      sent = self._tree.number(f"{port}/counters/port_xmit_data")
      if received is not None and sent is not None:
        counted.append((4 * received, 4 * sent))  # counted in words of 4 bytes
    loopback = found["lo"][0] if "lo" in found else None
    if not counted:
      return None, None, loopback
    return sum(r for r, _ in counted), sum(s for _, s in counted), loopback

  def _steal(self) -> int | None:
    """Time the hypervisor gave this guest's CPUs to others, ns, over all of them."""
    numbers = (self._tree.text("/proc/stat") or "").partition("\n")[0].split()
    return int(numbers[8]) * self._tick_ns if len(numbers) > 8 and numbers[8].isdecimal() else None


def find_interfaces(tree: Tree) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Network interfaces to add up, and RDMA ports.

  Interfaces with hardware behind them; where there is none, as in a container, all that do not sit
  on others. InfiniBand's own ports count what goes over IP as well, so their interfaces are left
  out; ports on Ethernet count RDMA only, which the interface does not see.
  """
  ports: list[str] = []
  counted: list[str] = []
  for nic in cards.read_nics(tree):
    folder = f"{_INFINIBAND}/{nic.name}/ports"
    own = [f"{folder}/{port}" for port in tree.names(folder)
           if tree.number(f"{folder}/{port}/counters/port_rcv_data") is not None]
    ports += own
    counted += () if own and nic.kind == "infiniband" else nic.interfaces
  if not ports and not counted:
    counted = [name for name in tree.names(_NET) if name != "lo" and not any(
        entry.startswith("lower_") for entry in tree.names(f"{_NET}/{name}"))]
  return tuple(sorted(counted)), tuple(ports)


class HostSampler:
  """A daemon thread that samples, and keeps the samples until the writer takes them."""

  def __init__(self, process: int, attempt: int, period: float = 1.0, *,
               make: Callable[[], HostCounters] = HostCounters):
    """Prepares; `start` starts the thread.

    Args:
      attempt: attempt its rows belong to.
      period: seconds between two samples.
      make: makes the counters, on the thread.
    """
    self._process, self._attempt, self._make = process, attempt, make
    self._period = max(period, _SHORTEST)
    self._rows: collections.deque[tuple[int, Values]] = collections.deque(maxlen=_KEEP)
    self._end = threading.Event()
    self._taken_at = time.monotonic()
    self._thread = BackgroundThread(self._run, "hosts")

  def start(self) -> None:
    """Starts it, if a thread can start; without it nothing is sampled."""
    self._thread.start_if_it_can()

  def stop(self, timeout: float) -> None:
    """Takes a last sample and ends the thread, if it answers within `timeout` seconds: a broken GPU
    may hold it."""
    self._end.set()
    if self._thread.is_alive():
      self._thread.join(timeout)

  def take(self, force: bool) -> dict[str, np.ndarray]:
    """Samples not taken yet, as columns of the `hosts` table."""
    now = time.monotonic()
    if not self._rows or not (force or now - self._taken_at >= _WRITE_SECONDS):
      return {}
    self._taken_at = now
    rows = [self._rows.popleft() for _ in range(len(self._rows))]
    columns = {name: np.array([row.get(name) for _, row in rows], object)
               for name in schema.HOSTS.names}
    return {**columns, "time_ns": np.array([at for at, _ in rows], np.int64),
            "process": np.full(len(rows), self._process, np.int32),
            "attempt": np.full(len(rows), self._attempt, np.int32)}

  def _run(self) -> None:
    try:
      counters = self._make()
      while True:
        ending = self._end.is_set()
        self._rows.append((time.monotonic_ns(), counters.read()))
        if ending:
          return
        self._end.wait(self._period)
    except Exception as error:  # Whatever it is: the rest of the recording goes on.
      _LOG.info("The host's counters are no longer sampled: %s: %s", type(error).__name__, error)


_IPPROTO_TCP, _TCP_INFO = 6, 11
_SOL_SOCKET, _SO_COOKIE = 1, 57
_RTT, _TOTAL_RETRANS, _MIN_RTT = 68, 100, 148  # offsets in bytes; round trips in microseconds
_BUSY = 168  # busy_time, rwnd_limited, sndbuf_limited: microseconds
_FULL = 184
_NO_MIN_RTT = 0xFFFFFFFF


_Connection = tuple[tuple[int, int, int], int, int]
"""Its counters: busy and receiver limited time in microseconds, retransmits; its round trip and the
shortest one, microseconds."""


class OwnSockets:
  """Adds up what the connections of this process do from its first reading on, closed ones
  included.

  Not those of JAX's coordination service: its answers are so small that each is acknowledged after
  40 ms only, and all come from process 0, whose link would seem to be busy.
  """

  def __init__(self, coordinator: int | None = None) -> None:
    """Begins to add up; `coordinator` is the port of the coordination service, if there is one."""
    self._coordinator = coordinator
    self._seen: dict[tuple[str, int], _Connection] = {}
    self._totals = [0, 0, 0]
    self._first = True
    self._short = False  # an old kernel, without busy times
    self._get = _libc().getsockopt
    self._buffer = ctypes.create_string_buffer(256)
    self._cookie = ctypes.c_uint64()

  def read(self) -> Values:
    """Columns of the table `hosts`: sums since the first reading; means of round trips, weighted by
    how long each connection was busy since the last one. Nothing where this can't be known."""
    try:
      descriptors = os.listdir("/proc/self/fd")
    except OSError:  # of another system than Linux
      return {}
    buffer, size = self._buffer, ctypes.c_uint32()
    seen: dict[tuple[str, int], _Connection] = {}
    for name in descriptors:
      descriptor = int(name)
      size.value = len(buffer)
      if (self._get(descriptor, _IPPROTO_TCP, _TCP_INFO, buffer, ctypes.byref(size))
          or size.value < _TOTAL_RETRANS + 4):
        continue  # no TCP socket
      connection = self._parse(size.value)
      if self._coordinator is None or self._coordinator not in _ports(descriptor):
        seen[self._identity(descriptor)] = connection
    weighted = []
    for key, (counters, rtt, least) in seen.items():
      # A connection first seen now was made since the last reading: all of it counts. Not so at the
      # first one.
      old = (self._seen[key][0] if key in self._seen else counters if self._first
             else (0, 0, 0))
      rise = [max(now - then, 0) for now, then in zip(counters, old, strict=True)]
      self._totals = [total + more for total, more in zip(self._totals, rise, strict=True)]
      if rise[0] > 0 and least != _NO_MIN_RTT:
        weighted.append((rise[0], rtt, least))
    self._seen, self._first = seen, False
    busy, limited, retransmits = self._totals
    return {"tcp_busy_ns": None if self._short else busy * 1000,
            "tcp_receiver_limited_ns": None if self._short else limited * 1000,
            "retransmits": retransmits, **dict(zip(_ROUND_TRIPS, _means(weighted), strict=True))}

  def _parse(self, size: int) -> _Connection:
    (retransmits,) = struct.unpack_from("=I", self._buffer, _TOTAL_RETRANS)
    if size < _FULL:
      self._short = True
      return (0, 0, retransmits), 0, 0
    busy, limited = struct.unpack_from("=QQ", self._buffer, _BUSY)
    (rtt,), (least,) = (struct.unpack_from("=I", self._buffer, place) for place in (_RTT, _MIN_RTT))
    return (busy, limited, retransmits), rtt, least

  def _identity(self, descriptor: int) -> tuple[str, int]:
    """Tells a connection from a later one on the same descriptor, where the kernel can; one on two
    of them is one."""
    size = ctypes.c_uint32(8)
    if self._get(descriptor, _SOL_SOCKET, _SO_COOKIE, ctypes.byref(self._cookie),
                 ctypes.byref(size)):
      return "descriptor", descriptor
    return "cookie", self._cookie.value


def _ports(descriptor: int) -> set[int]:
  """The ports of a connection's two ends, as far as there are any."""
  found = set()
  for ask in (_libc().getsockname, _libc().getpeername):
    address, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    if not ask(descriptor, address, ctypes.byref(size)):
      (port,) = struct.unpack_from("!H", address, 2)  # of IPv4 and IPv6 alike
      found.add(port)
  return found


def _means(weighted: list[tuple[int, int, int]]) -> tuple[int, int] | tuple[None, None]:
  """Means in nanoseconds of the second and third, in microseconds, weighted by the first; of none,
  None."""
  total = sum(weight for weight, _, _ in weighted)
  if not total:
    return None, None
  return (sum(weight * rtt for weight, rtt, _ in weighted) * 1000 // total,
          sum(weight * least for weight, _, least in weighted) * 1000 // total)


@functools.cache
def _libc() -> ctypes.CDLL:
  return ctypes.CDLL(None)
