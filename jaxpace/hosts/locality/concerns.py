"""What is wrong with a place, or worth knowing about it, in sentences that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxpace.hosts.locality.nics import fabric_of
from jaxpace.hosts.locality.tree import parse_list
from jaxpace.hosts.locality.types import Gpu, Link, Locality, Nic

WARNING, NOTE = "warning", "note"

_READ_FAST = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page", "timebase",
              "tod", "riscv_clocksource")
"""Clock sources read without entering the kernel."""


class Concern(NamedTuple):
  """A warning (it costs time, and something can be done) or a note (context, or it may be so on
  purpose)."""

  level: str
  kind: str
  sentence: str
  host: str | None = None
  processes: tuple[int, ...] = ()

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists and scalars."""
    return {**self._asdict(), "processes": list(self.processes)}


def find_concerns(place: Locality) -> list[Concern]:
  """Everything noteworthy of one process's place, warnings first."""
  found = [*_far_nics(place), *_shared_nics(place), *_far_socket(place), *_links(place),
           *_limits(place), *_clock(place), *_memory(place)]
  found += [(NOTE, "unread", note) for note in place.notes]
  processes = () if place.process is None else (place.process,)
  concerns = [Concern(level, kind, sentence, place.hostname, processes)
              for level, kind, sentence in found]
  return sorted(concerns, key=lambda concern: concern.level != WARNING)


_Found = Iterator[tuple[str, str, str]]


def _used(place: Locality) -> list[Gpu]:
  """The GPUs this process's devices are on; all of the host where that is not known."""
  own = {device.gpu for device in place.devices if device.gpu}
  return [gpu for gpu in place.gpus if not own or gpu.pci in own]


def _far_nics(place: Locality) -> _Found:
  nodes = {nic.name: nic.numa_node for nic in place.nics}
  for gpu in _used(place):
    node = nodes.get(gpu.nic or "")
    if gpu.numa_node is not None and node is not None and node != gpu.numa_node:
      yield WARNING, "far_nic", (
          f"GPU {gpu.pci} is on NUMA node {gpu.numa_node}, its nearest NIC {gpu.nic} on node "
          f"{node}: what it sends crosses the sockets' interconnect. Move the card or the NIC, or "
          "bring up a NIC on the GPU's node.")


def _shared_nics(place: Locality) -> _Found:
  users: dict[str, list[str]] = {}
  for gpu in _used(place):
    if gpu.nic:
      users.setdefault(gpu.nic, []).append(gpu.pci)
  for name, sharing in users.items():
    if len(sharing) > 1:
      level, sentence = sharing_of(place, f"{len(sharing)} GPUs ({', '.join(sharing)})", name)
      yield level, "shared_nic", sentence


def sharing_of(place: Locality, who: str, nic: str) -> tuple[str, str]:
  """Returns level and sentence of a NIC that several share: whether the host has another one for
  them."""
  taken = {gpu.nic for gpu in place.gpus}
  free = [other.name for other in fabric_of(place.nics) if other.name not in taken]
  if not free:
    return NOTE, (f"{who} share the NIC {nic}; the host has no other of its kind: their transfers "
                  "take turns.")
  return WARNING, (f"{who} share the NIC {nic}, while {', '.join(free)} "
                   f"{'is' if len(free) == 1 else 'are'} nearest to none: these ranks halve each "
                   "other's rate. Is a card in the wrong slot, or a NIC left out of the fabric?")


def _far_socket(place: Locality) -> _Found:
  allowed = set(parse_list(place.cpu.allowed))
  cpus = {node.node: set(parse_list(node.cpus)) for node in place.numa}
  here = sorted(node for node, own in cpus.items() if own & allowed)
  if not allowed or not here or len(cpus) < 2:
    return
  where = (f"This process may run on CPUs {place.cpu.allowed} only (NUMA node "
           f"{', '.join(map(str, here))})")
  gpus = _used(place)
  if gpus:
    far = [gpu for gpu in gpus if cpus.get(gpu.numa_node if gpu.numa_node is not None else -1) and
           gpu.numa_node not in here]
    # Where the process's own GPUs are not known, one on its node is enough.
    if far and (len(far) == len(gpus) or any(device.gpu for device in place.devices)):
      nodes = sorted({gpu.numa_node for gpu in far if gpu.numa_node is not None})
      yield WARNING, "far_socket", (
          f"{where}, but {_count(far, 'GPU')} on node {', '.join(map(str, nodes))} "
          f"({', '.join(gpu.pci for gpu in far)}): launches and host copies cross the sockets. "
          f"Bind it to node {nodes[0]}, such as with numactl --cpunodebind={nodes[0]}.")
    return
  nodes = sorted({nic.numa_node for nic in fabric_of(place.nics) if nic.numa_node is not None})
  if nodes and not set(nodes) & set(here):
    yield WARNING, "far_socket", (
        f"{where}, but its NIC is on node {', '.join(map(str, nodes))}: all it sends crosses the "
        f"sockets. Bind it to node {nodes[0]}, such as with numactl --cpunodebind={nodes[0]}.")


