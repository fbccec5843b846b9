"""The demo, shorter: real processes, one late on purpose, found."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from tests.multiprocess import jobs
from tests.patience import patiently

LATE = 40e-3


def start(*flags: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run([sys.executable, "-m", "experiments.examples.demo", *flags], cwd=jobs.ROOT,
                        env=jobs.clean_environment(),
                        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)


@pytest.mark.long
@patiently(LATE=40e-3)
def test_two_processes_of_which_one_is_late(tmp_path: pathlib.Path) -> None:
  done = start(f"--workdir={tmp_path}", "--nproc=2", "--steps=100", "--late_rank=1",
               f"--late_ms={1e3 * LATE}", "--min_accuracy=0.8")
  assert done.returncode == 0, done.stdout
  assert f"late: injected: rank 1, {1e3 * LATE:.1f} ms; found: rank 1" in done.stdout
  report = json.loads((tmp_path / "report.json").read_text())
  assert sum(report["shares"].values()) == pytest.approx(1, abs=1e-6)
  assert report["ranks"] == report["processes"] == 2 and report["problems"] == []
  late = next(row for row in report["per_rank"] if row["rank"] == 1)
  # two busy cores: the quiet bound is tested elsewhere
  assert late["lateness"] == pytest.approx(LATE, rel=0.25)
  assert late["compute"] > LATE, "a late forward pass is compute, not a gap"
  # Without them the step is shorter by at most those, and by most of them.
  saved = report["step_time"]["mean"] - report["what_if"]["without_rank"]["1"]["step_time"]
  assert saved == pytest.approx(LATE, rel=0.25)
  assert (tmp_path / "logs" / "process-1.log").exists()


@pytest.mark.parametrize(("flags", "sentence"), [
    (["--late_rank=4"], "the ranks of 4 processes are 0 to 3"),
    pytest.param(["runs/demo"], "All arguments are flags", marks=pytest.mark.long)])
def test_a_slip_is_a_sentence(tmp_path: pathlib.Path, flags: list[str], sentence: str) -> None:
  done = start(f"--workdir={tmp_path}", *flags)
  assert done.returncode != 0
  assert sentence in done.stdout and "Traceback" not in done.stdout
