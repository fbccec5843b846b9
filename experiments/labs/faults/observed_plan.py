"""Which runs the lab makes of the observed trainer, from its config alone. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.labs.faults.plan import fault_of, healthy_twin
from experiments.labs.faults.spec import NETWORK, Spec, layout

FAULTS = (
    ("straggler", 0.1, False), ("straggler", 0.1, True), ("straggler", 0.2, True),
    ("straggler", 0.35, False), ("rotating", 0.1, False), ("rotating", 0.2, True),
    ("rotating", 0.35, False), ("imbalance", 0.2, False), ("collecting", 0.2, False),
    ("loading", 0.1, False), ("loading", 0.2, True), ("checkpointing", 0.2, False),
    ("stopped", 0.35, False), ("stopped", 0.2, False), ("link", 0.35, True))
"""Kind, share of the step it is to cost while it lasts, and whether it begins mid-run: one run each
in every layout."""


def plan(config: Mapping[str, Any]) -> list[Spec]:
  """All runs of a config, each healthy twin directly before the runs with a fault that share its
  seed.

  Args:
    config: as `configs/observed_lab.py` gives.
  """
  specs: list[Spec] = []
  for name, healthy in dict(config["healthy"]).items():
    shape = layout(name)
    rng = np.random.default_rng([config["seed"], shape.ranks, shape.processes, 11])
    twins = [dataclasses.replace(healthy_twin(config, shape, number), misplaced=None, probe=False)
             for number in range(int(healthy))]
    whose = rng.permutation(len(FAULTS)) % len(twins) if twins else ()
    for number, twin in enumerate(twins):
      specs.append(twin)
      for place in np.flatnonzero(np.asarray(whose) == number):
        kind, severity, later = FAULTS[place]
        fault = fault_of(config, shape, twin, rng, kind, severity, later, False)
        specs.append(dataclasses.replace(
            twin, name=f"{shape.name}-{place:03d}-{kind}", faults=(fault,), twin=twin.name,
            probe=kind in NETWORK))
  return specs
