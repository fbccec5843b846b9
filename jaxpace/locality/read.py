"""Reads a process's place from all sources and joins them."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from jaxpace.locality import cgroup, host, nccl_topology, nics, nvml, pci
from jaxpace.locality.tree import Tree
from jaxpace.locality.types import Device, Gpu, Link, Locality, Nic


def read_locality(root: str | os.PathLike[str] = "/", *, process: int | None = None, devices: Iterable[Any] = (),
                  topology: str | None = None, environment: Mapping[str, str] | None = None) -> Locality:
  """Reads where this process runs. Missing sources leave fields empty; nothing but the topology file is an error.

  Args:
    root: folder that stands for "/".
    process: index of this process in its job.
    devices: JAX devices of this process, or anything with their attributes; they are only looked at.
    topology: NCCL topology file; what it says of GPUs and NICs goes before what sysfs says.
    environment: variables such as CUDA_VISIBLE_DEVICES; None takes this process's own, or none for another root.

  Raises:
    nccl_topology.TopologyError: the topology file can't be read or is another document.
  """
  tree = Tree(root)
  environment = (os.environ if tree.live else {}) if environment is None else environment
  described = nccl_topology.read_topology(topology) if topology else None
  sources = ["sysfs"] if tree.exists("/sys") else []
  notes: list[str] = []
  gpus, found = read_gpus(tree), nics.read_nics(tree)
  module = nvml.load() if tree.live else None
  if module is not None:
    told, notes = nvml.read_gpus(module)
    gpus = _join_nvml(gpus, told)
    sources.append("nvml")
  if described:
    gpus, found = _join_gpus(gpus, described.gpus), _join_nics(found, described.nics)
    sources.append("topology file")
  gpus = nics.nearest(gpus, found)
  clock, clocks = host.read_clock(tree)
  return Locality(
      process=process,
      hostname=socket.gethostname() if tree.live else tree.text("/etc/hostname"),
      kernel=platform.release() if tree.live else tree.text("/proc/sys/kernel/osrelease"),
      cpu=host.read_cpu(tree), numa=host.read_numa(tree), cgroup=cgroup.read_cgroup(tree),
      memory_bytes=host.read_memory(tree), clock_source=clock, clock_sources=clocks,
      huge_pages=host.read_huge_pages(tree), allocator=host.read_allocator(tree), gpus=gpus, nics=found,
      devices=tuple(_place(describe_device(d), gpus, environment) for d in devices),
      sources=tuple(sources), notes=tuple(notes))


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
      gpus.append(Gpu(device.address, facts.get("Model") or (f"{vendor} GPU" if vendor else None),
                      facts.get("GPU UUID"), pci.numa_node(tree, device.directory), path, pci.switch_of(path),
                      pci.link(tree, device.directory), interconnect="nvlink" if switched and vendor else None))
  return tuple(gpus)


def describe_device(device: Any) -> Device:
  """Plain values of a JAX device; what a platform does not have is None."""
  coords = _get(device, "coords")
  return Device(_whole(_get(device, "id")), _word(_get(device, "device_kind")), _word(_get(device, "platform")),
                _whole(_get(device, "process_index")), _whole(_get(device, "local_hardware_id")),
                _whole(_get(device, "slice_index")),
                tuple(int(c) for c in coords) if isinstance(coords, (list, tuple)) else None)


def visible(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[Gpu | None, ...]:
  """GPUs in the order CUDA numbers them, None for one that can't be told.

  Args:
    gpus: all of the host, in the order of their bus ids; CUDA takes the same order among GPUs of one kind.
    setting: CUDA_VISIBLE_DEVICES; None where it is not set.
  """
  if setting is None:
    return gpus
  chosen: list[Gpu | None] = []
  for piece in filter(None, (word.strip() for word in setting.split(","))):
    if piece.isdigit():
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


def _join_nvml(gpus: tuple[Gpu, ...], told: list[nvml.NvmlGpu]) -> tuple[Gpu, ...]:
  known = {gpu.pci: gpu for gpu in gpus}
  for one in told:
    gpu = known.get(one.pci, Gpu(one.pci))
    known[one.pci] = gpu._replace(
        name=one.name or gpu.name, uuid=one.uuid or gpu.uuid, nvlinks=one.nvlinks,
        interconnect=gpu.interconnect if one.nvlinks is None else "nvlink" if one.nvlinks else "pcie")
  return tuple(sorted(known.values()))


def _join_gpus(gpus: tuple[Gpu, ...], described: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
  known = {gpu.pci: gpu for gpu in gpus}
  for one in described:
    gpu = known.get(one.pci, Gpu(one.pci))
    known[one.pci] = gpu._replace(
        numa_node=gpu.numa_node if one.numa_node is None else one.numa_node, path=one.path, switch=one.switch,
        link=_join_link(gpu.link, one.link), nvlinks=gpu.nvlinks if one.nvlinks is None else one.nvlinks,
        interconnect=one.interconnect)
  # One kind of path, so that the GPUs can be compared with the NICs: those the file does not name have none.
  named = {one.pci for one in described}
  return tuple(gpu if gpu.pci in named else gpu._replace(path=()) for gpu in sorted(known.values()))


def _join_nics(found: tuple[Nic, ...], described: tuple[Nic, ...]) -> tuple[Nic, ...]:
  known = {nic.name: nic for nic in found}
  for one in described:
    nic = known.get(one.name)
    known[one.name] = one if nic is None else nic._replace(
        rate_gbps=one.rate_gbps or nic.rate_gbps, pci=one.pci or nic.pci, path=one.path, switch=one.switch,
        numa_node=nic.numa_node if one.numa_node is None else one.numa_node, link=_join_link(nic.link, one.link))
  named = {one.name for one in described}
  return tuple(nic if nic.name in named else nic._replace(path=()) for nic in known.values())


def _join_link(known: Link, described: Link) -> Link:
  """A file's link is what was negotiated; what the device and the slot could do only sysfs knows."""
  return known._replace(speed=known.speed or described.speed, width=known.width or described.width)


def _get(device: Any, name: str) -> Any:
  try:
    return getattr(device, name, None)
  except Exception:  # Some plug-ins' devices raise for attributes they don't have.
    return None


def _whole(value: Any) -> int | None:
  return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _word(value: Any) -> str | None:
  return value if isinstance(value, str) else None
