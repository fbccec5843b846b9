"""Where the links of README.md, CHANGELOG.md and docs/ lead: to files, and to headings in pages."""

from __future__ import annotations

import functools
import pathlib
import re
import urllib.parse
from collections.abc import Iterator
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.docs.blocks import ROOT, pages

DEEPEST = 3
"""Headings of this level and above have an anchor on the website: `myst_heading_anchors`."""


class Link(NamedTuple):
  """A link or a picture of a page."""

  line: int  # of the paragraph it stands in, from 1
  target: str  # as it is written


def sources() -> list[pathlib.Path]:
  """The pages whose links are followed."""
  return [*pages(), ROOT / "CHANGELOG.md"]


def of(text: str) -> list[Link]:
  """The links and pictures of a page, and its tables of contents' entries as `name.md`."""
  found = []
  for token in MarkdownIt("commonmark").enable("table").parse(text):
    line = token.map[0] + 1 if token.map else 0
    if token.type == "fence" and token.info.strip() == "{toctree}":
      names = [re.sub(r"^.*<(.*)>$", r"\1", name.strip()) for name in token.content.splitlines()]
      # An option begins with a colon; `*` is all pages of a folder.
      found += [Link(line, f"{name}.md") for name in names
                if name and not name.startswith(":") and "*" not in name]
    for child in token.children or ():
      target = child.attrGet("href" if child.type == "link_open" else "src")
      if child.type in ("link_open", "image") and target is not None:
        found.append(Link(line, urllib.parse.unquote(str(target))))
  return found


def anchors(text: str) -> set[str]:
  """What can follow `#` in a link to this page: its headings as GitHub and MyST spell them, and its
  explicit targets, `(name)=` or `<a id="name">`."""
  found: set[str] = set()
  tokens = MarkdownIt("commonmark").enable("table").parse(text)
  for heading, inside in zip(tokens, tokens[1:], strict=False):
    if heading.type == "heading_open" and int(heading.tag[1:]) <= DEEPEST:
      slug = base = _slug(inside)
      # The second of the same name is name-1, the third name-2.
      number = 0
      while slug in found:
        number += 1
        slug = f"{base}-{number}"
      found.add(slug)
  prose = re.sub(r"^( *)(```+).*?^ *\2`*$", "", text, flags=re.DOTALL | re.MULTILINE)
  found |= set(re.findall(r"^\(([^()\s]+)\)=\s*$", prose, re.MULTILINE))
  return found | set(re.findall(r'<a (?:id|name)="([^"]+)"', prose))


def _slug(heading: Token) -> str:
  """A heading's name in a link: small letters, no punctuation, a dash for each space."""
  words = "".join(child.content for child in heading.children or ()
                  if child.type in ("text", "code_inline"))
  return re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")


@functools.cache
def _anchors(page: pathlib.Path) -> set[str]:
  return anchors(page.read_text())


def broken(text: str, page: pathlib.Path) -> Iterator[str]:
  """Those links of `text`, to be read as the page at `page`, that lead nowhere, and why."""
  for line, target in of(text):
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
      # An address outside; nothing is fetched.
      continue
    name, _, anchor = target.partition("#")
    goal = (page.parent / name).resolve() if name else page
    if goal != page and not goal.exists():
      yield f"{page.name}:{line}: {target}: no such file"
    elif anchor and goal.suffix == ".md":
      there = anchors(text) if goal == page else _anchors(goal)
      if anchor not in there:
        yield f"{page.name}:{line}: {target}: no such heading in {goal.name}"
    elif target.endswith("#"):
      yield f"{page.name}:{line}: {target}: names no heading"
