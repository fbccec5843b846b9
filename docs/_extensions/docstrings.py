"""Docstrings are written to be read in the source; this makes reStructuredText of them, before
napoleon takes them.

Indented lines after an empty one are code; a star that begins `**arguments` is no emphasis.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from sphinx.application import Sphinx

SECTIONS = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Example|Examples|Note):$")
BULLET = re.compile(r"[-*] |\d+\. ")
STARS = re.compile(r"(?<![`*\w])\*\*(?=\w)(?![^*]+\*\*)")
BOLD = re.compile(r"\*\*[^*]+\*\*")


def rewrite(lines: list[str]) -> list[str]:
  """Returns the lines with `::` before each indented block of the text, and what is returned as a
  field of its own.

  Napoleon takes the words before a colon for the type of what is returned.
  """
  lines = [BOLD.sub(lambda found: found[0].replace("`", ""), line) for line in lines]
  begin = next((at for at, line in enumerate(lines) if SECTIONS.match(line)), len(lines))
  written = _text(lines[:begin])
  for at in range(begin, len(lines)):
    if lines[at] == "Returns:" and at + 1 < len(lines):
      written.append(f":returns: {lines[at + 1].strip()}")
    elif at == begin or lines[at - 1] != "Returns:":
      written.append(lines[at])
  return written


def _text(lines: list[str]) -> list[str]:
  """The part of a docstring before its sections."""
  written: list[str] = []
  inside, text = False, ""  # in a block of code; the last line of text
  for at, line in enumerate(lines):
    if line.startswith(" "):
      if not inside and at and not lines[at - 1].strip() and not BULLET.match(text):
        written += ["::", ""]
        inside = True
      written.append(line)
      continue
    if line.strip():
      inside, text = False, line
    written.append(STARS.sub(r"\\*\\*", line))
  return written


def _process(app: Sphinx, what: str, name: str, subject: object, options: object,
             lines: list[str]) -> None:
  del app, what, name, subject, options
  lines[:] = rewrite(lines)


def setup(app: Sphinx) -> dict[str, bool]:
  app.connect("autodoc-process-docstring", _process, priority=100)
  return {"parallel_read_safe": True}
