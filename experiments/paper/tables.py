"""Table 1 as a page: the paper's columns, the band over calibrated worlds, the null."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments import measured
from experiments.paper import calibrate, predict
from experiments.paper import world as worlds


def page(figures: dict[str, Any]) -> list[str]:
  """Markdown lines.

  Args:
    figures: as `experiments.table1` writes them.
  """
  sizes, starts = figures["sizes"], figures["starts"]
  mean = np.stack([np.array(sizes[str(n)]["all"]["bare_mean"]) for n in worlds.NODES], axis=1)
  cv = np.stack([np.array(sizes[str(n)]["all"]["bare_cv"]) for n in worlds.NODES], axis=1)
  again = calibrate.fits(mean, cv)
  chance, seconds = figures["pauses"]
  lines = measured.introduction("Table 1 of the paper, in calibrated worlds", figures)
  lines += [
      f"{figures['worlds']} worlds that fit the paper's *baseline* columns, from four searches that leave couplings",
      f"out in turn. Pauses as measured: {chance:.4f} of one in a step on each rank, {1e3 * seconds:.0f} ms.",
      f"On other draws than those they were fitted on ({figures['steps']} steps, {figures['seeds']} runs)",
      f"{int((again.misfit <= 1).sum())} of them are within tolerance still; the middle one's largest deviation is",
      f"{np.median(again.misfit):.2f} tolerances. Bands are lowest .. middle .. highest over the worlds.", "",
      "## The baseline, fitted", ""]
  lines += measured.table(["nodes", "throughput, off the paper's by", "CV", "the paper's CV"], [
      [nodes, percent(again.throughput[:, k] - 1), plain(cv[:, k]), worlds.CV["baseline"][k]]
      for k, nodes in enumerate(worlds.NODES)])
  lines += ["## Coordination, predicted", ""]
  rows = []
  for k, nodes in enumerate(worlds.NODES):
    said = worlds.THROUGHPUT["coordination"][k] / worlds.THROUGHPUT["baseline"][k] - 1
    gain, varies = (np.array(sizes[str(nodes)]["all"][name]) for name in ("gain", "cv"))
    best = int(gain.argmax())
    rows.append([nodes, f"{100 * said:+.1f} %", percent(gain), bool(gain.min() <= said <= gain.max()),
                 worlds.CV["coordination"][k], plain(varies), f"{100 * gain[best]:+.1f} %, {varies[best]:.3f}",
                 percent(np.array(sizes[str(nodes)]["null"]["gain"]), 2)])
  lines += measured.table(["nodes", "paper's gain", "predicted gain", "paper's is inside", "paper's CV", "predicted CV",
                           "largest gain, its CV", "null: couplings off"], rows)
  lines += ["What each part does, throughput, middle of the worlds:", ""]
  lines += measured.table(["nodes", *(predict.ARMS[name].about for name in predict.ARMS)], [
      [nodes, *(middle(sizes[str(nodes)][name]["gain"]) for name in predict.ARMS)] for nodes in worlds.NODES])
  lines += ["Gain of all parts together by what the search left out, middle of the worlds:", ""]
  kinds = list(dict.fromkeys(starts))
  chosen = {kind: np.array([s == kind for s in starts]) for kind in kinds}
  lines += measured.table(["nodes", *kinds], [
      [nodes, *(middle(np.array(sizes[str(nodes)]["all"]["gain"])[chosen[kind]]) for kind in kinds)]
      for nodes in worlds.NODES])
  return lines + _beyond(sizes)


def _beyond(sizes: dict[str, Any]) -> list[str]:
  beyond = [n for n in map(int, sizes) if n > max(worlds.NODES)]
  if not beyond:
    return []
  rows = []
  for nodes in beyond:
    everything, null = (sizes[str(nodes)][name] for name in ("all", "null"))
    of = {name: np.array(values) for name, values in everything.items()}
    rows.append([nodes, plain(of["bare_mean"], 2), plain(of["bare_cv"]), percent(of["gain"]), plain(of["cv"]),
                 percent(np.array(null["gain"]), 2)])
  header = ["nodes", "step, in units of compute", "CV", "gain", "CV with it", "null"]
  return ["## Beyond the paper's sizes", "", "By the same laws: an extrapolation. Fewer worlds, shorter runs.", "",
          *measured.table(header, rows)]


def percent(values: np.ndarray, digits: int = 1) -> str:
  """Lowest, middle, highest, in percent."""
  return " .. ".join(f"{100 * v:+.{digits}f}" for v in _three(values)) + " %"


def plain(values: np.ndarray, digits: int = 3) -> str:
  """Lowest, middle, highest."""
  return " .. ".join(f"{v:.{digits}f}" for v in _three(values))


def middle(values: Any) -> str:
  """The median, in percent; a dash for none."""
  return f"{100 * float(np.median(values)):+.2f} %" if len(values) else "–"


def _three(values: np.ndarray) -> tuple[float, float, float]:
  return float(np.min(values)), float(np.median(values)), float(np.max(values))
