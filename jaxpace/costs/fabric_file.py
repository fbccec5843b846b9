"""What collectives cost on a fabric, by level: latency α, time a byte β; measured by `jaxpace
bench`, or described."""

from __future__ import annotations

import math
import pathlib
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

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
from jaxpace.files.reading import LARGEST, UnreadableError, in_words, parse, read_bytes
from jaxpace.runs.run import CollectiveTimes, Run, RunError

SCHEMA = 1
ALGORITHMS = (RING, TREE, DOUBLING)
_SURE = 1.645
"""Half of a 90 % interval over the standard deviation."""


_LEVELS = "it takes a list of levels, each with alpha and beta, or with collectives"
_RANKS = "a whole number from 1, or null"
_MEANINGS = {"alpha": "seconds, from 0", "beta": "seconds a byte, from 0", "ranks": _RANKS,
             "measured": _RANKS, "algorithm": " or ".join(ALGORITHMS), "level": "a name",
             "points": "bytes and seconds as measured, from 0", "misfit": "a number"}

_Amount = Annotated[float, Meta(ge=0)]
_Ranks = Annotated[int, Meta(ge=1)]


class Estimate(NamedTuple):
  """A number with its 90 % interval."""

  estimate: _Amount
  low: _Amount
  high: _Amount

  @property
  def deviation(self) -> float:
    return (self.high - self.low) / (2 * _SURE)

  def to_json(self) -> dict[str, float]:
    return self._asdict()


class Cost(msgspec.Struct, frozen=True):
  """Cost of one kind of collective at one level: t = a·α + b·m·β, with (a, b) of
  `jaxpace.costs.alpha_beta`."""

  alpha: Estimate  # seconds
  beta: Estimate  # seconds a byte
  algorithm: Annotated[str, Meta(pattern=f"^({'|'.join(ALGORITHMS)})$")] = RING
  points: tuple[tuple[_Amount, _Amount], ...] = ()  # bytes and seconds as measured, rising
  misfit: float = 0.0  # largest |fitted / measured - 1| over the sizes

  def seconds(self, kind: str, ranks: int, size: float) -> float:
    """Time of a collective of `size` bytes over `ranks` ranks."""
    return seconds(kind, self.algorithm, ranks, size, self.alpha.estimate, self.beta.estimate)


class Level(msgspec.Struct, frozen=True, rename={"name": "level", "costs": "collectives"}):
  """A part of the fabric: what the ranks of one process, of one host or of several hosts exchange
  through."""

  costs: Annotated[dict[str, Cost], Meta(min_length=1)]  # by kind
  name: str = "unnamed"
  ranks: _Ranks | None = None  # most ranks that it joins; None where nothing limits them
  measured: _Ranks | None = None  # ranks it was measured with; None where it was described


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
  for entry in run.plan.get("collectives") or ():
    if entry.get("slot") == collective.slot and entry.get("primitives"):
      return kind_of(entry["primitives"][0])
  return kind_of(collective.name)


def read_fabric(path: str | pathlib.Path) -> MeasuredFabric:
  """Reads what `jaxpace bench` wrote, or a description of a fabric by hand; RunError, if it can't
  be read or is neither."""
  try:
    document = parse(read_bytes(path, LARGEST))
  except FileNotFoundError as error:
    raise RunError(
        f"There is no fabric at {path}: no such file. `jaxpace bench --json {path}` "
        "writes one.") from error
  except OSError as error:
    raise RunError(f"{path} can't be read: {error.strerror or error}.") from error
  except UnreadableError as error:
    raise RunError(f"{path} {error}: give the file that `jaxpace bench --json` wrote.") from error
  version = document.get("schema", SCHEMA)
  if isinstance(version, int) and version > SCHEMA:
    raise RunError(
        f"{path} was written by a newer jaxpace (schema {version}): upgrade jaxpace here.")
  try:
    levels = msgspec.convert([_in_full(level) for level in document["levels"]],
                             Annotated[list[Level], Meta(min_length=1)])
  except (ValueError, AttributeError, KeyError, TypeError) as error:
    why = (in_words(error, _MEANINGS, _LEVELS) if isinstance(error, msgspec.ValidationError)
           else _LEVELS)
    raise RunError(f"{path} describes no fabric: {why}. docs/forecast.md shows the "
                   "format.") from error
  levels.sort(key=lambda level: math.inf if level.ranks is None else level.ranks)
  return MeasuredFabric(tuple(levels), str(path))


def _in_full(level: dict[str, Any]) -> dict[str, Any]:
  """A level with a cost for each kind of collective, and every α and β with its interval."""
  costs = level.get("collectives") or dict.fromkeys(KINDS, level)
  return {**level, "collectives": {
      kind: {**cost, "alpha": _interval(cost.get("alpha")), "beta": _interval(cost.get("beta")),
             "points": sorted((point["bytes"], point["seconds"])
                              for point in cost.get("points") or ())}
      for kind, cost in costs.items()}}


def _interval(value: Any) -> list[Any]:
  return ([value.get(name) for name in Estimate._fields] if isinstance(value, dict)
          else [value] * 3)


def quiet_seconds(fabric: MeasuredFabric, kind: str, size: int, ranks: int) -> float | None:
  """What a collective of so many bytes takes on the fabric with nobody else on it; None where the
  fabric does not say. Read off the measured sizes if it was measured with as many ranks, straight
  between two of them on logarithmic scales; else from α and β."""
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
