"""Draws the package's architecture from what it really imports: docs/figures/architecture.svg, with
the data beside it.

    python -m experiments.docs.architecture

The layers and their order are those of `[tool.importlinter]` in pyproject.toml, the imports are
read from the source (grimp, as import-linter does). A test holds the committed data against both.
"""

from __future__ import annotations

import json
import pathlib
import tomllib
from typing import Any

import grimp
from absl import app, flags

from experiments.docs.concept_drawing import BLUE, GREY, INK, PAPER, save

ROOT = pathlib.Path(__file__).parents[2]
OUT = pathlib.Path("docs/figures")
PACKAGE = "jaxpace"


def layers() -> list[list[str]]:
  """The layers as pyproject.toml declares them, from the top down; those in one list may import
  each other."""
  settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
  [contract] = [each for each in settings["tool"]["importlinter"]["contracts"]
                if each["type"] == "layers"]
  return [[name.strip(" ()") for name in layer.split(":")] for layer in contract["layers"]]


def imports() -> dict[str, list[str]]:
  """Which layers each layer imports, from the source; what the package's own __init__ names lazily
  is no import."""
  graph = grimp.build_graph(PACKAGE, cache_dir=None)
  found: dict[str, set[str]] = {}
  for module in graph.modules - {PACKAGE}:
    own = module.split(".")[1]
    used = {other.split(".")[1] for other in graph.find_modules_directly_imported_by(module)
            if other != PACKAGE}
    found[own] = found.get(own, set()) | (used - {own})
  return {name: sorted(used) for name, used in sorted(found.items())}


def data() -> dict[str, Any]:
  """What is drawn."""
  return {"layers": layers(), "imports": imports()}


def draw(drawn: dict[str, Any]) -> Any:
  """A box a layer, the top one first, and a dot where the layer of the row imports that of the
  column."""
  from matplotlib.figure import Figure
  rows = [name for layer in drawn["layers"] for name in layer if name in drawn["imports"]]
  column = {name: at for at, name in enumerate(rows)}
  figure = Figure(figsize=(8.0, 7.0), layout="constrained", facecolor=PAPER)
  axes = figure.subplots()
  axes.set_facecolor(PAPER)
  begin = 0
  for layer in drawn["layers"]:
    count = sum(name in column for name in layer)
    if count:
      axes.axhspan(begin - 0.5, begin + count - 0.5, color=INK,
                   alpha=0.05 if column[layer[0]] % 2 else 0.1, lw=0)
      axes.add_patch(_box(begin, count))
      begin += count
  for name in rows:
    for used in drawn["imports"][name]:
      axes.plot(column[used], column[name], "o", color=BLUE, markersize=7)
  axes.plot([-0.5, len(rows) - 0.5], [-0.5, len(rows) - 0.5], "--", color=GREY, linewidth=1)
  axes.text(0.02, 0.02, "nothing here: no layer imports from above itself",
            transform=axes.transAxes, fontsize=9, color=INK)
  axes.set_xlim(-0.5, len(rows) - 0.5)
  axes.set_ylim(len(rows) - 0.5, -0.5)
  axes.set_yticks(range(len(rows)), rows, fontsize=10)
  axes.set_xticks(range(len(rows)), rows, rotation=90, fontsize=9)
  axes.xaxis.tick_top()
  axes.tick_params(length=0)
  axes.set_title("row imports column", fontsize=9, color=INK, loc="right")
  for spine in axes.spines.values():
    spine.set_visible(False)
  return figure


def _box(begin: int, count: int) -> Any:
  """The frame of layers that may import each other."""
  from matplotlib.patches import Rectangle
  return Rectangle((begin - 0.5, begin - 0.5), count, count, fill=False, edgecolor=INK, linewidth=1)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  out = pathlib.Path(flags.FLAGS.out)
  drawn = data()
  print(f"Written: {save(draw(drawn), out / 'architecture.svg')}")
  (out / "architecture.json").write_text(json.dumps(drawn, indent=1) + "\n")


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_string("out", str(OUT), "Where the figure goes.")


if __name__ == "__main__":
  define_flags()
  app.run(main)
