"""README.md, the pages of docs/ and `--help`: the field's words, sentences that can be read, and no
more than somebody reads."""

import argparse
import contextlib
import importlib
import io
import re

import pytest
from markdown_it import MarkdownIt

from jaxpace.cli import main
from tests.docs.blocks import ROOT, pages

PAGES = [page for page in pages() if "measurements" not in page.parts]
MOST_WORDS, MOST_OF_ALL, LONGEST_SENTENCE = 2000, 36_000, 50
LIMITS = {"docs/interleaving.md": 1500}
WORDS = {
    r"stamp(s|ed|ing)?": "timestamp", r"marks?": "timestamp", r"lanes?": "device buffer",
    r"turns of (a|the|its|their) loops?": "iterations", r"a turn": "per iteration",
    r"in full": "detailed", r"by (the|their) sums": "aggregated", r"by turns": "in turn",
    r"made[- ]up": "synthetic", r"(play|plays|played) again": "replay",
    r"as (it|they) (was|were)": "unmodified", r"(\d (ms|µs|s)|seconds) a step": "per step",
    r"(is|are|was|were) (told|said)": "name who says it, or what it shows",
    r"untold": "inconclusive",
    r"it is (told|said)": "say who says it", r"alike": "equal, or agree",
    r"chores?": "periodic tasks", r"(very|quite|simply|basically|obviously|of course)": "nothing"}
"""What not to write, and what instead."""


def prose(text):
  """The paragraphs of a page, tables and headings too, without code and the targets of links."""
  for token in MarkdownIt("commonmark").enable("table").parse(text):
    if token.type == "inline":
      yield "".join(" " if child.type == "softbreak" else child.content
                    for child in token.children or ()
                    if child.type in ("text", "softbreak")).strip()


def badly_said(paragraphs):
  """Words that another word is better than, with a few words around them."""
  for paragraph in paragraphs:
    for pattern, better in WORDS.items():
      for found in re.finditer(rf"\b({pattern})\b", paragraph, re.IGNORECASE):
        around = paragraph[max(found.start() - 30, 0):found.end() + 20]
        yield f"{around!r}: instead of {found[0]!r} write: {better}"


def too_long(text):
  """Sentences of more words than anybody wants to read."""
  for paragraph in prose(text):
    for sentence in re.split(r"(?<=[.!?:;])\s+", paragraph):
      if len(sentence.split()) > LONGEST_SENTENCE:
        yield sentence


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_plain_and_short(page):
  text = page.read_text()
  assert not [*badly_said(prose(text)), *too_long(text)]
  assert len(text.split()) <= LIMITS.get(str(page.relative_to(ROOT)), MOST_WORDS)


@pytest.mark.parametrize("command", main.COMMANDS)
def test_the_help_of_a_command_is_plain(command):
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
    main.main([command, "--help"])
  assert not [*badly_said([" ".join(printed.getvalue().split())])]


def test_all_pages_together_can_be_read():
  assert sum(len(page.read_text().split()) for page in PAGES) <= MOST_OF_ALL


OTHERS_OPTIONS = {"--longer", "--nojaxpace", "--signal"}
"""Options of experiments, examples and other programs that pages name by themselves."""


def options():
  """Names of all options of the commands."""
  for name in main.COMMANDS:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"jaxpace.cli.{name.replace('-', '_')}").add_arguments(parser)
    yield from parser._option_string_actions


def test_options_that_sentences_and_pages_name_exist():
  there = {*options(), *OTHERS_OPTIONS}
  for path in (ROOT / "jaxpace" / "diagnose" / "words").glob("*.py"):
    assert not {*re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text())} - there, path
  for path in PAGES:
    assert not {*re.findall(r"`(--[a-z][a-z-]+)", path.read_text())} - there, path
