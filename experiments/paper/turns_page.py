"""What `experiments.paper.turns` found, in tables."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from experiments.lib import measured
from experiments.paper import tables
from experiments.paper import world as worlds

_LONG = ("alone_long", "one_long", "one_guarded", "both_long", "both_guarded")
_UNTRIED = slice(1, None, 2)
"""Worlds in which no constant was tried."""


def page(figures: dict[str, Any]) -> list[str]:
  """Markdown lines.

  Args:
    figures: as `experiments.paper.turns` writes them.
  """
  lines = measured.introduction("Table 1 of the paper, taking turns", figures)
  ear = figures["ear"]
  lines += textwrap.wrap(
      f"Simulated: the {figures['worlds']} worlds of [Table 1](table1.md), as they are on record, "
      f"{figures['steps']} steps, the first {worlds.WARMUP} not counted. Listening takes "
      f"{100 * figures['listening']:g} % of this job's mean bucket on a quiet link and "
      f"{ear['busy']:g} times that on one in use, with a deviation of its logarithm of "
      f"{ear['scatter']:g}; {100 * ear['wrong']:g} % of the readings tell of the other state. "
      "These are assumed, not measured. Throughput against the same world without; lowest .. "
      "middle .. highest over the worlds. What is in the middle hangs on which worlds were looked "
      "for ([why](../paper.md)).", 116)
  lines += ["", "## Both jobs take turns", "", *both(figures)]
  lines += [
      "In the worlds in which no constant of `take_turns` was tried (every other one, of the same "
      "searches), and in the others:", "",
      *halves(figures)]
  lines += ["## The bound", "", *bound(figures)]
  lines += ["## One job, and nobody else", "", *others(figures)]
  return [*lines, "## Longer runs, and the guard", "", *longer(figures)]


def _sizes(figures: dict[str, Any], arm: str) -> list[tuple[int, int, dict[str, Any]]]:
  return [(k, nodes, figures["sizes"][str(nodes)][arm]) for k, nodes in enumerate(worlds.NODES)
          if arm in figures["sizes"].get(str(nodes), {})]


def both(figures: dict[str, Any]) -> list[str]:
  """The paper's columns beside both jobs', and the share of the worlds at or above the paper's
  gain."""
  rows = []
  for k, nodes, of in _sizes(figures, "both"):
    gain, wrong = np.array(of["gain"]), figures["sizes"][str(nodes)].get("both_5")
    said, cv = tables.PAPER[nodes], worlds.CV["coordination"][k]
    rows.append([nodes, f"{100 * said:+.1f} %", tables.percent(gain),
                 f"{100 * np.mean(gain >= said):.0f} %", cv, tables.plain(np.array(of["cv"])),
                 tables.plain(np.array(of["bare_cv"])),
                 tables.percent(np.array(of["neighbour_gain"])),
                 tables.percent(np.array(wrong["gain"])) if wrong else None])
  return measured.table(
      ["nodes", "paper's gain", "gain", "worlds at or above the paper's", "paper's CV", "CV",
       "CV without", "the neighbour's gain", "gain, 5 % of the readings wrong"], rows)


def bound(figures: dict[str, Any]) -> list[str]:
  """First come, first served; and what part of the step, and of its collectives, is exposed."""
  rows = []
  for _, nodes, of in _sizes(figures, "both"):
    best = figures["sizes"][str(nodes)].get("first_come")
    rows.append([nodes, tables.percent(np.array(best["gain"])) if best else None,
                 tables.plain(np.array(best["cv"])) if best else None,
                 *(tables.percent(np.array(of[name]), 0)
                   for name in ("bare_exposed", "exposed", "bare_hidden", "hidden"))])
  return [
      *textwrap.wrap(
          "First come, first served, bucket by bucket, by who knows all: nobody listens or errs. "
          "*Exposed*: of the step, what it takes beyond the slowest rank's compute. *Hidden*: of "
          "the time in which a bucket is held back or sent, what lies within that compute.", 116),
      "", *measured.table(
          ["nodes", "gain, first come, first served", "its CV", "exposed without", "exposed, both",
           "hidden without", "hidden, both"], rows)]


def halves(figures: dict[str, Any]) -> list[str]:
  """The same of the worlds it was tried in, and of those it was not."""
  return measured.table(["nodes", "gain, not tried in", "gain, tried in", "CV, not tried in",
                         "CV, tried in"], [
                             [nodes, tables.percent(np.array(of["gain"])[_UNTRIED]),
                              tables.percent(np.array(of["gain"])[::2]),
                              tables.plain(np.array(of["cv"])[_UNTRIED]),
                              tables.plain(np.array(of["cv"])[::2])]
                             for _, nodes, of in _sizes(figures, "both")])


def others(figures: dict[str, Any]) -> list[str]:
  """One job alone, and the two nulls."""
  rows = []
  for _, nodes, of in _sizes(figures, "one"):
    sizes = figures["sizes"][str(nodes)]
    rows.append([nodes, *(tables.percent(np.array(sizes[arm]["gain"]), 2) if arm in sizes else None
                          for arm in ("one", "alone", "harmless")),
                 tables.percent(np.array(of["neighbour_gain"]))])
  return measured.table(["nodes", *(figures["arms"][arm] for arm in ("one", "alone", "harmless")),
                         "the neighbour's gain, this job alone taking turns"], rows)


def longer(figures: dict[str, Any]) -> list[str]:
  """Long runs: one job alone and both, by themselves and under the guard."""
  rows = []
  for arm in _LONG:
    rows += [[figures["arms"][arm], nodes, len(of["gain"]),
              tables.percent(np.array(of["gain"]), 2),
              tables.percent(np.array(of["gain_later"]), 2), tables.plain(np.array(of["cv"])),
              tables.plain(np.array(of["bare_cv"])),
              tables.percent(np.array(of["neighbour_gain"]), 2) if "neighbour_gain" in of
              else None]
             for _, nodes, of in _sizes(figures, arm)]
  if not rows:
    return ["Not run.", ""]
  said = (f"{figures['long']:,} steps. Under the guard: `jaxpace.guard(take_turns(...), "
          f"block={figures['block']}, trust=True)`, each job's with a key of its own. Without it, "
          "what ends a harm is what `take_turns` itself measures. What may be lost was run in all "
          "worlds at all sizes, the rest in some.")
  return [*textwrap.wrap(said, 116), "", *measured.table(
      ["who", "nodes", "worlds", "gain, all steps", "gain, their second half", "CV", "CV without",
       "the neighbour's gain"], rows)]
