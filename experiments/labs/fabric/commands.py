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

PREFIX = "jaxfab"
"""Of the names of all namespaces of all labs; nothing else may be called so."""
FABRIC = "fabric"  # the namespace of the switches; no host is called so
SPINE = "spine"


@dataclasses.dataclass(frozen=True)
class Topology:
  """A lab to build.

  Attributes:
    racks: host names of each rack, at most 9 small letters and digits, a letter first.
    trunk_mbit: rate of each rack's uplink, each way, Mbit/s.
    queue_kb: KB (1,000 bytes) that may wait in front of an uplink; what comes on top is dropped.
    burst_kb: KB that a shaper lets through at once.
    congestion: TCP congestion control of every route.
  """

  racks: tuple[tuple[str, ...], ...]
  trunk_mbit: float
  queue_kb: float = 128.0
  burst_kb: float = 16.0
  congestion: str = "cubic"

  @property
  def hosts(self) -> tuple[str, ...]:
    """All hosts, rack by rack."""
    return tuple(host for rack in self.racks for host in rack)

  def address(self, host: str) -> str:
    """IPv4 address of a host.

    Raises:
      ValueError: there is no such host.
    """
    for r, rack in enumerate(self.racks):
      if host in rack:
        return f"10.0.{r + 1}.{rack.index(host) + 1}"
    raise ValueError(f"There is no host {host!r} in this lab; there are {', '.join(self.hosts)}.")

  def hosts_file(self) -> str:
    """What /etc/hosts says inside the lab: each host by its name, so that gloo binds to the right
    address."""
    lines = ["127.0.0.1 localhost", *(f"{self.address(host)} {host}" for host in self.hosts)]
    return "\n".join(lines) + "\n"


def namespace(lab: str, place: str) -> str:
  """Name of the namespace of a host, or of the switches (`FABRIC`), in the lab called `lab`."""
  return f"{PREFIX}-{lab}-{place}"


def lab_of(namespace_name: str) -> str | None:
  """Lab to which a namespace belongs, by its name; None if it is no lab's."""
  prefix, _, rest = namespace_name.partition("-")
  lab, _, place = rest.partition("-")
  return lab if prefix == PREFIX and lab and place else None


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
  for rack in range(len(topology.racks)):
    commands += [_shape(fabric, interface, topology) for interface in (f"up{rack}", f"down{rack}")]
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
  return [
      ["ip", "-n", here, "link", "set", "lo", "up"],
      ["ip", "-n", here, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns",
       fabric],
      ["ip", "-n", fabric, "link", "set", port, "master", rack, "up"],
      ["ip", "-n", here, "address", "add", f"{address}/16", "dev", "eth0"],
      ["ip", "-n", here, "link", "set", "eth0", "up"],
      ["ip", "-n", here, "route", "replace", "10.0.0.0/16", "dev", "eth0", "src", address,
       "congctl", topology.congestion]]


def _shape(name: str, interface: str, topology: Topology) -> list[str]:
  return ["tc", "-n", name, "qdisc", "add", "dev", interface, "root", "handle", "1:", "tbf",
          "rate", f"{round(1e6 * topology.trunk_mbit)}bit",
          "burst", f"{round(1e3 * topology.burst_kb)}b",
          "limit", f"{round(1e3 * topology.queue_kb)}b"]
