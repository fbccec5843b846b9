"""What a section of the GPU checks is given, and what it leaves: figures, checks, notes."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from experiments.lib.paired import Estimate
from jaxpace.observation.clocks import Clock, resolve_clock


@dataclasses.dataclass
class Bench:
  """One section's circumstances and results.

  Attributes:
    platform: of the devices, as in `jax.devices(platform)`.
    clock: name of the clock under test.
    size: "full", "quick" (fewer repetitions), or "tiny" (models and repetitions for tests on CPU).
    limit_s: seconds the section may take; it measures less often where that is short.
    out: file the results are kept in as they come, for when it is ended before time; None for none.
  """

  platform: str = "gpu"
  clock: str = "stream"
  size: str = "full"
  limit_s: float = 120.0
  out: pathlib.Path | None = None
  figures: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)
  offsets: list[list[float]] = dataclasses.field(default_factory=list)
  raw: dict[str, Any] = dataclasses.field(default_factory=dict)
  started: float = dataclasses.field(default_factory=time.monotonic)

  # Where it runs.

  def device(self) -> jax.Device:
    return jax.devices(self.platform)[0]

  def mesh(self) -> Mesh:
    return jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=[self.device()])

  def timer(self, name: str | None = None) -> Clock:
    """The clock under test, or another one by name."""
    return resolve_clock(name or self.clock, self.platform)

  def left_s(self) -> float:
    return max(0.0, self.limit_s - (time.monotonic() - self.started))

  def times(self, full: int, quick: int, tiny: int) -> int:
    """A number of repetitions by size."""
    return {"full": full, "quick": quick, "tiny": tiny}[self.size]

  # What it leaves.

  def say(self, text: str) -> None:
    print(f"  {time.monotonic() - self.started:6.1f} s  {text}", flush=True)

  def note(self, text: str) -> None:
    self.notes.append(text)
    self.say(text)

  def figure(self, name: str, value: Any, unit: str = "") -> None:
    """Keeps a number, an `Estimate` or a word."""
    self.figures.append({"name": name, "value": plain(value), "unit": unit})
    self._keep()
    self.say(f"{name}: {shown(plain(value))} {unit}".rstrip())

  def at_most(self, name: str, value: Any, limit: float, unit: str) -> None:
    """Checks that a figure (of an `Estimate`: its value) is at most a limit. NaN is not."""
    middle = value.value if isinstance(value, Estimate) else float(value)
    self._check(name, value, f"<= {limit:g}", unit, bool(middle <= limit))

  def holds(self, name: str, truth: bool, seen: Any = "") -> None:
    """Checks a sentence, with what was seen."""
    self._check(name, seen, "", "", bool(truth))

  def within(self, name: str, seconds: float, wanted: float, least: float = 5e-6,
             share: float = 0.05) -> None:
    """Checks a time against the true one: within `least` seconds or `share` of it, whichever is
    more."""
    error = abs(seconds - wanted)
    allowed = max(least, share * abs(wanted))
    self._check(name, f"{seconds * 1e6:.6g} (off by {(seconds - wanted) * 1e6:+.3g})",
                f"{wanted * 1e6:g} ± {allowed * 1e6:g}", "us", bool(error <= allowed))

  def _check(self, name: str, value: Any, limit: str, unit: str, passed: bool) -> None:
    self.checks.append({"name": name, "value": plain(value), "unit": unit, "limit": limit,
                        "passed": passed})
    self._keep()
    self.say(f"{'passed' if passed else 'FAILED'}  {name}: {shown(plain(value))} {unit}"
             + (f"  (wanted {limit})" if limit else ""))

  def _keep(self) -> None:
    if self.out is not None:
      self.out.write_text(json.dumps(self.to_json()))

  def to_json(self) -> dict[str, Any]:
    return {"platform": self.platform, "clock": self.clock, "size": self.size,
            "seconds": round(time.monotonic() - self.started, 1), "figures": self.figures,
            "checks": self.checks, "notes": self.notes, "offsets": self.offsets,
            **({"raw": self.raw} if self.raw else {})}


def plain(value: Any) -> Any:
  """A value as JSON knows it: numbers that are not finite become words."""
  if isinstance(value, Estimate):
    return [plain(part) for part in (value.value, value.low, value.high)]
  if isinstance(value, (bool, np.bool_)):
    return bool(value)
  if isinstance(value, (int, np.integer)):
    return int(value)
  if isinstance(value, (float, np.floating)):
    return float(f"{float(value):.6g}") if math.isfinite(value) else str(float(value))
  if isinstance(value, (list, tuple)):
    return [plain(part) for part in value]
  return str(value)


def shown(value: Any) -> str:
  """A plain value in a line: a figure with its interval in brackets.

  >>> shown([1.25, 1.0, 1.5]), shown(0.5), shown("yes")
  ('1.25 [1, 1.5]', '0.5', 'yes')
  """
  if isinstance(value, list) and len(value) == 3 and all(isinstance(part, float) for part in value):
    return f"{value[0]:.4g} [{value[1]:.4g}, {value[2]:.4g}]"
  if isinstance(value, float):
    return f"{value:.4g}"
  if isinstance(value, list):
    return ", ".join(shown(part) for part in value)
  return str(value)
