"""The pages of measurements are what their figures make."""

import json

import pytest

from experiments.lib import measured
from experiments.lib.paired import METHOD

RECORDS = sorted(measured.FOLDER.glob("*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_record_whose_program_is_gone_names_the_commit_that_has_it(record):
  page = record.with_suffix(".md")
  commit = json.loads(record.read_text()).get("commit")
  assert (commit is None) == (measured.program(record) is not None)
  if page.exists():
    assert (f"commit `{commit}` has it" in page.read_text()) == (commit is not None)


@pytest.mark.parametrize("name", measured.PAGES)
def test_a_page_is_what_its_record_makes(name):
  record = measured.FOLDER / f"{name}.json"
  assert record.with_suffix(".md").read_text() == measured.page(record)


def test_intervals_are_told_with_their_rounds():
  assert "over 12 rounds" in measured.about_intervals(METHOD, 12)
  old = measured.about_intervals(None, 12)
  assert "12 rounds" in old and "not kept" in old and "73 to 94" in old
  assert "about 94" in measured.about_intervals(None, 60)
  assert measured.circumstances("x")["intervals"] == METHOD
