"""The pages of measurements are what their figures make."""

import json
import pathlib
import re

import pytest

from experiments.docs import pages
from experiments.lib import measured
from experiments.lib.paired import METHOD


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_is_what_its_figures_make(name):
  path = pages.FOLDER / f"{name}.json"
  figures = json.loads(path.read_text())
  assert path.with_suffix(".md").read_text() == pages.text(name, figures)


RECORDS = sorted(pages.FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_names_a_program_that_is_here_or_the_commit_that_has_it(path):
  text = path.read_text()
  command = re.search(r"python -m (experiments[\w.]+)", text)[1]
  commit = json.loads(text).get("commit")
  here = pathlib.Path(command.replace(".", "/") + ".py").exists()
  assert here == (commit is None), command
  page = path.with_suffix(".md")
  if page.exists():
    assert (f"commit `{commit}` has it" in page.read_text()) == (not here)


def test_intervals_are_told_with_their_rounds():
  assert "over 12 rounds" in measured.about_intervals(METHOD, 12)
  old = measured.about_intervals(None, 12)
  assert "12 rounds" in old and "not kept" in old and "73 to 94" in old
  assert "about 94" in measured.about_intervals(None, 60)
  assert measured.circumstances("x")["intervals"] == METHOD
