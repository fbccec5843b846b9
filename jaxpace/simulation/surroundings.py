"""What a recorded run has beside its tables, of a simulated fabric: the processes' places, and what
transfers take.

Places are as `jaxpace doctor` would read them: a GPU hangs next to its network card, or, where its
path is slow, on the other socket. The floor is what `jaxpace bench` would measure on that fabric
were it healthy and quiet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxpace.costs import alpha_beta
from jaxpace.costs.fabric_file import SCHEMA
from jaxpace.hosts.locality.types import Cpu, Device, Gpu, Locality, Nic, NumaNode
from jaxpace.simulation.fabric import Fabric

SIMULATED = "simulated"
"""Kind of the document of a floor that nobody measured."""
_POINTS = 4
_LEAST = 1024.0


def place(fabric: Fabric, process: int, ranks: Sequence[int]) -> Locality:
  """Where a process runs.

  Args:
    fabric: simulated.
    process: its number in the job.
    ranks: of the fabric that are its own, all of one node.
  """
  node = ranks[0] // fabric.per_node
  nics = tuple(Nic(name=f"mlx5_{card}", kind="infiniband", pci=f"0000:{0x10 + card:02x}:00.0",
                   up=True, rate_gbps=fabric.card_rate * 8e-9,
                   numa_node=_socket(card, fabric.cards))
               for card in range(fabric.cards))
  gpus = []
  for slot in range(fabric.per_node):
    card = slot * fabric.cards // fabric.per_node
    far = node * fabric.per_node + slot in fabric.slow_paths
    beside = _socket(card, fabric.cards)
    gpus.append(Gpu(pci=f"0000:{0x80 + slot:02x}:00.0", name="simulated",
                    numa_node=1 - beside if far else beside, interconnect="nvlink",
                    nic=f"mlx5_{card}", nic_distance="SYS" if far else "PIX"))
  devices = tuple(Device(id=rank, kind="simulated", platform="gpu", process=process,
                         local_hardware_id=rank % fabric.per_node,
                         gpu=gpus[rank % fabric.per_node].pci)
                  for rank in ranks)
  return Locality(process=process, hostname=f"node{node}",
                  cpu=Cpu("simulated", "0-63", "0-63", ("0-31", "32-63")),
                  numa=(NumaNode(0, "0-31"), NumaNode(1, "32-63")), gpus=tuple(gpus), nics=nics,
                  devices=devices)


def _socket(card: int, cards: int) -> int:
  return 2 * card // cards if cards > 1 else 0


def quiet(fabric: Fabric, seconds: Callable[[Fabric, float], float], ranks: int,
          size: float) -> dict[str, Any]:
  """The document of `jaxpace bench`, of all-reduces over a job's ranks on the fabric without its
  slow paths.

  Args:
    fabric: simulated.
    seconds: of an all-reduce of so many bytes on a fabric.
    ranks: of the job.
    size: bytes of its largest all-reduce.
  """
  healthy = dataclasses.replace(fabric, slow_paths={})
  sizes = sorted({max(1.0, round(max(size, _LEAST) / 4**i)) for i in range(_POINTS)})
  took = [seconds(healthy, each) for each in sizes]
  a, b = alpha_beta.coefficients(alpha_beta.ALL_REDUCE, alpha_beta.RING, ranks)
  beta = max((took[-1] - took[0]) / (sizes[-1] - sizes[0]) / b, 0.0) if b else 0.0
  alpha = max((took[0] - b * sizes[0] * beta) / a, 0.0) if a else 0.0
  return {"schema": SCHEMA, "kind": SIMULATED, "levels": [
      {"level": "simulated fabric", "ranks": None, "measured": ranks,
       "collectives": {alpha_beta.ALL_REDUCE: {
           "algorithm": alpha_beta.RING, "alpha": alpha, "beta": beta, "points": [
               {"bytes": round(each), "seconds": value}
               for each, value in zip(sizes, took, strict=True)]}}}]}
