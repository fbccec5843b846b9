"""Are results the same, bit for bit, with jaxpace on, off and removed? And the collectives of the compiled step?

    python -m experiments.bitwise                                    # the default choice of cases
    python -m experiments.bitwise --cover=all                        # every model in every case, hours
    python -m experiments.bitwise --models=chars --dtypes=bf16-params --ranks=8 --layouts=pmap --parts=one

Trains each case bare, and instrumented in several ways, for the same number of steps from the same state on the same
batches, and compares every bit of the state and the metrics at the end, and the compiled programs. Part `one` is one
process with several devices; `no_fma` the same on instructions without fused multiply-add, where the order in which XLA
lays out memory can't change a bit; `processes` several processes. Beside it stands a null: the bare step that merely
returns a gradient too. Writes docs/measurements/bitwise.json and bitwise.md. The exit status is 1 if anything but a
null differs.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
from absl import app, flags

import jaxpace.distributed
from experiments import bitwise_cases, bitwise_models, bitwise_processes, bitwise_tables, measured

_PARTS = ("one", "no_fma", "processes")
_parts = flags.DEFINE_list("parts", ",".join(_PARTS), f"Which of {', '.join(_PARTS)}.")
_models = flags.DEFINE_list("models", ",".join(bitwise_models.MODELS), "Models.")
_dtypes = flags.DEFINE_list("dtypes", ",".join(bitwise_models.DTYPES), "Precisions.")
_layouts = flags.DEFINE_list("layouts", ",".join(bitwise_cases.LAYOUTS), "Layouts.")
_ranks = flags.DEFINE_list("ranks", "2,4,8", "Numbers of devices of one process.")
_processes = flags.DEFINE_list("processes", "2,4", "Numbers of processes.")
_steps = flags.DEFINE_integer("steps", 200, "Steps.", lower_bound=1)
_cover = flags.DEFINE_enum("cover", "some", ["some", "all"],
                           "some: two models and two ways of instrumenting, which take turns, for each precision, "
                           "layout and number of ranks; all: everything.")
_out = flags.DEFINE_string("out", "docs/measurements/bitwise.json", "File the results are written to.")
_worker = flags.DEFINE_string("worker", "", "Internal: this is one process of several; directory for its results.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  for flag, known in ((_parts, _PARTS), (_models, bitwise_models.MODELS), (_dtypes, bitwise_models.DTYPES),
                      (_layouts, bitwise_cases.LAYOUTS)):
    if not flag.value or (unknown := set(flag.value) - set(known)):
      raise app.UsageError(f"--{flag.name}: {', '.join(sorted(unknown)) if flag.value else 'nothing'} is none of "
                           f"{', '.join(known)}.")
  if _worker.value:
    jaxpace.distributed.initialize()
    bitwise_processes.work(pathlib.Path(_worker.value), _dtypes.value, _steps.value)
    return
  ranks, processes = _counts(_ranks), _counts(_processes)
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", max(ranks))  # not by the environment, which the workers inherit
  out = pathlib.Path(_out.value)
  figures = json.loads(out.read_text()) if out.exists() else {}
  figures |= measured.circumstances("experiments.bitwise") | {"steps": _steps.value}
  if "one" in _parts.value:
    figures["one"] = one_process(ranks)
  if "no_fma" in _parts.value:
    figures["no_fma"] = without_fma()
  if "processes" in _parts.value:
    figures["processes"] = [row for n in processes
                            for row in bitwise_processes.launch(n, _dtypes.value, _steps.value, __spec__.name)]
  measured.write(figures, bitwise_tables.markdown(figures), out)
  wrong = [row for part in _PARTS for row in bitwise_tables.instrumented(figures.get(part, ()))
           if not (row["bits_equal"] and row["hlo_equal"])]
  if wrong:
    print(f"{len(wrong)} comparisons differ:", *map(json.dumps, wrong), sep="\n  ", file=sys.stderr)
    sys.exit(1)


def _counts(flag: Any) -> list[int]:
  try:
    values = [int(text) for text in flag.value]
  except ValueError:
    values = []
  if not values or not all(2 <= value <= 64 for value in values):
    raise app.UsageError(f"--{flag.name}={','.join(flag.value)} must be whole numbers from 2 to 64, separated by "
                         "commas.")
  return values


def without_fma() -> list[dict[str, Any]]:
  """Runs part `one` in a process whose compiler knows no fused multiply-add."""
  with tempfile.TemporaryDirectory() as root:
    out = pathlib.Path(root) / "one.json"
    flags = [f"--{flag.name}={','.join(flag.value)}" for flag in (_models, _dtypes, _layouts, _ranks)]
    environment = dict(os.environ, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {bitwise_tables.NO_FMA}".strip())
    subprocess.run([sys.executable, "-m", __spec__.name, "--parts=one", *flags, f"--steps={_steps.value}",
                    f"--cover={_cover.value}", f"--out={out}"], env=environment, stdout=subprocess.DEVNULL, check=False)
    return json.loads(out.read_text())["one"]


def one_process(ranks: list[int]) -> list[dict[str, Any]]:
  """Runs the chosen cases, each with its ways of instrumenting; one row each way."""
  cells = list(itertools.product(_dtypes.value, _layouts.value, ranks))
  rows: list[dict[str, Any]] = []
  began = time.monotonic()
  for number, (dtype, layout, count) in enumerate(cells):
    for model, ways in bitwise_cases.chosen(number, _models.value, everything=_cover.value == "all"):
      rows += bitwise_cases.run(bitwise_cases.Case(model, dtype, layout, count), ways, _steps.value)
      ours = bitwise_tables.instrumented(rows)
      wrong = sum(not (row["bits_equal"] and row["hlo_equal"]) for row in ours)
      print(f"  {number + 1} of {len(cells)}: {model}, {dtype}, {layout}, {count} ranks; {len(ours)} comparisons, "
            f"{wrong} differ, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
  return rows


if __name__ == "__main__":
  app.run(main)
