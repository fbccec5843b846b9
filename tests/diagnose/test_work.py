"""What sharing work by speed did, read back from a recorded run, and said."""

import io
import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jaxpace.cli.main import main
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.diagnosis import to_json
from jaxpace.runs.reader import read_run
from jaxpace.show.terminal import render
from tests.lib.said import numbers
from tests.synthetic import synthetic_runs

STEPS = 300
SHARED, EFFECT = "Work was shared", "Effect on the mean step:"
"""How what is said begins."""


def report(path, columns):
  synthetic_runs.write(path,
                       synthetic_runs.SyntheticJob(ranks=2, steps=STEPS, processes=2, noise=0.02))
  for file in sorted((path / "steps").glob("*.parquet")):
    table = pq.read_table(file)
    steps = table.column("step").to_numpy()
    for name, values in columns.items():
      table = table.append_column(f"decision_{name}", [np.asarray(values, np.float32)[steps]])
    pq.write_table(table, file)
  diagnosis, out = diagnose(read_run(path)), io.StringIO()
  render(diagnosis, Console(width=120, file=out))
  return json.loads(json.dumps(to_json(diagnosis))), " ".join(out.getvalue().split())


def test_unguarded(tmp_path):
  document, text = report(tmp_path / "run",
                          {"work_uneven": np.arange(STEPS) >= 75, "work_gain": np.zeros(STEPS)})
  assert document["pacing"]["work"] == {"uneven_share": 0.75, "uneven_at_end": True,
                                        "guarded": False, "on": None, "effect": None,
                                        "effect_interval": None, "pairs": 0}
  assert numbers(text.partition(SHARED)[2])[0] == 75


def test_guarded(tmp_path):
  whole = np.ones(STEPS)
  columns = {"work_uneven": np.arange(STEPS) < 150, "work_on": 0 * whole,
             "work_effect": 0.1 * whole, "work_effect_low": 0.05 * whole,
             "work_effect_high": 0.15 * whole, "work_pairs": 12 * whole}
  document, text = report(tmp_path / "run", columns)
  work = document["pacing"]["work"]
  assert (work["effect_interval"] == pytest.approx([0.05, 0.15]) and work["on"] is False
          and work["pairs"] == 12)
  main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")])
  words = " ".join(re.sub("<[^>]*>", "", (tmp_path / "page.html").read_text()).split())
  # The share; the effect, its level and its ends.
  assert numbers(words.partition(SHARED)[2])[:5] == [50, 10, 95, 5, 15]
  assert numbers(text.partition(EFFECT)[2])[:5] == [10, 95, 5, 15, 12]


def test_none_where_no_work_is_shared(tmp_path):
  document, text = report(tmp_path / "run", {})
  assert "work" not in document["pacing"] and SHARED not in text
