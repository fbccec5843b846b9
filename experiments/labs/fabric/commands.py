"""The `ip` and `tc` commands that build a lab, as data: topology in, list of commands out. Nothing
is run here.

Everything is made inside namespaces of the lab's own, links too, so the machine's own interfaces,
addresses and routes are never named. One namespace holds the switches, a bridge for each rack and a
spine that joins them; each host is a namespace with one link to its rack.

    host a0 ── rack0 ══ spine ══ rack1 ── host a1        ══ is shaped: the trunk
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from experiments.labs.fabric.topology import Topology, pairs

PREFIX = "jaxfab"
"""Of the names of all namespaces of all labs; nothing else may be called so."""
FABRIC = "fabric"  # the namespace of the switches; no host is called so
SPINE = "spine"


@dataclasses.dataclass(frozen=True)
class Shaped:
  """One shaped way of one link.

  Attributes:
    name: as reports call it, "rack0 up" or "a0 up".
    place: host, or `FABRIC`.
    interface: in that place's namespace; what leaves through it is shaped.
    mbit: Mbit/s.
  """

  name: str
  place: str
  interface: str
  mbit: float


def namespace(lab: str, place: str) -> str:
  """Name of the namespace of a host, or of the switches (`FABRIC`), in the lab called `lab`."""
  return f"{PREFIX}-{lab}-{place}"


def lab_of(namespace_name: str) -> str | None:
  """Lab to which a namespace belongs, by its name; None if it is no lab's."""
  prefix, _, rest = namespace_name.partition("-")
  lab, _, place = rest.partition("-")
  return lab if prefix == PREFIX and lab and place else None


def shaped(topology: Topology) -> list[Shaped]:
  """Everything that is shaped: the uplinks each way, then the hosts' links each way."""
  found = []
  if topology.trunk_mbit and len(topology.racks) > 1:
    for rack in range(len(topology.racks)):
      found += [Shaped(f"rack{rack} up", FABRIC, f"up{rack}", topology.trunk_mbit),
                Shaped(f"rack{rack} down", FABRIC, f"down{rack}", topology.trunk_mbit)]
  if topology.link_mbit:
    for host in topology.hosts:
      found += [Shaped(f"{host} up", host, "eth0", topology.link_mbit),
                Shaped(f"{host} down", FABRIC, f"h-{host}", topology.link_mbit)]
  return found


def build(topology: Topology, lab: str) -> list[list[str]]:
  """Returns the commands that build a lab, in order; each is a program and its arguments.

  Args:
    topology: what to build.
    lab: the lab's own name, letters and digits.
  """
  fabric = namespace(lab, FABRIC)
  commands = [["ip", "netns", "add", namespace(lab, place)] for place in (FABRIC, *topology.hosts)]
  commands += _switches(topology, fabric)
  for rack, hosts in enumerate(topology.racks):
    for host in hosts:
      commands += _host(topology, lab, host, f"rack{rack}")
  for way in shaped(topology):
    commands += _shape(way, namespace(lab, way.place), topology)
  return commands


def enter(lab: str, host: str, hosts_file: str, command: Sequence[str]) -> list[str]:
  """Returns the command that runs `command` on a host: its network, its name, the lab's /etc/hosts.

  Each stage becomes the next by exec, so the process keeps its number from first to last.
  /etc/hosts is covered in a mount namespace that `ip netns exec` makes; the machine's own stays as
  it is. The kernel kills the process when whoever started it dies.
  """
  stages = ('hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec setpriv --pdeathsig '
            'KILL -- "$@"')
  return ["ip", "netns", "exec", namespace(lab, host), "unshare", "--uts", "--", "sh", "-c", stages,
          "sh", host, hosts_file, *command]


def _switches(topology: Topology, fabric: str) -> list[list[str]]:
  bridges = [*(f"rack{rack}" for rack in range(len(topology.racks))), SPINE]
  commands = []
  for bridge in bridges:
    commands += [["ip", "-n", fabric, "link", "add", bridge, "type", "bridge",
                  "forward_delay", "0"],
                 ["ip", "-n", fabric, "link", "set", bridge, "up"]]
  for rack in range(len(topology.racks)):
    commands += [["ip", "-n", fabric, "link", "add", f"up{rack}", "type", "veth", "peer", "name",
                  f"down{rack}"],
                 ["ip", "-n", fabric, "link", "set", f"up{rack}", "master", f"rack{rack}", "up"],
                 ["ip", "-n", fabric, "link", "set", f"down{rack}", "master", SPINE, "up"]]
  return commands


def _host(topology: Topology, lab: str, host: str, rack: str) -> list[list[str]]:
  here, fabric, port = namespace(lab, host), namespace(lab, FABRIC), f"h-{host}"
  address = topology.address(host)
  commands = [
      ["ip", "-n", here, "link", "set", "lo", "up"],
      ["ip", "-n", here, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns",
       fabric],
      ["ip", "-n", fabric, "link", "set", port, "master", rack, "up"],
      ["ip", "-n", here, "address", "add", f"{address}/16", "dev", "eth0"],
      ["ip", "-n", here, "link", "set", "eth0", "up"]]
  if topology.congestion:
    commands.append(["ip", "-n", here, "route", "replace", "10.0.0.0/16", "dev", "eth0", "src",
                     address, "congctl", topology.congestion])
  for job, algorithm in topology.job_congestion.items():
    commands += [["ip", "-n", here, "route", "replace", f"{topology.address(to)}/32", "dev", "eth0",
                  "src", address, "congctl", algorithm] for source, to in pairs(topology.jobs[job])
                 if source == host]
  return commands


def _shape(way: Shaped, name: str, topology: Topology) -> list[list[str]]:
  rate, burst = f"{round(1e6 * way.mbit)}bit", f"{round(1e3 * topology.burst_kb)}b"
  queue = f"{round(1e3 * topology.trunk_queue_kb)}b"
  root = ["tc", "-n", name, "qdisc", "add", "dev", way.interface, "root", "handle", "1:"]
  if topology.shaper == "tbf":
    return [[*root, "tbf", "rate", rate, "burst", burst, "limit", queue]]
  return [[*root, "htb", "default", "1", "r2q", "1000"],
          ["tc", "-n", name, "class", "add", "dev", way.interface, "parent", "1:", "classid", "1:1",
           "htb", "rate", rate, "ceil", rate, "burst", burst, "cburst", burst],
          ["tc", "-n", name, "qdisc", "add", "dev", way.interface, "parent", "1:1", "bfifo",
           "limit", queue]]
