"""The pages of measurements are what their figures make."""

import json

import pytest

from experiments.docs import pages
from experiments.lib import measured
from experiments.lib.paired import METHOD


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_is_what_its_figures_make(name):
  path = pages.FOLDER / f"{name}.json"
  figures = json.loads(path.read_text())
  assert path.with_suffix(".md").read_text() == pages.text(name, figures)
  again = pages.again(name, json.loads(path.read_text()))
  # intervals are those of the rounds that are in the file
  assert json.loads(json.dumps(again)) == figures


@pytest.mark.parametrize("name", [name for name in pages.PAGES if name != "intervals"])
def test_a_page_says_what_its_intervals_are(name):
  text = " ".join((pages.FOLDER / f"{name}.md").read_text().split())
  assert "Student" in text or "(intervals.md)" in text
  assert "95 % bootstrap" not in text


def test_intervals_are_told_with_their_rounds():
  assert "over 12 rounds" in measured.about_intervals(METHOD, 12)
  old = measured.about_intervals(None, 12)
  assert "12 rounds" in old and "not kept" in old and "73 to 94" in old
  assert "about 94" in measured.about_intervals(None, 60)
  assert measured.circumstances("x")["intervals"] == METHOD
