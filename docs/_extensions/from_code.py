"""Directives that show what the code says: `{command-help} report` is what `jaxpace report --help`
prints, `{codes-table}` the codes of verdicts, notes and evidence with their meanings."""

import contextlib
import io
import os
from typing import ClassVar
from unittest import mock

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx

from jaxpace.cli import main
from jaxpace.diagnose.words.codes import ChangeCode, HangCode, Silence, Verdict
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.notes import Note

KINDS = {"verdict": Verdict, "hang": HangCode, "comparison": ChangeCode, "silence": Silence,
         "evidence": Evidence, "note": Note}


def shown(command: str) -> str:
  """Returns the help of one command, 100 columns wide, as the command prints it.

  Raises:
    KeyError: there is no such command.
  """
  if command not in main.COMMANDS:
    raise KeyError(f"there is no `jaxpace {command}`; there are: {', '.join(main.COMMANDS)}")
  printed = io.StringIO()
  with mock.patch.dict(os.environ, {"COLUMNS": "100"}), contextlib.redirect_stdout(printed):
    main.main([command, "--help"])
  return printed.getvalue()


class CommandHelp(Directive):
  """The help of one command."""

  required_arguments = 1
  option_spec: ClassVar = {}

  def run(self) -> list[nodes.Node]:
    try:
      text = shown(self.arguments[0])
    except KeyError as error:
      raise self.error(str(error)) from error
    return [nodes.literal_block(text, text, language="text")]


def codes() -> list[str]:
  """The table of all codes, in Markdown."""
  return ["| code | of a | says |", "|---|---|---|",
          *(f"| `{code}` | {kind} | {code.meaning} |" for kind, of in KINDS.items() for code in of)]


class CodesTable(Directive):
  """All codes with their meanings."""

  def run(self) -> list[nodes.Node]:
    holder = nodes.container()
    self.state.nested_parse(StringList(codes(), source="codes.py"), self.content_offset, holder)
    return [*holder.children]


def setup(app: Sphinx) -> dict[str, bool]:
  app.add_directive("command-help", CommandHelp)
  app.add_directive("codes-table", CodesTable)
  return {"parallel_read_safe": True}
