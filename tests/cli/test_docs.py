"""Commands and code in the docs of replay and control are real."""

import argparse
import doctest
import importlib
import re
import shlex

import pytest

from jaxpace.cli import pacer_expression
from jaxpace.cli.main import COMMANDS
from tests.multiprocess.jobs import ROOT

PAGES = ("replay.md", "control.md")


def commands():
  found = []
  for page in (*PAGES, "what_if.md", "findings.md", "forecast.md", "bench.md", "compare.md", "link_probe.md",
               "html.md", "timeline.md", "stability.md", "watch.md"):
    for line in (ROOT / "docs" / page).read_text().splitlines():
      if line.startswith("jaxpace "):
        found.append(line)
  return found


@pytest.mark.parametrize("line", commands())
def test_every_command_line_parses(line):
  _, name, *arguments = shlex.split(line)
  parser = argparse.ArgumentParser()
  importlib.import_module(COMMANDS[name].module).add_arguments(parser)
  args = parser.parse_args(arguments)
  if name == "replay":
    pacer_expression.make(args.pacer)


def test_every_expression_in_the_table_makes_a_pacer():
  table = re.findall(r"^\| `([a-z_]+\(.*?)` \|", (ROOT / "docs" / "replay.md").read_text(), re.MULTILINE)
  assert len(table) == 3
  for expression in table:
    pacer_expression.make(expression)


@pytest.mark.parametrize("page", PAGES)
def test_code_with_a_prompt_runs(page):
  results = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
  assert results.failed == 0 and (results.attempted > 3) == (page == "control.md")
