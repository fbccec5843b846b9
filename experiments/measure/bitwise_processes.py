"""Several processes with gloo between them: final bits bare, with `share=None` and with sharing,
compared."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax

from experiments.measure import bitwise_cases, bitwise_models
from experiments.measure.bitwise_cases import LAYOUTS, Case, Way

_WAYS = (Way("native", None, True, False), Way("native", True, True, False))
_MODELS = (("digits", LAYOUTS[1]), ("mlp", LAYOUTS[0]))
"""Few leaves: gloo sends each in turn."""


def launch(processes: int, dtypes: list[str], steps: int, module: str) -> list[dict[str, Any]]:
  """Runs `module` as workers in several processes. Returns their rows, one a comparison: equal if
  on every process."""
  with tempfile.TemporaryDirectory() as root:
    command = [sys.executable, "-m", "jaxpace.cli", "run", "--no-record", "--nproc", str(processes),
               "--logs", os.path.join(root, "logs"), "--", sys.executable, "-m", module,
               f"--worker={root}", f"--dtypes={','.join(dtypes)}", f"--steps={steps}"]
    subprocess.run(command, check=True)
    found = [json.loads((pathlib.Path(root) / f"{n}.json").read_text()) for n in range(processes)]
  rows = []
  for same in zip(*found, strict=True):
    worst = next((row for row in same if not (row["bits_equal"] and row["hlo_equal"])), same[0])
    rows.append({**worst, "processes": processes})
  return rows


def work(root: pathlib.Path, dtypes: list[str], steps: int) -> None:
  """One process of several."""
  rows = []
  for dtype in dtypes:
    for model, layout in _MODELS:
      case = Case(model, dtype, layout, jax.device_count())
      job = bitwise_models.MODELS[model](case.ranks, *bitwise_models.DTYPES[dtype])
      bare = bitwise_cases.train(job, case, None, steps)
      again = bitwise_cases.train(job, case, None, steps)
      rows.append(bitwise_cases.compare(case, "not at all, run again", bare, again))
      rows += [bitwise_cases.compare(case, str(way), bare,
                                     bitwise_cases.train(job, case, way, steps))
               for way in _WAYS]
      if jax.process_index() == 0:
        print(
            f"{model}, {dtype}, {case.ranks} processes: {[row['bits_equal'] for row in rows[-3:]]}",
            flush=True)
  (root / f"{jax.process_index()}.json").write_text(json.dumps(rows))
