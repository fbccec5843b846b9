"""Reads a process's place from all sources: sysfs and procfs, JAX's devices, and what NVIDIA's
management library says, where `nvidia-ml-py` is installed. It is never required.

Source: NVML API reference; `nvidia-ml-py` is its binding, a module called `pynvml`.
"""

from __future__ import annotations

import importlib
import os
import platform
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from jaxpace.core.fields import is_whole
from jaxpace.hosts.locality import cards, host
from jaxpace.hosts.locality.host import Tree
from jaxpace.hosts.locality.types import Device, Gpu, Locality

_MAX_LINKS = 18
_CLOCK = "/sys/devices/system/clocksource/clocksource0"


def read_locality(root: str | os.PathLike[str] = "/", *, process: int | None = None,
                  devices: Iterable[Any] = ()) -> Locality:
  """Reads where this process runs. Missing sources leave fields empty; nothing is an error.

  Args:
    root: folder that stands for "/".
    process: index of this process in its job.
    devices: JAX devices of this process, or anything with their attributes; they are only looked
      at.
  """
  tree = Tree(root)
  environment = os.environ if tree.live else {}
  sources = ["sysfs"] if tree.exists("/sys") else []
  notes: list[str] = []
  gpus, nics = read_gpus(tree), cards.read_nics(tree)
  module = load_nvml() if tree.live else None
  if module is not None:
    driven, notes = driven_gpus(module)
    gpus = _join_nvml(gpus, driven)
    sources.append("nvml")
  gpus = cards.nearest(gpus, nics)
  return Locality(
      process=process,
      hostname=socket.gethostname() if tree.live else tree.text("/etc/hostname"),
      kernel=platform.release() if tree.live else tree.text("/proc/sys/kernel/osrelease"),
      clock_source=tree.text(f"{_CLOCK}/current_clocksource") or None,
      clock_sources=tuple((tree.text(f"{_CLOCK}/available_clocksource") or "").split()),
      huge_pages=tree.match("/sys/kernel/mm/transparent_hugepage/enabled", r"\[(\w+)\]"),
      cpu=host.read_cpu(tree), numa=host.read_numa(tree), cgroup=host.read_cgroup(tree),
      memory_bytes=host.read_memory(tree), allocator=host.read_allocator(tree), gpus=gpus,
      nics=nics, sources=tuple(sources), notes=tuple(notes),
      devices=tuple(_place(describe_device(device), gpus, environment) for device in devices))


def read_gpus(tree: Tree) -> tuple[Gpu, ...]:
  """GPUs and other accelerators on the PCIe bus."""
  everything = list(cards.devices(tree))
  switched = any(cards.is_nvswitch(cls, vendor) for _, _, cls, vendor in everything)
  gpus = []
  for address, directory, cls, vendor in everything:
    if cards.is_accelerator(cls, vendor):
      path = cards.path_of(directory)
      model, uuid = (tree.match(f"/proc/driver/nvidia/gpus/{address}/information",
                                rf"^{name}:[ \t]*(.*\S)") for name in ("Model", "GPU UUID"))
      maker = cards.GPU_VENDORS.get(vendor)
      gpus.append(Gpu(address, model or (f"{maker} GPU" if maker else None), uuid,
                      cards.numa_node(tree, directory), path, cards.switch_of(path),
                      cards.link(tree, directory),
                      interconnect="nvlink" if switched and vendor == cards.NVIDIA else None))
  return tuple(gpus)


def describe_device(device: Any) -> Device:
  """Plain values of a JAX device; what a platform does not have is None."""
  def of(name: str, kind: Any) -> Any:
    try:
      value = getattr(device, name, None)
    except Exception:  # Some plug-ins' devices raise for attributes they don't have.
      return None
    if kind is int:
      return int(value) if is_whole(value) else None
    return value if isinstance(value, kind) else None

  coords = of("coords", (list, tuple))
  return Device(of("id", int), of("device_kind", str), of("platform", str),
                of("process_index", int), of("local_hardware_id", int), of("slice_index", int),
                None if coords is None else tuple(int(c) for c in coords))


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
  return device.replace(gpu=gpu.pci if gpu else None)