def _count(things: list[Any], noun: str) -> str:
  return f"its {noun} is" if len(things) == 1 else f"{len(things)} of its {noun}s are"


def _links(place: Locality) -> _Found:
  cards: list[tuple[str, Gpu | Nic]] = [(f"GPU {gpu.pci}", gpu) for gpu in _used(place)]
  cards += [(f"NIC {nic.name} ({nic.pci})", nic) for nic in fabric_of(place.nics)]
  for name, card in cards:
    link = card.link
    width, speed = (_offered(link.max_width, link.slot_width),
                    _offered(link.max_speed, link.slot_speed))
    if link.width and width and link.width < width:
      yield WARNING, "link_width", (
          f"{name} runs at x{link.width} where card and slot offer x{width:g}, "
          f"{link.width / width:.0%} of its bandwidth to the host. Reseat the card or riser, or "
          "see whether the BIOS splits the slot.")
    if link.speed and speed and link.speed < speed:
      sentence = f"{name} runs at {link.speed:g} GT/s a lane where card and slot offer {speed:g}"
      if isinstance(card, Gpu):
        yield NOTE, "link_speed", (f"{sentence}: normal for an idle GPU that saves power; look "
                                   "again under load.")
      else:
        yield WARNING, "link_speed", (f"{sentence}. Set the slot's speed in the BIOS, or reseat "
                                      "the card.")
    for what, unit in (_slot(link, isinstance(card, Gpu)) or ()):
      yield NOTE, "slot", f"{name} sits in a slot that offers {what} of the card's {unit}."


def _offered(card: float | None, slot: float | None) -> float | None:
  """What both ends can do; None where neither says."""
  return min((value for value in (card, slot) if value), default=None)


def _slot(link: Link, gpu: bool) -> Iterator[tuple[str, str]]:
  if link.max_width and link.slot_width and link.slot_width < link.max_width:
    yield f"x{link.slot_width}", f"x{link.max_width}"
  if not gpu and link.max_speed and link.slot_speed and link.slot_speed < link.max_speed:
    yield f"{link.slot_speed:g} GT/s", f"{link.max_speed:g} GT/s"


def _limits(place: Locality) -> _Found:
  limit, allowed = (place.cgroup.cpu_limit,
                    len(parse_list(place.cpu.allowed) or parse_list(place.cpu.online)))
  if limit is None:
    return
  if place.devices and limit < len(place.devices):
    yield WARNING, "cpu_limit", (
        f"The control group grants {limit:g} CPUs to a process with {len(place.devices)} devices: "
        "the threads that feed them hold each other up, in bursts of up to 100 ms. Raise the "
        "container's CPU limit.")
  elif allowed and limit < allowed:
    yield WARNING, "cpu_limit", (
        f"The control group grants {limit:g} CPUs' worth of time, but the process sees {allowed} "
        "CPUs and sizes its thread pools by them: once the grant is used up, all its threads stand "
        "still until the next period. Raise the limit, or pin the process to as many CPUs as it "
        "is granted.")


def _clock(place: Locality) -> _Found:
  source = place.clock_source
  if source is None or source == "tsc":
    return
  if source not in _READ_FAST:
    advice = (
        "The kernel offers tsc: choose it in "
        "/sys/devices/system/clocksource/clocksource0/current_clocksource."
        if "tsc" in place.clock_sources else "`dmesg` says why the kernel gave up a faster one.")
    yield WARNING, "clock_source", (
        f"The clock source is {source}: each reading enters the kernel or leaves the guest and "
        f"takes about a microsecond or more, timestamps included. {advice}")
  elif source == "kvm-clock" and "tsc" in place.clock_sources:
    yield NOTE, "clock_source", ("The clock source is kvm-clock; tsc is offered too, and a little "
                                 "cheaper to read.")


def _memory(place: Locality) -> _Found:
  if place.huge_pages == "never":
    yield NOTE, "huge_pages", (
        "Transparent huge pages are switched off: large host buffers, those of data loading and "
        "checkpoints, cost more page faults. `madvise` is a safe setting.")
