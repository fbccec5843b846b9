"""What `experiments.paper.posterior` found, in tables: prior beside posterior."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from experiments.lib import measured
from experiments.paper import tables
from experiments.paper import world as worlds

FEW = 30
"""First draws with descendants below which a sample's figures are not to be relied on."""
_LOST = (0.0, 0.1, 0.3, 0.6)
"""Ends of the ranges of `lost` that are told apart."""


def page(figures: dict[str, Any]) -> list[str]:
  """Markdown lines.

  Args:
    figures: as `experiments.paper.posterior` writes them.
  """
  lines = measured.introduction("Table 1 of the paper: prior and posterior of the gain", figures)
  lines += textwrap.wrap(
      "Simulated. The prior is uniform over the box of `experiments/paper/world.py`, all couplings "
      "at once. The posterior is the prior where the simulated baseline is within so many "
      f"tolerances of the paper's at all five sizes ({figures['steps']} steps; a tolerance is 2 % "
      "of throughput, the larger of 0.004 and 10 % of the CV). Sequential Monte Carlo from the "
      "prior; no search around a world that was found. The coordination columns are used nowhere. "
      f"Gains are against the same world without, in {figures['played']} worlds of each run: 5th "
      "percentile .. median .. 95th percentile.", 116)
  lines += ["", "## Gain", "", "Both jobs take turns:", "", *gains(figures, "both"),
            "This job alone:", "", *gains(figures, "one"), "First come, first served:", "",
            *gains(figures, "first_come"), *said(figures), ""]
  lines += ["## What the baseline says of each number", "", *numbers(figures)]
  lines += ["## What is assumed lost while both send", "", *by_loss(figures)]
  return [*lines, "## The runs", "", *runs(figures)]


def brief(figures: dict[str, Any]) -> list[str]:
  """The part of it for docs/paper.md: gains of both jobs, in a table and in words."""
  return [*gains(figures, "both"), *said(figures)]


