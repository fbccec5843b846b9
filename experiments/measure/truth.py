"""Is what the stamps say true? Known delays are put into known ranks, and looked for in what was
recorded.

    python -m experiments.measure.truth                              # all parts, about ten minutes
    python -m experiments.measure.truth --parts steps --repeats 10
    python -m experiments.measure.truth --parts=processes --ranks=4  # alone, then shared: eight minutes

Parts: `steps`, one process with several devices, judged step by step; `places`, the same with the
delay in the backward pass and in the update; `exit`, a heavy update against the same update timed
by itself; `processes`, 2 and 4 processes, judged by the medians of blocks of steps against the
machine's one clock. Writes docs/measurements/truth.json and the tables of it, truth.md; what is
measured again takes the place of what the file had of the same.
"""  # noqa: E501

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
from absl import app, flags

import jaxpace
from experiments.lib import measured
from experiments.lib.injection import PLACES
from experiments.measure import heavy_update, truth_processes, truth_steps, truth_tables

_PARTS = ("steps", "places", "exit", "processes")
_parts = flags.DEFINE_list("parts", ",".join(_PARTS), f"Which of {', '.join(_PARTS)}.")
_delays = flags.DEFINE_list("delays_ms", "1,2,5,10,20,50,100,200", "Delays to inject, ms.")
_ranks = flags.DEFINE_list("ranks", "2,4",
                           "Numbers of ranks: devices of one process, and processes.")
_shares = flags.DEFINE_list("shares", "alone,shared",
                            "Several processes: with `share=None`, with sharing, or both.")
_repeats = flags.DEFINE_integer("repeats", 40, "Steps with each delay in one process.",
                                lower_bound=2)
_block = flags.DEFINE_integer("block", 100, "Steps in each block of several processes.",
                              lower_bound=5)
_out = flags.DEFINE_string("out", "docs/measurements/truth.json",
                           "File the figures are written to.")
_worker = flags.DEFINE_string("worker", "",
                              "Internal: this is one process of several; directory for "
                              "its figures.")
_share = flags.DEFINE_bool("worker_share", False,
                           "Internal: whether the processes share their arrivals.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  unknown = set(_parts.value) - set(_PARTS)
  if unknown:
    raise app.UsageError(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(_PARTS)}.")
  if not _shares.value or set(_shares.value) - {"alone", "shared"}:
    raise app.UsageError("--shares must be alone, shared, or both, separated by a comma.")
  delays, ranks = _numbers(_delays, float, 0.01, 1000), _numbers(_ranks, int, 2, 64)
  if _worker.value:
    jaxpace.distributed.initialize()
    truth_processes.work(pathlib.Path(_worker.value), delays, _block.value, _share.value)
    return
  _force_devices(max(ranks))
  out = pathlib.Path(_out.value)
  figures = json.loads(out.read_text()) if out.exists() else {}
  figures |= measured.circumstances("experiments.measure.truth")

  def keep(part: str, rows: Iterable[Any]) -> None:
    """Writes after each row: what is measured is kept, whatever becomes of the rest."""
    if part in _parts.value:
      for row in rows:
        kept = figures.setdefault(part, [])
        place = next((i for i, old in enumerate(kept) if _which(old) == _which(row)), len(kept))
        kept[place:place + 1] = [row]
        measured.write(figures, truth_tables.markdown(figures), out)

  keep("steps", (truth_steps.one_process("forward", n, clock, delays, _repeats.value)
                 for n in ranks for clock in ("native", "callback")))
  keep("places", (truth_steps.one_process(place, 2, clock, delays, max(_repeats.value // 2, 2))
                  for place in PLACES for clock in ("native", "callback")))
  if "exit" in _parts.value:
    figures["exit"] = heavy_update.measure(rounds=max(_repeats.value, 10))
    measured.write(figures, truth_tables.markdown(figures), out)
  keep("processes", (truth_processes.launch(n, share, delays, _block.value, __spec__.name)
                     for n in ranks for share in (False, True)
                     if ("shared" if share else "alone") in _shares.value))


def _which(row: dict[str, Any]) -> tuple[Any, ...]:
  """What was measured: the same in two rows means that one stands for the other."""
  return (row.get("place", ""), row.get("ranks", row.get("processes", 0)), row.get("share", False),
          row.get("clock", ""))


def _numbers(flag: Any, kind: type, low: float, high: float) -> list[Any]:
  try:
    values = [kind(text) for text in flag.value]
  except ValueError:
    values = []
  if not values or not all(low <= value <= high for value in values):
    raise app.UsageError(f"--{flag.name}={','.join(flag.value)} must be numbers from {low:g} to "
                         f"{high:g}, separated by commas.")
  return values


def _force_devices(count: int) -> None:
  """Makes this process have several CPU devices. They share its cores, so the work of each must be
  small."""
  jax.config.update("jax_platforms", "cpu")
  # not by the environment, which the workers inherit
  jax.config.update("jax_num_cpu_devices", count)


if __name__ == "__main__":
  app.run(main)
