"""Reads what is to be simulated from plain dicts, such as a config gives, and says which field is
wrong and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.fields import SettingsError, choice, known, number, section, truth, whole
from jaxpace.core.types import Pacer
from jaxpace.files import UserError
from jaxpace.runs.run import PAUSES
from jaxpace.simulation import noise as noises
from jaxpace.simulation import schedules
from jaxpace.simulation.fabric import Fabric
from jaxpace.simulation.job import Job, Shape

MAX_BUCKETS, MAX_STEPS, MAX_CELLS = 64, 10_000_000, 2**31
PROCESSES = ("node", "rank")


class Failures(NamedTuple):
  """How a job fails and recovers."""

  rate: float  # failures per second, of the whole job: nodes / MTBF of one
  every: int  # steps from one checkpoint to the next
  checkpoint: float  # s that a checkpoint takes
  restart: float  # s from a failure to the first step after it


@dataclasses.dataclass(frozen=True)
class JobSettings:
  """One job, checked."""

  name: str
  nodes: tuple[int, ...]  # of the fabric, in the order of the ranks
  members: list[int]  # of each rank, its number on the fabric
  shape: Shape
  job: Job
  buckets: int
  gradient_bytes: float
  algorithm: str
  load: schedules.Load  # of one of its buckets
  pacer: Pacer | None
  pacer_text: str
  start: float  # s
  leaves: int  # after so many steps; 0: never
  failures: Failures | None

  @property
  def processes(self) -> list[str]:
    """Host of each process."""
    each = len(self.nodes) and self.shape.ranks // len(self.nodes) // self.shape.per_process
    return [f"node{node}" for node in self.nodes for _ in range(each)]


@dataclasses.dataclass(frozen=True)
class Scenario:
  """All that is simulated, checked."""

  steps: int
  seed: int
  fabric: Fabric
  shared: bool
  """Whether jobs share the fabric's links; False switches that coupling off."""
  max_delay: float
  jobs: tuple[JobSettings, ...]


_TOP = {"steps", "seed", "fabric", "jobs", "shared_fabric", "max_delay", "name"}
_TIMES = {"forward": 10e-3, "backward": 20e-3, "update": 1e-3, "gap": 0.5e-3}
_JOB = {*_TIMES, "nodes", "gradient_bytes", "buckets", "algorithm", "overlap", "polling", "noise",
        "traffic", "pacer", "start", "leaves", "failures", "processes", "far"}


def read(config: Mapping[str, Any], make_pacer: Callable[[str], Pacer]) -> Scenario:
  """Reads and checks a config, nested dicts of numbers, strings and lists; `configs/simulate.py`
  shows every field. `make_pacer` makes a pacer of its expression, or raises a UserError that says
  what is wrong with it. Raises SettingsError where a field is unknown, missing or out of range."""
  known("", config, _TOP)
  steps = whole("steps", config.get("steps", 1000), 2, MAX_STEPS)
  fabric = _fabric(section("fabric", config.get("fabric", {})))
  declared = section("jobs", config.get("jobs", {}))
  if not declared:
    raise SettingsError(
        "jobs is empty: name one job at least, as in jobs={'a': {'forward': 0.01, "
        "'backward': 0.02}}.")
  jobs = tuple(_job(name, section(f"jobs.{name}", given), fabric, make_pacer)
               for name, given in declared.items())
  taken: dict[int, str] = {}
  for job in jobs:
    for node in job.nodes:
      if node in taken:
        raise SettingsError(f"jobs.{job.name}.nodes names node {node}, which job {taken[node]} "
                            "has: a node belongs to one job.")
      taken[node] = job.name
    cells = steps * job.shape.ranks * job.buckets
    if cells > MAX_CELLS:
      raise SettingsError(f"steps={steps:,} of {job.shape.ranks:,} ranks with {job.buckets} "
                          f"buckets are {cells:,} rows of job {job.name}; at most {MAX_CELLS:,} "
                          "can be recorded. Simulate fewer steps, ranks or buckets.")
  shared = truth("shared_fabric", config.get("shared_fabric", True))
  return Scenario(steps, whole("seed", config.get("seed", 0), 0, 2**31 - 1), fabric,
                  shared, number("max_delay", config.get("max_delay", 0.25), 0, 10, "seconds"),
                  jobs)


