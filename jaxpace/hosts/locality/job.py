"""The places of all processes of a job: read from a recorded run, and compared."""

from __future__ import annotations

import pathlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from jaxpace.files.reading import UnreadableError, read_document
from jaxpace.hosts.locality.concerns import NOTE, WARNING, Concern, find_concerns, sharing_of
from jaxpace.hosts.locality.nics import fabric_of
from jaxpace.hosts.locality.tree import parse_list
from jaxpace.hosts.locality.types import SCHEMA, Locality

FOLDER = "locality"


def read_places(directory: str | pathlib.Path,
                run: str | None = None) -> tuple[list[Locality], list[str]]:
  """Reads `locality/<process>.json` of a run.

  Args:
    directory: run directory.
    run: id of the run; files that name another one are left out. None takes all.

  Returns:
    The places in the order of their processes, and sentences about files that were left out.
  """
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
      document = read_document(file, Locality)
    except OSError as error:
      problems.append(f"{name} can't be read ({error.strerror}).")
      continue
    except UnreadableError as error:
      problems.append(f"{name} {error}: left out.")
      continue
    place = msgspec.convert(document.value, Locality)
    if run is not None and document.value.get("run", run) != run:
      problems.append(f"{name} belongs to another run: left out.")
    elif place.schema > SCHEMA:
      problems.append(f"{name} was written by a newer version: left out.")
    else:
      problems += [f"{name}: {sentence}." for sentence in document.left_out]
      places[int(file.stem)] = place.replace(process=int(file.stem))
  return [place for _, place in sorted(places.items())], problems


def host_name(place: Locality) -> str:
  """The host's name; where it is not known, its process stands for it."""
  return (place.hostname
          or ("this host" if place.process is None else f"host of process {place.process}"))


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
