"""Table 1 as a page: the paper's columns, the band over calibrated worlds, the null."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.lib import measured
from experiments.paper import calibrate, predict
from experiments.paper import world as worlds

PAPER = {nodes: worlds.THROUGHPUT["coordination"][k] / worlds.THROUGHPUT["baseline"][k] - 1
         for k, nodes in enumerate(worlds.NODES)}
"""The paper's gain in throughput."""
COORDINATED = ("all", "both")


def page(figures: dict[str, Any]) -> list[str]:
  """Markdown lines.

  Args:
    figures: as `experiments.paper.table1` writes them.
  """
  sizes, starts = figures["sizes"], figures["starts"]
  again = _again(sizes)
  chance, seconds = figures["pauses"]
  lines = measured.introduction("Table 1 of the paper, in calibrated worlds", figures)
  lines += textwrap.wrap(
      "Simulated. Worlds are fitted to the paper's *baseline* columns alone, by Monte Carlo; "
      f"pauses are as measured: {chance:.5f} of one in a step on each rank, {1e3 * seconds:.0f} "
      "ms. Of each search those that fit on other draws too are kept, and of these at most so many "
      f"that lie far apart: {figures['worlds']} worlds in all. On draws that are other again "
      f"({figures['steps']} steps, {figures['seeds']} runs) {int((again.misfit <= 1).sum())} of "
      "them are within tolerance; the middle one's largest deviation is "
      f"{np.median(again.misfit):.2f} tolerances. Bands are lowest .. middle .. highest over "
      "the worlds.", 116)
  lines += ["", "## The searches", "", *searches(figures), "## The baseline, fitted", "",
            *baseline(figures)]
  lines += ["## Coordination, predicted", "", *coordination(figures), *sentence(figures), "",
            *parts(figures)]
  lines += ["Gain of all parts together by search, lowest .. middle .. highest:", ""]
  kinds = list(dict.fromkeys(starts))
  chosen = {kind: np.array([s == kind for s in starts]) for kind in kinds}
  lines += measured.table(["nodes", *kinds], [
      [nodes, *(percent(np.array(sizes[str(nodes)]["all"]["gain"])[chosen[kind]])
                for kind in kinds)]
      for nodes in worlds.NODES])
  return [*lines, "## Beyond the paper's sizes", "", *beyond(figures)]


def searches(figures: dict[str, Any]) -> list[str]:
  """The table of the searches."""
  return measured.table(
      ["search", "worlds tried", "within tolerance", "least misfit, tolerances",
       "of those run again", "within again", "kept"],
      [[s["start"], s["tried"], s["within"], s["least_misfit"], s["checked"], s["within_again"],
        s["kept"]]
       for s in figures["searches"]])


def parts(figures: dict[str, Any]) -> list[str]:
  """The table of the arms."""
  sizes = figures["sizes"]
  return ["What each part does, throughput, lowest .. middle .. highest of the worlds:", "",
          *measured.table(
              ["nodes", *(predict.ARMS[name].about for name in predict.ARMS)], [
                  [nodes, *(percent(np.array(sizes[str(nodes)][name]["gain"]))
                            for name in predict.ARMS)]
                  for nodes in worlds.NODES])]


def baseline(figures: dict[str, Any]) -> list[str]:
  """The table of the fit."""
  again, sizes = _again(figures["sizes"]), figures["sizes"]
  return measured.table(["nodes", "throughput, off the paper's by", "CV", "the paper's CV"], [
      [nodes, percent(again.throughput[:, k] - 1),
       plain(np.array(sizes[str(nodes)]["all"]["bare_cv"])), worlds.CV["baseline"][k]]
      for k, nodes in enumerate(worlds.NODES)])


def coordination(figures: dict[str, Any]) -> list[str]:
  """The paper's columns, the band, the best world, the null."""
  sizes = figures["sizes"]
  arm, world, _ = best(sizes)
  rows = []
  for k, nodes in enumerate(worlds.NODES):
    of = sizes[str(nodes)]
    gain, varies = (np.concatenate([of[name][field] for name in COORDINATED])
                    for field in ("gain", "cv"))
    said, cv = PAPER[nodes], worlds.CV["coordination"][k]
    rows.append([nodes, f"{100 * said:+.1f} %", percent(ceiling(of)), percent(gain),
                 bool(gain.min() <= said <= gain.max()), cv, plain(varies),
                 bool(varies.min() <= cv <= varies.max()),
                 f"{100 * of[arm]['gain'][world]:+.1f} %, {of[arm]['cv'][world]:.3f}",
                 percent(np.array(of["null"]["gain"]), 2)])
  return measured.table(
      ["nodes", "paper's gain", "were the couplings gone", "predicted gain", "inside", "paper's CV",
       "predicted CV", "inside", "best world: gain, CV", "null: couplings off"], rows)


