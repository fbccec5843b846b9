"""The places of all processes of a job: read from a recorded run, and compared; what is wrong with
them, or worth knowing, in sentences that say what to do."""

from __future__ import annotations

import pathlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxpace.files.reading import UnreadableError, read_document
from jaxpace.hosts.locality.cards import fabric_of
from jaxpace.hosts.locality.host import parse_list
from jaxpace.hosts.locality.types import SCHEMA, Gpu, Link, Locality, Nic

FOLDER = "locality"


def read_places(directory: str | pathlib.Path,
                run: str | None = None) -> tuple[list[Locality], list[str]]:
  """Reads `locality/<process>.json` of a run, in the order of the processes; with sentences about
  files that were left out, those that name another run among them."""
  places: dict[int, Locality] = {}
  problems: list[str] = []
  folder = pathlib.Path(directory) / FOLDER
  try:
    files = sorted(path for path in folder.iterdir() if re.match(r"^[0-9]{1,8}\.json$", path.name))
  except (FileNotFoundError, NotADirectoryError):
    files = []
  except OSError as error:
    return [], [f"{FOLDER}/ can't be read ({error.strerror})."]
  for file in files:
    name = f"{FOLDER}/{file.name}"
    try:
      document, left_out = read_document(file, Locality)
    except OSError as error:
      problems.append(f"{name} can't be read ({error.strerror}).")
      continue
    except UnreadableError as error:
      problems.append(f"{name} {error}: left out.")
      continue
    place = msgspec.convert(document, Locality)
    if run is not None and document.get("run", run) != run:
      problems.append(f"{name} belongs to another run: left out.")
    elif place.schema > SCHEMA:
      problems.append(f"{name} was written by a newer version: left out.")
    else:
      problems += [f"{name}: {sentence}." for sentence in left_out]
      places[int(file.stem)] = place.replace(process=int(file.stem))
  return [place for _, place in sorted(places.items())], problems


def host_name(place: Locality) -> str:
  """The host's name; where it is not known, its process stands for it."""
  return (place.hostname
          or ("this host" if place.process is None else f"host of process {place.process}"))


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


def job_concerns(places: Sequence[Locality]) -> list[Concern]:
  """What is noteworthy of the processes of one job: each one's own, equal ones of a host once,
  and differences."""
  merged: dict[tuple[str, str, str, str | None], list[int]] = {}
  for place in places:
    for concern in find_concerns(place):
      processes = merged.setdefault((concern.level, concern.kind, concern.sentence, concern.host),
                                    [])
      processes.extend(concern.processes)
  found = [Concern(*key, tuple(processes)) for key, processes in merged.items()]
  found += _shared_between_processes(places)
  found += _differences(places)
  return sorted(found, key=lambda concern: concern.level != WARNING)


def _shared_between_processes(places: Sequence[Locality]) -> list[Concern]:
  """NICs that are nearest to the GPUs of several processes of one host."""
  users: dict[tuple[str, str], dict[int, Locality]] = {}
  for place in places:
    own = {device.gpu for device in place.devices if device.gpu}
    for gpu in place.gpus:
      if gpu.pci in own and gpu.nic and place.process is not None:
        users.setdefault((host_name(place), gpu.nic), {})[place.process] = place
  found = []
  for (host, nic), by_process in users.items():
    if len(by_process) > 1:
      processes = tuple(sorted(by_process))
      level, sentence = sharing_of(
          by_process[processes[-1]], f"The GPUs of processes {', '.join(map(str, processes))}", nic)
      found.append(Concern(level, "shared_nic", sentence, host, processes))
  return found


_FACTS: tuple[tuple[str, str, Callable[[Locality], Any]], ...] = (
    (WARNING, "CPU model", lambda p: p.cpu.model),
    (WARNING, "number of CPUs", lambda p: len(parse_list(p.cpu.online)) or None),
    (WARNING, "CPU limit", lambda p: f"{p.cgroup.cpu_limit:g}" if p.cgroup.cpu_limit else "none"),
    (WARNING, "memory", lambda p: f"{p.memory_bytes / 2**30:.0f} GiB" if p.memory_bytes else None),
    (WARNING, "GPUs", lambda p: _listed(gpu.name or "unnamed GPU" for gpu in p.gpus)),
    (WARNING, "GPU links",
     lambda p: _listed(f"x{gpu.link.width}" for gpu in p.gpus if gpu.link.width)),
    (WARNING, "NVLinks of a GPU",
     lambda p: _listed(str(gpu.nvlinks) for gpu in p.gpus if gpu.nvlinks is not None)),
    (WARNING, "NICs of the fabric", lambda p: _listed(
        f"{nic.kind} {nic.rate_gbps:g} Gbit/s" if nic.rate_gbps else nic.kind
        for nic in fabric_of(p.nics))),
    (WARNING, "clock source", lambda p: p.clock_source),
    (NOTE, "huge pages", lambda p: p.huge_pages),
    (NOTE, "kernel", lambda p: p.kernel),
)


def _listed(names: Any) -> str:
  counts = sorted(Counter(names).items())
  return " and ".join(f"{number} × {name}" for name, number in counts) or "none"


def _differences(places: Sequence[Locality]) -> list[Concern]:
  """Facts in which some hosts differ from most."""
  of_host: dict[str, list[Locality]] = {}
  for place in places:
    of_host.setdefault(host_name(place), []).append(place)
  found = []
  for level, name, fact in _FACTS:
    values = {host: value for host, own in of_host.items() if (value := fact(own[0])) is not None}
    usual = Counter(values.values()).most_common(1)
    if len(set(values.values())) < 2 or not usual:
      continue
    value, number = usual[0]
    odd: dict[Any, list[str]] = {}
    for host, other in values.items():
      if other != value:
        odd.setdefault(other, []).append(host)
    parts = [f"{other} on {', '.join(hosts[:8])}{' and others' if len(hosts) > 8 else ''}"
             for other, hosts in sorted(odd.items(), key=str)]
    processes = [p.process for hosts in odd.values() for host in hosts
                 for p in of_host[host] if p.process is not None]
    found.append(Concern(level, "hosts_differ", f"The hosts differ in {name}: {value} on {number} "
                                                f"of {len(values)}, but {'; '.join(parts)}. A "
                                                "synchronous step waits for the slowest of them.",
                         None, tuple(sorted(processes))))
  return found
