"""The paper's figures 1 and 2, drawn from the figures on record; dashes and shapes say what
colours say."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.paper import world as worlds

INK, BLUE, ORANGE, GREEN, GREY = "#222222", "#1f6fb4", "#d95f02", "#1b9e77", "#999999"
PHASES = {"forward": ("#1f4e79", ""), "backward": ("#9ecae1", ""), "waiting": ("#ffffff", "///"),
          "transfer": ("#f4a442", ""), "contention": ("#c65102", "\\\\\\"), "pause": (INK, ""),
          "delay": (GREY, "...")}
"""Colours that differ in grey, too, and hatches."""


def scaling(figures: dict[str, Any]) -> Any:
  """Figure 1: throughput of the baseline against ideal, in the paper and in calibrated worlds.

  Args:
    figures: `docs/measurements/table1.json`.

  Returns:
    A matplotlib figure.
  """
  from matplotlib.figure import Figure
  figure = Figure(figsize=(6.8, 4.4), layout="constrained")
  axes = figure.subplots()
  sizes, nodes = figures["sizes"], np.array(worlds.NODES)
  everywhere = np.array(sorted(map(int, sizes)))
  rate = rates(sizes)
  ideal = worlds.THROUGHPUT["baseline"][0] / 4 * everywhere
  axes.plot(everywhere, ideal, "--", color=GREY, label="ideal: linear from 4")
  band(axes, nodes, rate, BLUE, "calibrated worlds")
  beyond = everywhere[everywhere > nodes[-1]]
  if len(beyond):
    far = np.stack([rate[figures["few"], -1], *(
        rate[figures["few"], 0] * n / 4 * np.array(sizes["4"]["all"]["bare_mean"])[figures["few"]]
        / np.array(sizes[str(n)]["all"]["bare_mean"]) for n in beyond)], axis=1)
    at = np.concatenate([nodes[-1:], beyond])
    axes.fill_between(at, far.min(axis=0), far.max(axis=0), color=BLUE, alpha=0.2, lw=0)
    axes.plot(at, np.median(far, axis=0), ":", color=BLUE,
              label="the same laws beyond: some worlds, median, all")
  axes.plot(nodes, worlds.THROUGHPUT["baseline"], "o", color=INK, mfc="white", ms=6,
            label="paper, baseline", zorder=5)
  by_nodes(axes, everywhere)
  axes.set_yscale("log", base=2)
  axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
  axes.set_ylabel("throughput, samples a second")
  axes.legend(frameon=False, fontsize=8)
  axes.set_title("Scaling of the baseline against ideal")
  return figure


def rates(sizes: dict[str, Any]) -> np.ndarray:
  """Samples a second of the baseline, [W, N]. Samples a step are free: each world's give 4 nodes
  the paper's rate."""
  mean = np.stack([np.array(sizes[str(n)]["all"]["bare_mean"]) for n in worlds.NODES], axis=1)
  rate = np.array(worlds.NODES) / mean
  return rate * (worlds.THROUGHPUT["baseline"][0] / rate[:, :1])


def band(axes: Any, nodes: np.ndarray, values: np.ndarray, colour: str, label: str,
          dash: str = "-") -> None:
  """Lowest to highest faintly, the middle half darker, the median a line. values: [W, N]."""
  axes.fill_between(nodes, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, lw=0)
  low, high = np.percentile(values, [25, 75], axis=0)
  axes.fill_between(nodes, low, high, color=colour, alpha=0.3, lw=0)
  axes.plot(nodes, np.median(values, axis=0), dash, color=colour,
            label=f"{label}: median, middle half, all")


def by_nodes(axes: Any, nodes: np.ndarray) -> None:
  """Makes the axis of nodes."""
  axes.set_xscale("log", base=2)
  axes.set_xticks(nodes, [f"{n:,}" for n in nodes])
  axes.minorticks_off()
  axes.set_xlabel("nodes")
  axes.grid(True, alpha=0.3)


def timeline(spans: Sequence[tuple[int, str, float, float]],
             marks: Sequence[tuple[float, float, str]], ranks: int
             ) -> Any:
  """Figure 2: one step on every rank, with its bottlenecks marked.

  Args:
    spans: (rank, phase of `PHASES`, from, to), ms.
    marks: (ms, rank, text).
    ranks: rows.
  """
  from matplotlib.figure import Figure
  from matplotlib.patches import Patch
  figure = Figure(figsize=(8.0, 0.55 * ranks + 1.8), layout="constrained")
  axes = figure.subplots()
  for rank, phase, begin, end in spans:
    colour, hatch = PHASES[phase]
    axes.barh(rank, end - begin, left=begin, height=0.7, color=colour, hatch=hatch, edgecolor=INK,
              linewidth=0.5)
  for at, rank, text in marks:
    axes.annotate(text, (at, rank - 0.3), (at, rank - 0.62), ha="center", va="center", fontsize=8,
                  color=INK, bbox={"facecolor": "white", "edgecolor": INK, "lw": 0.4, "pad": 1.5},
                  arrowprops={"arrowstyle": "-", "color": INK, "lw": 0.6})
  axes.set_yticks(range(ranks), [f"rank {r}" for r in range(ranks)])
  axes.set_ylim(ranks - 0.4, -1.2)
  axes.set_xlim(0, 1.03 * max(end for _, _, _, end in spans))
  axes.set_xlabel("ms since the last exit")
  used = [phase for phase in PHASES if any(phase == s[1] for s in spans)]
  axes.legend(handles=[Patch(facecolor=PHASES[p][0], hatch=PHASES[p][1], edgecolor=INK, label=p)
                       for p in used],
              ncols=len(used), frameon=False, fontsize=8, loc="upper center",
              bbox_to_anchor=(0.5, -0.12))
  axes.set_title("Where one step goes, on every rank")
  return figure


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
  """Writes a figure as SVG, the same bytes for the same figure."""
  import matplotlib
  path.parent.mkdir(parents=True, exist_ok=True)
  file = path.with_suffix(".svg")
  with matplotlib.rc_context({"svg.hashsalt": "jaxpace", "svg.fonttype": "none"}):
    figure.savefig(file, metadata={"Date": None, "Creator": None})
  return file
