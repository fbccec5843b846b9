"""Measures a path with TCP: rate and round trips. Run by `Lab.measure` on both ends; needs only
Python.

    probe.py serve                              prints the port it listens on
    probe.py send ADDRESS PORT SECONDS          prints the figures as JSON
"""

from __future__ import annotations

import json
import socket
import statistics
import struct
import sys
import threading
import time

_BYTE, _CHUNK = b"x", bytes(1 << 16)
_PINGS = 50
_WARM_UP = 0.25  # share of the time that does not count: the window opens
_COUNT = struct.Struct("!QQ")  # bytes, nanoseconds


def serve() -> None:
  """Answers an echo connection and a bulk connection, then ends."""
  with socket.create_server(("", 0)) as server:
    print(server.getsockname()[1], flush=True)
    echo, _ = server.accept()
    threading.Thread(target=_echo, args=(echo,), daemon=True).start()
    bulk, _ = server.accept()
    seconds, = struct.unpack("!d", _exactly(bulk, 8))
    bulk.sendall(_COUNT.pack(*_receive(bulk, seconds)))
    _exactly(bulk, 1)  # until the other end has read it


def _echo(connection: socket.socket) -> None:
  connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  while byte := connection.recv(1):
    connection.sendall(byte)


def _receive(connection: socket.socket, seconds: float) -> tuple[int, int]:
  """Bytes that arrive after the warm-up until the sender stops, and the nanoseconds between first
  and last of them."""
  warm = time.monotonic_ns() + int(1e9 * _WARM_UP * seconds)
  total, first, last = 0, 0, 0
  while got := len(connection.recv(1 << 18)):
    now = time.monotonic_ns()
    if first:
      total, last = total + got, now
    elif now >= warm:
      first = last = now
  return total, last - first


def _exactly(connection: socket.socket, count: int) -> bytes:
  data = b""
  while len(data) < count and (more := connection.recv(count - len(data))):
    data += more
  return data


def send(address: str, port: int, seconds: float) -> dict[str, object]:
  """Pings the idle path, fills it for `seconds`, pings it while it is full."""
  with socket.create_connection((address, port), timeout=20) as echo:
    echo.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    idle = _pings(echo, _PINGS, time.monotonic() + 5)
    with socket.create_connection((address, port), timeout=20) as bulk:
      end = time.monotonic() + seconds
      bulk.sendall(struct.pack("!d", seconds))
      loaded: list[float] = []

      def ping_later() -> None:
        time.sleep(_WARM_UP * seconds)
        loaded.extend(_pings(echo, 10 * _PINGS, end))

      pinging = threading.Thread(target=ping_later)
      pinging.start()
      while time.monotonic() < end:
        bulk.sendall(_CHUNK)
      bulk.shutdown(socket.SHUT_WR)
      total, nanoseconds = _COUNT.unpack(_exactly(bulk, _COUNT.size))
      pinging.join()
      how = bulk.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
  return {"mbit": round(8e3 * total / max(nanoseconds, 1), 2),
          "rtt_ms": round(statistics.median(idle), 4),
          "loaded_rtt_ms": round(statistics.median(loaded or [float("nan")]), 3), "congestion": how}


def _pings(connection: socket.socket, most: int, until: float) -> list[float]:
  """Round trips of one byte, ms; at least one."""
  found: list[float] = []
  while not found or (len(found) < most and time.monotonic() < until):
    start = time.perf_counter()
    connection.sendall(_BYTE)
    connection.recv(1)
    found.append(1e3 * (time.perf_counter() - start))
  return found


if __name__ == "__main__":
  if sys.argv[1] == "serve":
    serve()
  else:
    print(json.dumps(send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))))
