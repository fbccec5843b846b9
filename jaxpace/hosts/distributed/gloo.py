"""Chooses the address at which a process's CPU collectives listen.

gloo takes the address that the host's name resolves to. On a laptop or in a container the name may
resolve to nothing, and on a Debian host to 127.0.1.1, which no other host can reach. Both are found
out here before gloo fails on them.
"""

from __future__ import annotations

import ipaddress
import socket

from jaxpace.hosts.distributed import client


def address_of(host: str) -> str | None:
  """Returns the first IP address that a name resolves to, or None."""
  try:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
  except OSError:
    return None


def is_own(address: str) -> bool:
  """Returns whether an IP address is one of this host's."""
  family = socket.AF_INET6 if ":" in address else socket.AF_INET
  try:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
      probe.bind((address, 0))
  except OSError:
    return False
  return True


def address_towards(host: str) -> str | None:
  """Returns the address of this host on the way to `host`; nothing is sent."""
  target = address_of(host)
  if target is None:
    return None
  family = socket.AF_INET6 if ":" in target else socket.AF_INET
  try:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
      probe.connect((target, 9))
      return str(probe.getsockname()[0])
  except OSError:
    return None


def better_address(hostname: str, coordinator: str) -> str | None:
  """Returns the address gloo should listen on, or None where the one it takes by itself is good.

  Args:
    hostname: this host's name.
    coordinator: "host:port" of process 0.
  """
  own = address_of(hostname)
  towards = address_towards(coordinator.rpartition(":")[0].strip("[]"))
  if own is None or not is_own(own):
    return towards
  if (towards and ipaddress.ip_address(own).is_loopback
      and not ipaddress.ip_address(towards).is_loopback):
    return towards
  return None


def choose_address() -> None:
  """Moves gloo to an address that works, where its own does not.

  Raises:
    RuntimeError: if this host's name does not resolve and this JAX offers no way to do without.
  """
  coordinator = client.coordinator_address()
  hostname = socket.gethostname()
  if coordinator is None or (address := better_address(hostname, coordinator)) is None:
    return
  try:
    client.bind_gloo_to(address)
  except (AttributeError, ImportError, TypeError) as error:
    if address_of(hostname) is None:
      raise RuntimeError(f"this host's name, {hostname}, resolves to no address, which gloo needs. "
                         f"Add a line `{address} {hostname}` to /etc/hosts.") from error
