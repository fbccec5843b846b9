"""The probe as users call it: measures, judges, and keeps what was found in the run directory."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpace.live import probe_pairs
from jaxpace.runs.links import ProbedLinks, infer, write_links

_LARGEST, _SMALLEST = 1 << 28, 1 << 10


def probe_links(directory: str | os.PathLike[str] | None = None, *, message_bytes: int = 1 << 20,
                repeats: int = 10, seconds: float = 60.0, devices: Sequence[Any] | None = None,
                progress: Callable[[int, int], None] | None = None) -> ProbedLinks:
  """Measures the links between the job's processes, pair by pair, and says which host or link is
  slow.

      if step == 1000:
        links = jaxpace.probe_links("runs/demo")
        print(links.text())

  A collective call: every process makes it, at the same point between two steps, with the same
  arguments. Each of n processes sends `repeats + 1` messages to each other one, n/2 pairs at a
  time: about 2 (n - 1) rounds. The devices' queues must be free: it waits for what was dispatched
  before.

  Args:
    directory: run directory; process 0 writes `links.json` there. None: nowhere.
    message_bytes: size of a message, 1 KiB to 256 MiB. Large enough that the rate counts, not the
      latency.
    repeats: messages a pair; the quickest counts. More of them where hosts are busy with other
      things.
    seconds: no new round begins after so long; pairs left out are NaN.
    devices: one device for each end, instead of each process's first.
    progress: called with rounds done and rounds in all.

  Returns:
    The same on every process.

  Raises:
    ValueError: an argument is out of range, or there is only one end.
  """
  if not _SMALLEST <= message_bytes <= _LARGEST or repeats < 1 or not seconds > 0:
    raise ValueError(f"message_bytes={message_bytes} must be {_SMALLEST} to {_LARGEST}, "
                     f"repeats={repeats} at least 1, and seconds={seconds} positive.")
  chosen = probe_pairs.ends() if devices is None else list(devices)
  if len(chosen) < 2:
    raise ValueError("There is one process with one device: no link to probe. Start the job with "
                     "`jaxpace run`, srun or the like, and call "
                     "jaxpace.distributed.initialize() first.")
  began = time.monotonic()
  times = probe_pairs.measure(chosen, message_bytes, repeats, seconds, progress)
  hosts = probe_pairs.host_names(chosen, socket.gethostname())
  if len(set(hosts)) == 1:  # one host: its ends are told apart instead
    hosts = [f"{hosts[0]}/{i}" for i in range(len(hosts))]
  found = infer(times.quickest, hosts)
  links = ProbedLinks(tuple(hosts), message_bytes, times.quickest, times.median, found.culprits,
                      found.cannot_tell, time.monotonic() - began, time.time_ns())
  if directory is not None and jax.process_index() == 0:
    write_links(directory, links)
  return links