def _join_nvml(gpus: tuple[Gpu, ...], others: list[Gpu]) -> tuple[Gpu, ...]:
  known = {gpu.pci: gpu for gpu in gpus}
  for one in others:
    gpu = known.get(one.pci, Gpu(one.pci))
    known[one.pci] = gpu.replace(
        name=one.name or gpu.name, uuid=one.uuid or gpu.uuid, nvlinks=one.nvlinks,
        interconnect=gpu.interconnect if one.nvlinks is None else "nvlink" if one.nvlinks
        else "pcie")
  return tuple(sorted(known.values()))


# What NVML says.

def load_nvml() -> Any | None:
  """The module of `nvidia-ml-py`, initialised; None where it or a driver is missing."""
  try:
    module: Any = importlib.import_module("pynvml")
    module.nvmlInit()
  except Exception:  # ImportError, NVMLError of many kinds, OSError of a broken library
    return None
  return module


def driven_gpus(module: Any) -> tuple[list[Gpu], list[str]]:
  """GPUs by PCI bus id, and what could not be read."""
  gpus, notes = [], []
  for index, (handle, address) in enumerate(_found(module)):
    if address is None:
      notes.append(
          f"The driver's GPU {index} does not answer: is it lost, or not permitted to "
          "this process?")
      continue
    gpus.append(Gpu(address,
                    _text(_ask(module.nvmlDeviceGetName, handle)),
                    _text(_ask(module.nvmlDeviceGetUUID, handle)), nvlinks=_links(module, handle)))
  return gpus, notes


Gauges = Callable[[], tuple[float | None, float | None]]
"""Reads the lowest SM clock in MHz, and the mean power in W; None where no GPU says."""


def gauges_of(module: Any, wanted: Collection[str] = ()) -> Gauges:
  """Makes what reads the GPUs with these PCI bus ids; all of them if none is given."""
  handles = [handle for handle, address in _found(module)
             if address is not None and (not wanted or address in wanted)]

  def read() -> tuple[float | None, float | None]:
    clocks = [_ask(module.nvmlDeviceGetClockInfo, handle, module.NVML_CLOCK_SM)
              for handle in handles]
    powers = [_ask(module.nvmlDeviceGetPowerUsage, handle) for handle in handles]
    known = [power / 1e3 for power in powers if power is not None]
    return (min((float(clock) for clock in clocks if clock is not None), default=None),
            sum(known) / len(known) if known else None)

  return read


def bus_id(text: str) -> str:
  """A PCI bus id as sysfs writes it.

  >>> bus_id("00000000:3B:00.0")
  '0000:3b:00.0'
  """
  domain, colon, rest = text.strip().lower().partition(":")
  return (f"{domain[-4:]}:{rest}" if colon and len(domain) == 8 and domain.startswith("0000")
          else text.strip().lower())


def _found(module: Any) -> Iterator[tuple[Any, str | None]]:
  """Each GPU's handle and bus id; None where it does not answer."""
  for index in range(_ask(module.nvmlDeviceGetCount) or 0):
    handle = _ask(module.nvmlDeviceGetHandleByIndex, index)
    info = _ask(module.nvmlDeviceGetPciInfo, handle) if handle is not None else None
    yield handle, None if info is None else bus_id(_text(info.busId) or "")


def _links(module: Any, handle: Any) -> int | None:
  states = [_ask(module.nvmlDeviceGetNvLinkState, handle, link) for link in range(_MAX_LINKS)]
  return None if all(state is None for state in states) else sum(1 for state in states if state)


def _ask(function: Any, *arguments: Any) -> Any:
  try:
    return function(*arguments)
  except Exception:  # NVMLError: not supported, no permission, GPU is lost
    return None


def _text(value: Any) -> str | None:
  """Older bindings return bytes."""
  return value.decode(errors="replace") if isinstance(value, bytes) else value
