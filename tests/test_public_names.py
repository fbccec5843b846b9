"""The package's public names: one table, what type checkers see, and nothing imported before it is
used."""

import ast
import pathlib
import subprocess
import sys
import types

import pytest

import jaxpace


def test_type_checkers_see_what_there_is():
  tree = ast.parse(pathlib.Path(jaxpace.__file__).read_text())
  [seen] = [node for node in tree.body if isinstance(node, ast.If)]
  homes = {alias.asname: f"{node.module}.{alias.name}" for node in seen.body
           for alias in node.names}
  table = {name: f"jaxpace.{home}.{name}" for name, home in jaxpace._HOMES.items()}
  assert homes == table | {name: f"jaxpace.{home}" for name, home in jaxpace._MODULES.items()}


@pytest.mark.parametrize("name", [*jaxpace.__all__, *jaxpace._MODULES])
def test_every_public_name_is_there(name):
  value = getattr(jaxpace, name)
  assert isinstance(value, types.ModuleType) == (name in jaxpace._MODULES)
  assert name in dir(jaxpace)


def test_an_unknown_name_is_an_attribute_error():
  with pytest.raises(AttributeError, match="no attribute 'instrumnet'"):
    jaxpace.instrumnet  # noqa: B018 - the access is what is tested


def test_nothing_is_imported_before_it_is_used():
  code = "import sys, jaxpace; print([m for m in ('jax', 'numpy', 'pyarrow') if m in sys.modules])"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "[]"
