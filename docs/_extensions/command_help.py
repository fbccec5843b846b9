"""A directive that shows what `jaxpace COMMAND --help` says: `{command-help} report`."""

import contextlib
import io
import os
from typing import ClassVar
from unittest import mock

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from jaxpace.cli import main


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


def setup(app: Sphinx) -> dict[str, bool]:
  app.add_directive("command-help", CommandHelp)
  return {"parallel_read_safe": True}
