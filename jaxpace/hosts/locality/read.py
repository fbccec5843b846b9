"""Reads a process's place from all sources and joins them.

What a topology file says is joined with what the machine itself shows so that the answer is never
worse for the file. Devices are matched by their bus ids. The machine's own tree goes before the
file's where it shows switches. A guest's flat bus shows none; there the file's tree is taken if it
has a place for each of the machine's cards, else not at all: ways of two trees can't be compared.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from jaxpace.core.fields import is_whole
from jaxpace.hosts.locality import host, nvml, pci, topology_file
from jaxpace.hosts.locality.nics import fabric_of, nearest, read_nics
from jaxpace.hosts.locality.topology_file import Described, DevicePlace
from jaxpace.hosts.locality.tree import Tree
from jaxpace.hosts.locality.types import FILE, Device, Gpu, Locality, Nic

Card = TypeVar("Card", Gpu, Nic)


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
    topology: file that describes the PCI tree, NCCL's XML. It adds to what the machine shows; on a
      machine without GPUs it alone is shown.
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
  gpus, nics = read_gpus(tree), read_nics(tree)
  module = nvml.load() if tree.live else None
  if module is not None:
    described_gpus, notes = nvml.read_gpus(module)
    gpus = _join_nvml(gpus, described_gpus)
    sources.append("nvml")
  clock, clocks = host.read_clock(tree)
  place = Locality(
      process=process,
      hostname=socket.gethostname() if tree.live else tree.text("/etc/hostname"),
      kernel=platform.release() if tree.live else tree.text("/proc/sys/kernel/osrelease"),
      cpu=host.read_cpu(tree), numa=host.read_numa(tree), cgroup=host.read_cgroup(tree),
      memory_bytes=host.read_memory(tree), clock_source=clock, clock_sources=clocks,
      huge_pages=host.read_huge_pages(tree), allocator=host.read_allocator(tree), gpus=gpus,
      nics=nics, sources=tuple(sources), notes=tuple(notes))
  if described is None:
    place = place.replace(gpus=nearest(gpus, nics))
  else:
    name = topology_file.read_name(os.path.basename(topology or "")) or "the file"
    place = join(place, described, name)
  if place.sources == (FILE,):
    return place
  return place.replace(
      devices=tuple(_place(describe_device(d), place.gpus, environment) for d in devices))


def read_gpus(tree: Tree) -> tuple[Gpu, ...]:
  """GPUs and other accelerators on the PCIe bus."""
  everything = list(pci.devices(tree))
  switched = any(pci.is_nvswitch(cls, vendor) for _, _, cls, vendor in everything)
  gpus = []
  for address, directory, cls, vendor in everything:
    if pci.is_accelerator(cls, vendor):
      path = pci.path_of(directory)
      information = tree.text(f"/proc/driver/nvidia/gpus/{address}/information") or ""
      lines = [line.partition(":") for line in information.splitlines()]
      facts = {key.strip(): value.strip() for key, _, value in lines}
      maker = pci.GPU_VENDORS.get(vendor)
      gpus.append(Gpu(address, facts.get("Model") or (f"{maker} GPU" if maker else None),
                      facts.get("GPU UUID"), pci.numa_node(tree, directory), path,
                      pci.switch_of(path), pci.link(tree, directory),
                      interconnect="nvlink" if switched and vendor == pci.NVIDIA else None))
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


def _get(device: Any, name: str) -> Any:
  try:
    return getattr(device, name, None)
  except Exception:  # Some plug-ins' devices raise for attributes they don't have.
    return None


def _whole(value: Any) -> int | None:
  return int(value) if is_whole(value) else None


def _word(value: Any) -> str | None:
  return value if isinstance(value, str) else None


def join(place: Locality, described: Described, name: str) -> Locality:
  """Joins a machine and a topology file, and gives every GPU its nearest NIC.

  Args:
    place: what the machine shows. Where it has one NUMA node, the file's go before it.
    described: what the file says.
    name: of the file, for sentences.

  Returns:
    The place with what was taken from the file, or why nothing was. Of a machine that shows no GPU:
    the machine that the file describes, to which nothing of this one's processors and limits
    belongs.
  """
  title = f"{name} (NCCL topology)"
  gpus, nics = place.gpus, place.nics
  if not gpus and (described.gpus or described.nics):
    return Locality(
        process=place.process, hostname=name, numa=described.numa,
        gpus=nearest(described.gpus, described.nics),
        nics=described.nics, sources=(FILE,), topology_used=(
            f"This machine shows no GPU: what is shown is the machine that {title} describes.",))
  if why := _of_another_machine(gpus, described):
    return place.replace(gpus=nearest(gpus, nics),
                          topology_ignored=f"Nothing of {title} is used: {why}")
  places = _places(nics, described)
  tree, why = _takes_tree(gpus, nics, places, len(place.numa))
  known = {gpu.pci: gpu for gpu in described.gpus}
  rates = {nic.name: nic.rate_gbps for nic in described.nics}
  nics = tuple(_placed(nic.replace(rate_gbps=nic.rate_gbps or rates.get(nic.name)),
                       places.get(nic.name), tree) for nic in nics)
  gpus = tuple(_placed(_with_links(gpu, known.get(gpu.pci)), places.get(gpu.pci), tree)
               for gpu in gpus)
  used = (f"Of {title} {sum(gpu.pci in places for gpu in gpus)} GPUs and "
          f"{sum(nic.name in places for nic in nics)} NICs are on this machine. {why}")
  return place.replace(gpus=nearest(gpus, nics), nics=nics, sources=(*place.sources, FILE),
                        topology_used=(used,))


def _of_another_machine(gpus: tuple[Gpu, ...], described: Described) -> str | None:
  """Why the file's cards are none of this machine's; None where they are."""
  if not (described.gpus or described.nics or described.unclassed):
    return "it holds no GPU and no NIC. Was it written where the devices could be seen?"
  ids = {gpu.pci for gpu in described.gpus} | {place.pci for place in described.unclassed}
  if ids and not ids & {gpu.pci for gpu in gpus}:
    return ("none of its GPUs' bus ids is one of this machine's. It is of another machine, or of "
            "another type of virtual machine.")
  return None


def _places(nics: tuple[Nic, ...], described: Described) -> dict[str, DevicePlace]:
  """Places by the bus ids of GPUs and the names of the machine's NICs."""
  cards: list[Gpu | Nic] = [*described.gpus, *described.nics]
  places = {place.pci: place for place in described.unclassed}
  places |= {card.pci: DevicePlace(card.pci, card.path, card.numa_node, card.switch, card.link)
             for card in cards if card.pci}
  by_name = {nic.name: DevicePlace("", nic.path, nic.numa_node, nic.switch, nic.link)
             for nic in described.nics if not nic.pci}
  for nic in nics:
    place = places.get(nic.pci or "") or by_name.get(nic.name)
    if place:
      places[nic.name] = place
  return places


