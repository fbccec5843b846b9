"""The website's parts: nothing public is missing from it, and what it reads from files is there."""

import importlib
import json
import re
import sys

import pytest

import jaxpace
from experiments.docs import architecture
from jaxpace.cli.main import COMMANDS
from tests.docs.blocks import ROOT

DOCS = ROOT / "docs"


def extension(name):
  """A module of docs/_extensions, which is no package."""
  sys.path.insert(0, str(DOCS / "_extensions"))
  try:
    return importlib.import_module(name)
  finally:
    sys.path.remove(str(DOCS / "_extensions"))


@pytest.fixture(scope="module")
def measured_figures():
  return extension("measured_figures")


def test_docstrings_become_restructured_text():
  rewrite = extension("docstrings").rewrite
  text = ["Does it.", "", "  with it:", "    run()", "", "Takes **options,", "**only `here`**.",
          "- one", "", "  more"]
  sections = ["Args:", "  a: first.", "", "Returns:", "  Two: this and", "  that.", "", "Raises:",
              "  ValueError: no."]
  assert rewrite([*text, "", *sections]) == [
      "Does it.", "", "::", "", "  with it:", "    run()", "", "Takes \\*\\*options,",
      "**only here**.", "- one", "", "  more", "", "Args:", "  a: first.", "",
      ":returns: Two: this and", "  that.", "", "Raises:", "  ValueError: no."]


def test_every_page_is_in_a_table_of_contents():
  listed = set()
  for page in (DOCS / "index.md", DOCS / "measurements" / "index.md"):
    for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
      for line in block.splitlines():
        name = re.sub(r"^.*<(.*)>$", r"\1", line)
        if name and not name.startswith(":"):
          listed |= set(page.parent.glob(f"{name}.md"))
  assert set(DOCS.rglob("*.md")) - listed == {DOCS / "index.md"}


def test_the_reference_has_every_public_name():
  said = (DOCS / "reference" / "python.md").read_text()
  missing = [name for name in jaxpace.__all__
             if f":: jaxpace.{name}\n" not in said and f":pyobject: {name}\n" not in said]
  assert not missing


def test_the_reference_has_every_command():
  said = re.findall(r"^```\{command-help\} ([\w-]+)$",
                    (DOCS / "reference" / "commands.md").read_text(), re.MULTILINE)
  assert said == sorted(COMMANDS)


def test_every_layer_has_its_words():
  said = set(re.findall(r"\*\*`(\w+)`\*\*", (DOCS / "architecture.md").read_text()))
  assert said == {name for layer in architecture.layers() for name in layer}


def test_the_drawing_is_of_the_real_imports():
  drawn = json.loads((DOCS / "figures" / "architecture.json").read_text())
  assert drawn == architecture.data(), ("layers or imports have changed: python -m "
                                        "experiments.docs.architecture")
  level = {name: at for at, layer in enumerate(drawn["layers"]) for name in layer}
  assert len(level) == 17 and drawn["imports"]["coordination"] == ["core"]
  assert all(level[name] <= level[used] for name, others in drawn["imports"].items()
             for used in others)
  picture = (DOCS / "figures" / "architecture.svg").read_text()
  assert all(f">{name}<" in picture for name in drawn["imports"])


def test_the_table_of_measurements_is_read_from_the_files(measured_figures, tmp_path, monkeypatch):
  rows = {what: (measured, met) for what, _, measured, met in measured_figures.rows()}
  assert len(rows) == len(measured_figures.FIGURES) > 20
  measured, met = rows[
      "[Guard: false alarms in 10,000 steps looked at one by one](guard_simulated.md)"]
  real = json.loads((DOCS / "measurements" / "guard_simulated.json").read_text())["summary"][
      "false_alarms"]["share"]
  assert measured == f"{100 * real:.1f} %" and met == ("yes" if real <= 0.05 else "**no**")
  for path in (DOCS / "measurements").glob("*.json"):
    (tmp_path / path.name).write_text(path.read_text())
  monkeypatch.setattr(measured_figures, "FOLDER", tmp_path)
  watchdog = json.loads((tmp_path / "watchdog.json").read_text())
  next(row for row in watchdog["rows"] if row["late_by"] is not None).update(
      named=False, late_by=7.5)
  (tmp_path / "watchdog.json").write_text(json.dumps(watchdog))
  [(measured, met)] = [row[2:] for row in measured_figures.rows() if "watchdog" in row[0]]
  assert "7.50 s" in measured and met == "**no**"
  (tmp_path / "watchdog.json").unlink()
  assert ([row[2] for row in measured_figures.rows() if "watchdog names" in row[0]]
          == ["not measured yet"])
  (tmp_path / "watchdog.json").write_text("{}")
  with pytest.raises(KeyError, match=r"watchdog\.json no longer holds"):
    measured_figures.rows()


def test_every_file_of_measurements_has_its_command(measured_figures):
  items = measured_figures.commands()
  assert len(items) == len(list((DOCS / "measurements").glob("*.json")))
  assert all("`python -m experiments." in item for item in items), items
