
import collections
import json
import sys
import types

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.files.plain import to_plain
from jaxpace.hosts.locality import cards, host, read
from jaxpace.hosts.locality.cards import nearest
from jaxpace.hosts.locality.host import Tree, format_list, parse_list
from jaxpace.hosts.locality.read import describe_device, read_locality, visible
from jaxpace.hosts.locality.types import Device, Gpu, Locality, Nic
from tests.hosts.locality import machines
from tests.quick import examples


def cuda(number, process=0):
  return types.SimpleNamespace(id=8 * process + number, device_kind="NVIDIA H100", platform="gpu",
                               process_index=process, local_hardware_id=number, slice_index=None)


def test_dgx_pairs_every_gpu_with_the_nic_on_its_switch(tmp_path):
  place = read_locality(machines.dgx(tmp_path), process=3, devices=[cuda(0, 3), cuda(5, 3)])
  assert [gpu.nic for gpu in place.gpus] == [f"mlx5_{i}" for i in range(8)]
  assert {gpu.nic_distance for gpu in place.gpus} == {"PIX"}
  assert [gpu.numa_node for gpu in place.gpus] == [0] * 4 + [1] * 4
  assert {gpu.name for gpu in place.gpus} == {"NVIDIA H100 80GB HBM3"}
  assert {gpu.interconnect for gpu in place.gpus} == {"nvlink"}
  first = place.gpus[0]
  assert (first.path == ("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:00.0",
                         "0000:18:00.0"))
  assert first.switch == "0000:16:00.0" == place.nics[0].switch
  assert (first.link.speed, first.link.width, first.link.slot_width) == (32.0, 16, 16)
  nic = place.nics[7]
  assert ((nic.name, nic.kind, nic.interfaces, nic.rate_gbps, nic.up)
          == ("mlx5_7", "infiniband", ("ib7",), 400.0, True))
  assert ([n.name for n in place.nics] == [*(f"mlx5_{i}"
                                             for i in range(8)), "eno1"]), "no virtual ones"
  assert [device.gpu for device in place.devices] == [place.gpus[0].pci, place.gpus[5].pci]
  assert (place.cpu.sockets == ("0-3", "4-7")
          and [node.cpus for node in place.numa] == ["0-3", "4-7"])
  assert place.numa[0].memory_bytes == 1056705000 * 1024
  assert (place.clock_source, place.cgroup.version, place.cgroup.cpu_limit) == ("tsc", 2, None)


def test_two_gpus_and_two_nics_on_one_switch_pair_up(tmp_path):
  for i in range(2):
    up = "pci0000:10/0000:10:01.0/0000:11:00.0"
    machines.pci(tmp_path, f"{up}/0000:12:0{i}.0/0000:1{3 + i}:00.0", "0x030200", "0x10de", numa=0)
    card = machines.pci(tmp_path, f"{up}/0000:12:1{i}.0/0000:1{5 + i}:00.0", "0x020700", "0x15b3",
                        numa=0)
    machines.rdma(tmp_path, f"mlx5_{i}", card, 200)
  assert [gpu.nic for gpu in read_locality(tmp_path).gpus] == ["mlx5_0", "mlx5_1"]


def test_a_nic_that_is_down_is_nobodys_nearest(tmp_path):
  machines.dgx(tmp_path)
  machines.write(tmp_path, "/sys/class/infiniband/mlx5_2/ports/1/state", "1: DOWN")
  place = read_locality(tmp_path)
  assert place.gpus[2].nic != "mlx5_2" and place.gpus[2].nic_distance == "NODE"


def test_cloud_vm_without_numa_says_what_it_can(tmp_path):
  place = read_locality(machines.cloud_vm(tmp_path))
  assert [gpu.numa_node for gpu in place.gpus] == [None, None] and place.numa == ()
  assert [(gpu.nic, gpu.nic_distance) for gpu in place.gpus] == [("eth0", "PHB")] * 2
  (nic,) = place.nics
  assert (nic.pci, nic.rate_gbps, nic.link.width) == ("0000:00:03.0", None, None)
  assert place.gpus[0].link.speed is None and place.gpus[0].switch is None
  # The group's path lies outside of the container's mount: its limits are those at the mount.
  assert (place.cgroup.cpu_limit, place.cgroup.memory_limit_bytes) == (4.0, 64 << 30)


def test_laptop_with_both_versions_of_control_groups(tmp_path):
  place = read_locality(machines.laptop(tmp_path))
  assert place.gpus == () and place.huge_pages == "never"
  assert ((place.cgroup.version, place.cgroup.cpu_limit, place.cgroup.memory_limit_bytes)
          == (1, 2.5, 8 << 30))
  tree = Tree(tmp_path)
  assert host.throttled_ns(tree, *host.chain(tree, "cpu")) == 7000


def test_throttling_of_version_two_is_in_microseconds(tmp_path):
  tree = Tree(machines.cloud_vm(tmp_path))
  assert host.throttled_ns(tree, *host.chain(tree, "cpu")) == 1_500_000


def test_the_tightest_limit_on_the_way_up_counts(tmp_path):
  machines.cgroup2(tmp_path, "/kubepods/pod/own", {"cpu.max": "max 100000", "memory.max": "max"})
  machines.write(tmp_path, "/sys/fs/cgroup/kubepods/pod/cpu.max", "150000 50000")
  machines.write(tmp_path, "/sys/fs/cgroup/kubepods/cpu.max", "800000 100000")
  limits = host.read_cgroup(Tree(tmp_path))
  assert (limits.version, limits.path, limits.cpu_limit, limits.memory_limit_bytes) == (
      2, "/sys/fs/cgroup/kubepods/pod/own", 3.0, None)


