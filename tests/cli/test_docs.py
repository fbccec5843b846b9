"""What docs/simulate.md says of pacers is real. (Commands and code of all pages are checked by
tests/docs.)"""

import re

from jaxpace.cli import pacer_expression
from tests.multiprocess.jobs import ROOT


def test_every_expression_in_the_table_makes_a_pacer():
  table = re.findall(r"^\| `([a-z_]+\(.*?)` \|", (ROOT / "docs" / "simulate.md").read_text(),
                     re.MULTILINE)
  assert len(table) == 3
  for expression in table:
    pacer_expression.make(expression)
