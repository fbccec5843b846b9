"""What a job can find out about its own network: the quiet cost of its collective, and which link
is slow."""

from __future__ import annotations

import json
import pathlib
import socket

import jax

from jaxpace.costs.bench.fit import fit, to_json
from jaxpace.costs.bench.measure import host_of_processes, levels, measure
from jaxpace.costs.fabric_file import ALL_REDUCE
from jaxpace.live.probe import links

_REPEATS = 5
_PROBE_BYTES, _PROBE_REPEATS, _PROBE_SECONDS = 1 << 18, 3, 20.0


def bench(path: pathlib.Path, size: int) -> None:
  """Measures the all-reduce at sizes about `size` bytes, as `jaxpace bench` does; process 0 writes
  the file.

  All processes call it together, on a quiet fabric.
  """
  devices = jax.devices()
  groups, notes = levels([device.process_index for device in devices],
                         host_of_processes(socket.gethostname()))
  group = groups[-1]
  found = measure(ALL_REDUCE, group, [size // 2, size, 2 * size], _REPEATS, devices)
  if jax.process_index() == 0:
    fitted = fit(ALL_REDUCE, "ring", len(group.members[0]), found)
    facts = {"backend": devices[0].platform, "devices": len(devices),
             "processes": jax.process_count()}
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(to_json([(group, {ALL_REDUCE: (fitted, found)})], facts,
                                      notes), indent=1) + "\n")
    new.replace(path)


def probe(directory: pathlib.Path) -> None:
  """Probes the links between the processes, as a user would on request; process 0 writes
  `links.json`."""
  links.probe_links(directory, message_bytes=_PROBE_BYTES, repeats=_PROBE_REPEATS,
                    seconds=_PROBE_SECONDS)
