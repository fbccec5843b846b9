"""Reads what is to be simulated from plain dicts, such as a config gives, and says which field is wrong and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxpace.core.types import Pacer
from jaxpace.simulation import noise as noises
from jaxpace.simulation import schedules
from jaxpace.simulation.fabric import Fabric, FabricError
from jaxpace.simulation.failures import Failures
from jaxpace.simulation.job import Job, Shape

MAX_BUCKETS, MAX_STEPS, MAX_CELLS = 64, 10_000_000, 2**31


class SettingsError(ValueError):
  """A field is wrong: a sentence that names it and the allowed range."""


@dataclasses.dataclass(frozen=True)
class JobSettings:
  """One job, checked."""

  name: str
  nodes: tuple[int, ...]  # of the fabric, in the order of the ranks
  shape: Shape
  job: Job
  buckets: int
  gradient_bytes: float
  algorithm: str
  load: schedules.Load  # of all its gradients at once
  pacer: Pacer | None
  pacer_text: str
  start: float  # s
  leaves: int  # after so many steps; 0: never
  failures: Failures | None


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
_JOB = {*_TIMES, "nodes", "gradient_bytes", "buckets", "algorithm", "overlap", "polling", "noise", "traffic", "pacer",
        "start", "leaves", "failures"}


def read(config: Mapping[str, Any], make_pacer: Callable[[str], Pacer]) -> Scenario:
  """Reads and checks a config; `configs/simulate.py` shows every field.

  Args:
    config: nested dicts of numbers, strings and lists.
    make_pacer: makes a pacer of its expression; raises a ValueError that says what is wrong with it.

  Raises:
    SettingsError: a field is unknown, missing or out of range.
  """
  _known("", config, _TOP)
  steps = _whole("steps", config.get("steps", 1000), 2, MAX_STEPS)
  fabric = _fabric(_section("fabric", config.get("fabric", {})))
  declared = _section("jobs", config.get("jobs", {}))
  if not declared:
    raise SettingsError("jobs is empty: name one job at least, as in jobs={'a': {'forward': 0.01, 'backward': 0.02}}.")
  jobs = tuple(_job(name, _section(f"jobs.{name}", given), fabric, make_pacer) for name, given in declared.items())
  taken: dict[int, str] = {}
  for job in jobs:
    for node in job.nodes:
      if node in taken:
        raise SettingsError(f"jobs.{job.name}.nodes names node {node}, which job {taken[node]} has: a node belongs to "
                            "one job.")
      taken[node] = job.name
    cells = steps * job.shape.ranks * job.buckets
    if cells > MAX_CELLS:
      raise SettingsError(f"steps={steps:,} of {job.shape.ranks:,} ranks with {job.buckets} buckets are {cells:,} rows "
                          f"of job {job.name}; at most {MAX_CELLS:,} can be recorded. Simulate fewer steps, ranks or "
                          "buckets.")
  return Scenario(steps, _whole("seed", config.get("seed", 0), 0, 2**31 - 1), fabric,
                  _truth("shared_fabric", config.get("shared_fabric", True)),
                  _number("max_delay", config.get("max_delay", 0.25), 0, 10, "seconds"), jobs)


def _fabric(given: Mapping[str, Any]) -> Fabric:
  fields = {field.name for field in dataclasses.fields(Fabric)}
  _known("fabric", given, fields)
  if "nodes" not in given:
    raise SettingsError("fabric.nodes is missing: how many machines there are.")
  values = dict(given)
  for name, value in values.items():
    if isinstance(value, int) and name.endswith(("rate", "latency")):
      values[name] = float(value)
  if "slow_paths" in values:
    slow = _section("fabric.slow_paths", values["slow_paths"])
    try:
      values["slow_paths"] = {int(rank): factor for rank, factor in slow.items()}
    except (TypeError, ValueError) as error:
      raise SettingsError("fabric.slow_paths must map ranks to factors, as in {3: 0.5}.") from error
  try:
    return Fabric(**values)
  except FabricError as error:
    raise SettingsError(f"fabric.{error}") from error


def _job(name: str, given: Mapping[str, Any], fabric: Fabric, make_pacer: Callable[[str], Pacer]) -> JobSettings:
  at = f"jobs.{name}"
  if not isinstance(name, str) or not name.isidentifier():
    raise SettingsError(f"jobs has a job called {name!r}: use letters, digits and underscores, a letter first.")
  _known(at, given, _JOB)
  nodes = _nodes(f"{at}.nodes", given.get("nodes"), fabric)
  ranks = len(nodes) * fabric.per_node
  buckets = _whole(f"{at}.buckets", given.get("buckets", 1), 1, MAX_BUCKETS)
  size = _number(f"{at}.gradient_bytes", given.get("gradient_bytes", 100e6), 0, 1e15, "bytes")
  algorithm = given.get("algorithm", "ring")
  if algorithm not in schedules.NAMES:
    raise SettingsError(f"{at}.algorithm={algorithm!r} must be one of {', '.join(schedules.NAMES)}.")
  members = [node * fabric.per_node + g for node in nodes for g in range(fabric.per_node)]
  whole = schedules.load(schedules.rounds(algorithm, members, size, fabric.per_node), fabric)
  bucket = schedules.load(schedules.rounds(algorithm, members, size / buckets, fabric.per_node), fabric)
  times = {field: _number(f"{at}.{field}", given.get(field, usual), 0, 3600, "seconds")
           for field, usual in _TIMES.items()}
  parts = tuple(_component(f"{at}.noise.{key}", key, _section(f"{at}.noise.{key}", value), ranks)
                for key, value in _section(f"{at}.noise", given.get("noise", {})).items())
  traffic = given.get("traffic")
  failures = given.get("failures")
  text = given.get("pacer") or ""
  if not isinstance(text, str):
    raise SettingsError(f"{at}.pacer={text!r} must be an expression in quotes, such as 'pace_early_ranks()', or ''.")
  try:
    pacer = make_pacer(text) if text else None
  except ValueError as error:
    raise SettingsError(f"{at}.pacer: {error}") from error
  job = Job(**{field: np.float32(value) for field, value in times.items()},
            transfers=np.full(buckets, bucket.seconds, np.float32), noise=parts,
            traffic=_traffic(f"{at}.traffic", _section(f"{at}.traffic", traffic)) if traffic else None,
            polling=np.float32(_number(f"{at}.polling", given.get("polling", 0.0), 0, 10, "seconds lost a second")))
  return JobSettings(
      name=name, nodes=nodes, shape=Shape(ranks, fabric.per_node, _truth(f"{at}.overlap", given.get("overlap", True))),
      job=job, buckets=buckets, gradient_bytes=size, algorithm=algorithm, load=whole, pacer=pacer, pacer_text=text,
      start=_number(f"{at}.start", given.get("start", 0.0), 0, 1e6, "seconds"),
      leaves=_whole(f"{at}.leaves", given.get("leaves", 0), 0, MAX_STEPS),
      failures=_failures(f"{at}.failures", _section(f"{at}.failures", failures), len(nodes)) if failures else None)


def _nodes(at: str, given: Any, fabric: Fabric) -> tuple[int, ...]:
  if given is None:
    return tuple(range(fabric.nodes))
  if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
    raise SettingsError(f"{at}={given!r} must be a list of nodes, 0 to {fabric.nodes - 1}; left out, it means all.")
  nodes = tuple(given)
  for node in nodes:
    _whole(at, node, 0, fabric.nodes - 1)
  if not nodes or len(set(nodes)) < len(nodes):
    raise SettingsError(f"{at}={list(nodes)!r} must name one node at least, and none twice.")
  return nodes


_RANGES: dict[str, tuple[float, float, str]] = {
    "deviation": (0, 10, "a share of the compute"), "mean": (0, 100, "a share of the compute"),
    "scale": (0, 100, "a share of the compute"), "tail": (1.01, 100, "above 1, or there is no mean"),
    "extra": (-0.9, 100, "a share of the compute"), "spread": (0, 10, "a share of extra"),
    "probability": (0, 1, "of a pause in a step"), "seconds": (0, 3600, "seconds"), "begins": (0, 1, "in a step"),
    "length": (1, 1e7, "steps"), "load": (0, 0.99, "a share of the link"), "steps": (0, 1e7, "steps"),
    "every": (1, 1e7, "steps")}


def _component(at: str, key: str, given: Mapping[str, Any], ranks: int) -> Any:
  values = dict(given)
  kind = values.pop("kind", key)
  if kind not in noises.COMPONENTS:
    raise SettingsError(f"{at}.kind={kind!r} must be one of {', '.join(noises.COMPONENTS)}.")
  if kind == "slow":
    return _slow(at, values, ranks)
  return _numbers(at, noises.COMPONENTS[kind], values)


def _slow(at: str, values: Mapping[str, Any], ranks: int) -> noises.Slow:
  _known(at, values, {"ranks", "extra"})
  extra = _number(f"{at}.extra", values.get("extra", 0.0), *_RANGES["extra"])
  slower = values.get("ranks", ())
  if isinstance(slower, (str, bytes)) or not isinstance(slower, Iterable):
    raise SettingsError(f"{at}.ranks={slower!r} must be a list of the job's ranks, 0 to {ranks - 1}.")
  share = np.zeros(ranks, np.float32)
  for rank in slower:
    share[_whole(f"{at}.ranks", rank, 0, ranks - 1)] = extra
  return noises.Slow(share)


def _traffic(at: str, values: Mapping[str, Any]) -> Any:
  return _numbers(at, noises.Traffic, values)


def _numbers(at: str, kind: Any, values: Mapping[str, Any]) -> Any:
  """Makes a component whose fields are numbers."""
  _known(at, values, set(kind._fields))
  missing = [field for field in kind._fields if field not in values and field not in kind._field_defaults]
  if missing:
    raise SettingsError(f"{at}.{missing[0]} is missing: {kind.__name__.lower()} needs {', '.join(kind._fields)}.")
  read_fields: dict[str, Any] = {}
  for field, value in values.items():
    if field == "aligned":
      read_fields[field] = np.bool_(_truth(f"{at}.{field}", value))
    elif field == "every":
      read_fields[field] = np.int32(_whole(f"{at}.{field}", value, 1, 10_000_000))
    else:
      least, most, hint = _RANGES[field]
      if field == "steps" and kind is not noises.Common:
        least = 1e-3
      read_fields[field] = np.float32(_number(f"{at}.{field}", value, least, most, hint))
  return kind(**read_fields)


def _failures(at: str, given: Mapping[str, Any], nodes: int) -> Failures:
  _known(at, given, {"mtbf", "every", "checkpoint", "restart"})
  for field in ("mtbf", "every"):
    if field not in given:
      raise SettingsError(f"{at}.{field} is missing: failures need mtbf (s, of one node) and every (steps).")
  mtbf = _number(f"{at}.mtbf", given["mtbf"], 1e-3, 1e12, "seconds between failures of one node")
  return Failures(rate=nodes / mtbf, every=_whole(f"{at}.every", given["every"], 1, MAX_STEPS),
                  checkpoint=_number(f"{at}.checkpoint", given.get("checkpoint", 0.0), 0, 1e6, "seconds"),
                  restart=_number(f"{at}.restart", given.get("restart", 0.0), 0, 1e7, "seconds"))


def _section(at: str, value: Any) -> Mapping[str, Any]:
  if not isinstance(value, Mapping):
    raise SettingsError(f"{at}={value!r} must be a dict of fields.")
  return value


def _known(at: str, given: Mapping[str, Any], names: set[str]) -> None:
  for name in given:
    if name not in names:
      where = f"{at}.{name}" if at else str(name)
      raise SettingsError(f"{where} is no field; there are {', '.join(sorted(names))}.")


def _whole(at: str, value: Any, least: int, most: int) -> int:
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
    raise SettingsError(f"{at}={value!r} must be a whole number from {least:,} to {most:,}.")
  return int(value)


def _number(at: str, value: Any, least: float, most: float, hint: str) -> float:
  numeric = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
  if not numeric or not math.isfinite(value) or not least <= value <= most:
    raise SettingsError(f"{at}={value!r} must be a number from {least:g} to {most:g}: {hint}.")
  return float(value)


def _truth(at: str, value: Any) -> bool:
  if not isinstance(value, (bool, np.bool_)):
    raise SettingsError(f"{at}={value!r} must be True or False.")
  return bool(value)
