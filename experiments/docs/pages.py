"""Writes the pages of measurements anew from their figures, without measuring.

    python -m experiments.docs.pages

For pages whose words have changed since.
"""

from __future__ import annotations

import importlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

from absl import app

from experiments.lib import measured

FOLDER = pathlib.Path("docs/measurements")
PAGES = {
    "emulated": ("experiments.paper.emulated", "tables"),
    "null_live": ("experiments.measure.null_live", "lines"),
}
"""By file, the module and the function that makes its page of its figures."""


def text(name: str, figures: dict[str, Any]) -> str:
  """A page's text."""
  module, function = PAGES[name]
  make: Callable[[dict[str, Any]], list[str]] = getattr(importlib.import_module(module), function)
  return measured.portable("\n".join(make(figures)).rstrip("\n")) + "\n"


def main(_: list[str]) -> None:
  for name in PAGES:
    path = FOLDER / f"{name}.json"
    path.with_suffix(".md").write_text(text(name, json.loads(path.read_text())))
    print(f"Written anew: {path.with_suffix('.md')}")


if __name__ == "__main__":
  app.run(main)
