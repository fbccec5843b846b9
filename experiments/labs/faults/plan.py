"""Which runs the lab makes, from its config alone. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.labs.faults.spec import NETWORK, Fault, Layout, Spec, layout

# kind, severity, whether it begins mid-run, whether it strikes several
_Kind = tuple[str, float, bool, bool]
_CHANCE = 0.1  # of a pause, for one process in a step
_EVERY = 25  # steps between two checkpoints
_LINKS = {0.06: 120.0, 0.1: 90.0, 0.2: 56.0, 0.35: 32.0}  # Mbit/s of a slow link, by severity
_FLOWS = {0.06: 0.25, 0.1: 0.5, 0.2: 1.0, 0.35: 2.0}  # connections each way on the trunk


OBSERVED = (
    ("straggler", 0.1, False), ("straggler", 0.1, True), ("straggler", 0.2, True),
    ("straggler", 0.35, False), ("rotating", 0.1, False), ("rotating", 0.2, True),
    ("rotating", 0.35, False), ("imbalance", 0.2, False), ("collecting", 0.2, False),
    ("loading", 0.1, False), ("loading", 0.2, True), ("checkpointing", 0.2, False),
    ("stopped", 0.35, False), ("stopped", 0.2, False), ("link", 0.35, True))
"""Kind, share of the step it is to cost while it lasts, and whether it begins mid-run, in runs of
the observed trainer."""


def plan(config: Mapping[str, Any]) -> list[Spec]:
  """All runs of a config, each healthy twin directly before the runs with a fault that share its
  seed.

  Args:
    config: as `configs/fault_lab.py` gives, or `configs/observed_lab.py`.

  Raises:
    ValueError: a layout is none.
  """
  if config.get("observed"):
    return _observed(config)
  specs: list[Spec] = []
  for name, healthy in dict(config["healthy"]).items():
    specs += _of_layout(config, layout(name), int(healthy))
  return specs


def _observed(config: Mapping[str, Any]) -> list[Spec]:
  """Those of the observed trainer: one run of each of `OBSERVED` in every layout."""
  specs: list[Spec] = []
  for name, healthy in dict(config["healthy"]).items():
    shape = layout(name)
    rng = np.random.default_rng([config["seed"], shape.ranks, shape.processes, 11])
    twins = [dataclasses.replace(healthy_twin(config, shape, number), misplaced=None, probe=False)
             for number in range(int(healthy))]
    whose = rng.permutation(len(OBSERVED)) % len(twins) if twins else ()
    for number, twin in enumerate(twins):
      specs.append(twin)
      for place in np.flatnonzero(np.asarray(whose) == number):
        kind, severity, later = OBSERVED[place]
        fault = fault_of(config, shape, twin, rng, kind, severity, later, False)
        specs.append(dataclasses.replace(
            twin, name=f"{shape.name}-{place:03d}-{kind}", faults=(fault,), twin=twin.name,
            probe=kind in NETWORK))
  return specs


def _of_layout(config: Mapping[str, Any], shape: Layout, healthy: int) -> list[Spec]:
  if not healthy:
    return []
  twins = [healthy_twin(config, shape, number) for number in range(healthy)]
  families = [faults for _ in range(config["repeat"]) for faults in _families(config, shape)]
  twins += [_spinning(config, shape, healthy + number) for number in range(_hogs(families))]
  with_faults: dict[str, list[Spec]] = {twin.name: [] for twin in twins}
  rng = np.random.default_rng([config["seed"], shape.ranks, shape.processes])
  for number, kinds in enumerate(families):
    names = {kind for kind, *_ in kinds}
    fit = [twin for twin in twins if ("hog" in names) == (twin.spinning is not None)
           and (not names & {"misplaced", "misplaced_link"} or twin.misplaced)
           and ("misplaced_link" not in names or len(twin.misplaced or ()) == 1)]
    if not fit:
      continue  # too few healthy runs asked for
    least = min(len(with_faults[twin.name]) for twin in fit)
    fit = [twin for twin in fit if len(with_faults[twin.name]) == least]
    twin = fit[int(rng.integers(len(fit)))]
    faults = tuple(fault_of(config, shape, twin, rng, *kind) for kind in kinds)
    spec = dataclasses.replace(
        twin, name=f"{shape.name}-{number:03d}-{'+'.join(fault.kind for fault in faults)}",
        faults=faults, twin=twin.name,
        probe=shape.processes > 1 and any(fault.kind in NETWORK for fault in faults))
    with_faults[twin.name].append(spec)
  return [spec for twin in twins for spec in (twin, *with_faults[twin.name])]


def healthy_twin(config: Mapping[str, Any], shape: Layout, number: int) -> Spec:
  """A healthy run. Every third has a fixture of GPUs and NICs, with some ranks misplaced, at no
  cost."""
  rng = np.random.default_rng([config["seed"], number, shape.ranks, shape.processes, 7])
  misplaced: tuple[int, ...] | None = None
  if number % 3 == 1:
    first = int(rng.integers(shape.ranks))
    groups = ([(first,), tuple(range(shape.ranks // 2, shape.ranks))] if shape.devices > 1
              else [(first,)])
    misplaced = groups[number // 3 % len(groups)]
  return Spec(f"{shape.name}-healthy-{number:03d}", shape.name, 1000 * config["seed"] + number,
              config["steps"][shape.name], 1e-3 * config["work_ms"][shape.name],
              float(config["jitter"]), None, misplaced,
              probe=shape.processes > 1 and number % 3 == 0)


def _spinning(config: Mapping[str, Any], shape: Layout, number: int) -> Spec:
  """A run without a fault, in which one rank computes. It's no healthy control: other load makes
  that rank late."""
  rng = np.random.default_rng([config["seed"], number, shape.ranks, shape.processes, 8])
  twin = healthy_twin(config, shape, number)
  return dataclasses.replace(twin, name=f"{shape.name}-reference-{number:03d}", misplaced=None,
                             spinning=int(rng.integers(shape.ranks)))


def _hogs(families: Sequence[Sequence[_Kind]]) -> int:
  return sum(kind[0] == "hog" for kinds in families for kind in kinds)


def _families(config: Mapping[str, Any], shape: Layout) -> Iterator[list[_Kind]]:
  """The faults of each run: all of them in some layouts, begun mid-run and one at a time in the
  others."""
  several, whole = shape.processes > 1, shape.name in config["whole"]
  severities: Sequence[float] = tuple(config["severities"])
  begin = (False, True) if whole else (True,)
  for kind, severity, later in itertools.product(("straggler", "rotating"), severities, begin):
    yield [(kind, severity, later, False)]
  costly = [severity for severity in severities if severity >= 0.06]
  few = severities if whole else costly[::2]
  for severity in few:
    if whole:
      yield [("imbalance", severity, False, False)]
    yield [("collecting", severity, severity in severities[::2], several)]
    yield [("loading", severity, severity in severities[1::2], False)]
    yield [("checkpointing", severity, severity in severities[::2], False)]
  if several:
    for severity in costly:
      yield [("stopped", severity, severity in costly[::2], False)]
      for later in begin:
        yield [("link", severity, later, False)]
        yield [("trunk", severity, later, False)]
  if several and whole:
    for severity in costly:
      yield [("collecting", severity, severity in costly[1::2], False)]
      yield [("hog", severity, severity in costly[1::2], False)]
      yield [("misplaced_link", severity, severity in costly[1::2], False)]
  if not several:
    for severity, later in itertools.product(severities, begin):
      yield [("misplaced", severity, later, False)]
      if whole:
        yield [("straggler", severity, later, True)]
  together = ("straggler", "rotating", "loading", "link" if several else "misplaced")
  for one, other in itertools.combinations(together, 2) if whole else ():
    for number, severity in enumerate(config["pairs"]):
      yield [(one, severity, number % 2 == 0, False), (other, severity, number % 2 == 1, False)]


def fault_of(config: Mapping[str, Any], shape: Layout, twin: Spec, rng: np.random.Generator,
             kind: str, severity: float, later: bool, many: bool) -> Fault:
  """Puts numbers to a kind of fault, so that it costs about `severity` of the step while it
  lasts."""
  step = twin.work + 1e-3 * config["rest_ms"][shape.name]
  cost = severity / (1 - severity) * step  # seconds per step
  onset = round(config["onset"] * twin.steps) if later else 0
  # Nobody can tell a misplaced rank that is slow for its place from one that is slow for another
  # reason.
  far = set(twin.misplaced or ())
  innocent = [rank for rank in range(shape.ranks) if rank not in far]
  rank = innocent[int(rng.integers(len(innocent)))]
  whole = [process for process in range(shape.processes) if not far & set(shape.ranks_of(process))]
  process = whole[int(rng.integers(len(whole)))] if whole else 0
  targets: tuple[int, ...] = ()
  seconds, chance = cost, 1.0
  if kind == "straggler":
    targets = (rank,)
    if many:
      second = [other for other in innocent if other != rank]
      targets = tuple(sorted((rank, second[int(rng.integers(len(second)))])))
  elif kind == "misplaced":
    targets = twin.misplaced or ()
    if not targets:
      raise ValueError("Only a run with a fixture can have misplaced ranks.")
  elif kind in ("collecting", "loading"):
    targets = tuple(range(shape.processes)) if many else (process,)
    chance = _CHANCE / 2 if many else _CHANCE
    seconds = cost / (1 - (1 - chance) ** len(targets))
  elif kind == "checkpointing":
    targets, chance, seconds = (0,), float(_EVERY), cost * _EVERY
  elif kind == "stopped":
    # a stop while the process sleeps costs what outlasts that
    targets, seconds = (process,), twin.work / 2 + 2 * cost
  elif kind == "hog":
    targets, seconds = (shape.process_of(twin.spinning or 0),), float(max(1, round(10 * severity)))
  elif kind == "link":
    targets, seconds = (process,), _LINKS.get(severity, 32.0)
  elif kind == "misplaced_link":
    targets, seconds = (shape.process_of((twin.misplaced or (0,))[0]),), _LINKS.get(severity, 32.0)
  elif kind == "trunk":
    seconds = _FLOWS.get(severity, 1.0)
  return Fault(kind, targets, seconds, onset, twin.steps, severity, chance)
