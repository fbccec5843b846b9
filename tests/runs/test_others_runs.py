"""Runs that other programs write: what is not as docs/trace.md says is refused with its reason, and
the files named."""

import shutil

import numpy as np
import pyarrow as pa
import pytest

from jaxpace.cli.main import main
from tests.runs.written import JOB, parts, replace, rewrite
from tests.synthetic import synthetic_runs


@pytest.fixture
def run(tmp_path):
  synthetic_runs.write(tmp_path / "run", JOB)
  return tmp_path / "run"


def refusal(run, capsys) -> str:
  assert main(["report", str(run)]) == 2
  said = capsys.readouterr().err
  assert said.count("\n") == 1
  return said


@pytest.mark.parametrize("values", [1.0, np.nan])
def test_floats_are_refused_with_the_reason(run, capsys, values):
  for table, column in (("steps", "gap_ns"), ("collectives", "enter_ns")):
    replace(parts(run, table), column, lambda old: np.full(len(old), values))
  said = refusal(run, capsys)
  assert "its column 'gap_ns' holds double, not whole numbers" in said
  assert 'convert it with .cast("int64")' in said
  assert parts(run)[0].name in said
  assert "torn" not in said and "copied completely" not in said


def test_other_names_are_named(run, capsys):
  for table in ("steps", "collectives"):
    for at, file in enumerate(parts(run, table)):
      file.rename(file.with_name(f"part-{at}.parquet"))
  said = refusal(run, capsys)
  assert "2 files in 'steps' left out (part-0.parquet, part-1.parquet)" in said
  assert "run-p00000.000000-000000.parquet" in said
  assert "without a single recorded step" not in said


def test_a_missing_column_is_named(run, capsys):
  shutil.rmtree(run / "steps")
  for file in parts(run, "collectives"):
    rewrite(file, lambda t: t.drop_columns(["exit_ns"]))
  said = refusal(run, capsys)
  assert "it has no column 'exit_ns'" in said
  assert "torn" not in said


@pytest.mark.parametrize("column", ["tcp_busy_ns", "gpu_clock_mhz", "tcp_rtt_ns"])
def test_a_column_of_host_samples_that_is_there_twice_is_said(tmp_path, capsys, column):
  synthetic_runs.write(tmp_path / "run",
                     synthetic_runs.SyntheticJob(ranks=4, steps=60, processes=2, host_columns=True,
                                            sample_steps=5))
  for file in parts(tmp_path / "run", "hosts"):
    rewrite(file, lambda t: t.append_column(column, pa.array(np.zeros(len(t), np.int64))))
  assert main(["report", str(tmp_path / "run")]) == 0
  assert f"it has 2 columns '{column}'" in " ".join(capsys.readouterr().out.split())
