"""Small simulated jobs, recorded and read back, for the tests beside it."""

import copy

import jax

from jaxpace.cli import pacer_expression
from jaxpace.costs.fabric_file import read_fabric
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.runs.reader import read_run
from jaxpace.simulation import scenario, settings
from jaxpace.simulation.record import FLOOR_FILE, RunWriter

PLAIN = {"steps": 400, "seed": 1, "fabric": {"nodes": 8, "per_node": 1, "card_rate": 1e10}}
JOB = {"forward": 10e-3, "backward": 20e-3, "gradient_bytes": 5e7,
       "noise": {"normal": {"deviation": 0.01}}}
COMPUTE = 30e-3


def link_names(fabric):
  """What each of a fabric's links is: [L], as its `paths` numbers them."""
  result = [f"{way} {what} of rank {r}" for what in ("port", "path") for way in ("out", "in")
            for r in range(fabric.ranks)]
  result += [f"{way} card {c} of node {n}" for way in ("out", "in") for n in range(fabric.nodes)
             for c in range(fabric.cards)]
  width = 1 if fabric.routing == "even" else fabric.uplinks
  return result + [f"{way}link {u} of rack {r}" for way in ("up", "down")
                   for r in range(fabric.racks) for u in range(width)]


def read(changes=None, fabric=None, steps=400, seed=1):
  """A scenario of one job, changed here and there."""
  config = copy.deepcopy({**PLAIN, "steps": steps, "seed": seed})
  config["fabric"].update(fabric or {})
  changes = changes or {}
  config["jobs"] = {"a": {**JOB, **changes, "noise": {**JOB["noise"], **changes.get("noise", {})}}}
  return settings.read(config, pacer_expression.make), config


def play(changes=None, fabric=None, steps=400, seed=1):
  """Its steps, rank by rank, in one piece."""
  made, _ = read(changes, fabric, steps, seed)
  parts = [steps for _, steps in scenario.run(made)]
  assert len(parts) == 1
  return parts[0]


def record(directory, changes=None, fabric=None, steps=400, seed=1):
  """Writes it as a recorded run and reads that: (steps, run)."""
  made, config = read(changes, fabric, steps, seed)
  writer = RunWriter(directory, made.jobs[0], made, config)
  parts = []
  for _, steps in scenario.run(made):
    writer.write(steps)
    parts.append(steps)
  writer.close()
  return jax.tree.map(lambda *x: x[0], *parts), read_run(directory)


def diagnosed(directory, changes=None, fabric=None, steps=400, seed=1, floor=False):
  """(steps, diagnosis) of it; with `floor`, against what the fabric takes when it is quiet."""
  steps_done, run = record(directory, changes, fabric, steps, seed)
  return steps_done, diagnose(run, fabric=read_fabric(directory / FLOOR_FILE) if floor else None)