def ceiling(of: dict[str, Any]) -> np.ndarray:
  """[W] gain of one size if no coupling took anything: what coordination could take back at most,
  pauses aside."""
  return np.array(of["all"]["bare_mean"]) / np.array(of["null"]["bare_mean"]) - 1


def best(sizes: dict[str, Any]) -> tuple[str, int, float]:
  """The one world, and who is coordinated in it, that comes nearest to the paper's gain or exceeds
  it at every size.

  Returns:
    Arm, number of the world, and by how much its gain is above the paper's where it is least so.
  """
  margins = {arm: np.min([np.array(sizes[str(n)][arm]["gain"]) - PAPER[n] for n in worlds.NODES],
                         axis=0)
             for arm in COORDINATED}
  arm = max(margins, key=lambda name: float(margins[name].max()))
  world = int(margins[arm].argmax())
  return arm, world, float(margins[arm][world])


def sentence(figures: dict[str, Any]) -> list[str]:
  """What it comes to, in words."""
  sizes = figures["sizes"]
  arm, world, margin = best(sizes)
  last = worlds.NODES[-1]
  gain = np.array(sizes[str(last)]["all"]["gain"])
  cells = [(n, k) for k, n in enumerate(worlds.NODES)]
  short = [n for n, _ in cells if sizes[str(n)][arm]["gain"][world] < PAPER[n]]
  varied = [n for n, k in cells if sizes[str(n)][arm]["cv"][world] > worlds.CV["coordination"][k]
            + 0.005]
  reach = np.mean(np.min([np.array(sizes[str(n)]["all"]["gain"]) - PAPER[n]
                          for n in worlds.NODES], axis=0) >= 0)
  who = "both jobs" if arm == "both" else "this job"
  room = np.mean(np.min([ceiling(sizes[str(n)]) - PAPER[n] for n in worlds.NODES], axis=0) >= 0)
  text = (f"Were the couplings gone, {100 * room:.0f} % of the worlds would gain what the paper "
          f"says, or more, at every size. What the pacers get of it: at {last} nodes "
          f"{100 * np.mean(gain > 0):.0f} % of the worlds gain anything, the middle one "
          f"{100 * np.median(gain):+.1f} %; {100 * reach:.0f} % of them gain at least what the "
          f"paper says at every size. The best one (search “{figures['starts'][world]}”, {who} "
          "coordinated) ")
  text += (
      f"falls short of the paper's gain at {_list(short)} nodes, by up to "
      f"{-100 * margin:.1f} points. " if short
      else "gains at least what the paper says at every size. ")
  text += (f"Its CV is above the paper's at {_list(varied)} nodes." if varied
           else "Its CV is no higher than the paper's, to the digits given.")
  return textwrap.wrap(text, 116)


def _list(numbers: Sequence[int]) -> str:
  return ", ".join(map(str, numbers))


def _again(sizes: dict[str, Any]) -> calibrate.Fits:
  mean, cv = (np.stack([np.array(sizes[str(n)]["all"][name]) for n in worlds.NODES], axis=1)
              for name in ("bare_mean", "bare_cv"))
  return calibrate.fits(mean, cv)


def beyond(figures: dict[str, Any]) -> list[str]:
  """The table of sizes the paper does not have."""
  sizes = figures["sizes"]
  rows = []
  for nodes in [n for n in map(int, sizes) if n > max(worlds.NODES)]:
    everything, null = (sizes[str(nodes)][name] for name in ("all", "null"))
    of = {name: np.array(values) for name, values in everything.items()}
    rows.append([f"{nodes:,}", plain(of["bare_mean"], 2), plain(of["bare_cv"]), percent(of["gain"]),
                 plain(of["cv"]), percent(np.array(null["gain"]), 2)])
  if not rows:
    return ["Not run."]
  return [
      f"By the same laws, in {len(figures['few'])} of the worlds, shorter runs: an extrapolation.",
      "", *measured.table(["nodes", "step, in units of compute", "CV", "gain", "CV with it",
                           "null"], rows)]


def percent(values: np.ndarray, digits: int = 1) -> str:
  """Lowest, middle, highest, in percent."""
  # Rounded first and 0 added, so that there is no -0.0.
  return " .. ".join(f"{round(100 * v, digits) + 0.0:+.{digits}f}" for v in _three(values)) + " %"


def plain(values: np.ndarray, digits: int = 3) -> str:
  """Lowest, middle, highest."""
  return " .. ".join(f"{v:.{digits}f}" for v in _three(values))


def _three(values: np.ndarray) -> tuple[float, float, float]:
  return float(np.min(values)), float(np.median(values)), float(np.max(values))
