"""How well listening tells a busy link from a free one, over gloo and real TCP, by the size of the
tiny collective.

    python -m experiments.labs.fabric.listening                              # some 3 minutes
    python -m experiments.labs.fabric.listening --seconds=4 --out=/tmp/listening.json

One job listens all the time, every few milliseconds, exactly as `jaxpace.take_turns` does in a live
step: a sum of so many zeros, timed on each rank, the least of all ranks' times told by another one.
The other job sends buckets with rests between them. All hosts share one clock, so of each reading
it is known whether the other job's bucket was under way. Writes docs/measurements/listening.json
and .md. Needs root, see experiments/labs/fabric/lab.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import numpy as np
from absl import app, flags
from ml_collections import config_flags

from experiments.labs.fabric import jobs
from experiments.labs.fabric.lab import Lab
from experiments.labs.fabric.listening_figures import figures_of, page
from experiments.labs.fabric.machine import LabError
from experiments.labs.fabric.topology import ConfigError
from experiments.lib import measured

_CONFIG = config_flags.DEFINE_config_file("config", "configs/fabric.py", "The lab.",
                                          lock_config=True)
_sizes = flags.DEFINE_list("sizes", ["1", "256", "2048"],
                           "Numbers (4 bytes each) of the tiny collective.")
_congestion = flags.DEFINE_list("congestion", ["cubic", "reno", "bbr"], "TCP congestion controls.")
_seconds = flags.DEFINE_float("seconds", 6.0, "Of each size, s.", lower_bound=1.0)
_bucket = flags.DEFINE_float("bucket_kb", 300.0, "KB (1,000 bytes) of the other job's buckets.",
                             lower_bound=1.0)
_out = flags.DEFINE_string("out", "docs/measurements/listening.json",
                           "File the figures are written to.")

_WORKER = "experiments.labs.fabric.listening_worker"


class _Workers:
  """A job's ranks, each a process on its host."""

  def __init__(self, lab: Lab, job: str, logs: pathlib.Path):
    self.ranks = []
    for index, host in enumerate(jobs.hosts_of(lab.topology, job)):
      with (logs / f"{job}-{index}.log").open("wb") as log:
        self.ranks.append(lab.popen(
            host, [sys.executable, "-m", _WORKER],
            env=jobs.environment(lab.topology, job, index, os.environ), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log, text=True))

  def ask(self, **request: Any) -> None:
    for rank in self.ranks:
      rank.stdin.write(json.dumps(request) + "\n")
      rank.stdin.flush()

  def answer(self) -> Any:
    return [self._line(rank) for rank in self.ranks][0]  # noqa: RUF015 (all are read)

  def _line(self, rank: subprocess.Popen[str]) -> Any:
    assert rank.stdout is not None
    # Gloo says something there, too.
    for line in rank.stdout:
      if line.startswith("{"):
        return json.loads(line)["answer"]
    raise LabError("A rank of the listening lab ended; see its log.")

  def close(self) -> None:
    for rank in self.ranks:
      rank.stdin.close()
    for rank in self.ranks:
      try:
        rank.wait(timeout=10)
      except subprocess.TimeoutExpired:
        rank.kill()


def _priority() -> str:
  return ("precedence on a machine in use" if os.sched_getscheduler(0) != os.SCHED_OTHER
          else "no precedence")


def _measure(congestion: str, figures: dict[str, Any], out: pathlib.Path) -> None:
  config = _CONFIG.value.copy_and_resolve_references()
  with config.unlocked():
    config.congestion = congestion
  logs = pathlib.Path(out).with_suffix(".logs")
  logs.mkdir(parents=True, exist_ok=True)
  with Lab(config) as lab:
    first, second = list(lab.topology.jobs)
    listens, sends = _Workers(lab, first, logs), _Workers(lab, second, logs)
    try:
      for size in map(int, _sizes.value):
        listens.ask(kind="listen", size=size)
        sends.ask(kind="send", size=round(250 * _bucket.value))
        for workers in (listens, sends):
          workers.answer()
        start = time.monotonic() + 0.5
        for workers in (listens, sends):
          workers.ask(start=start, seconds=_seconds.value,
                      each=0.004 if workers is listens else 0.03)
        heard, sent = np.array(listens.answer()), np.array(sends.answer())[:, :2]
        figures["by_congestion"].setdefault(congestion, {})[str(size)] = figures_of(heard, sent)
        print(f"{congestion}, {4 * size} bytes: {figures['by_congestion'][congestion][str(size)]}",
              file=sys.stderr, flush=True)
        measured.write(figures, page(figures), out)
    finally:
      listens.close()
      sends.close()


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  config = _CONFIG.value
  figures = measured.circumstances(_WORKER.removesuffix("_worker")) | {
      "trunk_mbit": config.trunk_mbit, "queue_kb": config.trunk_queue_kb,
      "bucket_kb": _bucket.value, "seconds": _seconds.value, "priority": _priority(),
      "by_congestion": {}}
  try:
    for congestion in _congestion.value:
      try:
        _measure(congestion, figures, pathlib.Path(_out.value))
      except (ConfigError, LabError) as error:
        if congestion == _congestion.value[0]:
          raise
        print(f"{congestion}: {error}", file=sys.stderr)
  except (ConfigError, LabError) as error:
    sys.exit(f"listening: {error}")


if __name__ == "__main__":
  app.run(main)
