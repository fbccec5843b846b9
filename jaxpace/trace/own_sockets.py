"""What the kernel says of this process's own TCP connections: busy time, retransmits, round trips.
Linux only.

`getsockopt(TCP_INFO)` on each of the process's file descriptors, whoever opened them: the sockets
of gloo and NCCL belong to native code. Called through ctypes, since a `socket` object would own the
descriptor and close it. Source: struct tcp_info in include/uapi/linux/tcp.h; fields are only ever
appended to it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import NamedTuple

_IPPROTO_TCP, _TCP_INFO = 6, 11
_SOL_SOCKET, _SO_COOKIE = 1, 57
_RTT, _TOTAL_RETRANS, _MIN_RTT = 68, 100, 148  # offsets in bytes; round trips in microseconds
_BUSY = 168  # busy_time, rwnd_limited, sndbuf_limited: microseconds
_FULL = 184
_NO_MIN_RTT = 0xFFFFFFFF


class Counts(NamedTuple):
  """Sums and means over connections. None: the kernel does not count it, or nothing was sent."""

  busy_ns: int | None  # time with data sent or waiting to be sent, not yet acknowledged
  receiver_limited_ns: int | None  # of it, time in which the receiver's window was full
  retransmits: int
  # round trip, smoothed; mean weighted by how long each was busy since the last reading
  rtt_ns: int | None = None
  min_rtt_ns: int | None = None  # the shortest one of the last minutes, weighted alike


class _Connection(NamedTuple):
  counters: tuple[int, int, int]  # busy and receiver limited time, microseconds; retransmits
  rtt: int  # microseconds
  min_rtt: int


class OwnSockets:
  """Adds up what the connections of this process do from its first reading on, closed ones
  included."""

  def __init__(self) -> None:
    self._seen: dict[tuple[str, int], _Connection] = {}
    self._totals = [0, 0, 0]
    self._first = True
    self._short = False  # an old kernel, without busy times
    self._get = _getsockopt()
    self._buffer = ctypes.create_string_buffer(256)
    self._cookie = ctypes.c_uint64()

  def read(self) -> Counts | None:
    """Counts since the first reading; None where this can't be known."""
    get = self._get
    if get is None:
      return None
    try:
      descriptors = os.listdir("/proc/self/fd")
    except OSError:
      return None
    buffer, size = self._buffer, ctypes.c_uint32()
    seen: dict[tuple[str, int], _Connection] = {}
    for name in descriptors:
      descriptor = int(name)
      size.value = len(buffer)
      if (get(descriptor, _IPPROTO_TCP, _TCP_INFO, buffer, ctypes.byref(size))
          or size.value < _TOTAL_RETRANS + 4):
        continue  # no TCP socket
      seen[self._identity(descriptor)] = self._parse(size.value)
    weighted = []
    for key, new in seen.items():
      # A connection first seen now was made since the last reading: all of it counts. Not so at the
      # first one.
      old = (self._seen[key].counters if key in self._seen else new.counters if self._first
             else (0, 0, 0))
      rise = [max(now - then, 0) for now, then in zip(new.counters, old, strict=True)]
      self._totals = [total + more for total, more in zip(self._totals, rise, strict=True)]
      if rise[0] > 0 and new.min_rtt != _NO_MIN_RTT:
        weighted.append((rise[0], new.rtt, new.min_rtt))
    self._seen, self._first = seen, False
    busy, limited, retransmits = self._totals
    return Counts(None if self._short else busy * 1000, None if self._short else limited * 1000,
                  retransmits, *_means(weighted))

  def _parse(self, size: int) -> _Connection:
    (retransmits,) = struct.unpack_from("=I", self._buffer, _TOTAL_RETRANS)
    if size < _FULL:
      self._short = True
      return _Connection((0, 0, retransmits), 0, 0)
    busy, limited = struct.unpack_from("=QQ", self._buffer, _BUSY)
    (rtt,), (least,) = (struct.unpack_from("=I", self._buffer, place) for place in (_RTT, _MIN_RTT))
    return _Connection((busy, limited, retransmits), rtt, least)

  def _identity(self, descriptor: int) -> tuple[str, int]:
    """Tells a connection from a later one on the same descriptor, where the kernel can; one on two
    of them is one."""
    size = ctypes.c_uint32(8)
    assert self._get is not None
    if self._get(descriptor, _SOL_SOCKET, _SO_COOKIE, ctypes.byref(self._cookie),
                 ctypes.byref(size)):
      return "descriptor", descriptor
    return "cookie", self._cookie.value


def _means(weighted: list[tuple[int, int, int]]) -> tuple[int, int] | tuple[None, None]:
  """Means in nanoseconds of the second and third, in microseconds, weighted by the first; of none,
  None."""
  total = sum(weight for weight, _, _ in weighted)
  if not total:
    return None, None
  return (sum(weight * rtt for weight, rtt, _ in weighted) * 1000 // total,
          sum(weight * least for weight, _, least in weighted) * 1000 // total)


def _getsockopt():
  if not sys.platform.startswith("linux"):
    return None
  try:
    return ctypes.CDLL(None).getsockopt
  except (OSError, AttributeError):
    return None
