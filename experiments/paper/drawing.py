"""The paper's figures 1, 2 and 5, drawn from the figures on record; dashes and shapes say what colours say."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.paper import world as worlds

INK, BLUE, ORANGE, GREEN, GREY = "#222222", "#1f6fb4", "#d95f02", "#1b9e77", "#999999"
PHASES = {"forward": (BLUE, ""), "backward": (GREEN, ""), "waiting": ("#ffffff", "///"), "transfer": (ORANGE, ""),
          "pause": (INK, "xx"), "delay": (GREY, "...")}


def scaling(sizes: dict[str, Any], said: bool) -> Any:
  """Figure 1: throughput against ideal; with `said` figure 5: with coordination beside it.

  Args:
    sizes: of `docs/measurements/table1.json`.
    said: whether coordination is drawn.

  Returns:
    A matplotlib figure.
  """
  from matplotlib.figure import Figure
  figure = Figure(figsize=(6.4, 4.2), layout="constrained")
  axes = figure.subplots()
  nodes = np.array(worlds.NODES)
  mean = np.stack([np.array(sizes[str(n)]["all"]["bare_mean"]) for n in nodes], axis=1)
  rate = nodes / mean
  # Samples a step are free: each world's, so that 4 nodes give the paper's throughput.
  rate = rate * (worlds.THROUGHPUT["baseline"][0] / rate[:, :1])
  axes.plot(nodes, worlds.THROUGHPUT["baseline"][0] / 4 * nodes, "--", color=GREY, label="ideal, linear")
  axes.fill_between(nodes, rate.min(axis=0), rate.max(axis=0), color=BLUE, alpha=0.25,
                    label="baseline, all calibrated worlds")
  axes.plot(nodes, np.median(rate, axis=0), "-", color=BLUE, label="baseline, middle world")
  axes.plot(nodes, worlds.THROUGHPUT["baseline"], "o", color=INK, mfc="none", label="paper, baseline")
  if said:
    gain = np.stack([np.array(sizes[str(n)]["all"]["gain"]) for n in nodes], axis=1)
    paced = rate * (1 + gain)
    axes.fill_between(nodes, paced.min(axis=0), paced.max(axis=0), color=ORANGE, alpha=0.25,
                      label="coordination, all calibrated worlds")
    axes.plot(nodes, np.median(paced, axis=0), "-.", color=ORANGE, label="coordination, middle world")
    axes.plot(nodes, worlds.THROUGHPUT["coordination"], "s", color=INK, mfc="none", label="paper, coordination")
  axes.set_xscale("log", base=2)
  axes.set_yscale("log", base=2)
  axes.set_xticks(nodes, [str(n) for n in nodes])
  ticks = [1024, 2048, 4096, 8192, 16384]
  axes.set_yticks(ticks, [f"{t:,}" for t in ticks])
  axes.set_xlabel("nodes")
  axes.set_ylabel("samples a second")
  axes.grid(True, alpha=0.3)
  axes.legend(frameon=False, fontsize=8)
  axes.set_title("Throughput with and without coordination" if said else "Scaling against ideal")
  return figure


def timeline(spans: Sequence[tuple[int, str, float, float]], marks: Sequence[tuple[float, float, str]], ranks: int
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
    axes.barh(rank, end - begin, left=begin, height=0.7, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.5)
  for at, rank, text in marks:
    axes.annotate(text, (at, rank - 0.3), (at, rank - 0.62), ha="center", va="center", fontsize=8, color=INK,
                  bbox={"facecolor": "white", "edgecolor": INK, "lw": 0.4, "pad": 1.5},
                  arrowprops={"arrowstyle": "-", "color": INK, "lw": 0.6})
  axes.set_yticks(range(ranks), [f"rank {r}" for r in range(ranks)])
  axes.set_ylim(ranks - 0.4, -1.2)
  axes.set_xlim(0, 1.03 * max(end for _, _, _, end in spans))
  axes.set_xlabel("ms since the last exit")
  used = [phase for phase in PHASES if any(phase == s[1] for s in spans)]
  axes.legend(handles=[Patch(facecolor=PHASES[p][0], hatch=PHASES[p][1], edgecolor=INK, label=p) for p in used],
              ncols=len(used), frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12))
  axes.set_title("Where one step goes, on every rank")
  return figure


def save(figure: Any, path: pathlib.Path) -> list[pathlib.Path]:
  """Writes a figure as PNG and SVG, the same bytes for the same figure."""
  import matplotlib
  path.parent.mkdir(parents=True, exist_ok=True)
  written = []
  with matplotlib.rc_context({"svg.hashsalt": "jaxpace", "svg.fonttype": "none"}):
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
      file = path.with_suffix(f".{kind}")
      figure.savefig(file, dpi=150, metadata=metadata)
      written.append(file)
  return written
