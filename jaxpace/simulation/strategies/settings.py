"""One config object a strategy; a field that is wrong is named, with what it may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpace.core.fields import SettingsError, choice, number, truth, whole

CODECS = ("fp16", "int8", "top_k")
MAX_STALENESS, MAX_EVERY, MAX_RANKS = 10_000, 1_000_000, 65_536


@dataclasses.dataclass(frozen=True)
class Synchronous:
  """Every step all ranks wait for all gradients, averaged by a ring all-reduce."""

  def check(self, ranks: int) -> None:
    """Raises a SettingsError if the strategy is impossible with so many ranks."""
    _ranks(ranks)


@dataclasses.dataclass(frozen=True)
class BoundedStaleness:
  """Stale synchronous parallel: no rank begins a step before all have ended the one `staleness` + 1
  before it.

  Parameters lie in shards on the ranks: a step sends and fetches as much as a ring all-reduce. (Ho
  et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013.)

  Attributes:
    staleness: steps by which a rank may be ahead of the slowest; 0 is synchronous, None without
      limit.
  """

  staleness: int | None = 3

  def __post_init__(self) -> None:
    if self.staleness is not None:
      whole("staleness", self.staleness, 0, MAX_STALENESS, more=", or None for no limit")

  def check(self, ranks: int) -> None:
    """Raises a SettingsError if the strategy is impossible with so many ranks."""
    _ranks(ranks)


@dataclasses.dataclass(frozen=True)
class ParameterServer:
  """Asynchronous: each rank sends its gradient to servers, which take one after the other, and gets
  new parameters.

  (Dean et al., "Large scale distributed deep networks", 2012.)

  Attributes:
    servers: over which the parameters are spread, each with a link of the cluster's `server_rate`.
  """

  servers: int = 1

  def __post_init__(self) -> None:
    whole("servers", self.servers, 1, MAX_RANKS)

  def check(self, ranks: int) -> None:
    """Raises a SettingsError if the strategy is impossible with so many ranks."""
    _ranks(ranks)


@dataclasses.dataclass(frozen=True)
class LocalSteps:
  """Local SGD, DiLoCo: every rank trains by itself for `every` steps; then what they have moved by
  is averaged.

  The outer step is Nesterov's on that average; rate 1 and momentum 0 set all parameters to their
  mean, local SGD (Stich, "Local SGD converges fast and communicates little", 2019). DiLoCo has 0.7
  and 0.9, and AdamW inside (Douillard et al., "DiLoCo: Distributed low-communication training of
  language models", 2023).

  Attributes:
    every: steps from one exchange to the next; 1 is synchronous.
    outer_rate: of the outer step.
    outer_momentum: of the outer step.
  """

  every: int = 8
  outer_rate: float = 1.0
  outer_momentum: float = 0.0

  def __post_init__(self) -> None:
    whole("every", self.every, 1, MAX_EVERY)
    number("outer_rate", self.outer_rate, 1e-6, 10)
    number("outer_momentum", self.outer_momentum, 0, 0.999)

  def check(self, ranks: int) -> None:
    """Raises a SettingsError if the strategy is impossible with so many ranks."""
    _ranks(ranks)


@dataclasses.dataclass(frozen=True)
class Backup:
  """The first `wait_for` gradients of a step count, the others are dropped and their ranks go on
  with the next step.

  (Chen et al., "Revisiting distributed synchronous SGD", 2016.)

  Attributes:
    wait_for: ranks whose gradients count; all of them is synchronous.
  """

  wait_for: int

  def __post_init__(self) -> None:
    whole("wait_for", self.wait_for, 1, MAX_RANKS)

  def check(self, ranks: int) -> None:
    """Raises a SettingsError if the strategy is impossible with so many ranks."""
    _ranks(ranks)
    whole("wait_for", self.wait_for, 1, ranks, more=f" (there are {ranks} ranks)")


@dataclasses.dataclass(frozen=True)
class Compressed:
  """Synchronous, with smaller messages; what a message leaves out is added to the next one (error
  feedback).

  Attributes:
    codec: "fp16", "int8" or "top_k".
    keep: share of a gradient's elements that top_k sends.
    error_feedback: whether what was left out is kept for the next step.
    passes: over the whole gradient, of reading and writing it at the cluster's `codec_rate`, that
      encoding and decoding take; None for 2 (fp16), 4 (int8: its sum is encoded again) or 8 (top_k:
      selection by radix): assumed, not measured.
  """

  codec: str
  keep: float = 0.01
  error_feedback: bool = True
  passes: float | None = None

  def __post_init__(self) -> None:
    choice("codec", self.codec, CODECS)
    number("keep", self.keep, 1e-9, 1)
    truth("error_feedback", self.error_feedback)
    if self.passes is not None:
      number("passes", self.passes, 0, 1000)

  def check(self, ranks: int) -> None:
    """Raises a SettingsError if the strategy is impossible with so many ranks."""
    _ranks(ranks)


Strategy = Synchronous | BoundedStaleness | ParameterServer | LocalSteps | Backup | Compressed
STRATEGIES: dict[str, type[Any]] = {
    "synchronous": Synchronous, "bounded_staleness": BoundedStaleness,
    "parameter_server": ParameterServer, "local_steps": LocalSteps, "backup": Backup,
    "compressed": Compressed}
"""By the name they have in a config."""


def read(config: Mapping[str, Any]) -> Strategy:
  """Reads a strategy from a dict: its name as `kind`, and its fields.

  Raises:
    SettingsError: the kind or a field is unknown, missing or out of range.

  >>> read({"kind": "backup", "wait_for": 60})
  Backup(wait_for=60)
  """
  fields = dict(config)
  kind = choice("kind", fields.pop("kind", None), STRATEGIES)
  declared = {field.name: field for field in dataclasses.fields(STRATEGIES[kind])}
  for name in fields:
    if name not in declared:
      raise SettingsError(
          f"{name} is no field of {kind}; there are {', '.join(declared) or 'none'}.")
  for name, field in declared.items():
    if field.default is dataclasses.MISSING and name not in fields:
      raise SettingsError(f"{name} is missing: {kind} needs it.")
  strategy: Strategy = STRATEGIES[kind](**fields)
  return strategy


def _ranks(ranks: int) -> None:
  whole("ranks", ranks, 1, MAX_RANKS)
