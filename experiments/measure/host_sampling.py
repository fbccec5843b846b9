"""What a sample of the host's counters costs, by open TCP connections.

    python -m experiments.measure.host_sampling

CPU time of the thread that samples, which other programs disturb little. Writes
docs/measurements/host_sampling.json and .md. Takes a few seconds.
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
import statistics
import time

from absl import app, flags

from experiments.lib import measured
from jaxpace.hosts.locality.read import read_locality
from jaxpace.trace.host_sampler import HostCounters

TARGET = 1e-2  # of one core, at one sample a second: 10 ms


def seconds_a_sample(connections: int, samples: int) -> list[float]:
  """CPU time of each of `samples` readings while this process holds both ends of so many
  connections."""
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    for _ in range(connections):
      stack.enter_context(socket.create_connection(server.getsockname()))
      stack.enter_context(server.accept()[0])
    counters = HostCounters()
    counters.read()
    times = []
    for _ in range(samples):
      start = time.thread_time()
      counters.read()
      times.append(time.thread_time() - start)
  return times


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments {argv[1:]}.")
  samples = flags.FLAGS.samples
  figures = measured.circumstances("experiments.measure.host_sampling")
  rows = []
  for connections in (0, 8, 64, 256):
    times = sorted(seconds_a_sample(connections, samples))
    rows.append({"sockets": 2 * connections, "median_s": statistics.median(times),
                 "p99_s": times[min(samples - 1, int(samples * 0.99))]})
  start = time.perf_counter()
  read_locality()
  figures.update(samples=samples, rows=rows, locality_s=time.perf_counter() - start,
                 met=all(row["p99_s"] <= TARGET for row in rows))
  lines = measured.introduction("Cost of sampling the host", figures)
  lines += [f"Each of {samples} samples for itself, CPU time of its thread. At the default of one "
            "sample a second, 1 ms is 0.1 % of one core.", ""]
  lines += measured.table(("open TCP sockets", "median, us", "p99, us"),
                          [(row["sockets"], row["median_s"] * 1e6, row["p99_s"] * 1e6)
                           for row in rows])
  lines += [f"Target: p99 at most {TARGET * 1e3:g} ms: {'met' if figures['met'] else 'missed'}. "
            "Reading where the process runs, once when a Recorder opens: "
            f"{figures['locality_s'] * 1e3:.1f} ms."]
  measured.write(figures, lines, pathlib.Path(flags.FLAGS.out))


if __name__ == "__main__":
  flags.DEFINE_integer("samples", 500, "Samples for each number of connections.", lower_bound=10)
  flags.DEFINE_string("out", "docs/measurements/host_sampling.json", "Where the figures go.")
  app.run(main)
