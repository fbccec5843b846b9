"""Fixtures of GPUs and NICs, put into a recorded run's `locality/<process>.json`: the lab's machine
has neither.

A host has two sockets. Every rank has a GPU; its NIC hangs on the same PCIe switch, or, where the
rank is misplaced, on the other socket. Hosts of several ranks hold the first half of them on socket
0.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import msgspec

from experiments.labs.faults.spec import Spec, layout
from jaxpace.files.plain import to_plain
from jaxpace.hosts.locality.types import Cpu, Gpu, Link, Locality, Nic, NumaNode

_SWITCHED = Link(32.0, 16, 32.0, 16, 32.0, 16)


def place(known: Locality, ranks: Sequence[int], misplaced: Sequence[int]) -> Locality:
  """A process's place with GPUs and NICs put in.

  Args:
    known: what was read of the real machine; host name, process and devices are kept.
    ranks: of this process, in the order of its devices.
    misplaced: ranks of the job whose GPU sits across the socket from its NIC.
  """
  gpus, nics = [], []
  for slot, rank in enumerate(ranks):
    socket = 2 * slot // len(ranks) if len(ranks) > 1 else 0
    far = rank in misplaced
    bus, other = 0x10 + 0x10 * slot, socket if not far else 1 - socket
    switch = f"0000:{bus:02x}:01.0"
    path = (f"pci0000:{bus:02x}", switch)
    nic_path = (f"pci0000:{bus + 8:02x}", f"0000:{bus + 8:02x}:01.0") if far else path
    gpus.append(Gpu(pci=f"0000:{bus + 2:02x}:00.0", name="NVIDIA H100 80GB HBM3",
                    uuid=f"GPU-{rank:02d}", numa_node=socket,
                    path=(*path, f"0000:{bus + 2:02x}:00.0"), switch=switch, link=_SWITCHED,
                    nvlinks=18, interconnect="nvlink", nic=f"mlx5_{slot}",
                    nic_distance="SYS" if far else "PIX"))
    nic = f"0000:{bus + (9 if far else 3):02x}:00.0"
    nics.append(Nic(name=f"mlx5_{slot}", kind="infiniband", interfaces=(f"ib{slot}",), pci=nic,
                    rate_gbps=400.0, up=True, numa_node=other, path=(*nic_path, nic),
                    switch=nic_path[1], link=_SWITCHED))
  devices = tuple(device.replace(gpu=gpu.pci)
                  for device, gpu in zip(known.devices, gpus, strict=True))
  cpu = Cpu("Intel(R) Xeon(R) Platinum 8480C", "0-111", "0-111", ("0-55", "56-111"))
  numa = (NumaNode(0, "0-55", 1 << 40), NumaNode(1, "56-111", 1 << 40))
  return known.replace(cpu=cpu, numa=numa, gpus=tuple(gpus), nics=tuple(nics), devices=devices,
                        memory_bytes=2 << 40)


def write(path: pathlib.Path, spec: Spec, process: int, ranks: Sequence[int]) -> None:
  """Puts the fixture of a run into what the recorder wrote of this process."""
  document = json.loads(path.read_text())
  assert tuple(ranks) == layout(spec.layout).ranks_of(process)
  found = place(msgspec.convert(document, Locality), ranks, spec.misplaced or ())
  path.write_text(json.dumps({"run": document["run"], **to_plain(found)}, indent=1) + "\n")
