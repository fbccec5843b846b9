"""Trains the digits CNN: `python -m experiments.examples.digits.main --workdir=runs/digits`.

In several processes: `jaxpace run --nproc 4 -- python -m experiments.examples.digits.main
--workdir=runs/digits`.
"""

from __future__ import annotations

import pathlib

from absl import app, flags
from ml_collections import config_flags

from experiments.examples import late, start

_CONFIG = config_flags.DEFINE_config_file("config", "configs/digits.py", "Hyperparameters.",
                                          lock_config=True)
_WORKDIR, _SCRIPT = start.define_flags()
_LATE_RANK = flags.DEFINE_integer("late_rank", 0, "Rank to make late on purpose.", lower_bound=0)
_LATE_MS = flags.DEFINE_float("late_ms", 0.0, "By how many milliseconds a step; 0 for not at all.",
                              lower_bound=0)


def main(_: list[str]) -> None:
  """Trains with the flags' settings."""
  script = _SCRIPT(pathlib.Path(__file__).parent)

  def train_digits() -> None:
    step = late.make_late(script.train_step, "data", _LATE_RANK.value, 1e-3 * _LATE_MS.value)
    script.train_and_evaluate(_CONFIG.value, _WORKDIR.value, step)

  start.run(train_digits)


if __name__ == "__main__":
  app.run(main)
