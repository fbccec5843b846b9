"""What a recorder records, for monitoring systems, while the job runs. See docs/watch.md.

Scalars by step, for TensorBoard or anything that has `write_scalars(step, scalars)`, from process 0
only. Time series of each process's ranks: for Prometheus, as a text file for node_exporter and an
endpoint to scrape; for OpenTelemetry, through a meter of the program's own.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import socket
import socketserver
import threading
import time
import wsgiref.simple_server
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpace.files.folders import Folder
from jaxpace.record.columns import Columns
from jaxpace.show.figures import SERIES, BatchFigures, Bounded, figures


class Scalars:
  """An exporter of means over the steps since the last ones it wrote, of process 0's ranks.

  Every few seconds it writes `jaxpace/step_ms`, `jaxpace/<phase>_ms`, `jaxpace/wait_ms`,
  `jaxpace/gc_ms` and others that the run has, and `jaxpace/decision/<name>`, the pacer's newest,
  under the number of the newest step.
  """

  def __init__(self, writer: Any):
    """Prepares.

    Args:
      writer: has a method `write_scalars(step, scalars)`, called with numbers by name, as `clu`'s
        metric writers have. It is called by a thread of the recorder's: one that the loop uses too
        must bear that.

    Raises:
      TypeError: the writer has no method `write_scalars`.
    """
    if not callable(getattr(writer, "write_scalars", None)):
      raise TypeError("Scalars takes an object with write_scalars(step, scalars), not "
                      f"{type(writer).__name__}. For TensorBoard files: TensorBoard(logdir).")
    self._writer = writer

  def export(self, steps: Columns, collectives: Columns) -> None:
    """Writes the means of new rows; see `jaxpace.record.exporting.Exporter`."""
    found = figures(steps, collectives)
    if found is not None and found.process == 0:
      scalars = {f"jaxpace/{name}": value for name, value in means(found).items()}
      self._writer.write_scalars(found.last_step, scalars)

  def close(self) -> None:
    """Leaves the writer open: it is the caller's."""


class TensorBoard(Scalars):
  """An exporter that writes TensorBoard files, by tensorboardX; see `Scalars` for the names."""

  def __init__(self, logdir: str | os.PathLike[str]):
    """Prepares; the folder is made with the first rows, by process 0.

    Raises:
      ImportError: the package tensorboardX is not installed.
    """
    try:
      import tensorboardX
    except ImportError as error:
      raise ImportError(
          "TensorBoard() needs tensorboardX: pip install 'jaxpace[metrics]'.") from error
    self._make = lambda: tensorboardX.SummaryWriter(os.path.abspath(logdir))
    self._files: Any = None
    super().__init__(self)

  def write_scalars(self, step: int, scalars: dict[str, float]) -> None:
    """Writes numbers by name."""
    if self._files is None:
      self._files = self._make()
    for name, value in scalars.items():
      self._files.add_scalar(name, value, step)
    self._files.flush()

  def close(self) -> None:
    """Closes the files."""
    if self._files is not None:
      self._files.close()


def means(found: BatchFigures) -> dict[str, float]:
  """Means a step over the process's ranks, in ms, and the pacer's newest decisions."""
  rows, steps = sum(found.steps.values()), max(found.steps.values())
  durations = np.concatenate(list(found.step_seconds.values()))
  scalars = {"step_ms": float(durations.mean() * 1e3)} if durations.size else {}
  for (_, phase), seconds in found.phases.items():
    scalars[f"{phase}_ms"] = scalars.get(f"{phase}_ms", 0.0) + seconds * 1e3 / rows
  if found.waits:
    scalars["wait_ms"] = sum(found.waits.values()) * 1e3 / rows
  scalars.update({f"{cause}_ms": seconds * 1e3 / steps for cause, seconds in found.host.items()})
  scalars.update({f"decision/{name}": value for name, value in found.decisions.items()})
  return scalars


MOST_CONNECTIONS = 16
REQUEST_SECONDS = 5.0
"""Longest silence of a client, before its request has come and while the answer goes."""
_ROOM_SECONDS = 1.0


class _Handler(wsgiref.simple_server.WSGIRequestHandler):
  timeout = REQUEST_SECONDS

  def log_message(self, format: str, *args: Any) -> None:
    """Says nothing: the program's output is its own."""


