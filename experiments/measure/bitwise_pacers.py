"""Are parameters the same, bit for bit, with every pacer, guard and housekeeper, while delays
really occur?

    python -m experiments.measure.bitwise_pacers

Beside `experiments.measure.bitwise`, which compares ways of instrumenting under a pacer that delays
at random: here are the library's own, set so that they delay in a short run. Trains each case bare
and with each of them for the same number of steps from the same state on the same batches. A run in
which nothing was delayed counts as a failure. Writes docs/measurements/bitwise_pacers.json and .md;
the exit status is 1 if anything differs.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import measured
from experiments.measure import bitwise_cases, bitwise_models, bitwise_processes
from experiments.measure.bitwise_cases import LAYOUTS, Case, Way

MOST = 3e-4
MODELS = ("mlp", "digits")
SHARED = Way("auto", True, True, False)


def eager() -> jaxpace.Pacer:
  """`pace_early_ranks` with thresholds at zero and a bucket that fills at once: ordinary jitter is
  slack to it."""
  return jaxpace.pace_early_ranks(window=8, threshold=0.0, noise=0.0, quantile=0.9,
                                  share_of_slack=1.0, cost=1.0, max_delay=MOST)


def shifting() -> jaxpace.Pacer:
  """`interleave_jobs` told that a collective takes a nanosecond by itself: all there is looks like
  contention."""
  return jaxpace.interleave_jobs(max_delay=MOST, floor=1e-9, budget=1.0, key=1)


PACERS: dict[str, tuple[Callable[[], jaxpace.Pacer], Way]] = {
    "pace_early_ranks": (eager, SHARED),
    "interleave_jobs": (shifting, SHARED),
    "guard(pace_early_ranks)": (lambda: jaxpace.guard(eager(), block=4, retry=8), SHARED),
    "chain of four": (lambda: jaxpace.chain(eager(), shifting(),
                                            jaxpace.limit(bitwise_cases.unruly(), MOST / 2),
                                            jaxpace.only_ranks(eager(), [0])), SHARED),
    "steerable(guard(chain))": (lambda: jaxpace.steerable(
        jaxpace.guard(jaxpace.chain(eager(), shifting()), block=4, retry=8)), SHARED),
    "pace_early_ranks, aligned housekeeper": (eager, SHARED),
    "pace_early_ranks, freezing housekeeper": (eager, SHARED),
}
KEEPERS = {"pace_early_ranks, aligned housekeeper": "aligned",
           "pace_early_ranks, freezing housekeeper": "frozen"}


def compare(case: Case, names: list[str], steps: int) -> list[dict[str, Any]]:
  """Trains a case bare, and with each of the `PACERS` named: a row of comparison for each."""
  job = bitwise_models.MODELS[case.model](case.ranks, *bitwise_models.DTYPES[case.dtype])
  bare = bitwise_cases.train(job, case, None, steps)
  rows = []
  for name in names:
    make, way = PACERS[name]
    if name in KEEPERS:
      with jaxpace.Housekeeper(every=8, mode=KEEPERS[name], warmup=4) as keeper:
        kept: collections.deque[list[list[int]]] = collections.deque(maxlen=4)
        keeper.add(functools.partial(_allocate, kept), every=5)
        found = bitwise_cases.train(job, case, way, steps, pacer=make(), after_step=keeper.step)
        collected = keeper.summary()["full_collections"]
    else:
      found, collected = bitwise_cases.train(job, case, way, steps, pacer=make()), None
    assert found.delays is not None
    rows.append(bitwise_cases.compare(case, name, bare, found) | {
        "delays": int((found.delays > 0).sum()),
        "longest_delay_ms": 1e3 * float(found.delays.max()), "collections": collected})
  return rows


def _allocate(kept: collections.deque[list[list[int]]]) -> None:
  """Makes enough objects that live a while for the interpreter to collect in full by itself every
  few calls."""
  kept.append([[number] for number in range(20_000)])


def sound(row: dict[str, Any]) -> bool:
  """Says whether bits and collectives are equal, and there was something that could have changed
  them."""
  return bool(row["bits_equal"] and row["hlo_equal"] and row["delays"] > 0
              and row["collections"] != 0)


def one_process(names: list[str], ranks: list[int], dtypes: list[str], steps: int,
                each: int) -> list[dict[str, Any]]:
  """All layouts, precisions and models; pacers take turns, `each` a case. Numbers of ranks take
  turns too."""
  rows: list[dict[str, Any]] = []
  began = time.monotonic()
  cells = list(itertools.product(dtypes, LAYOUTS, MODELS))
  for number, (dtype, layout, model) in enumerate(cells):
    chosen = [names[(number * each + i) % len(names)] for i in range(min(each, len(names)))]
    count = ranks[(number + number // len(MODELS)) % len(ranks)]
    rows += compare(Case(model, dtype, layout, count), list(dict.fromkeys(chosen)), steps)
    print(f"  {number + 1} of {len(cells)}: {model}, {dtype}, {layout}, {count} ranks; {len(rows)} "
          f"comparisons, {sum(not sound(row) for row in rows)} not sound, "
          f"{time.monotonic() - began:.0f} s", file=sys.stderr,
          flush=True)
  return rows


def work(root: pathlib.Path, dtypes: list[str], steps: int) -> None:
  """One process of several."""
  names = ["pace_early_ranks", "pace_early_ranks, not shared", "guard(pace_early_ranks)",
           "pace_early_ranks, aligned housekeeper"]
  rows = [row for dtype in dtypes
          for row in compare(Case("mlp", dtype, LAYOUTS[1], jax.device_count()), names, steps)]
  (root / f"{jax.process_index()}.json").write_text(json.dumps(rows))


def lines(figures: dict[str, Any]) -> list[str]:
  """The results as a page."""
  rows = figures["rows"]
  page = measured.introduction("Bitwise: with every pacer, guard and housekeeper", figures)
  page += [f"{figures['steps']} steps each, against the bare step. Bits: parameters, optimizer "
           "state, statistics and metrics. Collectives: of the compiled programs, but for one "
           f"operand where arrivals are shared. Delays: asked up to {1e3 * MOST:g} ms, applied "
           "ones as measured. Several processes: delays of one.", "",
           f"{len(rows)} comparisons; bits differ in {sum(not row['bits_equal'] for row in rows)}, "
           f"collectives in {sum(not row['hlo_equal'] for row in rows)}; no delay in "
           f"{sum(row['delays'] == 0 for row in rows)}.", ""]
  table = []
  for name in PACERS:
    own = [row for row in rows if row["way"] == name]
    if own:
      collected = [row["collections"] for row in own if row["collections"] is not None]
      table.append([name, len(own), sum(not row["bits_equal"] for row in own),
                    sum(not row["hlo_equal"] for row in own), min(row["delays"] for row in own),
                    int(np.median([row["delays"] for row in own])),
                    f"{max(row['longest_delay_ms'] for row in own):.2f}",
                    min(collected) if collected else None])
  page += measured.table(["pacer", "comparisons", "bits differ", "collectives differ",
                          "delays applied, least", "median", "longest, ms", "collections, least"],
                         table)
  for key, title in (("dtype", "precision"), ("layout", "layout"), ("model", "model"),
                     ("ranks", "ranks")):
    page += measured.table([title, "comparisons", "not equal or not delayed"], [
        [value, len(own), sum(not sound(row) for row in own)]
        for value in dict.fromkeys(row[key] for row in rows)
        for own in [[row for row in rows if row[key] == value]]])
  wrong = [row for row in rows if not sound(row)]
  if wrong:
    page += ["Not sound:", "",
             *measured.table(["case", "pacer", "leaves that differ", "delays", "collectives"], [
                 [f"{row['model']}, {row['dtype']}, {row['layout']}, {row['ranks']} ranks",
                  row["way"], len(row["leaves"]), row["delays"], row["hlo"] or "equal"]
                 for row in wrong])]
  return page


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the
  same names."""
  flags.DEFINE_list("dtypes", list(bitwise_models.DTYPES), "Precisions.")
  flags.DEFINE_list("only", [],
                    "Pacers of one process whose names hold one of these words, such as "
                    "housekeeper; all.")
  flags.DEFINE_list("ranks", ["2", "4"], "Numbers of devices of one process, which take turns.")
  flags.DEFINE_list("processes", ["2"], "Numbers of processes; empty for none.")
  flags.DEFINE_integer("steps", 200, "Steps.", lower_bound=1, upper_bound=256)
  flags.DEFINE_integer("each", 2, "Pacers a case; they take turns.", lower_bound=1)
  flags.DEFINE_string("out", "docs/measurements/bitwise_pacers.json",
                      "File the results are written to.")
  flags.DEFINE_string("worker", "",
                      "Internal: this is one process of several; directory for its results.")


