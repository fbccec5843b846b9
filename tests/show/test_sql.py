"""Every query of docs/sql.md runs, and says what the report says."""

import contextlib
import re

import duckdb
import numpy as np
import pytest

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.diagnosis import to_json
from jaxpace.runs.reader import read_run
from tests.multiprocess.jobs import ROOT
from tests.synthetic import synthetic_overlap, synthetic_runs
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_overlap import OverlappingJob
from tests.synthetic.synthetic_runs import SyntheticJob

PAGE = ROOT / "docs" / "sql.md"
JOB = SyntheticJob(ranks=4, steps=200, processes=2, hosts=2, noise=0.05, collectives=2,
                   late={3: 6e-3},
                delays={0: 1e-3}, faults=(Fault("pause", 20e-3, ranks=(1,), probability=0.05,
                                                mechanism="gc"),), host_columns=True)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
  path = tmp_path_factory.mktemp("sql") / "run"
  truth = synthetic_runs.write(path, JOB, part_steps=80)
  found = {}
  with contextlib.chdir(path), duckdb.connect() as database:
    for number, query in enumerate(re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)):
      name = re.match(r"-- name: (\w+)", query)
      result = database.execute(query)
      columns = [column[0] for column in result.description]
      found[name[1] if name else number] = [dict(zip(columns, row, strict=True))
                                            for row in result.fetchall()]
  return path, truth, to_json(diagnose(read_run(path))), found


def test_every_query_answers(answers):
  found = answers[3]
  assert len(found) == 13 and all(rows for name, rows in found.items() if isinstance(name, str))


def test_what_was_recorded(answers):
  assert answers[3]["recorded"] == [
      {"process": p, "ranks": 2, "first": 0, "last": 199, "attempts": 0} for p in range(2)]


def test_times_are_those_of_the_report(answers):
  _, truth, report, found = answers
  (times,) = found["step_time"]
  for name in ("mean", "median", "p99"):
    # the report leaves warm-up out
    assert times[name] == pytest.approx(report["step_time"][name], rel=0.03)
  transfers = {row["name"]: row["transfer_ms"] for row in found["transfer"]}
  assert transfers == pytest.approx({"psum.0": 2.0, "psum.1": 2.0}, abs=2e-3)
  step = np.diff(truth.exit[-1, 0])
  assert found["slowest"][0]["step"] == int(step.argmax()) + 1
  assert found["slowest"][0]["step_ms"] == pytest.approx(step.max() / 1e6, abs=2e-3)


def test_the_late_rank_is_the_late_rank(answers):
  _, truth, report, found = answers
  assert found["late"][0]["rank"] == found["lateness"][0]["rank"] == 3
  own = truth.busy.copy()
  own[0] -= truth.delay
  late = (own - own.mean(axis=1, keepdims=True))[:, :, 1:]
  mean = late.sum(axis=0).mean(axis=1) / 1e6
  for row in found["lateness"]:
    assert row["late_ms"] == pytest.approx(mean[row["rank"]] - np.sort(mean)[1], abs=2e-3)
    assert (row["late_ms"] == pytest.approx(1e3 * report["per_rank"][row["rank"]]["lateness"],
                                            abs=0.02))
  last = np.bincount(late.max(axis=0).argmax(axis=0), minlength=4)
  assert ({row["rank"]: row["times_last"] for row in found["lateness"]}
          == dict(enumerate(last.tolist())))
  assert any(finding["ranks"] == [3] for finding in report["findings"])


def asked(path, name, views=2):
  """Rows of a query of the page."""
  queries = dict(re.findall(r"```sql\n-- name: (\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
  made = re.findall(r"```sql\n(create.*?)```", PAGE.read_text(), re.DOTALL)
  with contextlib.chdir(path), duckdb.connect() as database:
    for view in made[-views:]:
      database.execute(view)
    return database.execute(queries[name]).fetchall()


def test_exposed_time_of_collectives_is_the_reports(tmp_path):
  synthetic_overlap.write(tmp_path, OverlappingJob(noise=0.02))
  found = {row["name"]: row for row in to_json(diagnose(read_run(tmp_path)))["collectives"]}
  rows = asked(tmp_path, "exposed", views=1)
  assert len(rows) == 4
  for name, *times in rows:
    # The report leaves the first step out.
    assert times == pytest.approx(
        [1e3 * found[name][key] for key in ("in_flight", "exposed")], rel=0.02)


def test_lateness_of_two_ranks_is_the_reports(tmp_path):
  synthetic_runs.write(tmp_path, SyntheticJob(ranks=2, steps=200, noise=0.01, late={1: 15e-3}))
  report = to_json(diagnose(read_run(tmp_path)))["per_rank"]
  rows = asked(tmp_path, "lateness")
  assert [row[0] for row in rows] == [1, 0]
  assert [row[1] for row in rows] == pytest.approx([1e3 * report[1]["lateness"], 0.0], abs=0.02)
  assert rows[0][1] == pytest.approx(15.0, abs=0.2)


def test_phases_pauses_and_delays(answers):
  _, truth, _, found = answers
  for row in found["phases"]:
    assert row["forward_ms"] == pytest.approx(truth.forward[row["rank"]].mean() / 1e6, abs=2e-3)
  paused = np.flatnonzero(truth.extra.shown["gc"][1])
  assert [row["step"] for row in found["garbage"]] == paused[:20].tolist()
  assert found["delays"] == [{"rank": 0, "steps_delayed": 200, "delay_s": 0.2}]
  assert [row["process"] for row in found["hosts"]] == [0, 1]


def test_newest_attempts_count(answers, tmp_path):
  synthetic_runs.write(tmp_path, JOB)
  synthetic_runs.write(tmp_path, SyntheticJob(ranks=4, steps=50, processes=2, forward=1e-3),
                       attempt=1,
                     first_step=150)
  view, *_ = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
  with contextlib.chdir(tmp_path), duckdb.connect() as database:
    database.execute(view)
    rows = database.execute(
        "select step, rank, count(*), max(attempt) from steps group by all").fetchall()
  assert len(rows) == 800 and {number for *_, number, _ in rows} == {1}
  assert {step for step, *_, attempt in rows if attempt == 1} == set(range(150, 200))
