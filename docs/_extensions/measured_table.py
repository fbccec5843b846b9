"""A directive that makes the table of measurements: `{measured-table}`."""

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from measured_figures import FIGURES, FOLDER, rows
from sphinx.application import Sphinx

HEADER = ("figure", "aim", "measured", "met", "command")


class MeasuredTable(Directive):
  """The table, read from the files at the time of building."""

  def run(self) -> list[nodes.Node]:
    try:
      found = rows()
    except (KeyError, FileNotFoundError) as error:
      raise self.error(str(error)) from error
    environment = self.state.document.settings.env
    for figure in FIGURES:
      environment.note_dependency(str(FOLDER / figure.file))
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEADER, ("---",) * len(HEADER), *found)]
    holder = nodes.container()
    self.state.nested_parse(StringList(lines, source="measured_figures.py"), self.content_offset, holder)
    return [*holder.children]


def setup(app: Sphinx) -> dict[str, bool]:
  app.add_directive("measured-table", MeasuredTable)
  return {"parallel_read_safe": True}
