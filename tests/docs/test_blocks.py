"""Every code block of README.md and docs/ is run or checked by its language; none is left out
silently."""

from __future__ import annotations

import ast
import contextlib
import doctest
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
import yaml

from tests.docs import names, shell
from tests.docs.blocks import ROOT, Block, blocks, written
from tests.synthetic import synthetic_runs

SHOWN = {"output", "formula", "layout", "query", "json"}
"""What a block of text may be; the word after `text` says it, for an output or a layout with of
what."""
CHECKED = {"python", "sh", "sql", "yaml", "diff", "text"}
PAGES_WITH_PROMPTS = sorted({block.page for block in blocks() if block.prompts})
COMMANDS = written("sh")
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def unsaid(block: Block) -> str | None:
  """Why nothing here checks a block, or None."""
  if block.language.startswith("{"):
    return None  # a directive: the building of the pages fails where it is wrong
  if block.language not in CHECKED:
    return f"the language {block.language!r}: write one of {sorted(CHECKED)} after the three ticks"
  if block.language == "text":
    kind, _, of_what = block.rest.partition(" ")
    if kind.rstrip(",:") not in SHOWN or (kind in ("output", "layout") and not of_what):
      return f"the text {block.rest!r}: after `text` say one of {sorted(SHOWN)}, and of what"
  elif block.rest:
    return f"the words {block.rest!r} after {block.language}"
  return None


def test_every_block_is_checked_by_something():
  assert len(blocks()) > 100
  complaints = {block.where: unsaid(block) for block in blocks() if unsaid(block)}
  assert not complaints, f"blocks that nothing checks: {complaints}"


def test_a_prompt_is_nowhere_but_in_a_block_of_python():
  loose = [block.where for block in blocks() if block.prompts and block.language != "python"]
  for page in sorted((ROOT / "docs").rglob("*.md")):
    inside = sum(block.text.count(">>> ")
                 for block in blocks() if block.page == str(page.relative_to(ROOT)))
    loose += [str(page)] * (page.read_text().count(">>> ") != inside)
  assert not loose


@pytest.mark.parametrize("page", [
    pytest.param(page, marks=pytest.mark.long) if page == "docs/how_to/write_a_pacer.md" else page
    for page in PAGES_WITH_PROMPTS])
def test_code_with_prompts_runs(page, tmp_path):
  # for the page on SQL
  synthetic_runs.write(tmp_path,
                       synthetic_runs.SyntheticJob(ranks=4, steps=200, processes=2, hosts=2))
  prompts = sum(block.text.count(">>> ") for block in written("python") if block.page == page)
  # JAX's own promotion, as a reader has it
  with contextlib.chdir(tmp_path), jax.numpy_dtype_promotion("standard"):
    results = doctest.testfile(str(ROOT / page), module_relative=False, optionflags=OPTIONS)
  assert results.attempted == prompts > 0 and not results.failed


@pytest.mark.parametrize("block", [b for b in written("python") if not b.prompts],
                         ids=lambda block: block.where)
def test_names_and_arguments_of_python_exist(block):
  assert not names.wrong(block.text)


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.where)
def test_commands_can_be_typed(block):
  assert shell.check(block.text)


def test_the_first_query_can_be_typed(tmp_path):
  """With what `pip install duckdb` brings: a module, and no command of that name."""
  synthetic_runs.write(tmp_path / "runs" / "demo", synthetic_runs.SyntheticJob(ranks=2, steps=20))
  lines = next(block.text for block in written("sh") if "duckdb" in block.text)
  environment = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin"}
  typed = subprocess.run(["bash", "-ec", lines], cwd=tmp_path, env=environment, capture_output=True,
                         text=True)
  assert typed.returncode == 0, typed.stderr
  assert "start_ns" in typed.stdout and "5 rows" in typed.stdout


def test_yaml_is_yaml_and_its_commands_can_be_typed():
  for block in written("yaml"):
    for document in yaml.safe_load_all(block.text):
      for step in document if isinstance(document, list) else ():
        assert shell.check(step["run"])


def test_differences_are_those_of_the_examples():
  real = []
  for patch in (ROOT / "experiments" / "examples").glob("*/*.patch"):
    lines = patch.read_text().splitlines()[2:]
    real.append([line for line in lines if not line.startswith("@@")])
  for block in written("diff"):
    assert block.text.splitlines() in real, block.where


def _strings(folder: pathlib.Path) -> set[str]:
  """All constant strings and names of arguments in the package: whatever a key may be made of."""
  found: set[str] = set()
  for path in folder.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.add(node.value)
      elif isinstance(node, ast.keyword | ast.arg) and node.arg:
        found.add(node.arg)
      elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        found.add(node.target.id)
  return found


def test_keys_of_json_are_written_somewhere():
  said = {(block.where, key) for block in written("text") if block.rest == "json"
          for key in re.findall(r'"([A-Za-z_]\w*)":', block.text)}
  real = _strings(ROOT / "jaxpace")
  assert len(said) > 50
  assert not {(where, key) for where, key in said if key not in real}
