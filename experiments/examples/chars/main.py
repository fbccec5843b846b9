"""Trains the character transformer: `python -m experiments.examples.chars.main --workdir=runs/chars
[--text=FILE]`.

In several processes: `jaxpace run --nproc 2 -- python -m experiments.examples.chars.main
--workdir=runs/chars`.
"""

from __future__ import annotations

import pathlib

from absl import app, flags
from ml_collections import config_flags

from experiments.examples import start
from experiments.examples.chars import data

_CONFIG = config_flags.DEFINE_config_file("config", "configs/chars.py", "Hyperparameters.",
                                          lock_config=True)
_WORKDIR, _SCRIPT = start.define_flags()
_TEXT = flags.DEFINE_string("text", str(data.DEFAULT_TEXT), "Any text file.")


def main(_: list[str]) -> None:
  """Trains with the flags' settings."""
  script = _SCRIPT(pathlib.Path(__file__).parent)
  start.run(lambda: script.train_and_evaluate(_CONFIG.value, _WORKDIR.value, _TEXT.value))


if __name__ == "__main__":
  app.run(main)
