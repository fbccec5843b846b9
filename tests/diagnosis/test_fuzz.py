"""Damaged run directories end in a sentence or in a report that says what is missing: no traceback,
no NaN."""

import contextlib
import io
import json
import math
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxpace.cli.main import main
from tests.synthetic import made_up_runs
from tests.synthetic.made_up_faults import Fault

JOB = made_up_runs.MadeUpJob(ranks=4, steps=60, processes=2, noise=0.02, host_columns=True,
                             sample_steps=5,
                             faults=(Fault("compute", 8e-3, (1,)),
                                     Fault("pause", 30e-3, (2,), probability=0.2, mechanism="gc"),
                                     Fault("contention", 5e-3, begin=0.5)))
EXTREME = (0, 1, -1, 2**62, -2**62, 2**63 - 1, -2**63, 10**12, 3_600_000_000_000)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
  path = tmp_path_factory.mktemp("fuzz") / "run"
  made_up_runs.write(path, JOB)
  (path / "locality").mkdir()
  for process in range(2):
    (path / "locality" / f"{process}.json").write_text(
        json.dumps({"run": "synthetic", "hostname": f"host{process}"}))
  return path


def report(run, target) -> int:
  return main(["report", str(run), "--json", str(target)])


def finite(value) -> bool:
  if isinstance(value, dict):
    return all(finite(v) for v in value.values())
  if isinstance(value, list):
    return all(finite(v) for v in value)
  return not isinstance(value, float) or math.isfinite(value)


def check(run) -> dict | None:
  """Reports; a document, or one sentence and status 2."""
  target = run.parent / "report.json"
  target.unlink(missing_ok=True)
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = report(run, target)
  assert "Traceback" not in out.getvalue() + err.getvalue()
  if status:
    assert status == 2
    assert err.getvalue().startswith("jaxpace report: ")
    assert err.getvalue().count("\n") == 1
    assert not target.exists()
    return None
  document = json.loads(target.read_text(),
                        parse_constant=lambda name: pytest.fail(f"{name} in the document"))
  assert finite(document)
  for shares in (document["shares"], *document["per_host"].values(),
                 *(r["shares"] for r in document["per_rank"])):
    if shares is not None and any(shares.values()):
      assert sum(shares.values()) == pytest.approx(1, abs=1e-6)
      assert min(shares.values()) >= -1e-9
  for finding in document["findings"]:
    assert -1e-9 <= finding["share"] <= 1 + 1e-9
    assert 0 <= finding["confidence"] <= 1
  return document


def copy(sound, tmp_path_factory):
  path = tmp_path_factory.mktemp("mutant") / "run"
  shutil.copytree(sound, path)
  return path


def test_the_sound_run_has_its_findings(sound):
  document = check(sound)
  assert ({f["mode"] for f in document["findings"]}
          == {"persistent_straggler", "runtime_jitter", "fabric_contention"})


@settings(max_examples=30, phases=[Phase.generate])
@given(data=st.data())
def test_damaged_bytes_and_missing_files(sound, tmp_path_factory, data):
  run = copy(sound, tmp_path_factory)
  files = sorted(p for p in run.rglob("*") if p.is_file())
  for file in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=3, unique=True)):
    content = bytearray(file.read_bytes())
    how = data.draw(st.sampled_from(("cut", "flip", "empty", "gone", "garbage", "json")))
    if how == "cut":
      file.write_bytes(content[:data.draw(st.integers(0, len(content)))])
    elif how == "flip":
      for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
      file.write_bytes(bytes(content))
    elif how == "empty":
      file.write_bytes(b"")
    elif how == "gone":
      file.unlink()
    elif how == "garbage":
      file.write_bytes(data.draw(st.binary(max_size=64)))
    else:
      file.write_text(data.draw(st.sampled_from(("null", "[]", "{}", '{"ranks": -1}',
                                                 '{"run": 3, "ranks": "x"}'))))
  check(run)


@pytest.mark.long
@settings(max_examples=40, phases=[Phase.generate])
@given(data=st.data())
def test_mutated_rows(sound, tmp_path_factory, data):
  run = copy(sound, tmp_path_factory)
  random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
  for file in data.draw(st.lists(st.sampled_from(sorted(run.rglob("*.parquet"))), min_size=1,
                                 max_size=4, unique=True)):
    table = pq.read_table(file)
    for _ in range(data.draw(st.integers(1, 3))):
      table = mutate(table, data, random)
    pq.write_table(table, file)
  check(run)


def mutate(table: pa.Table, data, random) -> pa.Table:
  how = data.draw(st.sampled_from(
      ("shuffle", "repeat", "drop", "column", "null", "extreme", "jump", "rank", "attempt")))
  if how == "shuffle":
    return table.take(random.permutation(len(table)))
  if how == "repeat":
    return (pa.concat_tables([table, table.take(random.integers(0, len(table), 20))]) if len(table)
            else table)
  if how == "drop":
    return table.filter(pa.array(random.random(len(table))
                                 < data.draw(st.sampled_from((0.02, 0.5, 0.95)))))
  name = data.draw(st.sampled_from(table.column_names))
  if how == "column":
    return table.drop_columns([name])
  if how == "null":
    return replaced(table, name, pa.nulls(len(table), table.schema.field(name).type))
  whole = [n for n in table.column_names if pa.types.is_integer(table.schema.field(n).type)]
  if how == "extreme":
    name = data.draw(st.sampled_from(whole))
    return altered(table, name, random, 0.05,
                   lambda v: np.full(len(v), data.draw(st.sampled_from(EXTREME))))
  if how == "jump":  # the clock jumps, for good or for a while
    begin, by = random.integers(0, max(len(table), 1)), data.draw(st.sampled_from(EXTREME))
    for name in (n for n in whole if n in ("start_ns", "end_ns", "enter_ns", "exit_ns", "time_ns")):
      values = table.column(name).to_numpy(zero_copy_only=False).astype(np.float64)
      moved = np.where(np.arange(len(values)) >= begin, values + float(by), values)
      moved = np.nan_to_num(np.clip(moved, -9e18, 9e18)).astype(np.int64)
      table = replaced(table, name, pa.array(moved, table.schema.field(name).type))
    return table
  name = {"rank": "rank", "attempt": "attempt"}[how]
  if name not in table.column_names:
    return table
  return altered(table, name, random, 0.3, lambda v: random.integers(-1, 5, len(v)))


def altered(table, name, random, share, new) -> pa.Table:
  kind = table.schema.field(name).type
  values = np.array(table.column(name).to_numpy(zero_copy_only=False))
  values = np.nan_to_num(values.astype(np.float64)).clip(-9e18, 9e18).astype(np.int64)
  at = np.flatnonzero(random.random(len(values)) < share)
  limits = np.iinfo(kind.to_pandas_dtype())
  values[at] = np.clip(new(values[at]), limits.min, limits.max)
  return replaced(table, name,
                  pa.array(np.clip(values, limits.min, limits.max).astype(kind.to_pandas_dtype()),
                           kind))


def replaced(table, name, column) -> pa.Table:
  at = table.column_names.index(name)
  return table.set_column(at, pa.field(name, column.type), column)