def samples(figures: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
  """The runs by what they are a sample of: the prior, then within ever narrower tolerances."""
  result: dict[str, list[dict[str, Any]]] = {}
  for run in sorted(figures["runs"], key=lambda run: -(run["tolerance"] or np.inf)):
    wide = run["tolerance"]
    name = f"within {wide:g} tolerance{'s' * (wide != 1)}" if wide else "prior"
    result.setdefault(name, []).append(run)
  return result


def gain(some: list[dict[str, Any]], nodes: int, arm: str = "both") -> np.ndarray:
  """[W] of all these runs."""
  return np.concatenate([run["sizes"][str(nodes)][arm]["gain"] for run in some])


def band(values: np.ndarray, factor: float = 100, form: str = "+.1f", unit: str = " %") -> str:
  """5th percentile .. median .. 95th."""
  return " .. ".join(f"{factor * value:{form}}" for value in
                     np.percentile(values, (5, 50, 95))) + unit


def gains(figures: dict[str, Any], arm: str) -> list[str]:
  """Prior beside posterior by size; the share of the worlds at or above the paper's gain."""
  found, rows = samples(figures), []
  for nodes in worlds.NODES:
    row: list[Any] = [nodes, f"{100 * tables.PAPER[nodes]:+.1f} %"]
    for some in found.values():
      values = gain(some, nodes, arm)
      row += [band(values), f"{100 * np.mean(values >= tables.PAPER[nodes]):.0f} %"]
    rows.append(row)
  heads = [f"{name}{more}" for name in found for more in ("", ": at or above")]
  return measured.table(["nodes", "the paper", *heads], rows)


def said(figures: dict[str, Any]) -> list[str]:
  """How far the figures can be relied on, and the prior's share of them."""
  found = samples(figures)
  prior, *posterior = found
  largest, words = worlds.NODES[-1], []
  for name in posterior:
    medians = " and ".join(f"{100 * np.median(gain([run], largest)):+.1f} %" for run in found[name])
    ancestors = [run["ancestors"] for run in found[name]]
    words.append(
        f"The {'run' if len(ancestors) == 1 else f'{len(ancestors)} independent runs'} {name} "
        f"{'has' if len(ancestors) == 1 else 'have'} a median of {medians} at {largest} nodes, in "
        f"worlds that descend from {' and '.join(map(str, ancestors))} of the first draws"
        + (", which is the least that can be taken for an effective sample size."
           if min(ancestors) >= FEW else
           f": the effective sample size may be as small, and below {FEW} **this is no figure to "
           "rely on**."))
  widths = {name: np.subtract(*np.percentile(gain(found[name], largest), (95, 5)))
            for name in (prior, posterior[0])} if posterior else {}
  if widths:
    lost = column(figures, found[posterior[0]], "lost")
    little = lost < _LOST[1]
    words.append(
        f"{posterior[0].capitalize()} the gain at {largest} nodes still spans "
        f"{100 * widths[posterior[0]]:.0f} points, where the prior alone spans "
        f"{100 * widths[prior]:.0f}"
        + (": the baseline does not narrow it. " if widths[posterior[0]] >= widths[prior] else ". ")
        + "It goes with what is assumed lost while both send (rank correlation "
        f"{rank_correlation(lost, gain(found[posterior[0]], largest)):+.2f}): in the "
        f"{little.sum()} worlds that lose less than {100 * _LOST[1]:.0f} % the median gain is "
        + (f"{100 * np.median(gain(found[posterior[0]], largest)[little]):+.1f} %."
           if little.any() else "unknown."))
  return textwrap.wrap(" ".join(words), 116)


def column(figures: dict[str, Any], some: list[dict[str, Any]], name: str) -> np.ndarray:
  """[W] a number of the worlds of these runs."""
  at = figures["fields"].index(name)
  return np.concatenate([np.array(run["worlds"])[:, at] for run in some])


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
  """Spearman's."""
  ranks = [np.argsort(np.argsort(values)).astype(float) for values in (a, b)]
  return float(np.corrcoef(*ranks)[0, 1])


def numbers(figures: dict[str, Any]) -> list[str]:
  """Of each number of a world: its box, its posterior within the widest tolerance, what the data
  took away of its spread, and how the gain goes with it."""
  name, some = list(samples(figures).items())[1]
  rows, gained = [], gain(some, worlds.NODES[-1])
  for field in figures["fields"]:
    low, high = figures["bounds"][field]
    values = column(figures, some, field)
    narrower = 1 - values.std() / ((high - low) / 12 ** 0.5)
    rows.append([field, f"{low:g} to {high:g}", band(values, 1, ".3g", ""),
                 f"{100 * narrower:.0f} %", f"{rank_correlation(values, gained):+.2f}"])
  return measured.table(
      ["number", "prior: uniform", name, "deviation less than the prior's by",
       f"rank correlation with the gain of both at {worlds.NODES[-1]} nodes"], rows)


def by_loss(figures: dict[str, Any]) -> list[str]:
  """The gain of both by what is assumed lost."""
  name, some = list(samples(figures).items())[1]
  lost, rows = column(figures, some, "lost"), []
  low, high = figures["bounds"]["lost"]
  for begin, end in zip(_LOST, _LOST[1:], strict=False):
    chosen = (lost >= begin) & ((lost < end) | (end == high))
    rows.append([f"{begin:g} to {end:g}", f"{100 * (end - begin) / (high - low):.0f} %",
                 f"{100 * chosen.mean():.0f} %", int(chosen.sum()),
                 *(band(gain(some, nodes)[chosen]) if chosen.any() else None
                   for nodes in worlds.NODES[-3:])])
  return measured.table(["lost", "of the prior", name, "worlds",
                         *(f"gain, {nodes} nodes" for nodes in worlds.NODES[-3:])], rows)


def runs(figures: dict[str, Any]) -> list[str]:
  """How each sample was made."""
  return measured.table(
      ["run", "tolerance", "worlds", "simulated", "stages", "accepted in the last stage",
       "first draws with descendants", "logarithm of the prior's mass within tolerance"],
      [[run["seed"], run["tolerance"], run["population"], run["tried"], len(run["tolerances"]),
        f"{100 * run['accepted'][-1]:.0f} %", run["ancestors"], f"{run['log_evidence']:.1f}"]
       for run in figures["runs"] if run["tolerance"]])
