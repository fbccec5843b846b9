"""The pictures of docs/how_it_works.md, from numbers. Dashes, hatches and words say what colours
say."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

INK, BLUE, ORANGE, GREY = "#222222", "#1f6fb4", "#d95f02", "#8a8a8a"
PAPER = "#fcfcfa"  # not transparent: a dark page shows the figure as a light card
BARS = {"gap": (GREY, "xx", "gap"), "compute": (BLUE, "", "compute"),
        "waiting": ("#ffffff", "///", "waiting"), "transfer": (ORANGE, "", "transfer")}


def one_step(data: dict[str, Any]) -> Any:
  """One step on every rank, and below what the mean of the ranks spends."""
  from matplotlib.patches import Patch
  figure, axes = _figure(8.0, 3.6)
  ranks, last = len(data["gap"]), data["last"]
  rows = [*range(ranks), ranks + 0.6]
  for row, at in enumerate(rows):
    begin = 0.0
    for name, (colour, hatch, _) in BARS.items():
      length = data[name][row] if row < ranks else data["mean"][name]
      if not length:
        continue
      axes.barh(at, length, left=begin, height=0.72, color=colour, hatch=hatch, edgecolor=INK,
                linewidth=0.6)
      if name == "waiting" and row < ranks:
        _label(axes, begin + length / 2, at, f"{length:.1f} ms")
      elif row == ranks:
        _label(axes, begin + length / 2, at, f"{100 * length / data['step_ms']:.0f} %")
      begin += length
  arrived = max(data["gap"][r] + data["compute"][r] for r in range(ranks))
  axes.axvline(arrived, ymin=0.24, color=INK, linewidth=1, linestyle="--")
  axes.text(arrived, -0.62, f"rank {last} arrives", ha="center", va="bottom", fontsize=9, color=INK)
  axes.set_yticks(rows, [*(f"rank {r}" for r in range(ranks)), "mean rank"])
  axes.set_ylim(rows[-1] + 0.55, -1.15)
  axes.set_xlim(0, data["step_ms"])
  axes.set_xlabel("ms since all left the last collective")
  figure.legend(handles=[Patch(facecolor=colour, hatch=hatch, edgecolor=INK, label=label)
                         for colour, hatch, label in BARS.values()],
                ncols=len(BARS), frameon=False, fontsize=9, loc="outside lower center")
  return figure


def late(data: dict[str, Any]) -> Any:
  """Lateness of every rank in every step, for one that is late for good and for late ones by
  turns."""
  from matplotlib.figure import Figure
  figure = Figure(figsize=(8.0, 3.6), layout="constrained", facecolor=PAPER)
  panels = figure.subplots(1, len(data), sharey=True)
  limit = max(np.abs(np.array(case["lateness_ms"])).max() for case in data.values())
  shown = None
  for axes, (name, case) in zip(panels, data.items(), strict=True):
    values = np.array(case["lateness_ms"])
    shown = axes.imshow(np.maximum(values, 0), aspect="auto", cmap="Blues", vmin=0,
                        vmax=0.7 * limit, interpolation="nearest",
                        extent=(0, values.shape[1], len(values) - 0.5, -0.5))
    last = values.argmax(axis=0)
    axes.plot(np.arange(len(last)) + 0.5, last, ".", color=ORANGE, markersize=3)
    [finding, *_] = case["findings"]
    who = f"rank {finding['ranks'][0]}" if finding["ranks"] else "nobody"
    axes.set_title(f"{name.capitalize()} is late.\nReport: {finding['mode'].replace('_', ' ')},\n"
                   f"{100 * finding['share']:.0f} % of the step, blames {who}", fontsize=9,
                   color=INK)
    axes.set_xlabel("step")
  panels[0].set_ylabel("rank")
  bar = figure.colorbar(shown, ax=panels, pad=0.01, extend="max")
  bar.set_label("late by, ms (dot: the last)")
  return figure


def growth(data: dict[str, Any]) -> Any:
  """The mean step by number of ranks: points simulated, lines in closed form."""
  figure, axes = _figure(8.0, 3.8)
  ranks = np.array(data["ranks"])
  styles = {"normal, 5 %": (BLUE, "-", "o"), "exponential, 5 %": (ORANGE, "--", "s"),
            "a pause of 30 ms in one step of 200": (INK, ":", "^")}
  for name, (colour, dash, mark) in styles.items():
    axes.plot(ranks, data[name]["closed"], dash, color=colour, linewidth=1.4)
    axes.plot(ranks, data[name]["simulated"], mark, color=colour, markersize=5, mfc=PAPER)
    axes.annotate(name, (ranks[-1], data[name]["closed"][-1]), (-6, 7 if mark != "o" else -13),
                  textcoords="offset points", ha="right", fontsize=9, color=colour)
  axes.set_xscale("log", base=2)
  axes.set_yscale("log", base=2)
  axes.set_xticks(ranks, [f"{n:,}" for n in ranks])
  ticks = [1, 1.25, 1.5, 2, 2.5, 3]
  axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
  axes.minorticks_off()
  axes.set_ylim(0.98, 3.6)
  axes.set_xlabel("ranks")
  axes.set_ylabel("step, over one that nothing disturbs")
  axes.grid(True, alpha=0.3)
  return figure


def paced(data: dict[str, Any]) -> Any:
  """Change of the step by pacing in each situation: a bar for the mean of the seeds, a dot for
  each."""
  figure, axes = _figure(8.0, 3.6)
  for row, changes in enumerate(data.values()):
    mean = 100 * float(np.mean(changes))
    axes.barh(row, mean, height=0.55, color=BLUE if mean < -1 else GREY, edgecolor=INK,
              linewidth=0.6)
    axes.plot([100 * change for change in changes], [row] * len(changes), ".", color=INK,
              markersize=5)
    axes.annotate(f"{mean:+.2f} %", (max(0.0, 100 * max(changes)), row), (8, 0),
                  textcoords="offset points", va="center", fontsize=9, color=INK)
  axes.axvline(0, color=INK, linewidth=1)
  axes.set_yticks(range(len(data)), list(data))
  axes.invert_yaxis()
  low = min(100 * min(changes) for changes in data.values())
  axes.set_xlim(1.08 * low, 0.2 * -low)
  axes.set_xlabel("change of the mean step with pacing, %  (left: quicker)")
  axes.grid(True, axis="x", alpha=0.3)
  return figure


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
  """Writes a figure as SVG, the same bytes for the same figure; text stays text."""
  import matplotlib
  path.parent.mkdir(parents=True, exist_ok=True)
  with matplotlib.rc_context({"svg.hashsalt": "jaxpace", "svg.fonttype": "none"}):
    figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor=PAPER)
  return path


def _figure(width: float, height: float) -> tuple[Any, Any]:
  from matplotlib.figure import Figure
  figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
  axes = figure.subplots()
  axes.set_facecolor(PAPER)
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)
  return figure, axes


def _label(axes: Any, x: float, y: float, text: str) -> None:
  axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2})
