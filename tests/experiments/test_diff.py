"""Each example before and after jaxpace: few lines differ, and the documentation shows those very
lines."""

from __future__ import annotations

import pathlib

import pytest

import jaxpace
from experiments.examples import start

ROOT = pathlib.Path(__file__).parents[2]
MOST_LINES = 5


def difference(example: str, patch: str = "paced") -> list[str]:
  """Returns the lines of a patch, without its header."""
  folder = ROOT / "experiments" / "examples" / example
  return (folder / f"{patch}.patch").read_text().splitlines()[2:]


@pytest.mark.parametrize("example", ["digits", "chars"])
@pytest.mark.parametrize("patch", ["paced", "observed"])
def test_a_patch_makes_a_script_that_names_jaxpace(example: str, patch: str) -> None:
  folder = ROOT / "experiments" / "examples" / example
  assert start.script(folder, patch).jaxpace is jaxpace
  assert not hasattr(start.script(folder), "jaxpace")


def test_a_patch_that_does_not_fit_is_refused() -> None:
  assert start.patched("a\nb\nc\n", "--- x\n+++ x\n@@ -2 +2,2 @@\n-b\n+B\n+b\n") == "a\nB\nb\nc\n"
  with pytest.raises(ValueError, match="does not fit line 2"):
    start.patched("a\nc\n", "--- x\n+++ x\n@@ -2 +2 @@\n-b\n+B\n")


@pytest.mark.parametrize("example", ["digits", "chars"])
def test_at_most_five_lines_change(example: str) -> None:
  lines = difference(example)
  added = [line for line in lines if line.startswith("+")]
  removed = [line for line in lines if line.startswith("-")]
  assert 0 < len(added) <= MOST_LINES
  assert len(removed) <= len(added)
  assert not any(";" in line for line in added), "five lines, not five times two"


@pytest.mark.parametrize("example", ["digits", "chars"])
def test_the_plain_script_knows_nothing_of_jaxpace(example: str) -> None:
  assert "jaxpace" not in (ROOT / "experiments" / "examples" / example / "train.py").read_text()


@pytest.mark.parametrize("example", ["digits", "chars"])
def test_the_documentation_shows_the_diff(example: str) -> None:
  page = "docs/how_to/existing_flax.md"
  shown = (ROOT / page).read_text()
  changed = "\n".join(line for line in difference(example) if not line.startswith("@@"))
  assert changed in shown, f"{page} is out of date; the diff of {example} is:\n{changed}"


@pytest.mark.parametrize("example", ["digits", "chars"])
def test_to_observe_a_step_three_lines_change(example: str) -> None:
  lines = [line for line in difference(example, "observed") if not line.startswith("@@")]
  assert sum(line.startswith("+") for line in lines) == 3
  assert sum(line.startswith("-") for line in lines) == 2
  for page in ("README.md", "docs/observe.md", "docs/how_to/existing_flax.md"):
    assert "\n".join(lines) in (ROOT / page).read_text()
