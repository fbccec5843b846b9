"""What a synchronisation strategy makes of a simulated job: what it sends, how long for, and in
which steps.

Synchronous, compressed: a step like any other, its messages smaller, encoding and decoding in its
update. Local steps: a step is a round of them, with one exchange. Backup: a step ends with the
first ranks. Bounded staleness, parameter servers: no step is the job's, each rank has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.fields import SettingsError
from jaxpace.simulation import schedules
from jaxpace.simulation.fabric import Fabric
from jaxpace.simulation.schedules import Load, MessageRound
from jaxpace.simulation.strategies.cluster import Cluster, coding, wire_bytes
from jaxpace.simulation.strategies.settings import (
    Backup,
    BoundedStaleness,
    Compressed,
    LocalSteps,
    ParameterServer,
    Strategy,
    Synchronous,
    read,
)


class Sent(NamedTuple):
  """What an exchange is on a fabric."""

  bucket: Load  # one bucket of the gradients
  coding: float  # s of encoding and decoding


def read_strategy(at: str, given: Any, ranks: int) -> Strategy:
  """Reads a job's strategy.

  Raises:
    SettingsError: it is none, or impossible with so many ranks.
  """
  if given is None:
    return Synchronous()
  if isinstance(given, str):
    given = {"kind": given}
  if not hasattr(given, "items"):
    raise SettingsError(
        f"{at}={given!r} must be a dict with a kind, such as {{'kind': 'local_steps', "
        f"'every': 8}}.")
  try:
    strategy = read(given)
    strategy.check(ranks)
  except SettingsError as error:
    raise SettingsError(f"{at}.{error}") from error
  return strategy


def own_steps(strategy: Strategy) -> bool:
  """Whether ranks go their own ways, so that there is no step of the job."""
  return isinstance(strategy, (BoundedStaleness, ParameterServer))


def local(strategy: Strategy) -> int:
  """Steps of compute in a step of the job."""
  return strategy.every if isinstance(strategy, LocalSteps) else 1


def wait_for(strategy: Strategy) -> int:
  """Ranks that a step waits for; 0 for all."""
  return strategy.wait_for if isinstance(strategy, Backup) else 0


def sent(strategy: Strategy, algorithm: str, members: Sequence[int], fabric: Fabric, size: float,
         buckets: int, codec_rate: float) -> Sent:
  """What a strategy's exchange takes on a fabric that carries nothing else.

  Args:
    strategy: which one; top_k goes around a ring whatever the algorithm, P - 1 messages of what was
      kept.
    algorithm: of the all-reduce.
    members: ranks of the fabric.
    fabric: what it runs on.
    size: bytes of the gradients.
    buckets: number of collectives they are sent in.
    codec_rate: B/s of a pass over a gradient that is encoded or decoded.
  """
  packed = strategy if isinstance(strategy, Compressed) else None
  wire = float(wire_bytes(packed, size, len(members))) if packed else size

  def load(bytes_sent: float) -> Load:
    if packed and packed.codec == "top_k":
      at = np.asarray(members)
      around = [MessageRound(at, np.roll(at, -1), bytes_sent, len(at) - 1)] if len(at) > 1 else []
      return schedules.load(around, fabric)
    return schedules.load(schedules.rounds(algorithm, members, bytes_sent, fabric.per_node), fabric)

  coded = float(coding(packed, size, codec_rate, len(members))) if packed else 0.0
  return Sent(load(wire / buckets), coded)


def cluster(fabric: Fabric, members: Sequence[int], compute: float, update: float,
            noise: tuple[Any, ...], size: float) -> Cluster:
  """What ranks that go their own ways run on: their share of a card each, and servers with a card
  each.

  A message takes the latency between the racks of the job. Ranks don't slow each other down but at
  the servers.
  """
  share = fabric.card_rate * fabric.cards / fabric.per_node
  rate = min(share, fabric.path_rate) if fabric.path_rate else share
  rate *= min((factor for rank, factor in fabric.slow_paths.items() if rank in set(members)),
              default=1.0)
  racks = {rank // fabric.per_node // (fabric.rack or fabric.nodes) for rank in members}
  latency = fabric.spine_latency if len(racks) > 1 else fabric.rack_latency
  return Cluster(compute=np.float32(compute), update=np.float32(update), noise=noise,
                 gradient_bytes=np.float32(size), latency=np.float32(latency),
                 rate=np.float32(rate), server_rate=np.float32(fabric.card_rate))


def said(strategy: Strategy, ranks: int) -> list[str]:
  """What a reader of the recorded run must know: sentences."""
  if isinstance(strategy, LocalSteps) and strategy.every > 1:
    return [
        f"Simulated local steps: a recorded step is a round of {strategy.every} steps of compute "
        "and one exchange."]
  if isinstance(strategy, Backup) and strategy.wait_for < ranks:
    return [f"Simulated backup: the collectives wait for {strategy.wait_for} of {ranks} ranks. One "
            "that comes later has no entry in that step, and neither that step nor the next counts "
            "for it."]
  if own_steps(strategy):
    kind = "bounded staleness" if isinstance(strategy, BoundedStaleness) else "parameter servers"
    return [f"Simulated {kind}: ranks don't meet, each has steps of its own. Skew, transfer, "
            "contention, and what-if are not defined; sending, fetching and waiting for a turn is "
            "sync_ns of the steps, here in compute."]
  return []
