"""The nearest NIC is the one fewest hops away on the PCI tree, held against a search that knows no
paths."""

import collections

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.hosts.locality.nics import nearest
from jaxpace.hosts.locality.types import Gpu, Nic
from tests.quick import examples


def search(links, start):
  """Links from `start` to every vertex, by breadth."""
  far, queue = {start: 0}, collections.deque([start])
  while queue:
    vertex = queue.popleft()
    for other in links[vertex]:
      if other not in far:
        far[other] = far[vertex] + 1
        queue.append(other)
  return far


@st.composite
def trees(draw):
  """Two NUMA nodes, host bridges below them, bridges below those; GPUs and NICs anywhere. (parent
  of each, devices)"""
  parent = {"node0": None, "node1": None}
  bridges = []
  for i in range(draw(st.integers(1, 4))):
    name = f"pci{i:04x}:00"
    parent[name] = f"node{draw(st.integers(0, 1))}"
    bridges.append(name)
  for i in range(draw(st.integers(0, 12))):
    name = f"0000:{i:02x}:00.0"
    parent[name] = draw(st.sampled_from(bridges))
    bridges.append(name)
  devices = {"gpu": [], "nic": []}
  for kind, most in (("gpu", 5), ("nic", 6)):
    for i in range(draw(st.integers(1, most))):
      name = f"0000:{'a' if kind == 'gpu' else 'b'}{i:x}:00.0"
      parent[name] = draw(st.sampled_from(bridges))
      devices[kind].append(name)
  return parent, devices["gpu"], devices["nic"]


def way(parent, name):
  found = [name]
  while parent[found[0]] is not None:
    found.insert(0, parent[found[0]])
  return found


@settings(max_examples=examples(300), deadline=None)
@given(trees())
def test_fewest_hops_on_random_trees(tree):
  parent, gpus, nics = tree
  links = collections.defaultdict(set)
  for child, above in parent.items():
    if above is not None:
      links[child].add(above)
      links[above].add(child)

  def place(name):
    node, *path = way(parent, name)
    return {"numa_node": int(node[4:]), "path": tuple(path)}

  placed = nearest([Gpu(gpu, **place(gpu)) for gpu in gpus],
                   [Nic(nic, pci=nic, **place(nic)) for nic in nics])
  for gpu in placed:
    # The two nodes are not joined: what is found is on the GPU's own.
    far = search(links, gpu.pci)
    here = [far[nic] for nic in nics if nic in far]
    if here:
      assert far[gpu.nic] == min(here)
      assert gpu.nic_distance != "SYS"
    else:
      assert gpu.nic_distance == "SYS"
