"""Recorded runs whose pages have something in every section."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxpace.cli.main import main
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_runs import SyntheticJob

STEPS = 1300
RICH = SyntheticJob(ranks=6, steps=STEPS, processes=3, hosts=3, noise=0.05, collectives=2,
                 late={4: 6e-3}, compile=1.0, faults=(
    Fault("pause", 30e-3, (1,), probability=0.1, mechanism="gc"),
    Fault("contention", 4e-3, begin=0.5)))
NASTY = ('</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'
         '{a|b}\x1b[2J\u202e\u2028&amp;\'"`')
"""A name as nobody should have it."""


def rich(path: pathlib.Path) -> pathlib.Path:
  """A late rank, pauses, contention from the middle on, a guard, and places."""
  synthetic_runs.write(path, RICH)
  guard(path)
  (path / "locality").mkdir()
  for process in range(3):
    place = {"schema": 1, "process": process, "hostname": f"host{process}", "kernel": "6.1",
             "cpu": {"model": "a processor", "online": "0-7", "allowed": "0-3", "sockets": ["0-7"]},
             "numa": [{"node": 0, "cpus": "0-7", "memory_bytes": 2**35}], "clock_source": "hpet"}
    (path / "locality" / f"{process}.json").write_text(json.dumps(place))
  return path


def guard(path: pathlib.Path) -> None:
  """Adds what a guard decided, in blocks of 20 steps."""
  random = np.random.default_rng(0)
  steps = np.arange(STEPS)
  on = (steps // 20 % 2 == 0) ^ (random.random(STEPS // 40 + 1)[steps // 40] < 0.5)
  pair = np.where((steps >= 40) & (steps % 20 >= 4), steps // 40, np.nan)
  with_columns(path, "steps",
               {"decision_guard_on": np.asarray(on, np.float32), "decision_guard_pair": np.asarray(
                   pair, np.float32)})


def with_columns(path: pathlib.Path, table: str, columns: dict[str, np.ndarray]) -> None:
  for file in sorted((path / table).glob("*.parquet")):
    rows = pq.read_table(file)
    at = rows.column("step").to_numpy()
    for name, values in columns.items():
      rows = rows.append_column(name, [values[at]])
    pq.write_table(rows, file)


def hostile(folder: pathlib.Path) -> pathlib.Path:
  """A run in which everything that has a name is called `NASTY`."""
  path = folder / "<img src=x onerror=alert(1)>"
  synthetic_runs.write(path, SyntheticJob(ranks=3, steps=130, processes=3, hosts=3, noise=0.05,
                                     late={1: 8e-3}))
  for file in [path / "run.json", *(path / "process").glob("*.json")]:
    text = file.read_text()
    document = json.loads(text)
    document["hostname"] = f"host{document.get('process', '')}{NASTY}"
    document["clock"] = NASTY
    if "plan" in document:
      document["plan"]["clock"] = NASTY
      document["plan"]["collectives"][0]["name"] = NASTY
    file.write_text(json.dumps(document))
  (path / "locality").mkdir()
  for process in range(3):
    (path / "locality" / f"{process}.json").write_text(json.dumps({
        "schema": 1, "process": process, "hostname": NASTY, "kernel": NASTY,
        "cpu": {"model": NASTY, "online": "0-3"}, "clock_source": NASTY, "notes": [NASTY],
        "nics": [{"name": NASTY, "kind": NASTY}]}))
  for file in (path / "collectives").glob("*.parquet"):
    rows = pq.read_table(file)
    if "name" in rows.column_names:
      at = rows.column_names.index("name")
      pq.write_table(rows.set_column(at, "name",
                                     pa.array([NASTY] * len(rows)).cast(rows.column(at).type)),
                     file)
  return path


def report(run: pathlib.Path, html: pathlib.Path, *more: str) -> int:
  """Runs the command, as a user does."""
  return main(["report", str(run), "--html", str(html), *more])
