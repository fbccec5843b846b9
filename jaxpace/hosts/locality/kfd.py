"""Links among AMD's GPUs, as the kernel driver lists them in sysfs.

Source: drivers/gpu/drm/amd/amdkfd/kfd_topology.c of the Linux kernel.
"""

from __future__ import annotations

import re

from jaxpace.hosts.locality.tree import Tree

_NODES = "/sys/class/kfd/kfd/topology/nodes"
_XGMI = 11
"""Type of a link of AMD's Infinity Fabric; PCIe is 2."""


def read_xgmi_links(tree: Tree) -> dict[str, int]:
  """Number of links of Infinity Fabric (XGMI) to other GPUs, by PCI bus id; no entry for what is no
  GPU of AMD."""
  addresses: dict[str, str] = {}
  for node in tree.names(_NODES):
    facts = _properties(tree, f"{_NODES}/{node}/properties")
    # Processors are nodes too: they have no compute units of a GPU, and no place on the bus.
    if facts.get("simd_count") and "location_id" in facts:
      place = facts["location_id"]
      domain, bus, device = facts.get("domain", 0), place >> 8 & 0xFF, place >> 3 & 0x1F
      addresses[node] = f"{domain:04x}:{bus:02x}:{device:02x}.{place & 7}"
  links: dict[str, int] = {}
  for node, address in addresses.items():
    peers = set()
    for folder in ("io_links", "p2p_links"):
      for name in tree.names(f"{_NODES}/{node}/{folder}"):
        facts = _properties(tree, f"{_NODES}/{node}/{folder}/{name}/properties")
        peer = addresses.get(str(facts.get("node_to")))
        if facts.get("type") == _XGMI and peer is not None and peer != address:
          peers.add(peer)
    # The parts of a partitioned GPU are nodes of their own on one bus id.
    links[address] = max(links.get(address, 0), len(peers))
  return links


def _properties(tree: Tree, path: str) -> dict[str, int]:
  """Lines of "name number"."""
  found = re.findall(r"^(\w+) (\d{1,20})$", tree.text(path) or "", re.MULTILINE)
  return {name: int(number) for name, number in found}