def _takes_tree(gpus: tuple[Gpu, ...], nics: tuple[Nic, ...], places: dict[str, DevicePlace],
                nodes: int) -> tuple[bool, str]:
  """Whether the file's tree takes the place of the machine's own, and a sentence."""
  if any(gpu.switch for gpu in gpus) or any(nic.switch for nic in nics):
    return False, "This machine's own tree shows its switches and goes before the file's."
  lacking = [*(f"GPU {gpu.pci}" for gpu in gpus if gpu.pci not in places),
             *(f"NIC {nic.name}" for nic in fabric_of(nics) if nic.name not in places)]
  if lacking:
    return False, f"The file's tree lacks {lacking[0]}, so that this machine's own is taken."
  for key, node in [*((gpu.pci, gpu.numa_node) for gpu in gpus),
                    *((nic.name, nic.numa_node) for nic in nics)]:
    other = places[key].numa_node if key in places else None
    if nodes > 1 and None not in (node, other) and node != other:
      return False, (f"They disagree on the NUMA node of {key} ({node} here, {other} there), so "
                     "that this machine's own tree is taken.")
  return True, "Their places are those of the file."


def _with_links(gpu: Gpu, other: Gpu | None) -> Gpu:
  """A GPU with what the file knows of it beside its place."""
  if other is None:
    return gpu
  return gpu.replace(nvlinks=other.nvlinks if gpu.nvlinks is None else gpu.nvlinks,
                      interconnect=gpu.interconnect or other.interconnect)


def _placed(card: Card, place: DevicePlace | None, tree: bool) -> Card:
  """A card where the file puts it, or, without its tree, with what the file adds to its own
  place."""
  if place is None:
    # One kind of way, so that all cards can be compared.
    return card.replace(path=(), switch=None) if tree else card
  first, second = (place, card) if tree else (card, place)
  node = second.numa_node if first.numa_node is None else first.numa_node
  # What was negotiated; what the device and the slot could do only sysfs knows.
  link = card.link.replace(speed=card.link.speed or place.link.speed,
                            width=card.link.width or place.link.width)
  if tree:
    card = card.replace(path=place.path, switch=place.switch)
  return card.replace(numa_node=node, link=link)
