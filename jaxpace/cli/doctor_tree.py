"""The tree that `jaxpace doctor` prints: an outline of a host, drawn."""

from __future__ import annotations

from rich.text import Text
from rich.tree import Tree

from jaxpace.hosts.locality.outline import Outline


def host_tree(outline: Outline) -> Tree:
  """Draws an outline."""
  tree = Tree(Text(outline.text), guide_style="dim")
  _add(tree, outline)
  return tree


def _add(tree: Tree, outline: Outline) -> None:
  for line in outline.below:
    _add(tree.add(Text(line.text)), line)
