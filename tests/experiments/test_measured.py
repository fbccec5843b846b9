"""What goes with every measurement."""

import json
import pathlib
import sys
import traceback

from experiments.lib import measured


def test_no_path_of_this_machine_is_written_down(tmp_path):
  try:
    json.loads("{")
  except ValueError:
    said = traceback.format_exc()
  root = str(pathlib.Path(measured.__file__).parents[2])
  assert root in said and sys.base_prefix in said
  measured.write({"said": said, "folder": f"{root}/runs"}, [said], tmp_path / "figures.json")
  for name in ("figures.json", "figures.md"):
    written = (tmp_path / name).read_text()
    assert root not in written and f"{sys.base_prefix}/" not in written
    assert "tests/experiments/test_measured.py" in written and "json/decoder.py" in written
