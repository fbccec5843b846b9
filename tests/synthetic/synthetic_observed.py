"""Observed runs whose truth is known: many collectives a step, in loops, each with groups of its
own.

The job is a transformer's step under plain `jit` on a mesh of data x fsdp x tensor: a loop over the
layers forward and one backward, parameters gathered and gradients scattered over `fsdp`,
activations summed over `tensor`, gradients over `data`, a norm over all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpace.core.detail import every as usual
from tests.synthetic.synthetic_groups import Job, Place, rank_groups

FORWARD, BACKWARD, TRANSFER, UPDATE = 20e-3, 40e-3, 12e-3, 2e-3
"""Seconds of a step; the transfers are those of all collectives together."""
_FORWARD = [("all-gather", "fsdp", 64), ("all-reduce", "tensor", 81)]
_BODIES = {"forward": _FORWARD, "backward": [*_FORWARD, ("reduce-scatter", "fsdp", 64)]}


def observed(*, tensor: int = 1, layers: int = 4, processes: int = 2, norm: bool = True,
             uneven: float = 0.0, every: int | None = None, seed: int = 0, **settings: Any) -> Job:
  """Makes the job.

  Args:
    tensor: ranks of the fastest axis; the others have two each.
    layers: L.
    processes: those of two hosts, or one.
    norm: whether a sum over all ranks ends the step; without it nothing need join all at once.
    uneven: by which layers differ in their work, on all ranks alike, as a share of it.
    every: steps of which one is detailed; None: as many as a recorder would choose.
    seed: of the layers' work, too.
    **settings: further ones of the job.
  """
  mesh = {"data": 2, "fsdp": 2, "tensor": tensor}
  work = np.random.default_rng((seed, 7)).normal(1.0, uneven, layers).clip(0.2)
  places: list[Place] = []
  of = 0

  def add(of: int, kind: str, axis: str, phase: str, source: str, busy: float, turn: int = 0,
          **told: Any) -> None:
    layer = told.pop("layer", None)
    places.append(rank_groups(mesh, axis, busy, 0.0, phase=phase, layer=layer, told={
        "name": f"{kind}.{of}" + (f"@{turn}" if turn else ""), "primitives": [kind], "kind": kind,
        "bytes": 1 << 20, "operands": 1, "dtypes": ["float32"], "rank_pairs": None,
        "operation": f"jit(train_step)/{phase}/{kind}", "source": source, "of": of,
        "loops": [], **told}))

  for which, (phase, seconds) in enumerate((("forward", FORWARD), ("backward", BACKWARD))):
    body = [entry for entry in _BODIES[phase] if mesh[entry[1]] > 1]
    for turn in range(layers):
      layer = turn if phase == "forward" else layers - 1 - turn
      for at, (kind, axis, line) in enumerate(body):
        add(of + at, kind, axis, phase, f"model.py:{line}",
            seconds * work[layer] / work.sum() / len(body), turn, layer=layer,
            loops=[[f"while.{which}", turn, layers]])
    of += len(body)
  add(of, "all-reduce", "data", "backward", "train.py:97", 1e-4)
  if norm:
    add(of + 1, "all-reduce", "data,fsdp,tensor", "update", "train.py:120", 1e-4)
  return Job(mesh, tuple(place._replace(transfer=TRANSFER / len(places)) for place in places),
             seed=seed, processes=processes, hosts=min(processes, 2), update=UPDATE,
             every=every or usual(len(places), 4 * tensor), **settings)
