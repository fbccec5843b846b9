"""Two versions on the same runs: every difference of their reports is found, none is made up."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from experiments.lib import measured
from experiments.measure import versions
from jaxpace.testing import made_up_runs
from jaxpace.testing.made_up_runs import MadeUpJob


def test_each_kind_of_difference_is_told_by_its_path() -> None:
  old = {"verdict": "late", "shares": {"compute": 0.5, "skew": 0.25}, "gone": 1, "sure": True,
         "findings": [{"mode": "a", "ranks": [1, 2]}, {"mode": "b", "ranks": []}], "near": 3.0,
         "floor": None}
  new = {"verdict": "later", "shares": {"compute": 0.5, "skew": 0.26}, "sure": False,
         "findings": [{"mode": "a", "ranks": [1], "code": "x"},
                      {"mode": "b", "ranks": [], "evidence_codes": ["y"]}],
         "verdict_code": "late", "hang": None, "near": 3.0 + 1e-10, "floor": 0}
  found = list(versions.differences(old, new))
  assert {(path, kind) for path, kind, _, _ in found} == {
      ("verdict", "words"), ("shares.skew", "number"), ("gone", "gone"), ("sure", "value"),
      ("findings.*.ranks", "length"), ("findings.*.code", "code added"),
      ("findings.*.evidence_codes", "code added"), ("verdict_code", "code added"),
      ("hang", "added"), ("floor", "value")}
  assert next(one for one in found if one[0] == "shares.skew")[2:] == (0.25, 0.26)
  again = list(versions.differences({"at": [{"x": 1}, {"x": 2}]}, {"at": [{"x": 3}, {"x": 4}]}))
  assert versions.counted(again) == [{"kind": "number", "path": "at.*.x", "times": 2, "old": 1,
                                      "new": 3}]
  assert not list(versions.differences(new, new))


@pytest.mark.long
def test_a_version_differs_in_nothing_from_itself_and_is_timed(tmp_path: pathlib.Path) -> None:
  made_up_runs.write(tmp_path / "run", MadeUpJob(ranks=4, steps=60, late={1: 5e-3}))
  # A version that says one thing otherwise: the same package, its JSON with another word in it.
  other = tmp_path / "other"
  shutil.copytree(versions.HERE / "jaxpace", other / "jaxpace", ignore=shutil.ignore_patterns(
      "__pycache__"))
  written = other / "jaxpace/diagnosis/report_json.py"
  assert '"verdict_code"' in written.read_text()
  written.write_text(written.read_text().replace('"verdict_code"', '"said"'))
  compared = versions.compare(other, versions.HERE, [tmp_path / "run"])
  assert compared[0]["run"] == tmp_path.name and compared[0]["entries"] > 50
  assert {(one["kind"], one["path"]) for one in compared[0]["differences"]} == {
      ("gone", "said"), ("code added", "verdict_code")}

  timed = versions.timed(versions.HERE, versions.HERE, tmp_path, [2], 400, 1, measured.progress)
  assert [row["command"] for row in timed] == [
      "report", "watch --once", "a poll after 20 more steps"]
  for row in timed:
    assert set(row["wall"]["median_s"]) == {"old", "new", "new again"} and row["rounds"] == 1
    assert all(value > 0 for what in ("wall", "cpu") for value in row[what]["median_s"].values())
  figures = {**measured.circumstances("experiments.measure.versions"), "note": "a word",
             "old": "abc1234", "new": "def5678", "compared": compared, "timed": timed}
  page = "\n".join(versions.page(figures))
  assert "`verdict_code`" in page and "| watch --once | 2 |" in page and "a word" in page


def test_a_version_that_fails_is_told_of(tmp_path: pathlib.Path) -> None:
  with pytest.raises(RuntimeError, match="ended with status"):
    versions.command(tmp_path, ["-c", "raise SystemExit('no')"])