def _fabric(given: Mapping[str, Any]) -> Fabric:
  fields = {field.name for field in dataclasses.fields(Fabric)}
  known("fabric", given, fields)
  if "nodes" not in given:
    raise SettingsError("fabric.nodes is missing: how many machines there are.")
  values = dict(given)
  for name, value in values.items():
    if isinstance(value, int) and name.endswith(("rate", "latency")):
      values[name] = float(value)
  if "slow_paths" in values:
    slow = section("fabric.slow_paths", values["slow_paths"])
    try:
      values["slow_paths"] = {int(rank): factor for rank, factor in slow.items()}
    except (TypeError, ValueError) as error:
      raise SettingsError("fabric.slow_paths must map ranks to factors, as in {3: 0.5}.") from error
  try:
    return Fabric(**values)
  except SettingsError as error:
    raise SettingsError(f"fabric.{error}") from error


def _job(name: str, given: Mapping[str, Any], fabric: Fabric,
         make_pacer: Callable[[str], Pacer]) -> JobSettings:
  at = f"jobs.{name}"
  if not isinstance(name, str) or not name.isidentifier():
    raise SettingsError(
        f"jobs has a job called {name!r}: use letters, digits and underscores, a letter first.")
  known(at, given, _JOB)
  nodes = _nodes(f"{at}.nodes", given.get("nodes"), fabric)
  ranks = len(nodes) * fabric.per_node
  buckets = whole(f"{at}.buckets", given.get("buckets", 1), 1, MAX_BUCKETS)
  size = number(f"{at}.gradient_bytes", given.get("gradient_bytes", 100e6), 0, 1e15, "bytes")
  algorithm = choice(f"{at}.algorithm", given.get("algorithm", "ring"), schedules.NAMES)
  members = [node * fabric.per_node + g for node in nodes for g in range(fabric.per_node)]
  load = schedules.load(
      schedules.rounds(algorithm, members, size / buckets, fabric.per_node), fabric)
  times = {field: number(f"{at}.{field}", given.get(field, usual), 0, 3600, "seconds")
           for field, usual in _TIMES.items()}
  parts, causes = components(f"{at}.noise", section(f"{at}.noise", given.get("noise", {})), ranks)
  far = number(f"{at}.far", given.get("far", 0.0), 0, 100, "a share of the compute")
  if far:
    slow = np.asarray([far if rank in fabric.slow_paths else 0.0 for rank in members], np.float32)
    parts, causes = (*parts, noises.Slow(slow)), (*causes, "")
  by_node = choice(f"{at}.processes", given.get("processes", "node"), PROCESSES) == "node"
  shape = Shape(ranks, fabric.per_node, truth(f"{at}.overlap", given.get("overlap", True)),
                causes if any(causes) else (), fabric.per_node if by_node else 1)
  text, pacer = _pacer(at, given.get("pacer") or "", make_pacer)
  traffic, failures = given.get("traffic"), given.get("failures")
  job = Job(forward=np.float32(times["forward"]), backward=np.float32(times["backward"]),
            update=np.float32(times["update"]), gap=np.float32(times["gap"]),
            transfers=np.full(buckets, load.seconds, np.float32), noise=parts,
            traffic=_numbers(f"{at}.traffic", noises.Traffic, section(f"{at}.traffic", traffic))
            if traffic else None,
            polling=np.float32(number(f"{at}.polling", given.get("polling", 0.0), 0, 10,
                                      "seconds lost a second")))
  return JobSettings(
      name=name, nodes=nodes, members=members, shape=shape, job=job, buckets=buckets,
      gradient_bytes=size, algorithm=algorithm, load=load, pacer=pacer, pacer_text=text,
      start=number(f"{at}.start", given.get("start", 0.0), 0, 1e6, "seconds"),
      leaves=whole(f"{at}.leaves", given.get("leaves", 0), 0, MAX_STEPS),
      failures=_failures(f"{at}.failures", section(f"{at}.failures", failures), len(nodes))
      if failures else None)


def _pacer(at: str, text: Any, make_pacer: Callable[[str], Pacer]) -> tuple[str, Pacer | None]:
  if not isinstance(text, str):
    raise SettingsError(
        f"{at}.pacer={text!r} must be an expression in quotes, such as 'pace_early_ranks()', "
        "or ''.")
  try:
    return text, make_pacer(text) if text else None
  except UserError as error:
    raise SettingsError(f"{at}.pacer: {error}") from error


