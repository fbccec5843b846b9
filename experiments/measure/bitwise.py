"""Are results the same, bit for bit, with jaxpace on, off and removed? And the collectives of the
compiled step?

    python -m experiments.measure.bitwise                                    # the default choice of cases
    python -m experiments.measure.bitwise --cover=all                        # every model in every case, hours
    python -m experiments.measure.bitwise --models=chars --dtypes=bf16-params --ranks=8 --layouts=pmap --parts=one
    python -m experiments.measure.bitwise --parts=no_fma --resume            # goes on where it was stopped

Trains each case bare, and instrumented in several ways, for the same number of steps from the same
state on the same batches, and compares every bit of the state and the metrics at the end, and the
compiled programs. Part `one` is one process with several devices; `no_fma` the same on instructions
without fused multiply-add, where the order in which XLA lays out memory can't change a bit;
`processes` several processes; `pacers` every pacer, guard and housekeeper that really delays.
Beside it stands a null: the bare step that merely returns a gradient
too. Writes docs/measurements/bitwise.json and bitwise.md, after each case, so that what was
compared is kept whatever becomes of the rest. The exit status is 1 if anything but a null differs.
"""  # noqa: E501

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

import jaxpace
from experiments.lib import measured
from experiments.measure import bitwise_cases, bitwise_delays, bitwise_models, bitwise_tables
from experiments.measure.bitwise_cases import LAYOUTS, Case, Way

_WAYS = (Way("native", None, True, False), Way("native", True, True, False))
_MODELS = (("digits", LAYOUTS[1]), ("mlp", LAYOUTS[0]))
"""Few leaves: gloo sends each in turn."""
_PARTS = ("one", "no_fma", "processes", "pacers")
_parts = flags.DEFINE_list("parts", ",".join(_PARTS), f"Which of {', '.join(_PARTS)}.")
_models = flags.DEFINE_list("models", ",".join(bitwise_models.MODELS), "Models.")
_dtypes = flags.DEFINE_list("dtypes", ",".join(bitwise_models.DTYPES), "Precisions.")
_layouts = flags.DEFINE_list("layouts", ",".join(LAYOUTS), "Layouts.")
_ranks = flags.DEFINE_list("ranks", "2,4,8", "Numbers of devices of one process.")
_processes = flags.DEFINE_list("processes", "2,4", "Numbers of processes.")
_steps = flags.DEFINE_integer("steps", 200, "Steps.", lower_bound=1)
_cover = flags.DEFINE_enum("cover", "some", ["some", "all"],
                           "some: two models and two ways of instrumenting, which take turns, for "
                           "each precision, layout and number of ranks; all: everything.")
_out = flags.DEFINE_string("out", "docs/measurements/bitwise.json",
                           "File the results are written to.")
_resume = flags.DEFINE_bool("resume", False,
                            "Leave out the cases of one process that are in the file already.")
_part_as = flags.DEFINE_string("part_as", "one",
                               "Internal: the part under whose name rows of one process are kept.")