def main(_: list[str]) -> None:
  its = flags.FLAGS
  if its.worker:
    jaxpace.distributed.initialize()
    work(pathlib.Path(its.worker), its.dtypes, its.steps)
    return
  ranks = [int(n) for n in its.ranks]
  names = [name for name in PACERS if not its.only or any(word in name for word in its.only)]
  if not names:
    raise app.UsageError(f"--only={','.join(its.only)} is in no name of: {'; '.join(PACERS)}.")
  jax.config.update("jax_platforms", "cpu")
  # not by the environment, which the workers inherit
  jax.config.update("jax_num_cpu_devices", max(ranks))
  figures = measured.circumstances("experiments.measure.bitwise_pacers") | {"steps": its.steps}
  rows = one_process(names, ranks, its.dtypes, its.steps, its.each)
  for count in map(int, its.processes):
    rows += bitwise_processes.launch(count, its.dtypes, its.steps,
                                     "experiments.measure.bitwise_pacers")
  figures["rows"] = rows
  measured.write(figures, lines(figures), pathlib.Path(its.out))
  if wrong := [row for row in rows if not sound(row)]:
    print(f"{len(wrong)} comparisons are not sound:", *map(json.dumps, wrong), sep="\n  ",
          file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  define_flags()
  app.run(main)