class Endpoint(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
  """Serves one page over HTTP, on daemon threads of its own, until `close`: `wsgiref`'s server with
  a bounded number of threads.

  It lives in the training process, whose descriptors and threads are not for strangers to use up:
  whoever connects and says nothing makes room for the next one.
  """

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


_BUCKETS = (.001, .002, .005, .01, .02, .03, .05, .075, .1, .15, .2, .3, .5, .75, 1.0, 1.5, 2.0,
            5.0, 10.0, 30.0, 60.0)
_PORTS = 64


class Prometheus:
  """An exporter of counters, histograms and gauges; each process exports its own ranks.

      with jaxpace.Recorder("runs/demo", paced, exporters=[Prometheus(port=9400)]) as recorder:
  """

  def __init__(self, *, port: int | None = None, address: str = "127.0.0.1",
               textfile: str | os.PathLike[str] | None = None):
    """Prepares; file and endpoint are there with the first rows.

    Args:
      port: of the HTTP endpoint; where another process of this host has it, the next free one. 0:
        any. None: none.
      address: to listen on. By default only this host can read the endpoint, which has no password.
        It has at most 16 connections; one that says nothing for 5 s, or is the oldest of too many,
        is hung up on.
      textfile: folder and file, `metrics/jaxpace.prom` say; process 3 writes
        `metrics/jaxpace-3.prom`.

    Raises:
      ImportError: the package prometheus_client is not installed.
      ValueError: neither port nor file is given, or the port is none.
    """
    if port is None and textfile is None:
      raise ValueError(
          "Prometheus() exports nowhere: give port=9400, textfile=\"jaxpace.prom\", or both.")
    if port is not None and (type(port) is not int or not 0 <= port < 65536):
      raise ValueError(f"port={port!r} is not a TCP port: give 1 to 65535, or 0 for any free one.")
    try:
      import prometheus_client
    except ImportError as error:
      raise ImportError(
          "Prometheus() needs prometheus_client: pip install 'jaxpace[metrics]'.") from error
    self._client = prometheus_client
    self._wanted, self._address = port, address
    self._textfile = None if textfile is None else pathlib.Path(os.path.abspath(textfile))
    self._server: Endpoint | None = None
    self._bounded = Bounded()
    self.port: int | None = None  # at which the endpoint listens
    self.registry = prometheus_client.CollectorRegistry()
    self._process: int | None = None
    client = self._client
    made: dict[str, Any] = {
        "counter": client.Counter, "gauge": client.Gauge,
        "histogram": functools.partial(client.Histogram, buckets=_BUCKETS)}
    self._series = {name: made[kind](f"jaxpace_{name}", what, labels, registry=self.registry)
                    for name, (kind, _, _, what, labels) in SERIES.items()}

  def export(self, steps: Columns, collectives: Columns) -> None:
    """Adds rows up; see `jaxpace.record.exporting.Exporter`."""
    found = figures(steps, collectives)
    if found is None:
      return
    self._take(found)
    if self._process is None:
      self._process = found.process
      self._listen()
    self._write()

  def close(self) -> None:
    """Writes the file a last time and closes the endpoint."""
    self._write()
    if self._server is not None:
      self._server.close()
      self._server = None

  def _take(self, found: BatchFigures) -> None:
    for name, labels, number in self._bounded.points(found):
      one = self._series[name].labels(**labels)
      add = getattr(one, "observe", None) or getattr(one, "set", None) or one.inc
      add(number)

  def _listen(self) -> None:
    if self._wanted is None:
      return
    last = self._wanted + _PORTS if self._wanted else 1
    for port in range(self._wanted, min(last, 65536)):
      try:
        self._server = Endpoint(self._address, port, self._client.make_wsgi_app(self.registry))
      except OSError as error:
        if error.errno != errno.EADDRINUSE or port + 1 == min(last, 65536):
          raise
      else:
        self.port = self._server.server_port
        return

  def _write(self) -> None:
    if self._textfile is None or self._process is None:
      return
    self._textfile.parent.mkdir(parents=True, exist_ok=True)
    own = self._textfile.with_name(
        f"{self._textfile.stem}-{self._process}{self._textfile.suffix or '.prom'}")
    Folder(own.parent).write_text(
        own.name, self._client.generate_latest(self.registry).decode("utf-8"))


class OpenTelemetry:
  """An exporter to OpenTelemetry. Where figures go is up to the program's meter provider, as for
  all its metrics."""

  def __init__(self, meter: Any = None):
    """Makes the instruments.

    Args:
      meter: an `opentelemetry.metrics.Meter`; None takes "jaxpace" of the global provider.

    Raises:
      ImportError: no meter is given and the package opentelemetry-api is not installed.
    """
    if meter is None:
      try:
        from opentelemetry import metrics
      except ImportError as error:
        raise ImportError("OpenTelemetry() needs opentelemetry-api, and opentelemetry-sdk to send "
                          "anything: pip install 'jaxpace[opentelemetry]'.") from error
      meter = metrics.get_meter("jaxpace")
    self._bounded = Bounded()
    made: dict[str, Callable[..., Any]] = {
        "counter": lambda *said: meter.create_counter(*said).add,
        "histogram": lambda *said: meter.create_histogram(*said).record,
        "gauge": lambda *said: meter.create_gauge(*said).set}
    self._takes = {name: made[kind](f"jaxpace.{called}", unit, what)
                   for name, (kind, called, unit, what, _) in SERIES.items()}

  def export(self, steps: Columns, collectives: Columns) -> None:
    """Adds rows up; see `jaxpace.record.exporting.Exporter`."""
    found = figures(steps, collectives)
    for name, labels, number in self._bounded.points(found) if found else ():
      self._takes[name](number, labels)

  def close(self) -> None:
    """Leaves the provider running: it is the program's."""