_worker = flags.DEFINE_string("worker", "",
                              "Internal: this is one process of several; directory for "
                              "its results.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  for flag, known in ((_parts, _PARTS), (_models, bitwise_models.MODELS),
                      (_dtypes, bitwise_models.DTYPES), (_layouts, LAYOUTS)):
    if not flag.value or (unknown := set(flag.value) - set(known)):
      raise app.UsageError(f"--{flag.name}: "
                           f"{', '.join(sorted(unknown)) if flag.value else 'nothing'} is none of "
                           f"{', '.join(known)}.")
  if _worker.value:
    jaxpace.distributed.initialize()
    work(pathlib.Path(_worker.value), _dtypes.value, _steps.value)
    return
  ranks, processes = _counts(_ranks), _counts(_processes)
  jax.config.update("jax_platforms", "cpu")
  # not by the environment, which the workers inherit
  jax.config.update("jax_num_cpu_devices", max(ranks))
  out = pathlib.Path(_out.value)
  figures = json.loads(out.read_text()) if out.exists() else {}
  if _part_as.value != "one":  # by the process that this one was started by
    keep(figures, out, _part_as.value, ranks)
    return
  now = measured.circumstances("experiments.measure.bitwise")
  figures |= now | {"steps": _steps.value}
  figures["runs"] = figures.get("runs", {}) | dict.fromkeys(_parts.value, now)
  if "one" in _parts.value:
    keep(figures, out, "one", ranks)
  if "no_fma" in _parts.value:
    figures = without_fma(figures, out)
  if "processes" in _parts.value:
    figures["processes"] = [row for n in processes
                            for row in launch(n, _dtypes.value, _steps.value)]
  if "pacers" in _parts.value:
    figures["pacers"] = list(bitwise_delays.one_process(
        [model for model in bitwise_delays.MODELS if model in _models.value], _layouts.value,
        ranks[:2], _dtypes.value, _steps.value))
  measured.write(figures, bitwise_tables.markdown(figures), out)
  wrong = [row for part in _PARTS for row in bitwise_tables.instrumented(figures.get(part, ()))
           if not bitwise_delays.sound(row)]
  if wrong:
    print(f"{len(wrong)} comparisons differ:", *map(json.dumps, wrong), sep="\n  ", file=sys.stderr)
    sys.exit(1)


def _counts(flag: Any) -> list[int]:
  try:
    values = [int(text) for text in flag.value]
  except ValueError:
    values = []
  if not values or not all(2 <= value <= 64 for value in values):
    raise app.UsageError(f"--{flag.name}={','.join(flag.value)} must be whole numbers from 2 to "
                         "64, separated by commas.")
  return values


def without_fma(figures: dict[str, Any], out: pathlib.Path) -> dict[str, Any]:
  """Runs the cases of one process in a process whose compiler knows no fused multiply-add. Returns
  all figures."""
  measured.write(figures, bitwise_tables.markdown(figures), out)
  flags = [f"--{flag.name}={','.join(flag.value)}" for flag in (_models, _dtypes, _layouts, _ranks)]
  environment = dict(os.environ,
                     XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {bitwise_tables.NO_FMA}".strip())
  subprocess.run([sys.executable, "-m", __spec__.name, "--part_as=no_fma", *flags,
                  f"--steps={_steps.value}", f"--cover={_cover.value}", f"--out={out}",
                  f"--resume={str(_resume.value).lower()}"],
                 env=environment, stdout=subprocess.DEVNULL, check=True)
  return json.loads(out.read_text())


def keep(figures: dict[str, Any], out: pathlib.Path, part: str, ranks: list[int]) -> None:
  """Runs the chosen cases of one process, each with its ways of instrumenting; writes after
  each."""
  rows = figures[part] = figures.get(part, []) if _resume.value else []
  done = {Case(*(row[name] for name in Case._fields)) for row in rows}
  cells = list(itertools.product(_dtypes.value, _layouts.value, ranks))
  began = time.monotonic()
  for number, (dtype, layout, count) in enumerate(cells):
    for model, ways in bitwise_cases.chosen(number, _models.value,
                                            everything=_cover.value == "all"):
      case = Case(model, dtype, layout, count)
      if case in done:
        continue
      rows += bitwise_cases.run(case, ways, _steps.value)
      measured.write(figures, bitwise_tables.markdown(figures), out)
      ours = bitwise_tables.instrumented(rows)
      wrong = sum(not (row["bits_equal"] and row["hlo_equal"]) for row in ours)
      print(f"  {number + 1} of {len(cells)}: {model}, {dtype}, {layout}, {count} ranks; "
            f"{len(ours)} comparisons, {wrong} differ, {time.monotonic() - began:.0f} s",
            file=sys.stderr, flush=True)


def launch(processes: int, dtypes: list[str], steps: int) -> list[dict[str, Any]]:
  """Runs this program as workers in several processes. Returns their rows, one a comparison: equal
  if on every process."""
  with tempfile.TemporaryDirectory() as root:
    command = [sys.executable, "-m", "jaxpace", "run", "--no-record", "--nproc", str(processes),
               "--logs", os.path.join(root, "logs"), "--", sys.executable, "-m", __spec__.name,
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


if __name__ == "__main__":
  app.run(main)
