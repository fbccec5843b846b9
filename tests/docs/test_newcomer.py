"""The table of docs/contributing.md that says which file to open: each file is there, and each name
is defined in it."""

import ast
import re

import pytest

from tests.docs.blocks import ROOT

ROWS = re.findall(r"^\| (.*?) \| `([\w/]+\.py)` \| (.*?) \|",
                  (ROOT / "docs" / "contributing.md").read_text(), re.MULTILINE)


def defined(path):
  """Names that a module defines at its top: functions, classes, values."""
  for node in ast.parse(path.read_text()).body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      yield node.target.id
    elif isinstance(node, ast.Assign):
      yield from (target.id for target in node.targets if isinstance(target, ast.Name))


@pytest.mark.parametrize(("task", "path", "names"), ROWS, ids=[row[0] for row in ROWS])
def test_the_file_to_open_defines_what_is_to_change(task, path, names):
  assert (ROOT / path).is_file(), f"docs/contributing.md: to {task}, {path} is not there"
  wanted = set(re.findall(r"`(\w+)`", names))
  assert wanted <= set(defined(ROOT / path)), f"docs/contributing.md: to {task}, open {path}"
