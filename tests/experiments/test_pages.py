"""The pages of measurements are what their figures make."""

import json

import pytest

from experiments.lib import measured

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
