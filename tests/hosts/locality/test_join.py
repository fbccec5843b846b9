"""A topology file beside a machine: what it adds, what of it is left out, and that the answer is
never worse for it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.cli.main import main
from jaxpace.hosts.locality.concerns import find_concerns
from jaxpace.hosts.locality.described import Described
from jaxpace.hosts.locality.join import Shown, join
from jaxpace.hosts.locality.nics import nearest
from jaxpace.hosts.locality.read import read_locality
from jaxpace.hosts.locality.types import Gpu, Nic
from tests.hosts.locality import machines, topologies
from tests.quick import examples

SWITCH_OF_NIC = [("0000:10:10.0", 0), ("0000:10:11.0", 0), ("0000:10:12.0", 1), ("0000:10:13.0", 1),
                 ("0000:10:14.0", 2), ("0000:10:15.0", 2), ("0000:10:16.0", 3), ("0000:10:17.0", 3)]
"""GPUs of `topologies.bare`, and the number of the NIC that shares their switch."""


def machine(root, *, switches, nodes=True, gpus="0000:10:1{i:x}.0", nics="0000:20:1{i:x}.0"):
  """The machine that `topologies.bare` describes: with its switches, or as a guest sees it, each
  card on its own."""
  machines.cpus(root, "x", ["0-3", "4-7"])
  machines.clock(root)
  for i in range(12):
    number = i if i < 8 else i - 8
    at = number // 2 if i < 8 else number
    node = at // 2 if nodes else -1
    address = (gpus if i < 8 else nics).format(i=number)
    above = (f"pci000{at}:00/000{at}:00:01.0/000{at}:01:00.0/000{at}:02:{i:02x}.0" if switches
             else f"pci01{i:02x}:00")
    card = machines.pci(root, f"{above}/{address}", "0x030200" if i < 8 else "0x020000",
                        "0x10de" if i < 8 else "0x1d0f", numa=node)
    if i >= 8:
      machines.rdma(root, f"rdmap{number}", card, 100, layer="Unspecified")
  return root


def doctor(capsys, *arguments):
  status = main(["doctor", *map(str, arguments)])
  out, err = capsys.readouterr()
  return status, " ".join(out.split()), err


def placed(place):
  return [(gpu.pci, gpu.nic) for gpu in place.gpus]


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "topo.xml"
  path.write_text(topologies.bare())
  return path


EXPECTED = [(gpu, f"rdmap{nic}") for gpu, nic in SWITCH_OF_NIC]


def test_a_file_of_bare_elements_is_read_by_class(tmp_path, file, capsys):
  place = read_locality(tmp_path / "none", topology=str(file))
  assert placed(place) == [(gpu, f"0000:20:1{nic}.0") for gpu, nic in SWITCH_OF_NIC]
  assert {gpu.nic_distance for gpu in place.gpus} == {"PIX"}
  assert [gpu.numa_node for gpu in place.gpus] == [0] * 4 + [1] * 4
  assert [node.cpus for node in place.numa] == ["0-3", "4-7"]
  status, out, _ = doctor(capsys, "--topology", file, "--root", tmp_path)
  assert status == 0 and "no GPU found" not in out and out.count("GPU 0000:10:1") >= 8
  assert "8 GPUs and 4 NICs are as topo.xml (NCCL topology) has them" in out
  assert "2 devices that are neither GPU nor NIC" in out


@pytest.mark.parametrize("nodes", [True, False])
def test_a_guest_gets_its_switches_from_the_file(tmp_path, file, nodes):
  root = machine(tmp_path / "root", switches=False, nodes=nodes)
  assert placed(read_locality(root)) != EXPECTED
  place = read_locality(root, topology=str(file))
  assert placed(place) == EXPECTED and [gpu.numa_node for gpu in place.gpus] == [0] * 4 + [1] * 4
  used = place.topology_used[0]
  assert "8 GPUs and 4 NICs are on this machine. Their places are those of the file." in used
  assert [c.kind for c in find_concerns(place) if c.level == "warning"] == []


def test_classes_left_blank_are_the_machines(tmp_path):
  file = tmp_path / "topo.xml"
  file.write_text(topologies.bare(classes=False))
  assert (placed(read_locality(machine(tmp_path / "root", switches=False), topology=str(file)))
          == EXPECTED)
  place = read_locality(tmp_path / "none", topology=str(file))
  assert (place.gpus == ()
          and "shows no GPU and no NIC where the file has devices" in place.topology_ignored)


def test_a_machine_that_shows_its_switches_stays_as_it_is(tmp_path, file):
  root = machine(tmp_path / "root", switches=True)
  alone, place = read_locality(root), read_locality(root, topology=str(file))
  assert placed(alone) == placed(place) == EXPECTED
  assert place.gpus == alone.gpus and "goes before the file's" in place.topology_used[0]


def test_the_file_of_another_machine_is_refused_with_a_warning(tmp_path, file, capsys):
  root = machine(tmp_path / "root", switches=True, gpus="0000:40:1{i:x}.0", nics="0000:50:1{i:x}.0")
  alone, place = read_locality(root), read_locality(root, topology=str(file))
  assert place.gpus == alone.gpus and place.nics == alone.nics
  status, out, _ = doctor(capsys, "--root", root, "--topology", file, "--strict")
  assert (status == 1
          and "Nothing of topo.xml (NCCL topology) is used: none of its GPUs' bus ids" in out)


def test_a_file_without_cards_is_no_silence(tmp_path, capsys):
  file = tmp_path / "topo.xml"
  file.write_text(
      '<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" '
      'class="0x010802"/></cpu></system>')
  status, out, _ = doctor(capsys, "--root", machine(tmp_path / "root", switches=True), "--topology",
                          file, "--strict")
  assert (status == 1 and "it holds no GPU and no NIC (1 other device)" in out
          and "No warnings" not in out)


def test_a_login_node_shows_the_files_machine_alone(tmp_path, capsys):
  file = tmp_path / "lstopo.xml"
  file.write_text(topologies.lstopo())
  _, out, _ = doctor(capsys, "--root", machines.laptop(tmp_path / "root"), "--topology", file)
  assert "node17" in out and "NVIDIA H100" in out and "NUMA node 2: no CPUs, 64 GiB" in out
  assert "wlp0s20f3" not in out and "hpet" not in out, "nothing of this machine"
  assert "what is shown is the machine that the file describes" in out


def test_a_part_of_the_machine_is_no_tree(tmp_path, file):
  root = machine(tmp_path / "root", switches=False)
  file.write_text(file.read_text().replace("0000:20:12.0", "0000:20:1f.0"))
  alone, place = read_locality(root), read_locality(root, topology=str(file))
  assert placed(place) == placed(alone)
  assert "lacks NIC rdmap2" in place.topology_used[0] and ("Left out, as this machine has none "
                                                           "such: 0000:20:1f.0.") in (
                                                               place.topology_used)


def test_a_file_that_disagrees_on_nodes_is_not_believed(tmp_path, file):
  root = machine(tmp_path / "root", switches=False)
  swapped = file.read_text().replace('numaid="0"', 'numaid="x"').replace('numaid="1"', 'numaid="0"')
  file.write_text(swapped.replace('numaid="x"', 'numaid="1"'))
  alone, place = read_locality(root), read_locality(root, topology=str(file))
  assert (placed(place) == placed(alone)
          and "They disagree on the NUMA node" in place.topology_used[0])


def test_a_nic_without_a_place_is_on_no_node(tmp_path):
  file = tmp_path / "topo.xml"
  file.write_text("""<system version="1"><cpu numaid="0">
    <nic><net name="eth0" dev="0" speed="100000" guid="0x0"/></nic></cpu>
    <cpu numaid="1"><pci busid="0002:00:00.0" class="0x030200"><gpu dev="0"/></pci></cpu></system>""")  # noqa: E501
  place = read_locality(tmp_path / "none", topology=str(file))
  assert ((place.gpus[0].nic, place.gpus[0].nic_distance, place.nics[0].numa_node)
          == ("eth0", "?", None))
  assert "far_nic" not in {concern.kind for concern in find_concerns(place)}


def test_of_several_hosts_in_one_file_the_first_is_read():
  from jaxpace.hosts.locality.nccl_topology import parse_topology
  cpu = ('<cpu host_hash="0x{0}" numaid="0"><pci busid="0000:01:00.0" class="0x030200"><gpu '
         'dev="0"/></pci></cpu>')
  found = parse_topology(f'<system version="1">{cpu.format(1)}{cpu.format(2)}</system>')
  assert len(found.gpus) == 1 and "2 hosts" in found.notes[0]


@st.composite
def machines_and_files(draw):
  """A machine that shows its switches, and a file with any of its cards, and others, in any
  places."""
  def path():
    node = draw(st.integers(0, 1))
    switch = draw(st.integers(0, 3))
    return node, (f"pci{node}", f"root{node}{switch}", f"up{node}{switch}")

  def anywhere():
    node = draw(st.integers(0, 1))
    return node, (f"cpu{node}", f"ffff:ff:0{draw(st.integers(0, 2))}.0")

  gpus, nics, told_gpus, told_nics = [], [], [], []
  for i in range(draw(st.integers(1, 4))):
    node, way = path()
    address = f"0000:0{i}:00.0"
    gpus.append(Gpu(address, numa_node=node, path=(*way, f"down{i}", address), switch=way[2]))
  for i in range(draw(st.integers(1, 4))):
    node, way = path()
    address = f"0000:1{i}:00.0"
    nics.append(Nic(f"mlx5_{i}", "infiniband", pci=address, numa_node=node,
                    path=(*way, f"down{9 - i}", address), switch=way[2], rate_gbps=200.0))
  for i in range(draw(st.integers(0, 6))):
    node, way = anywhere()
    told_gpus.append(Gpu(f"0000:0{i}:00.0", numa_node=node, path=(*way, f"0000:0{i}:00.0"),
                         interconnect="pcie"))
  for i in range(draw(st.integers(0, 6))):
    node, way = anywhere()
    kind = draw(st.sampled_from(["infiniband", "ethernet"]))
    told_nics.append(Nic(f"mlx5_{i}", kind,
                         pci=draw(st.sampled_from([None, f"0000:1{i}:00.0", "0000:77:00.0"])),
                         numa_node=node, path=way,
                         rate_gbps=draw(st.sampled_from([None, 10.0, 800.0]))))
  return tuple(gpus), tuple(nics), Described("x", tuple(told_gpus), tuple(told_nics))


@settings(max_examples=examples(300), deadline=None)
@given(machines_and_files())
def test_no_file_changes_what_a_machine_shows_of_its_switches(case):
  gpus, nics, described = case
  ways = {card.pci: card.path for card in (*gpus, *nics)}
  joined = join(Shown(gpus, nics, ways, 2), described, "x")
  before = [(gpu.pci, gpu.nic, gpu.nic_distance, gpu.numa_node) for gpu in nearest(gpus, nics)]
  after = [(gpu.pci, gpu.nic, gpu.nic_distance, gpu.numa_node)
           for gpu in nearest(joined.gpus, joined.nics, joined.distances)]
  assert before == after
