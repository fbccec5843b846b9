"""What `experiments.paper.scenarios` found, in tables."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from experiments.lib import measured
from experiments.paper import tables
from experiments.paper import world as worlds


def page(figures: dict[str, Any]) -> list[str]:
  """Markdown lines.

  Args:
    figures: as `experiments.paper.scenarios` writes them.
  """
  lines = measured.introduction("Table 1 of the paper in other scenes", figures)
  ear = figures["ear"]
  lines += textwrap.wrap(
      f"Simulated, {figures['steps']} steps, the first {worlds.WARMUP} not counted. What the ranks "
      f"compute follows {figures['worlds']} of the recorded worlds (every "
      f"{_nth(figures['apart'])}); what is sent, and lost where several send, is fitted to the "
      f"paper's baseline columns again ({figures['rounds']} rounds of {figures['candidates']} "
      "candidates for each world), and what is within "
      f"{figures['within']:g} tolerances on other draws is kept (1 tolerance: throughput within 2 "
      "%, CV within the larger of 0.004 and 10 %). Listening takes 0.5 % of what this job sends in "
      f"a step, {ear['busy']:g} times that on a link in use; {100 * ear['wrong']:g} % of the "
      "readings are wrong. Constants of the pacer were not chosen here. Lowest .. middle .. "
      "highest.", 116)
  lines += [""]
  for name in figures["scenes"]:
    lines += [f"## {figures['scenes'][name]['about']}", "", *scene(figures, name)]
  if figures.get("long"):
    lines += ["## All arms", "", *arms(figures)]
  return [*lines, "## A fabric of two tiers", "", *fabrics(figures)]


def _nth(apart: int) -> str:
  return {1: "one", 2: "second", 4: "fourth", 8: "eighth"}.get(apart, f"{apart}th")


def scene(figures: dict[str, Any], name: str) -> list[str]:
  """One kind of scene, by size."""
  of = figures["scenes"][name]
  if not of["kept"]:
    return [f"None of {of['tried']} fits: least misfit {min(of['misfit']):.2f} tolerances.", ""]
  rows = []
  for k, nodes in enumerate(worlds.NODES):
    arms = of["sizes"][str(nodes)]
    both, one, bound = arms["both"], arms["one"], arms["first_come"]
    rows.append([
        nodes, f"{100 * tables.PAPER[nodes]:+.1f} %", tables.percent(np.array(both["gain"])),
        tables.percent(np.array(bound["gain"])), tables.percent(np.array(one["gain"])),
        tables.percent(np.array(arms["alone"]["gain"]), 2), worlds.CV["coordination"][k],
        tables.plain(np.array(both["cv"])), tables.plain(np.array(both["bare_cv"])),
        tables.percent(np.array(both["neighbour_gain"])), exposed(both)])
  return [f"{of['kept']} of {of['tried']} kept.", "", *measured.table(
      ["nodes", "paper's gain", "gain, all take turns", "first come, first served",
       "gain, this job alone", "null: nobody else", "paper's CV", "CV, all", "CV without",
       "gain of the neighbour that gains least", "exposed, of the step: without, all take turns"],
      rows)]


def scenes(figures: dict[str, Any]) -> list[str]:
  """All kinds of scenes at the largest size, a row each."""
  rows = []
  for of in figures["scenes"].values():
    if not of["kept"]:
      rows.append([of["about"], f"0 of {of['tried']}", *[None] * 8])
      continue
    for nodes in worlds.NODES[-2:]:
      arms = of["sizes"][str(nodes)]
      both = arms["both"]
      rows.append([
          of["about"], f"{of['kept']} of {of['tried']}", nodes,
          tables.percent(np.array(both["gain"])),
          tables.percent(np.array(arms["first_come"]["gain"])),
          tables.percent(np.array(arms["one"]["gain"])),
          tables.percent(np.array(arms["alone"]["gain"]), 2),
          f"{np.median(both['bare_cv']):.3f} → {np.median(both['cv']):.3f}",
          tables.percent(np.array(both["neighbour_gain"])), exposed(both)])
  return measured.table(
      ["scene", "fit", "nodes", "gain, all take turns", "first come, first served",
       "gain, this job alone", "null: nobody else", "CV: without, all",
       "gain of the neighbour that gains least", "exposed, of the step: without, all"], rows)


_ARMS = {
    "both": "by bucket, all", "one": "by bucket, this job alone",
    "alone": "by bucket, null: nobody else", "message": "by message, all",
    "message_one": "by message, this job alone", "message_alone": "by message, null: nobody else",
    "first_come": "first come, first served, by bucket",
    "both_guarded": "by bucket, all, under guards",
    "one_guarded": "by bucket, this job alone, under the guard",
    "message_guarded": "by message, all, under guards",
    "message_one_guarded": "by message, this job alone, under the guard"}


def arms(figures: dict[str, Any]) -> list[str]:
  """Every arm of every kind of scene that was kept, at the largest sizes."""
  rows = []
  for of in figures["scenes"].values():
    for name, about in _ARMS.items() if of["kept"] else ():
      row: list[Any] = [of["about"], f"{of['kept']} of {of['tried']}", about]
      for nodes in worlds.NODES[-2:]:
        values = of["sizes"][str(nodes)][name]
        row += [tables.percent(np.array(values["gain"])),
                f"{np.median(values['bare_cv']):.3f} → {np.median(values['cv']):.3f}",
                tables.percent(np.array(values["neighbour_gain"])) if "neighbour_gain" in values
                else None]
      rows.append(row)
  said = (f"{figures['steps']} steps, under the guard {figures['long']:,} "
          f"(`jaxpace.guard(take_turns(...), block={figures['block']}, trust=True)`); fitted on "
          f"{figures['drawn']} steps, kept by as many others.")
  each = [f"{what}, {nodes} nodes" for nodes in worlds.NODES[-2:]
          for what in ("gain", "CV: without, with", "gain of the neighbour that gains least")]
  return [*textwrap.wrap(said, 116), "", *measured.table(["scene", "fit", "turns", *each], rows)]


def exposed(of: dict[str, Any]) -> str:
  """Middle shares of the step in which the job computes no more and waits for its collectives."""
  return (f"{100 * np.median(of['bare_exposed']):.0f} → "
          f"{100 * np.median(of['exposed']):.0f} %")


def fabrics(figures: dict[str, Any]) -> list[str]:
  """The sweep, at the largest size and at half of it."""
  if not figures["fabrics"]:
    return ["Not run.", ""]
  rows = []
  for about, sizes in figures["fabrics"].items():
    first = np.array(sizes["4"]["both"]["bare_mean"])
    for nodes in worlds.NODES[-2:]:
      of = sizes[str(nodes)]
      scaling = first / np.array(of["both"]["bare_mean"])
      rows.append([about, nodes, f"{100 * np.median(scaling):.0f} %",
                   tables.plain(np.array(of["both"]["bare_cv"])),
                   tables.percent(np.array(of["both"]["gain"])),
                   tables.percent(np.array(of["first_come"]["gain"])),
                   tables.percent(np.array(of["one"]["gain"])),
                   tables.plain(np.array(of["both"]["cv"])), exposed(of["both"])])
  said = ("Eight racks of 16 nodes; a ring over this job's nodes and one over a neighbour's of as "
          "many, played message by message on `jaxpace.simulation.fabric`. *Packed*: each job's "
          "nodes lie side by side. *Spread*: each job has as many nodes in every rack. 2:1: a "
          "rack's cards can send twice what its uplinks carry. What 64 spread nodes send at 4:1 is "
          "the recorded world's, of every second of these worlds; nothing is fitted, nothing is "
          "lost in collisions. The paper's own scaling from 4 to 64 nodes is 50 %, to 32 nodes "
          "71 %.")
  return [*textwrap.wrap(said, 116), "", *measured.table(
      ["fabric", "nodes", "scaling from 4 nodes, without", "CV without", "gain, both take turns",
       "first come, first served", "gain, this job alone", "CV, both",
       "exposed, of the step: without, both"], rows)]
