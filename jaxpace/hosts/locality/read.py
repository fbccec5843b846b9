"""Reads a process's place from all sources and joins them."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from jaxpace.core.fields import is_whole
from jaxpace.hosts.locality import host, join, nics, nvml, pci, topology_file
from jaxpace.hosts.locality.tree import Tree
from jaxpace.hosts.locality.types import Device, Gpu, Locality


def read_locality(root: str | os.PathLike[str] = "/", *, process: int | None = None,
                  devices: Iterable[Any] = (), topology: str | None = None,
                  environment: Mapping[str, str] | None = None) -> Locality:
  """Reads where this process runs. Missing sources leave fields empty; nothing but the topology
  file is an error.

  Args:
    root: folder that stands for "/".
    process: index of this process in its job.
    devices: JAX devices of this process, or anything with their attributes; they are only looked
      at.
    topology: file that describes the PCI tree: NCCL's XML, or the output of `nvidia-smi topo -m`.
      It adds to what the machine shows; on a machine without GPUs it alone is shown.
    environment: variables such as CUDA_VISIBLE_DEVICES; None takes this process's own, or none for
      another root.

  Raises:
    topology_file.TopologyError: the topology file can't be read or is another document.
  """
  tree = Tree(root)
  environment = (os.environ if tree.live else {}) if environment is None else environment
  described = topology_file.read_topology(topology) if topology else None
  sources = ["sysfs"] if tree.exists("/sys") else []
  notes: list[str] = []
  gpus, found = read_gpus(tree), nics.read_nics(tree)
  module = nvml.load() if tree.live else None
  if module is not None:
    described_gpus, notes = nvml.read_gpus(module)
    gpus = _join_nvml(gpus, described_gpus)
    sources.append("nvml")
  numa = host.read_numa(tree)
  joined = join.JoinedCards(gpus, found)
  name = topology_file.read_name(os.path.basename(topology or "")) or "the file"
  if described:
    joined = join.join(gpus, found, described, name, len(numa))
    if joined.ignored is None:
      sources.append("topology file")
  gpus, found = nics.nearest(joined.gpus, joined.nics, joined.distances), joined.nics
  used = (joined.used,) if joined.used else ()
  if described and joined.alone:
    # Nothing of this machine's processors and limits belongs to the cards.
    return Locality(process=process, hostname=name, numa=described.numa, gpus=gpus, nics=found,
                    sources=("topology file",), topology_used=used)
  clock, clocks = host.read_clock(tree)
  return Locality(
      process=process,
      hostname=socket.gethostname() if tree.live else tree.text("/etc/hostname"),
      kernel=platform.release() if tree.live else tree.text("/proc/sys/kernel/osrelease"),
      cpu=host.read_cpu(tree), numa=numa, cgroup=host.read_cgroup(tree),
      memory_bytes=host.read_memory(tree), clock_source=clock, clock_sources=clocks,
      huge_pages=host.read_huge_pages(tree), allocator=host.read_allocator(tree), gpus=gpus,
      nics=found, devices=tuple(_place(describe_device(d), gpus, environment) for d in devices),
      sources=tuple(sources), notes=tuple(notes), topology_used=used,
      topology_ignored=joined.ignored)


def read_gpus(tree: Tree) -> tuple[Gpu, ...]:
  """GPUs and other accelerators on the PCIe bus."""
  everything = list(pci.devices(tree))
  switched = any(pci.is_nvswitch(device) for device in everything)
  gpus = []
  for device in everything:
    if pci.is_accelerator(device):
      path = pci.path_of(device.directory)
      information = tree.text(f"/proc/driver/nvidia/gpus/{device.address}/information") or ""
      lines = [line.partition(":") for line in information.splitlines()]
      facts = {key.strip(): value.strip() for key, _, value in lines}
      vendor = pci.vendor_name(device)
      interconnect = "nvlink" if switched and pci.is_nvidia(device) else None
      gpus.append(Gpu(device.address, facts.get("Model") or (f"{vendor} GPU" if vendor else None),
                      facts.get("GPU UUID"), pci.numa_node(tree, device.directory), path,
                      pci.switch_of(path), pci.link(tree, device.directory),
                      interconnect=interconnect))
  return tuple(gpus)


def describe_device(device: Any) -> Device:
  """Plain values of a JAX device; what a platform does not have is None."""
  coords = _get(device, "coords")
  return Device(_whole(_get(device, "id")), _word(_get(device, "device_kind")),
                _word(_get(device, "platform")), _whole(_get(device, "process_index")),
                _whole(_get(device, "local_hardware_id")), _whole(_get(device, "slice_index")),
                tuple(int(c) for c in coords) if isinstance(coords, (list, tuple)) else None)


def visible(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[Gpu | None, ...]:
  """GPUs in the order CUDA numbers them, None for an unknown one.

  Args:
    gpus: all of the host, in the order of their bus ids; CUDA takes the same order among GPUs of
      one kind.
    setting: CUDA_VISIBLE_DEVICES; None where it is not set.
  """
  if setting is None:
    return gpus
  chosen: list[Gpu | None] = []
  for piece in filter(None, (word.strip() for word in setting.split(","))):
    if piece.isdecimal():
      chosen.append(gpus[int(piece)] if int(piece) < len(gpus) else None)
    else:
      matching = [gpu for gpu in gpus if gpu.uuid and gpu.uuid.lower().startswith(piece.lower())]
      chosen.append(matching[0] if len(matching) == 1 else None)
  return tuple(chosen)


def _place(device: Device, gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> Device:
  number = device.local_hardware_id
  if device.platform not in ("gpu", "cuda", "rocm") or number is None:
    return device
  name = "HIP_VISIBLE_DEVICES" if device.platform == "rocm" else "CUDA_VISIBLE_DEVICES"
  order = visible(gpus, environment.get(name))
  gpu = order[number] if 0 <= number < len(order) else None
  return device._replace(gpu=gpu.pci if gpu else None)


def _join_nvml(gpus: tuple[Gpu, ...], others: list[Gpu]) -> tuple[Gpu, ...]:
  known = {gpu.pci: gpu for gpu in gpus}
  for one in others:
    gpu = known.get(one.pci, Gpu(one.pci))
    known[one.pci] = gpu._replace(
        name=one.name or gpu.name, uuid=one.uuid or gpu.uuid, nvlinks=one.nvlinks,
        interconnect=gpu.interconnect if one.nvlinks is None else "nvlink" if one.nvlinks
        else "pcie")
  return tuple(sorted(known.values()))


def _get(device: Any, name: str) -> Any:
  try:
    return getattr(device, name, None)
  except Exception:  # Some plug-ins' devices raise for attributes they don't have.
    return None


def _whole(value: Any) -> int | None:
  return int(value) if is_whole(value) else None


def _word(value: Any) -> str | None:
  return value if isinstance(value, str) else None