def test_this_machine_and_an_empty_one():
  place = read_locality()
  assert place.hostname and place.cpu.online and place.cpu.allowed and place.kernel


def test_nothing_there_is_no_error(tmp_path):
  assert read_locality(tmp_path, process=1) == Locality(process=1)


def test_devices_are_only_looked_at():
  import jax
  (place,) = {describe_device(device).replace(id=None, local_hardware_id=None)
              for device in jax.local_devices()}
  assert (place.platform, place.kind, place.process, place.gpu) == ("cpu", "cpu", 0, None)
  tpu = types.SimpleNamespace(id=3, platform="tpu", process_index=1, coords=[1, 0, 2],
                              slice_index=4)
  assert describe_device(tpu) == Device(3, None, "tpu", 1, None, 4, (1, 0, 2))

  class Broken:
    @property
    def coords(self):
      raise NotImplementedError
  assert describe_device(Broken()).coords is None


def test_visible_gpus_follow_the_variable():
  gpus = tuple(Gpu(f"0000:0{i}:00.0", uuid=f"GPU-{i}abc") for i in range(4))
  assert visible(gpus, None) == gpus
  assert visible(gpus, "2,0") == (gpus[2], gpus[0])
  assert visible(gpus, "GPU-3, 9,MIG-x") == (gpus[3], None, None)
  assert visible(gpus, "") == ()


def test_json_and_back(tmp_path):
  place = read_locality(machines.dgx(tmp_path), devices=[cuda(1)])
  document = json.loads(json.dumps(to_plain(place)))
  assert msgspec.convert({**document, "of_a_newer_version": 1}, Locality) == place


@given(st.lists(st.integers(0, 300)))
def test_lists_of_cpus_and_back(numbers):
  assert parse_list(format_list(tuple(numbers))) == tuple(sorted(set(numbers)))


@given(st.text())
def test_no_text_is_an_error(text):
  assert all(number >= 0 for number in parse_list(text))


@pytest.mark.parametrize("a, b, nodes, expected", [
    (("p", "r", "u", "d0", "x"), ("p", "r", "u", "d1", "y"), (0, 0), "PIX"),
    (("p", "r", "u", "d0", "u2", "d3", "x"), ("p", "r", "u", "d1", "y"), (0, 0), "PXB"),
    (("p", "r", "u", "d0", "u2", "x"), ("p", "r", "u", "d1", "y"), (0, 0), "PXB"),
    (("p", "r0", "x"), ("p", "r1", "y"), (0, 0), "PHB"),
    (("p", "r", "x"), ("q", "r", "y"), (1, 1), "NODE"),
    (("p", "r", "x"), ("q", "r", "y"), (0, 1), "SYS"),
    (("p", "r", "x"), ("q", "r", "y"), (None, 1), "?"),
    ((), (), (0, 1), "SYS"),
])
def test_distance(a, b, nodes, expected):
  assert cards.distance(a, b, *nodes) == cards.distance(b, a, *nodes[::-1]) == expected


class NvmlError(Exception):
  pass


def fake(clocks=(1980, 1200), lost=()):
  """A binding with two GPUs."""
  def handle(index):
    if index in lost:
      raise NvmlError("GPU is lost")
    return index

  def link_state(index, link):
    if link >= 6:
      raise NvmlError("not supported")
    return 1 if index == 0 else 0

  return types.SimpleNamespace(
      nvmlInit=lambda: None, NVML_CLOCK_SM=1, nvmlDeviceGetCount=lambda: 2,
      nvmlDeviceGetHandleByIndex=handle,
      nvmlDeviceGetPciInfo=lambda h: types.SimpleNamespace(
          busId=f"00000000:0{h + 1}:00.0".encode()), nvmlDeviceGetName=lambda h: b"NVIDIA H200",
      nvmlDeviceGetUUID=lambda h: f"GPU-{h}", nvmlDeviceGetNvLinkState=link_state,
      nvmlDeviceGetClockInfo=lambda h, kind: clocks[h],
      nvmlDeviceGetPowerUsage=lambda h: 400_000 + h * 100_000)


def test_gpus_of_the_driver_join_those_of_the_bus():
  told, notes = read.driven_gpus(fake())
  assert notes == []
  first, second = read._join_nvml((Gpu("0000:01:00.0", "NVIDIA GPU", numa_node=1),), told)
  assert first == Gpu("0000:01:00.0", "NVIDIA H200", "GPU-0", 1, nvlinks=6, interconnect="nvlink")
  assert (second.pci, second.nvlinks, second.interconnect) == ("0000:02:00.0", 0, "pcie")


def test_a_lost_gpu_is_a_note():
  told, notes = read.driven_gpus(fake(lost=(1,)))
  assert [gpu.uuid for gpu in told] == ["GPU-0"] and "GPU 1 does not answer" in notes[0]


def test_gauges_take_the_lowest_clock_and_the_mean_power():
  assert read.gauges_of(fake())() == (1200.0, 450.0)
  assert read.gauges_of(fake(), ("0000:01:00.0",))() == (1980.0, 400.0)
  assert read.gauges_of(fake(lost=(0, 1)))() == (None, None)


def test_without_the_binding_or_the_driver_there_is_none(monkeypatch):
  monkeypatch.setitem(sys.modules, "pynvml", None)
  assert read.load_nvml() is None

  def no_driver():
    raise NvmlError("driver not loaded")
  monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(nvmlInit=no_driver))
  assert read.load_nvml() is None


# The nearest NIC is the one fewest hops away on the PCI tree, held against a search that knows no
# paths.

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
