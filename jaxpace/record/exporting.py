"""Hands the rows a recorder decodes to exporters, on a thread of its own.

The training thread has no part in it: rows come from the recorder's writer thread, through a queue
that is bounded and never waited for. An exporter that fails is left out from then on, with one
warning; one that is slow misses rows.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from jaxpace.record.columns import Columns

_LOG = logging.getLogger("jaxpace")
_QUEUE = 16
"""Batches, of some seconds of steps each, that wait for slow exporters; those that come when it is
full are lost."""


@runtime_checkable
class Exporter(Protocol):
  """Takes the rows of this process's ranks. Both methods are called by one thread, not that of the
  training loop."""

  def export(self, steps: Columns, collectives: Columns) -> None:
    """Takes new rows of the tables `steps` and `collectives`, see `jaxpace.runs.schema`; a masked
    entry is null."""

  def close(self) -> None:
    """Is called once, after the last rows."""


class Feed:
  """A daemon thread in front of the exporters. `put` and `close` may be called from any thread."""

  def __init__(self, exporters: Iterable[Exporter]):
    """Prepares; `start` starts the thread.

    Raises:
      TypeError: something is no exporter.
    """
    self._exporters = list(exporters) if isinstance(exporters, Iterable) else [exporters]
    for exporter in self._exporters:
      if not isinstance(exporter, Exporter) or isinstance(exporter, type):
        raise TypeError("exporters takes objects with methods export and close, such as "
                        f"jaxpace.show.exporters.Prometheus(port=9400); {exporter!r:.80} is "
                        "none. Anything with write_scalars(step, scalars) becomes one by "
                        "jaxpace.show.exporters.Scalars(writer).")
    self._queue: queue.Queue[tuple[Columns, Columns] | None] = queue.Queue(_QUEUE)
    self._thread: threading.Thread | None = None
    self.lost = 0  # batches that found the queue full

  def start(self) -> None:
    """Starts the thread, if there is an exporter."""
    if self._exporters:
      self._thread = threading.Thread(target=self._run, name="jaxpace-exporters", daemon=True)
      self._thread.start()

  def put(self, steps: Columns, collectives: Columns) -> None:
    """Queues rows. Never blocks."""
    if self._thread is None:
      return
    try:
      self._queue.put_nowait((steps, collectives))
    except queue.Full:
      self.lost += 1
      if self.lost == 1:
        _LOG.warning("An exporter is slower than the steps come: some are missing from what it "
                     "shows. The recorded run has them all.")

  def close(self, timeout: float) -> None:
    """Exports what is queued and closes the exporters, for at most `timeout` seconds."""
    if self._thread is None:
      return
    with contextlib.suppress(queue.Full):
      self._queue.put(None, timeout=timeout)
    self._thread.join(timeout)
    if self._thread.is_alive():
      _LOG.warning("An exporter has not finished within %.0f s: leaving it.", timeout)
    self._thread = None

  def _run(self) -> None:
    rows: tuple[Columns, Columns] | None = ({}, {})
    while rows is not None:
      rows = self._queue.get()
      for exporter in list(self._exporters):
        try:
          if rows is None:
            exporter.close()
          else:
            exporter.export(*rows)
        except Exception as error:
          self._exporters.remove(exporter)
          _LOG.warning("%s stopped, training and recording go on: %s: %s",
                       type(exporter).__name__, type(error).__name__, error)
          _LOG.debug("Exporter stopped", exc_info=error)
