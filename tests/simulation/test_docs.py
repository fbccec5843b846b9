"""The page on simulation: its fields exist, and its pacers are made."""

import re

from configs import simulate
from jaxpace.cli.pacer_expression import make
from jaxpace.simulation import noise
from jaxpace.simulation.settings import read
from tests.multiprocess.jobs import ROOT

PAGE = ROOT / "docs" / "simulate.md"


def test_every_component_is_named_on_the_page_and_in_the_config():
  said, config = PAGE.read_text(), (ROOT / "configs" / "simulate.py").read_text()
  for name in noise.COMPONENTS:
    assert f"`{name}`" in said
    assert f'"{name}"' in config or f"{name}(" in config
  assert read(simulate.get_config().to_dict(), make).steps == 2000


def test_every_expression_in_the_table_makes_a_pacer():
  table = re.findall(r"^\| `([a-z_]+\(.*?)` \|", PAGE.read_text(), re.MULTILINE)
  assert len(table) == 3
  for expression in table:
    make(expression)
