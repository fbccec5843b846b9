"""Each example before and after jaxpace: few lines differ, and the documentation shows those very
lines."""

from __future__ import annotations

import difflib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MOST_LINES = 5


def difference(example: str, after: str = "train_jaxpace") -> list[str]:
  """Returns the lines of a unified diff between the plain script and another, without its
  header."""
  folder = ROOT / "experiments" / "examples" / example
  plain, other = ((folder / f"{name}.py").read_text().splitlines() for name in ("train", after))
  return list(difflib.unified_diff(plain, other, lineterm="", n=0))[2:]


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
  lines = [line for line in difference(example, "train_observed") if not line.startswith("@@")]
  assert sum(line.startswith("+") for line in lines) == 3
  assert sum(line.startswith("-") for line in lines) == 2
  for page in ("README.md", "docs/observe.md", "docs/how_to/existing_flax.md"):
    assert "\n".join(lines) in (ROOT / page).read_text()
