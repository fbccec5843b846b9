"""The HTTP endpoint that Prometheus scrapes: `wsgiref`'s server with a bounded number of threads.

It lives in the training process, whose descriptors and threads are not for strangers to use up:
whoever connects and says nothing makes room for the next one.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
import wsgiref.simple_server
from collections.abc import Callable
from typing import Any

MOST_CONNECTIONS = 16
REQUEST_SECONDS = 5.0
"""Longest silence of a client, before its request has come and while the answer goes."""
_ROOM_SECONDS = 1.0


class _Handler(wsgiref.simple_server.WSGIRequestHandler):
  timeout = REQUEST_SECONDS

  def log_message(self, format: str, *args: Any) -> None:
    """Says nothing: the program's output is its own."""


class Endpoint(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
  """Serves one page over HTTP, on daemon threads of its own, until `close`."""

  daemon_threads = True
  request_queue_size = 128

  def __init__(self, address: str, port: int, app: Callable[..., Any]):
    """Listens.

    Args:
      address: host to listen on, such as "127.0.0.1" or "::1".
      port: TCP port, 0 for any.
      app: makes the page (WSGI); called in the endpoint's threads.

    Raises:
      OSError: the port is taken, or can't be had.
    """
    self.address_family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    self._open: list[socket.socket] = []  # oldest first
    self._room = threading.Semaphore(MOST_CONNECTIONS)
    super().__init__((address, port), _Handler)
    self.set_app(app)
    self._thread = threading.Thread(target=self.serve_forever, name="jaxpace-metrics", daemon=True)
    self._thread.start()

  def get_request(self) -> tuple[socket.socket, Any]:
    """Accepts a connection. Where no descriptor is left, asking again at once helps nobody."""
    try:
      return super().get_request()
    except OSError:
      time.sleep(0.05)
      raise

  def process_request(self, request: Any, client_address: Any) -> None:
    """Answers on a thread; hangs up on the oldest where there are too many."""
    if not self._room.acquire(blocking=False):
      with contextlib.suppress(OSError, IndexError):
        self._open[0].shutdown(socket.SHUT_RDWR)  # its thread sees that, and ends
      if not self._room.acquire(timeout=_ROOM_SECONDS):
        request.close()
        return
    self._open.append(request)
    super().process_request(request, client_address)

  def shutdown_request(self, request: Any) -> None:
    """Hangs up."""
    super().shutdown_request(request)
    self._open.remove(request)
    self._room.release()

  def handle_error(self, request: Any, client_address: Any) -> None:
    """Says nothing of clients that go, or say nothing."""

  def close(self) -> None:
    """Stops listening and hangs up on everyone."""
    self.shutdown()
    for client in list(self._open):
      with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
    self.server_close()
    self._thread.join(REQUEST_SECONDS)
