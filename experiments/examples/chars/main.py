"""Trains the character transformer: `python -m experiments.examples.chars.main --workdir=runs/chars
[--text=FILE]`.

In several processes: `jaxpace run --nproc 2 -- python -m experiments.examples.chars.main
--workdir=runs/chars`.
"""

from __future__ import annotations

import functools

from absl import app, flags
from ml_collections import config_flags

from experiments.examples import start
from experiments.examples.chars import data, train, train_jaxpace, train_observed

_CONFIG = config_flags.DEFINE_config_file("config", "configs/chars.py", "Hyperparameters.",
                                          lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None,
                               "Directory for metrics and, with jaxpace, the recorded run.",
                               required=True)
_TEXT = flags.DEFINE_string("text", str(data.DEFAULT_TEXT), "Any text file.")
_OBSERVE = flags.DEFINE_bool("observe", False,
                             "Run train_observed.py, which observes the step as it is.")
_JAXPACE = flags.DEFINE_bool("jaxpace", True,
                             "Run train_jaxpace.py; --nojaxpace runs the plain train.py.")


def main(_: list[str]) -> None:
  """Trains with the flags' settings."""
  script = train_observed if _OBSERVE.value else train_jaxpace if _JAXPACE.value else train
  start.run(functools.partial(script.train_and_evaluate, _CONFIG.value, _WORKDIR.value,
                              _TEXT.value))


if __name__ == "__main__":
  app.run(main)
