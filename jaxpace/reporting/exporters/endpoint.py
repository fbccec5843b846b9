"""The HTTP endpoint that Prometheus scrapes: one thread, a few connections, a time limit on each.

It lives in the training process, whose descriptors and threads are not for strangers to use up:
whoever connects and says nothing, or reads nothing, makes room for the next one. Nothing here can
keep a scraper out for long, or the recording from its files.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

MOST_CONNECTIONS = 16
LONGEST_REQUEST = 8192
"""Bytes of a request's head; there is no body."""
REQUEST_SECONDS, ANSWER_SECONDS = 5.0, 10.0
_TICK_SECONDS = 0.5
_BACKLOG = 128
_PIECE = 1 << 16

App = Callable[[dict[str, str], Callable[..., Any]], Iterable[bytes]]
"""As of WSGI, as far as an exporter's page needs it: method, path, query and two headers."""


class _Client:
  """One client: first its request comes, then the answer goes."""

  def __init__(self, client: socket.socket, now: float):
    self.client, self.begun, self.until = client, now, now + REQUEST_SECONDS
    self.request, self.answer = b"", memoryview(b"")

  @property
  def answering(self) -> bool:
    return len(self.answer) > 0


class Endpoint:
  """Serves one page over HTTP, on a daemon thread of its own, until `close`."""

  def __init__(self, address: str, port: int, app: App):
    """Listens.

    Args:
      address: host to listen on, such as "127.0.0.1" or "::1".
      port: TCP port, 0 for any.
      app: makes the page; called in the endpoint's thread.

    Raises:
      OSError: the port is taken, or can't be had.
    """
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM,
                                                flags=socket.AI_PASSIVE)[0]
    self._app = app
    self._socket = socket.socket(family, socket.SOCK_STREAM)
    try:
      self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      self._socket.bind(where)
      self._socket.listen(_BACKLOG)
      self._socket.setblocking(False)
      self._stop, self._stopped = socket.socketpair()
    except OSError:
      self._socket.close()
      raise
    self.server_address = self._socket.getsockname()
    self._connections: dict[socket.socket, _Client] = {}
    self._selector = selectors.DefaultSelector()
    self._selector.register(self._socket, selectors.EVENT_READ)
    self._selector.register(self._stopped, selectors.EVENT_READ)
    self._thread = threading.Thread(target=self._run, name="jaxpace-metrics", daemon=True)
    self._thread.start()

  @property
  def server_port(self) -> int:
    """The port that it listens on."""
    return int(self.server_address[1])

  def close(self) -> None:
    """Stops listening and hangs up on everyone."""
    with contextlib.suppress(OSError):
      self._stop.send(b"\0")
    self._thread.join(ANSWER_SECONDS)
    self._stop.close()

  def _run(self) -> None:
    try:
      while True:
        for key, _ in self._selector.select(_TICK_SECONDS):
          if key.fileobj is self._stopped:
            return
          if key.fileobj is self._socket:
            self._accept()
          elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._connections:
            self._advance(self._connections[key.fileobj])
        now = time.monotonic()
        for connection in [each for each in self._connections.values() if each.until < now]:
          self._hang_up(connection)
    finally:
      for connection in list(self._connections.values()):
        self._hang_up(connection)
      self._selector.close()
      self._socket.close()
      self._stopped.close()

  def _accept(self) -> None:
    for _ in range(_BACKLOG):
      try:
        client, _ = self._socket.accept()
      except BlockingIOError:
        return
      except OSError:
        # no descriptor is left: those in use here may be given up, and a loop that asks at once
        # again helps nobody
        self._make_room(0)
        time.sleep(0.05)
        return
      self._welcome(client)

  def _welcome(self, client: socket.socket) -> None:
    self._make_room(MOST_CONNECTIONS - 1)
    client.setblocking(False)
    self._connections[client] = connection = _Client(client, time.monotonic())
    self._selector.register(client, selectors.EVENT_READ)
    self._advance(connection)  # its request is mostly there already

  def _make_room(self, most: int) -> None:
    """Hangs up on the oldest, those first whose request hasn't come, until at most so many are
    left."""
    waiting = sorted(self._connections.values(), key=lambda each: (each.answering, each.begun))
    for connection in waiting[:max(0, len(waiting) - most)]:
      self._hang_up(connection)

  def _advance(self, connection: _Client) -> None:
    try:
      if connection.answering:
        sent = connection.client.send(connection.answer[:_PIECE])
        connection.answer = connection.answer[sent:]
        if not connection.answering:
          self._hang_up(connection)
        return
      piece = connection.client.recv(LONGEST_REQUEST)
    except BlockingIOError:
      return
    except OSError:
      self._hang_up(connection)
      return
    connection.request += piece
    if not piece or len(connection.request) > LONGEST_REQUEST:
      self._hang_up(connection)
    elif b"\r\n\r\n" in connection.request or b"\n\n" in connection.request:
      connection.answer = memoryview(_answer(connection.request, self._app))
      connection.until = time.monotonic() + ANSWER_SECONDS
      self._selector.modify(connection.client, selectors.EVENT_WRITE)

  def _hang_up(self, connection: _Client) -> None:
    if self._connections.pop(connection.client, None) is None:
      return
    with contextlib.suppress(KeyError, ValueError, OSError):
      self._selector.unregister(connection.client)
    connection.client.close()


def _answer(request: bytes, app: App) -> bytes:
  """Makes the whole answer to a request; a request that is none, and a page that can't be made, get
  a status alone."""
  head, *lines = request.decode("latin-1").splitlines()
  words = head.split()
  if len(words) != 3 or not words[2].startswith("HTTP/1."):
    return b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
  path, _, query = words[1].partition("?")
  environment = {"REQUEST_METHOD": words[0], "PATH_INFO": path, "QUERY_STRING": query}
  for line in lines:
    name, colon, value = line.partition(":")
    if colon and name.strip().lower() in ("accept", "accept-encoding"):
      environment["HTTP_" + name.strip().upper().replace("-", "_")] = value.strip()
  said: list[Any] = []
  try:
    body = b"".join(app(environment, lambda status, headers, *_: said.extend((status, headers))))
  except Exception:
    return b"HTTP/1.1 500 Internal Server Error\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
  status, headers = said
  own = [("Connection", "close"), ("Content-Length", str(len(body)))]
  text = "".join(f"{name}: {value}\r\n" for name, value in [*headers, *own])
  return f"HTTP/1.1 {status}\r\n{text}\r\n".encode("latin-1") + body
