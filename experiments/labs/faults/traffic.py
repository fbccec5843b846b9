"""Traffic that competes with a job: as many TCP connections as asked for, as fast as they go. Needs
only Python.

    traffic.py serve PORT                   takes connections and reads
    traffic.py send ADDRESS PORT FLOWS      writes until it is ended; 0.25 flows: one, a quarter of the time
"""  # noqa: E501

from __future__ import annotations

import socket
import sys
import threading
import time

_CHUNK = bytes(1 << 15)
_TURN = 0.1  # s


def serve(port: int) -> None:
  """Reads from whoever connects, until it is ended."""
  with socket.create_server(("", port)) as server:
    print("ready", flush=True)
    while True:
      connection, _ = server.accept()
      threading.Thread(target=_read, args=(connection,), daemon=True).start()


def _read(connection: socket.socket) -> None:
  while connection.recv(1 << 18):
    pass


def send(address: str, port: int, flows: float) -> None:
  """Writes to `flows` connections until it is ended; a part of one writes that part of the time."""
  for _ in range(max(1, round(flows))):
    connection = socket.create_connection((address, port), timeout=20)
    threading.Thread(target=_write, args=(connection, min(flows, 1.0)), daemon=True).start()
  print("ready", flush=True)
  while True:
    time.sleep(3600)


def _write(connection: socket.socket, part: float) -> None:
  connection.settimeout(None)
  while True:
    until = time.monotonic() + part * _TURN
    while time.monotonic() < until:
      connection.sendall(_CHUNK)
    time.sleep((1 - part) * _TURN)


if __name__ == "__main__":
  if sys.argv[1] == "serve":
    serve(int(sys.argv[2]))
  else:
    send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
