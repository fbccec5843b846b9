"""Every code block of README.md and docs/, with its place."""

from __future__ import annotations

import functools
import pathlib
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = pathlib.Path(__file__).parents[2]


class Block(NamedTuple):
  """A fenced block."""

  page: str  # path from the root
  line: int  # of its first line, from 1
  language: str  # "" if none is said
  rest: str  # what follows the language
  text: str

  @property
  def where(self) -> str:
    return f"{self.page}:{self.line}"

  @property
  def prompts(self) -> bool:
    """Whether it is a doctest."""
    return any(line.startswith(">>> ") for line in self.text.splitlines())


def pages() -> list[pathlib.Path]:
  """README.md and all pages of docs/."""
  return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def of(text: str, page: str) -> list[Block]:
  """The blocks of one page, indented ones too."""
  found = []
  for token in MarkdownIt("commonmark").parse(text):
    if token.type in ("fence", "code_block"):
      assert token.map is not None
      language, _, rest = token.info.strip().partition(" ")
      found.append(Block(page, token.map[0] + 1, language, rest.strip(), token.content))
  return found


@functools.cache
def blocks() -> tuple[Block, ...]:
  """All blocks of all pages."""
  return tuple(block for page in pages()
               for block in of(page.read_text(), str(page.relative_to(ROOT))))


def written(language: str) -> list[Block]:
  """The blocks in a language."""
  return [block for block in blocks() if block.language == language]
