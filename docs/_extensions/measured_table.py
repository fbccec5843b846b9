"""Directives that make the table of measurements and the list of commands: `measured-table`,
`measured-commands`."""

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from measured_figures import commands, rows
from measured_values import FOLDER
from sphinx.application import Sphinx

HEADER = ("figure", "aim", "measured", "met")


class _Made(Directive):
  """Markdown made when the pages are built."""

  def lines(self) -> list[str]:
    raise NotImplementedError

  def run(self) -> list[nodes.Node]:
    try:
      lines = self.lines()
    except KeyError as error:
      raise self.error(str(error)) from error
    for path in FOLDER.glob("*.json"):
      self.state.document.settings.env.note_dependency(str(path))
    holder = nodes.container()
    self.state.nested_parse(StringList(lines, source="measured_figures.py"), self.content_offset,
                            holder)
    return [*holder.children]


class MeasuredTable(_Made):
  """The figures, read from the files."""

  def lines(self) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (HEADER, ("---",) * len(HEADER), *rows())]


class MeasuredCommands(_Made):
  """The command of each file."""

  def lines(self) -> list[str]:
    return commands()


def setup(app: Sphinx) -> dict[str, bool]:
  app.add_directive("measured-table", MeasuredTable)
  app.add_directive("measured-commands", MeasuredCommands)
  return {"parallel_read_safe": True}