def _nodes(at: str, given: Any, fabric: Fabric) -> tuple[int, ...]:
  if given is None:
    return tuple(range(fabric.nodes))
  if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
    raise SettingsError(
        f"{at}={given!r} must be a list of nodes, 0 to {fabric.nodes - 1}; left out, it means all.")
  nodes = tuple(given)
  for node in nodes:
    whole(at, node, 0, fabric.nodes - 1)
  if not nodes or len(set(nodes)) < len(nodes):
    raise SettingsError(f"{at}={list(nodes)!r} must name one node at least, and none twice.")
  return nodes


def _failures(at: str, given: Mapping[str, Any], nodes: int) -> Failures:
  known(at, given, {"mtbf", "every", "checkpoint", "restart"})
  for field in ("mtbf", "every"):
    if field not in given:
      raise SettingsError(
          f"{at}.{field} is missing: failures need mtbf (s, of one node) and every (steps).")
  mtbf = number(f"{at}.mtbf", given["mtbf"], 1e-3, 1e12, "seconds between failures of one node")
  return Failures(rate=nodes / mtbf, every=whole(f"{at}.every", given["every"], 1, MAX_STEPS),
                  checkpoint=number(f"{at}.checkpoint", given.get("checkpoint", 0.0), 0, 1e6,
                                    "seconds"),
                  restart=number(f"{at}.restart", given.get("restart", 0.0), 0, 1e7, "seconds"))


CAUSES = ("", *PAUSES)
"""What a pause may be: one that a column of a recorded run shows; "" where nothing shows it."""
_RANGES: dict[str, tuple[float, float, str]] = {
    "deviation": (0, 10, "a share of the compute"), "mean": (0, 100, "a share of the compute"),
    "scale": (0, 100, "a share of the compute"),
    "tail": (1.01, 100, "above 1, or there is no mean"),
    "extra": (-0.9, 100, "a share of the compute"), "spread": (0, 10, "a share of extra"),
    "probability": (0, 1, "of a pause in a step"), "seconds": (0, 3600, "seconds"),
    "begins": (0, 1, "in a step"), "length": (1, 1e7, "steps"),
    "load": (0, 0.99, "a share of the link"), "steps": (0, 1e7, "steps"),
    "every": (1, 1e7, "steps")}


def components(at: str, given: Mapping[str, Any],
               ranks: int) -> tuple[tuple[Any, ...], tuple[str, ...]]:
  """Reads noise components, and what their pauses are."""
  parts, causes = [], []
  for key, value in given.items():
    where = f"{at}.{key}"
    values = dict(section(where, value))
    kind = choice(f"{where}.kind", values.pop("kind", key), tuple(noises.COMPONENTS))
    causes.append("")
    if noises.COMPONENTS[kind] in noises.IN_GAP:
      causes[-1] = choice(f"{where}.cause", values.pop("cause", ""), CAUSES)
    parts.append(_slow(where, values, ranks) if kind == "slow"
                 else _numbers(where, noises.COMPONENTS[kind], values))
  return tuple(parts), tuple(causes)


def _slow(at: str, values: Mapping[str, Any], ranks: int) -> noises.Slow:
  known(at, values, {"ranks", "extra"})
  extra = number(f"{at}.extra", values.get("extra", 0.0), *_RANGES["extra"])
  slower = values.get("ranks", ())
  if isinstance(slower, (str, bytes)) or not isinstance(slower, Iterable):
    raise SettingsError(
        f"{at}.ranks={slower!r} must be a list of the job's ranks, 0 to {ranks - 1}.")
  share = np.zeros(ranks, np.float32)
  for rank in slower:
    share[whole(f"{at}.ranks", rank, 0, ranks - 1)] = extra
  return noises.Slow(share)


def _numbers(at: str, kind: Any, values: Mapping[str, Any]) -> Any:
  """Makes a component whose fields are numbers."""
  names = set(kind._fields)
  known(at, values, {*names, "cause"} if kind in noises.IN_GAP else names)
  missing = [field for field in kind._fields if field not in values
             and field not in kind._field_defaults]
  if missing:
    raise SettingsError(
        f"{at}.{missing[0]} is missing: {kind.__name__.lower()} needs {', '.join(kind._fields)}.")
  read_fields: dict[str, Any] = {}
  for field, value in values.items():
    if field == "aligned":
      read_fields[field] = np.bool_(truth(f"{at}.{field}", value))
    elif field == "every":
      read_fields[field] = np.int32(whole(f"{at}.{field}", value, 1, 10_000_000))
    else:
      least, most, hint = _RANGES[field]
      if field == "steps" and kind is not noises.Common:
        least = 1e-3
      read_fields[field] = np.float32(number(f"{at}.{field}", value, least, most, hint))
  return kind(**read_fields)
