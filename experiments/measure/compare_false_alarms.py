"""How often `jaxpace compare --fail-above` fails equal runs, and how often it finds a slowdown that
is there.

    python -m experiments.measure.compare_false_alarms

Simulated pairs of runs, by kind of noise, length and true slowdown; the limit is 0 % and 3 %. A
limit of 0 % is the rule at its worst: then only the interval stands between chance and an alarm,
and 2.5 % of equal runs should fail.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.measure.forecast_accuracy import KINDS, own_noise
from jaxpace.diagnosis.compare.change import change

_PAIRS = flags.DEFINE_integer("pairs", 1000, "Pairs of runs of each kind, length and slowdown.",
                              lower_bound=10)
_RANKS = flags.DEFINE_integer("compared_ranks", 8, "Ranks of both runs.", lower_bound=2)
_OUTPUT = flags.DEFINE_string("table", "docs/measurements/compare_false_alarms.json",
                              "Where the numbers go.")
_LIMITS, _SLOWER, _STEPS = (0.0, 0.03), (0.0, 0.03, 0.06), (200, 2000)


def rates(kind: str, steps: int, slower: float, pairs: int, ranks: int) -> dict[str, float]:
  """Shares of pairs that fail at each limit, and of intervals that hold the true change."""
  failed, held = np.zeros(len(_LIMITS)), 0
  for pair in range(pairs):
    random = np.random.default_rng([KINDS.index(kind), steps, round(1000 * slower), pair])
    lasting = random.standard_normal(ranks)
    a, b = (own_noise(kind, ranks, steps, lasting, random).max(axis=0) for _ in range(2))
    found = change(a, b * (1 + slower))
    relative = found.relative()
    assert relative is not None
    failed += [relative[0] > limit and found.low > 0 for limit in _LIMITS]
    held += found.low <= slower * _mean(kind, ranks, lasting) <= found.high
  return {**{f"fails_above_{100 * limit:g}_percent": float(failed[i] / pairs)
             for i, limit in enumerate(_LIMITS)},
          "interval_holds": held / pairs}


_MEANS: dict[Any, float] = {}


def _mean(kind: str, ranks: int, lasting: np.ndarray) -> float:
  """The true mean step, from one very long run."""
  key = kind, ranks, tuple(lasting) if kind == "offsets" else ()
  if key not in _MEANS:
    steps = 20_000 if kind == "offsets" else 200_000
    _MEANS[key] = float(own_noise(kind, ranks, steps, lasting,
                                  np.random.default_rng(9)).max(axis=0).mean())
  return _MEANS[key]


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  rows = []
  for kind in KINDS:
    for steps in _STEPS:
      for slower in _SLOWER:
        rows.append({"kind": kind, "steps": steps, "slower": slower,
                     **rates(kind, steps, slower, _PAIRS.value, _RANKS.value)})
        print(rows[-1], file=sys.stderr, flush=True)
  equal = [row for row in rows if not row["slower"]]
  result = {**measured.circumstances("experiments.measure.compare_false_alarms"),
            "pairs": _PAIRS.value, "ranks": _RANKS.value,
            "false_alarms_above_0_percent":
            float(np.mean([row["fails_above_0_percent"] for row in equal])),
            "worst_above_0_percent": max(row["fails_above_0_percent"] for row in equal),
            "false_alarms_above_3_percent":
            float(np.mean([row["fails_above_3_percent"] for row in equal])),
            "worst_above_3_percent": max(row["fails_above_3_percent"] for row in equal),
            "rows": rows}
  path = pathlib.Path(_OUTPUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(result, indent=1) + "\n")
  print(json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=1))


if __name__ == "__main__":
  app.run(main)
