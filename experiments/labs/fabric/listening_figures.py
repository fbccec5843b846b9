"""From readings of a link to the figures that are published. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.labs.fabric.machine import LabError
from experiments.lib import measured

_STEPS = (5, 20, 50)  # ms


def auc(free: np.ndarray, busy: np.ndarray) -> float:
  """Area under the curve: how often a reading of a busy link is longer than one of a free link;
  ties count half.

  Args:
    free: readings of a free link.
    busy: readings of a link in use.
  """
  both = np.concatenate([free, busy])
  _, inverse, counts = np.unique(both, return_inverse=True, return_counts=True)
  ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
  above = ranks[len(free):].sum() - len(busy) * (len(busy) + 1) / 2
  return float(above / (len(free) * len(busy)))


def told_apart(free: np.ndarray, busy: np.ndarray) -> dict[str, float]:
  """The best threshold, and what goes wrong there: shares of readings of a free link, and of one in
  use.

  The one at which the mean of both shares is least; and `take_turns`' own rule: nearer, in ratio,
  to the longest readings (their 99th percentile here) than to the shortest (the 1st).
  """
  places = np.unique(np.concatenate([free, busy]))
  false = 1 - np.searchsorted(np.sort(free), places, side="right") / len(free)
  missed = np.searchsorted(np.sort(busy), places, side="right") / len(busy)
  best = int((false + missed).argmin())
  both = np.concatenate([free, busy])
  rule = float(np.sqrt(np.percentile(both, 1) * np.percentile(both, 99)))
  return {"threshold_ms": float(1e3 * places[best]), "false": float(false[best]),
          "missed": float(missed[best]), "rule_ms": 1e3 * rule,
          "rule_false": float((free > rule).mean()), "rule_missed": float((busy <= rule).mean())}


def figures_of(heard: np.ndarray, sent: np.ndarray) -> dict[str, Any]:
  """Figures of one run.

  Args:
    heard: [N, 4] s: when a reading began, when it ended, what was heard, when all ranks had been
      told.
    sent: [M, 2] s: when each bucket of the other job began and ended.
  """
  began, ended, reading, told = heard.T
  # Fraction of the reading during which a bucket was under way.
  overlap = np.zeros(len(heard))
  for begin, end in sent:
    overlap += np.clip(np.minimum(ended, end) - np.maximum(began, begin), 0, None)
  share = overlap / (ended - began)
  free, busy = reading[share == 0], reading[share > 0.99]
  if min(len(free), len(busy)) < 20:
    raise LabError(
        f"Too few readings: {len(free)} of a free link, {len(busy)} of one in use. Ask for more "
        "--seconds.")
  return {"free": len(free), "busy": len(busy), "auc": auc(free, busy),
          # Of one that began with both ranks there: what listening costs a job whose ranks come
          # together.
          "whole_ms": float(1e3 * np.median((reading + told - ended)[share == 0])),
          "free_ms": [float(1e3 * np.percentile(free, q)) for q in (5, 50, 95)],
          "busy_ms": [float(1e3 * np.percentile(busy, q)) for q in (5, 50, 95)],
          **told_apart(free, busy)}


_HEADER = ("TCP", "bytes", "readings, free, in use", "free, ms, 5 .. 50 .. 95 %", "in use, ms",
           "AUC", "best: false, missed", "rule: false, missed")


def page(figures: dict[str, Any]) -> list[str]:
  """The page, in Markdown."""
  about = (
      f"Two jobs of two hosts each on one trunk of {figures['trunk_mbit']:g} Mbit/s (network "
      "namespaces, shaped, a\n"
      f"queue of {figures['queue_kb']:g} KB, real TCP, gloo; {figures['priority']}). One listens "
      "every few ms as\n"
      f"`jaxpace.take_turns` does, the other sends {figures['bucket_kb']:g} KB at a time with "
      "rests between. A\n"
      "reading counts as of a link in use where the other's bucket was under way all through it, "
      "as of a free one\n"
      "where it was not at all. AUC: how often a reading of a link in use is longer than one of a "
      "free link. *Best*:\n"
      "the threshold with the fewest mistakes, found afterwards. *Rule*: halfway, in ratio, "
      "between the shortest and\n"
      "the longest readings, as `take_turns` has it. *False*: of a free link, and sounds like one "
      "in use; *missed*:\n"
      "the other way round.")
  rows = []
  for name, sizes in figures["by_congestion"].items():
    for size, f in sizes.items():
      spans = ["{:.2f} .. {:.2f} .. {:.2f}".format(*f[kind]) for kind in ("free_ms", "busy_ms")]
      rows.append((name, f"{4 * int(size):,}", f"{f['free']}, {f['busy']}", *spans,
                   f"{f['auc']:.3f}", f"{100 * f['false']:.1f} %, {100 * f['missed']:.1f} %",
                   f"{100 * f['rule_false']:.1f} %, {100 * f['rule_missed']:.1f} %"))
  cost = [(name, f"{4 * int(size):,}", f"{f['whole_ms']:.2f}",
           *(f"{100 * f['whole_ms'] / step:.1f} %" for step in _STEPS))
          for name, sizes in figures["by_congestion"].items() for size, f in sizes.items()]
  return [*measured.introduction("Listening to a link", figures), about, "",
          *measured.table(_HEADER, rows),
          "What listening once costs on a free link, the median, telling all ranks included; per "
          "bucket, as a share\n"
          f"of steps of {', '.join(map(str, _STEPS))} ms (a pacer that is silent does not listen):",
          "", *measured.table(("TCP", "bytes", "once, ms", *(f"of {step} ms" for step in _STEPS)),
                              cost)]
