"""What collectives cost on a fabric, by level: latency α, time a byte β; measured by `jaxpace
bench`, or described."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpace.core.fields import is_number, is_whole
from jaxpace.costs.alpha_beta import (
    ALL_GATHER,
    ALL_REDUCE,
    DOUBLING,
    KINDS,
    REDUCE_SCATTER,
    RING,
    SHIFT,
    TREE,
    seconds,
)
from jaxpace.files.reading import LARGEST, UnreadableError, read_bytes
from jaxpace.runs.run import CollectiveTimes, Run, RunError

SCHEMA = 1
ALGORITHMS = (RING, TREE, DOUBLING)
_SURE = 1.645
"""Half of a 90 % interval over the standard deviation."""


class Estimate(NamedTuple):
  """A number with its 90 % interval."""

  estimate: float
  low: float
  high: float

  @property
  def deviation(self) -> float:
    return (self.high - self.low) / (2 * _SURE)

  def to_json(self) -> dict[str, float]:
    return self._asdict()


class Cost(NamedTuple):
  """Cost of one kind of collective at one level: t = a·α + b·m·β, with (a, b) of
  `jaxpace.costs.alpha_beta`."""

  alpha: Estimate  # seconds
  beta: Estimate  # seconds a byte
  algorithm: str
  points: tuple[tuple[int, float], ...] = ()  # bytes and seconds as measured, rising
  misfit: float = 0.0  # largest |fitted / measured - 1| over the sizes

  def seconds(self, kind: str, ranks: int, size: float) -> float:
    """Time of a collective of `size` bytes over `ranks` ranks."""
    return seconds(kind, self.algorithm, ranks, size, self.alpha.estimate, self.beta.estimate)


class Level(NamedTuple):
  """A part of the fabric: what the ranks of one process, of one host or of several hosts exchange
  through."""

  name: str
  ranks: int | None  # most ranks that it joins; None where nothing limits them
  measured: int | None  # ranks it was measured with; None where it was described
  costs: dict[str, Cost]  # by kind


class MeasuredFabric(NamedTuple):
  """The levels, the smallest first."""

  levels: tuple[Level, ...]
  source: str

  def level(self, ranks: int) -> Level | None:
    """The smallest level that joins this many ranks."""
    return next((level for level in self.levels if level.ranks is None or level.ranks >= ranks),
                None)


def kind_of(name: str) -> str:
  """Kind of a recorded collective, by its name.

  >>> kind_of("psum"), kind_of("psum_scatter"), kind_of("all_gather_invariant"), kind_of("ppermute")
  ('all_reduce', 'reduce_scatter', 'all_gather', 'shift')
  """
  if "scatter" in name:
    return REDUCE_SCATTER
  if "gather" in name:
    return ALL_GATHER
  return SHIFT if "permute" in name else ALL_REDUCE


def kind_in(run: Run, collective: CollectiveTimes) -> str:
  """Kind of a collective by the plan of the step, which knows the operation; else by its name."""
  entries = run.plan.get("collectives")
  for entry in entries if isinstance(entries, list) else []:
    primitives = (entry.get("primitives") if isinstance(entry, dict)
                  and entry.get("slot") == collective.slot else None)
    if isinstance(primitives, list) and primitives and isinstance(primitives[0], str):
      return kind_of(primitives[0])
  return kind_of(collective.name)


def read_fabric(path: str | pathlib.Path) -> MeasuredFabric:
  """Reads what `jaxpace bench` wrote, or a description of a fabric by hand.

  Raises:
    RunError: it can't be read or is neither; the message says what is wrong.
  """
  path = pathlib.Path(path)
  try:
    document = json.loads(read_bytes(path, LARGEST).decode("utf-8"))
  except FileNotFoundError as error:
    raise RunError(
        f"There is no fabric at {path}: no such file. `jaxpace bench --json {path}` "
        "writes one.") from error
  except OSError as error:
    raise RunError(f"{path} can't be read: {error.strerror or error}.") from error
  except UnreadableError as error:
    raise RunError(f"{path} {error}: give the file that `jaxpace bench --json` wrote.") from error
  except (ValueError, RecursionError) as error:
    raise RunError(
        f"{path} is not JSON, or torn: give the file that `jaxpace bench --json` wrote.") from error
  if (not isinstance(document, dict) or not isinstance(document.get("levels"), list)
      or not document["levels"]):
    raise RunError(
        f"{path} describes no fabric: it has no list 'levels'. docs/forecast.md shows the format.")
  version = document.get("schema", SCHEMA)
  if isinstance(version, int) and version > SCHEMA:
    raise RunError(
        f"{path} was written by a newer jaxpace (schema {version}): upgrade jaxpace here.")
  levels = [_level(entry, f"{path}: level {i + 1}") for i, entry in enumerate(document["levels"])]
  levels.sort(key=lambda level: math.inf if level.ranks is None else level.ranks)
  return MeasuredFabric(tuple(levels), str(path))


def _level(entry: Any, where: str) -> Level:
  if not isinstance(entry, dict):
    raise RunError(f"{where} is not an object. docs/forecast.md shows the format.")
  ranks, measured = entry.get("ranks"), entry.get("measured")
  for value in (ranks, measured):
    if value is not None and not is_whole(value, 1):
      raise RunError(f"{where}: {value!r} is not a number of ranks.")
  by_kind = entry.get("collectives")
  if by_kind is None:
    by_kind = dict.fromkeys(KINDS, entry)
  if not isinstance(by_kind, dict):
    raise RunError(f"{where}: 'collectives' is not an object.")
  costs = {kind: _cost(cost, f"{where}, {kind}") for kind, cost in by_kind.items() if kind in KINDS}
  if not costs:
    raise RunError(
        f"{where} says nothing of {', '.join(KINDS)}, and has no alpha and beta of its own.")
  return Level(str(entry.get("level", where)), ranks, measured, costs)


def _cost(entry: Any, where: str) -> Cost:
  if not isinstance(entry, dict):
    raise RunError(f"{where} is not an object with alpha and beta.")
  algorithm = entry.get("algorithm", RING)
  if algorithm not in ALGORITHMS:
    raise RunError(
        f"{where}: the algorithm is {algorithm!r}, and must be one of {', '.join(ALGORITHMS)}.")
  points = []
  for point in entry.get("points") or ():
    if (isinstance(point, Mapping) and is_number(point.get("bytes"), 0)
        and is_number(point.get("seconds"), 0)):
      points.append((int(point["bytes"]), float(point["seconds"])))
  return Cost(_estimate(entry.get("alpha"), f"{where}: alpha"),
              _estimate(entry.get("beta"), f"{where}: beta"), algorithm, tuple(sorted(points)))


def _estimate(value: Any, where: str) -> Estimate:
  if is_number(value, 0):
    return Estimate(float(value), float(value), float(value))
  if isinstance(value, dict) and all(is_number(value.get(name), 0) for name in Estimate._fields):
    return Estimate(*(float(value[name]) for name in Estimate._fields))
  raise RunError(
      f"{where} must be a number of 0 or more, or {{'estimate': x, 'low': x, 'high': x}}, not "
      f"{value!r}.")


def quiet_seconds(fabric: MeasuredFabric, kind: str, size: int, ranks: int) -> float | None:
  """What a collective takes on the fabric with nobody else on it; None where the fabric does not
  say.

  Read off the measured sizes if it was measured with as many ranks, straight between two of them on
  logarithmic scales; else from α and β.

  Args:
    fabric: measured or described.
    kind: one of `KINDS`.
    size: bytes.
    ranks: ranks of the job.
  """
  level = fabric.level(ranks)
  cost = level.costs.get(kind) if level else None
  if level is None or cost is None:
    return None
  if (level.measured == ranks and len(cost.points) > 1
      and cost.points[0][0] <= size <= cost.points[-1][0]):
    (low, before), (high, after) = next(
        (a, b) for a, b in zip(cost.points, cost.points[1:], strict=False) if a[0] <= size <= b[0])
    if min(before, after) > 0 and low < high:
      part = math.log(size / low) / math.log(high / low)
      return math.exp((1 - part) * math.log(before) + part * math.log(after))
  return cost.seconds(kind, ranks, size)
