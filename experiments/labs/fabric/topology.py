"""What a lab is to look like: racks, hosts, rates, and who sits where. Pure; nothing is touched
here."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

SHAPERS = ("tbf", "htb")
_NAME = re.compile(r"[a-z][a-z0-9]{0,8}")
_ALGORITHM = re.compile(r"[a-z0-9_]{1,15}")
_MOST_RACKS, _MOST_HOSTS = 200, 200  # an address is 10.0.<rack + 1>.<host + 1>
_LEAST_BURST_KB = 2.0  # one Ethernet frame, and a little


class ConfigError(ValueError):
  """The config describes no lab; the message is a sentence with the fix."""


@dataclasses.dataclass(frozen=True)
class Topology:
  """A lab to build. Make it with `from_config`, which checks it.

  Attributes:
    racks: host names of each rack.
    jobs: hosts of each job's ranks, rank 0 first.
    link_mbit: rate of a host's own link, each way, Mbit/s; 0 for none.
    trunk_mbit: rate of each rack's uplink, each way, Mbit/s; 0 for none.
    trunk_queue_kb: KB (1,000 bytes) that may wait in front of a shaped interface.
    burst_kb: KB that a shaper lets through at once.
    shaper: one of `SHAPERS`.
    congestion: TCP congestion control of every route; "" for the kernel's default.
    job_congestion: the same for the routes among a job's hosts, by job.
  """

  racks: tuple[tuple[str, ...], ...]
  jobs: Mapping[str, tuple[str, ...]]
  link_mbit: float = 0.0
  trunk_mbit: float = 0.0
  trunk_queue_kb: float = 256.0
  burst_kb: float = 16.0
  shaper: str = "tbf"
  congestion: str = ""
  job_congestion: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def hosts(self) -> tuple[str, ...]:
    """All hosts, rack by rack."""
    return tuple(host for rack in self.racks for host in rack)

  def address(self, host: str) -> str:
    """IPv4 address of a host.

    Raises:
      ConfigError: there is no such host.
    """
    for r, rack in enumerate(self.racks):
      if host in rack:
        return f"10.0.{r + 1}.{rack.index(host) + 1}"
    raise ConfigError(f"There is no host {host!r} in this lab; there are {', '.join(self.hosts)}.")

  def algorithms(self) -> tuple[str, ...]:
    """The TCP congestion controls that are asked for by name."""
    return tuple(sorted({self.congestion, *self.job_congestion.values()} - {""}))

  def hosts_file(self) -> str:
    """What /etc/hosts says inside the lab: each host by its name, so that gloo binds to the right
    address."""
    lines = ["127.0.0.1 localhost", *(f"{self.address(host)} {host}" for host in self.hosts)]
    return "\n".join(lines) + "\n"


def from_config(config: Mapping[str, Any]) -> Topology:
  """Reads and checks a config such as `configs/fabric.py` gives. Fields it does not know it leaves
  to others.

  Raises:
    ConfigError: a name, number or choice that no lab can be built from.
  """
  racks = tuple(tuple(rack) for rack in config["racks"])
  jobs = {str(name): tuple(hosts) for name, hosts in dict(config.get("jobs", {})).items()}
  topology = Topology(
      racks=racks, jobs=jobs, congestion=str(config.get("congestion", "")),
      shaper=str(config.get("shaper", "tbf")),
      job_congestion={name: str(how)
                      for name, how in dict(config.get("job_congestion", {})).items()},
      **{name: float(config[name])
         for name in ("link_mbit", "trunk_mbit", "trunk_queue_kb", "burst_kb") if name in config})
  _check_hosts(topology)
  _check_jobs(topology)
  _check_numbers(topology)
  return topology


def _check_hosts(topology: Topology) -> None:
  racks = topology.racks
  if not racks or not all(racks):
    raise ConfigError(
        'racks must name at least one host in each rack, for example (("a0", "b0"), ("a1", "b1")).')
  if len(racks) > _MOST_RACKS or max(map(len, racks)) > _MOST_HOSTS:
    raise ConfigError(f"A lab has at most {_MOST_RACKS} racks of {_MOST_HOSTS} hosts each.")
  for host in topology.hosts:
    if not isinstance(host, str) or not _NAME.fullmatch(host) or host in ("fabric", "localhost"):
      raise ConfigError(f"{host!r} is no name for a host: it must be at most 9 small letters and "
                        "digits, a letter first, and not `fabric` or `localhost`. (One host in a "
                        "rack is written (\"a0\",), with a comma.)")
  twice = sorted({host for host in topology.hosts if topology.hosts.count(host) > 1})
  if twice:
    raise ConfigError(
        f"{', '.join(twice)} is in the racks more than once: every host needs a name of its own.")


def _check_jobs(topology: Topology) -> None:
  for job, hosts in topology.jobs.items():
    if not hosts:
      raise ConfigError(f"Job {job!r} has no hosts: list one for each rank.")
    for host in hosts:
      if host not in topology.hosts:
        raise ConfigError(f"Job {job!r} wants a rank on {host!r}, which is in no rack; there are "
                          f"{', '.join(topology.hosts)}.")
  unknown = sorted(set(topology.job_congestion) - set(topology.jobs))
  if unknown:
    raise ConfigError(f"job_congestion names {', '.join(unknown)}, but the jobs are "
                      f"{', '.join(topology.jobs) or 'none'}.")
  for algorithm in topology.algorithms():
    if not _ALGORITHM.fullmatch(algorithm):
      raise ConfigError(f"{algorithm!r} is no congestion control; reno, cubic and bbr are.")
  chosen: dict[tuple[str, str], str] = {}
  for job, algorithm in topology.job_congestion.items():
    for pair in pairs(topology.jobs[job]):
      if chosen.setdefault(pair, algorithm) != algorithm:
        raise ConfigError("Two jobs want different congestion controls on the route from "
                          f"{pair[0]} to {pair[1]}: give them hosts of their own, or the same one.")


def _check_numbers(topology: Topology) -> None:
  for name in ("link_mbit", "trunk_mbit"):
    if not (math.isfinite(value := getattr(topology, name)) and 0 <= value <= 1e5):
      raise ConfigError(f"{name}={value:g} must be Mbit/s from 0 (not shaped) to 100,000.")
  if not 2 * _LEAST_BURST_KB <= topology.trunk_queue_kb <= 1e6:
    raise ConfigError(f"trunk_queue_kb={topology.trunk_queue_kb:g} must be KB from "
                      f"{2 * _LEAST_BURST_KB:g} to 1,000,000: a queue that holds no packet lets "
                      "nothing through.")
  if not _LEAST_BURST_KB <= topology.burst_kb <= topology.trunk_queue_kb:
    raise ConfigError(f"burst_kb={topology.burst_kb:g} must be KB from {_LEAST_BURST_KB:g} (a "
                      f"packet must fit) to trunk_queue_kb={topology.trunk_queue_kb:g}.")
  if topology.shaper not in SHAPERS:
    raise ConfigError(f"shaper={topology.shaper!r} must be one of {', '.join(SHAPERS)}.")


def pairs(hosts: tuple[str, ...]) -> list[tuple[str, str]]:
  """Every ordered pair of different hosts."""
  return [(source, to) for source in hosts for to in hosts if source != to]
