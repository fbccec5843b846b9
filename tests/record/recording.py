"""What the tests of the recorder share: a training loop, and a look at what came out."""

import json
import logging
import pathlib
import time

import jax
import pyarrow.parquet as pq
import pytest

from jaxpace.record import writer
from jaxpace.record.recorder import Recorder
from tests.record import fake_step as fake


def table(directory: pathlib.Path, name: str = "steps") -> list[dict]:
  return [row for path in sorted((directory / name).glob("*.parquet"))
          for row in pq.read_table(path).to_pylist()]


def process_file(directory: pathlib.Path) -> dict:
  return json.loads((directory / "process" / "0.json").read_text())


def run_file(directory: pathlib.Path) -> dict:
  return json.loads((directory / "run.json").read_text())


def parts(row: dict) -> list[int]:
  """ns of each part of a step that is known, 0 of the others."""
  return [row[f"{name}_ns"] or 0 for name in ("forward", "backward", "compute", "sync", "update")]


def write_often(monkeypatch: pytest.MonkeyPatch) -> None:
  """Rows go to disk many times a second, so that no test waits for seconds."""
  monkeypatch.setattr(writer, "_FLUSH_SECONDS", 0.05)


def train(recorder: Recorder, steps: int, pause: float = 0.0, every: int = 1,
          first: int = 0, pace=None):
  mesh = fake.mesh()
  step = fake.make_step(mesh)
  pace = fake.init(mesh, first) if pace is None else pace
  for i in range(steps):
    pace = step(pace)
    if i % every == every - 1:
      recorder.record()
    if pause:
      time.sleep(pause)
  if not recorder.recording:
    # Steps under way would be taken for those of the next test.
    jax.block_until_ready(pace)
  return pace


def assert_complete(directory: pathlib.Path, steps: range) -> None:
  """Every row of every rank, with the timestamps the step wrote."""
  rows = table(directory)
  found = sorted((r["rank"], r["step"]) for r in rows)
  assert found == [(r, s) for r in range(jax.device_count()) for s in steps], found
  for r in rows:
    assert r["start_ns"] == fake.timestamp(r["step"], r["rank"], 0)
    assert r["end_ns"] == fake.timestamp(r["step"], r["rank"], 7)
    gap = None if r["step"] == steps[0] else fake.PERIOD - sum(fake.DURATIONS)
    assert ((r["forward_ns"], r["sync_ns"], r["gap_ns"], r["compute_ns"])
            == (200_000, 45_000, gap, None))
  for r in table(directory, "collectives"):
    assert r["exit_ns"] == fake.timestamp(r["step"], r["rank"], 5)
  assert len(table(directory, "collectives")) == len(rows)


def one_warning(caplog, text: str) -> None:
  """Asserts that there was one warning, and this one."""
  warnings = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
  assert len(warnings) == 1 and text in warnings[0], warnings
