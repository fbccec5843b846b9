"""What hangs on what in a host, as nested lines of text: sockets, cards, limits, processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxpace.hosts.locality.host import parse_list
from jaxpace.hosts.locality.job import host_name
from jaxpace.hosts.locality.types import Gpu, Link, Locality, Nic, NumaNode

_SHOWN = 16


Outline = dict[str, Any]
"""A line as its "text", and outlines of what belongs to it, "below"."""


def outlines(places: Sequence[Locality],
             more: Callable[[int], str] = lambda process: "") -> list[Outline]:
  """An outline for each kind of host, hosts that are alike together; `more` says what else is to be
  said of a process, empty for nothing."""
  hosts: dict[str, list[Locality]] = {}
  for place in places:
    hosts.setdefault(host_name(place), []).append(place)
  alike: dict[Any, list[str]] = {}
  for name, own in hosts.items():
    first = own[0].replace(process=None, hostname=None, devices=(),
                            cpu=own[0].cpu.replace(allowed=""))
    # Serial numbers differ between hosts that are alike.
    key = first.replace(gpus=tuple(gpu.replace(uuid=None) for gpu in first.gpus))
    alike.setdefault(key, []).append(name)
  return [_host(names, [place for name in names for place in hosts[name]], more)
          for names in alike.values()]


def _host(names: Sequence[str], places: Sequence[Locality], more: Callable[[int], str]) -> Outline:
  """The outline of hosts that are alike; places of all their processes, the first host's first."""
  place = places[0]
  title = names[0] if len(names) == 1 else f"{len(names)} equal hosts: {_some(names)}"
  lines = [_line(_processor(place)), _line(_limits(place))]
  cards: list[Gpu | Nic] = [*place.gpus, *place.nics]
  nodes = sorted({node.node for node in place.numa}
                 | {card.numa_node for card in cards if card.numa_node is not None})
  for node in nodes:
    own = next((n for n in place.numa if n.node == node), None)
    lines.append(_line(f"NUMA node {node}{f': {_node(own)}' if own else ''}",
                       _cards(card for card in cards if card.numa_node == node)))
  homeless = [card for card in cards if card.numa_node is None]
  if homeless:
    lines.append(_line("NUMA node not known", _cards(homeless)))
  if not place.gpus:
    lines.append(_line("no GPU found"))
  processes = [p for p in places if p.process is not None or p.devices]
  for process in processes[:_SHOWN]:
    said = "" if process.process is None else more(process.process)
    lines.append(_line(", ".join(filter(None, [_process(process), said]))))
  if len(processes) > _SHOWN:
    lines.append(_line(f"and {len(processes) - _SHOWN} more processes"))
  return _line(title, lines)


def _line(text: str, below: Sequence[Outline] = ()) -> Outline:
  return {"text": text, "below": list(below)}


def _node(node: NumaNode) -> str:
  """CPUs and memory of a node. One of memory alone (HBM, CXL, that of a GPU) has no CPUs."""
  memory = f"{node.memory_bytes / 2**30:.0f} GiB" if node.memory_bytes else ""
  return ", ".join(filter(None, [f"CPUs {node.cpus}" if node.cpus else "no CPUs", memory]))


def _cards(cards: Iterable[Gpu | Nic]) -> list[Outline]:
  """Cards of a node, those on one PCIe switch together."""
  switches: dict[str | None, list[Outline]] = {}
  for card in cards:
    switches.setdefault(card.switch,
                        []).append(_line(_gpu(card) if isinstance(card, Gpu) else _nic(card)))
  lines: list[Outline] = []
  for switch, own in switches.items():
    lines += [_line(f"PCIe switch {switch}", own)] if switch else own
  return lines


def _gpu(gpu: Gpu) -> str:
  parts = [f"GPU {gpu.pci.removeprefix('GPU')}  {gpu.name or 'accelerator'}", _link(gpu.link)]
  if gpu.interconnect == "nvlink":
    parts.append(f"{gpu.nvlinks} NVLinks" if gpu.nvlinks else "NVLink")
  if gpu.nic:
    parts.append(f"nearest NIC {gpu.nic} ({gpu.nic_distance})")
  return ", ".join(filter(None, parts))


def _nic(nic: Nic) -> str:
  names = (f" ({', '.join(nic.interfaces)})" if nic.interfaces and nic.interfaces != (nic.name,)
           else "")
  rate = f"{nic.rate_gbps:g} Gbit/s" if nic.rate_gbps else "rate not known"
  return ", ".join(filter(None, [f"NIC {nic.name}{names}  {nic.kind}", rate, _link(nic.link),
                                 "down" if nic.up is False else ""]))


def _link(link: Link) -> str:
  if not link.width:
    return ""
  most = min((w for w in (link.max_width, link.slot_width) if w), default=link.width)
  return (f"x{link.width}{f' of x{most}' if most > link.width else ''}"
          f"{f' at {link.speed:g} GT/s' if link.speed else ''}")


def _processor(place: Locality) -> str:
  number = len(parse_list(place.cpu.online))
  sockets = len(place.cpu.sockets)
  parts = [f"{number} CPUs" if number else "CPUs not known"]
  if sockets:
    parts.append(f"{sockets} socket{'s' if sockets > 1 else ''}")
  if place.cpu.model:
    parts.append(place.cpu.model)
  if place.memory_bytes:
    parts.append(f"{place.memory_bytes / 2**30:.0f} GiB")
  return ", ".join(parts)


def _limits(place: Locality) -> str:
  cgroup = place.cgroup
  parts = [f"CPU limit {f'{cgroup.cpu_limit:g}' if cgroup.cpu_limit else 'none'}"]
  if cgroup.memory_limit_bytes:
    parts.append(f"memory limit {cgroup.memory_limit_bytes / 2**30:.1f} GiB")
  parts.append(f"clock source {place.clock_source or 'not known'}")
  if place.huge_pages:
    parts.append(f"huge pages {place.huge_pages}")
  parts.append(f"malloc {place.allocator or 'of the C library'}")
  return ", ".join(parts)


def _process(place: Locality) -> str:
  name = "devices" if place.process is None else f"process {place.process}"
  parts = [f"{name}: CPUs {place.cpu.allowed}" if place.cpu.allowed else name]
  kinds: dict[str, list[str]] = {}
  for device in place.devices:
    kinds.setdefault(device.kind or device.platform or "device", []).append(
        (device.gpu or "") + (f" at {device.coords}" if device.coords else ""))
  for kind, where in kinds.items():
    known = [w for w in where if w]
    parts.append(f"{len(where)} × {kind}{f' ({_some(known)})' if known else ''}")
  return ", ".join(parts)


def _some(names: Sequence[str]) -> str:
  return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
