"""Mistakes on purpose: each can be made, and what is told of them is so."""

from __future__ import annotations

import pathlib

import pytest

from experiments.measure import mutations
from experiments.measure.mutations import MUTATIONS, ROOT, Mutation


def test_every_mistake_can_be_made_and_has_tests() -> None:
  assert len(MUTATIONS) >= 40 and len({(m.file, m.old) for m in MUTATIONS}) == len(MUTATIONS)
  for mutation in MUTATIONS:
    assert (ROOT / "jaxpace" / mutation.file).read_text().count(mutation.old) == 1, mutation
    assert mutation.new != mutation.old
    assert (mutation.tests
            and all((ROOT / "tests" / name).is_file() for name in mutation.tests)), mutation


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
  """A formula, a test of it, a test that fails anyhow, and one that `make test` leaves out."""
  for folder in ("jaxpace", "tests"):
    (tmp_path / folder).mkdir()
  (tmp_path / "pyproject.toml").write_text(
      '[tool.pytest.ini_options]\nmarkers = ["long: not in make test"]\n')
  (tmp_path / "jaxpace" / "formula.py").write_text("def area(a, b):\n  return a * b\n\n\ndef "
                                                   "rim(a, b):\n"
                                                   "  return 2 * (a + b)\n")
  (tmp_path / "tests" / "test_formula.py").write_text(
      "import pytest\nfrom jaxpace import formula\n\n\ndef test_wrong_anyhow():\n  assert "
      "False\n\n\n"
      "def test_area():\n  assert formula.area(2, 3) == 6\n\n\n"
      "@pytest.mark.long\ndef test_rim():\n  assert formula.rim(2, 3) == 10\n")
  return tmp_path


@pytest.mark.long
def test_what_is_noticed_is_told_apart(tree: pathlib.Path) -> None:
  tests = ("test_formula.py",)
  figures = mutations.measure(tree, [Mutation("formula.py", "a * b", "a + b", tests),
                                     Mutation("formula.py", "2 * (a + b)", "a + b", tests)], jobs=2)
  assert [row["noticed"] for row in figures["rows"]] == [True, False]
  assert figures["rows"][0]["by"] == "tests/test_formula.py::test_area"
  assert (figures["mistakes"], figures["noticed"]) == (2, 1)
  assert (figures["left_out"]
          == ["tests/test_formula.py::test_wrong_anyhow"]), "it would notice everything"
  assert "a * b" in (tree / "jaxpace" / "formula.py").read_text(), "mistakes are made in copies"


def test_a_list_is_judged_in_pieces() -> None:
  def judged(mutation: Mutation, noticed: bool) -> dict:
    return {"file": mutation.file, "old": mutation.old, "noticed": noticed}

  first, second, third = MUTATIONS[:3]
  gone = Mutation("gone.py", "a", "b", ())
  before = {"rows": [judged(third, True), judged(second, False), judged(gone, True)],
            "left_out": ["x"]}
  found = mutations.added(before,
                          {"rows": [judged(second, True), judged(first, False)], "left_out": []})
  assert found["rows"] == [judged(first, False), judged(second, True), judged(third, True)]
  assert (found["mistakes"], found["noticed"], found["left_out"]) == (3, 2, ["x"])


def test_a_text_that_is_gone_is_named(tree: pathlib.Path) -> None:
  with pytest.raises(ValueError, match=r"formula\.py holds 0 times.*'a / b'"):
    mutations.mutate(tree, Mutation("formula.py", "a / b", "a", ("test_formula.py",)))


@pytest.mark.long
def test_a_file_without_tests_is_no_answer(tree: pathlib.Path) -> None:
  (tree / "tests" / "test_none.py").write_text("")
  with pytest.raises(ValueError, match="pytest ended with 5"):
    mutations.measure(tree, [Mutation("formula.py", "a * b", "a + b", ("test_none.py",))], jobs=1)
