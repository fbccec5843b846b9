"""Are parameters the same, bit for bit, with every pacer, guard and housekeeper, while delays
really occur?

A part of `experiments.measure.bitwise`, whose other parts compare ways of instrumenting under a
pacer that delays at random: here are the library's own, set so that they delay in a short run. A
run in which nothing was delayed counts as a failure.
"""

from __future__ import annotations

import collections
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxpace
from experiments.lib import measured
from experiments.measure import bitwise_cases, bitwise_models
from experiments.measure.bitwise_cases import Case, Way

MOST = 3e-4
MODELS = ("mlp", "digits")
EACH = 2
"""Pacers of each case."""
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
  return bool(row["bits_equal"] and row["hlo_equal"] and row.get("delays") != 0
              and row.get("collections") != 0)


def one_process(models: list[str], layouts: list[str], ranks: list[int], dtypes: list[str],
                steps: int) -> Iterator[dict[str, Any]]:
  """All layouts, precisions and models; pacers take turns, `EACH` a case. Numbers of ranks take
  turns too."""
  names = list(PACERS)
  for number, (dtype, layout, model) in enumerate(itertools.product(dtypes, layouts, models)):
    chosen = [names[(number * EACH + i) % len(names)] for i in range(EACH)]
    count = ranks[(number + number // len(models)) % len(ranks)]
    print(f"  pacers: {model}, {dtype}, {layout}, {count} ranks", file=sys.stderr, flush=True)
    yield from compare(Case(model, dtype, layout, count), chosen, steps)


def table(rows: list[dict[str, Any]]) -> list[str]:
  """How often each pacer's comparisons are equal, and how much it delayed."""
  lines = []
  for name in PACERS:
    own = [row for row in rows if row["way"] == name]
    if own:
      collected = [row["collections"] for row in own if row["collections"] is not None]
      lines.append([name, len(own), sum(not row["bits_equal"] for row in own),
                    sum(not row["hlo_equal"] for row in own), min(row["delays"] for row in own),
                    int(np.median([row["delays"] for row in own])),
                    f"{max(row['longest_delay_ms'] for row in own):.2f}",
                    min(collected) if collected else None])
  return measured.table(["pacer", "comparisons", "bits differ", "collectives differ",
                          "delays applied, least", "median", "longest, ms", "collections, least"],
                         lines)
