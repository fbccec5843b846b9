"""A topology file beside a machine: what it adds, that no machine is worse described for it, and
that hostile ones end in a sentence."""

import contextlib
import os
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.cli.main import main
from jaxpace.hosts.locality.concerns import find_concerns
from jaxpace.hosts.locality.nics import nearest
from jaxpace.hosts.locality.read import join, read_locality
from jaxpace.hosts.locality.topology_file import (
  Described,
  TopologyError,
  parse_topology,
  read_mask,
)
from jaxpace.hosts.locality.types import Gpu, Locality, Nic, NumaNode
from tests.hosts.locality import machines, topologies
from tests.quick import examples

DUMP = topologies.DUMP
EXPECTED = [(f"0000:10:1{i}.0", f"rdmap{i // 2}") for i in range(8)]
"""GPUs of `topologies.bare`, each with the NIC that shares its switch."""


def machine(root, *, switches, nodes=True, gpus="0000:10:1{i:x}.0", nics="0000:20:1{i:x}.0"):
  """The machine that `topologies.bare` describes: with its switches, or as a guest sees it, each
  card on its own."""
  machines.cpus(root, "x", ["0-3", "4-7"])
  machines.clock(root)
  for i in range(12):
    number = i if i < 8 else i - 8
    at = number // 2 if i < 8 else number
    above = (f"pci000{at}:00/000{at}:00:01.0/000{at}:01:00.0/000{at}:02:{i:02x}.0" if switches
             else f"pci01{i:02x}:00")
    card = machines.pci(root, f"{above}/{(gpus if i < 8 else nics).format(i=number)}",
                        "0x030200" if i < 8 else "0x020000", "0x10de" if i < 8 else "0x1d0f",
                        numa=at // 2 if nodes else -1)
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


def test_a_file_of_bare_elements_is_read_by_class(tmp_path, file, capsys):
  place = read_locality(tmp_path / "none", topology=str(file))
  assert placed(place) == [(f"0000:10:1{i}.0", f"0000:20:1{i // 2}.0") for i in range(8)]
  assert {gpu.nic_distance for gpu in place.gpus} == {"PIX"}
  assert [gpu.numa_node for gpu in place.gpus] == [0] * 4 + [1] * 4
  assert [node.cpus for node in place.numa] == ["0-3", "4-7"]


@pytest.mark.parametrize("nodes, classes", [(True, True), (False, True), (True, False)])
def test_a_guest_gets_its_switches_from_the_file(tmp_path, file, nodes, classes):
  root = machine(tmp_path / "root", switches=False, nodes=nodes)
  file.write_text(topologies.bare(classes=classes))
  assert placed(read_locality(root)) != EXPECTED
  place = read_locality(root, topology=str(file))
  assert placed(place) == EXPECTED and [gpu.numa_node for gpu in place.gpus] == [0] * 4 + [1] * 4
  assert ("8 GPUs and 4 NICs are on this machine. Their places are those of the file."
          in place.topology_used[0])
  assert [c.kind for c in find_concerns(place) if c.level == "warning"] == []


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
  file.write_text('<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" '
                  'class="0x010802"/></cpu></system>')
  status, out, _ = doctor(capsys, "--root", root, "--topology", file, "--strict")
  assert status == 1 and "it holds no GPU and no NIC" in out and "No warnings" not in out


def test_a_login_node_shows_the_files_machine_alone(tmp_path, file, capsys):
  _, out, _ = doctor(capsys, "--root", machines.laptop(tmp_path / "root"), "--topology", file)
  assert out.count("GPU 0000:10:1") >= 8 and "NUMA node 1: CPUs 4-7" in out
  assert "wlp0s20f3" not in out and "hpet" not in out, "nothing of this machine"
  assert "what is shown is the machine that topo.xml (NCCL topology) describes" in out


def test_a_part_of_the_machine_is_no_tree(tmp_path, file):
  root = machine(tmp_path / "root", switches=False)
  file.write_text(file.read_text().replace("0000:20:12.0", "0000:20:1f.0"))
  alone, place = read_locality(root), read_locality(root, topology=str(file))
  assert placed(place) == placed(alone) and "lacks NIC rdmap2" in place.topology_used[0]


def test_a_file_that_disagrees_on_nodes_is_not_believed(tmp_path, file):
  root = machine(tmp_path / "root", switches=False)
  swapped = file.read_text().replace('numaid="0"', 'numaid="x"').replace('numaid="1"', 'numaid="0"')
  file.write_text(swapped.replace('numaid="x"', 'numaid="1"'))
  alone, place = read_locality(root), read_locality(root, topology=str(file))
  assert (placed(place) == placed(alone)
          and "They disagree on the NUMA node" in place.topology_used[0])


def test_a_dump_names_nics_and_counts_nvlinks():
  topology = parse_topology(DUMP.encode())
  first, second = topology.gpus
  assert (first.pci, first.numa_node, first.switch, first.nvlinks, first.interconnect) == (
      "0000:00:04.0", 0, "ffff:ff:01.0", 12, "nvlink")
  assert (first.link.speed, first.link.width) == (16.0, 16)
  assert (second.numa_node, second.switch, second.interconnect) == (1, None, "pcie")
  nics = {nic.name: (nic.rate_gbps, nic.kind, nic.switch, nic.numa_node) for nic in topology.nics}
  # Where it has no place on the bus, NCCL puts a NIC below a processor, and nobody knows on which
  # node it is.
  assert nics == {"mlx5_0": (200.0, "infiniband", "ffff:ff:01.0", 0),
                  "eth0": (10.0, "ethernet", None, None)}


def test_a_socket_is_no_rdma_device_whatever_its_number():
  """NCCL writes the number of a socket's interface as its guid."""
  def kinds(text):
    return {nic.name: nic.kind for nic in parse_topology(text.encode()).nics}
  veth = DUMP.replace('name="eth0" dev="1" speed="10000" guid="0x0"',
                      'name="veth0a1" dev="3" speed="10000" guid="0x3"')
  assert kinds(veth) == {"mlx5_0": "infiniband", "veth0a1": "ethernet"}
  assert kinds(DUMP.replace('class="0x020700"', 'class="0x028000"'))["mlx5_0"] == "rdma"


def test_of_several_hosts_in_one_file_the_first_is_read():
  cpu = ('<cpu host_hash="0x{0}" numaid="0"><pci busid="0000:01:00.0" class="0x030200"><gpu '
         'dev="0"/></pci></cpu>')
  found = parse_topology(f'<system version="1">{cpu.format(1)}{cpu.format(2)}</system>'.encode())
  assert len(found.gpus) == 1


@given(data=st.data())
def test_a_mutated_file_is_read_or_refused(data):
  at = data.draw(st.integers(0, len(DUMP) - 1))
  text = DUMP[:at] + data.draw(st.text(max_size=3)) + DUMP[at + data.draw(st.integers(0, 40)):]
  with contextlib.suppress(TopologyError):
    parse_topology(text.encode(errors="replace"))


LAUGHS = ('<?xml version="1.0"?><!DOCTYPE system [<!ENTITY a "haha">'
          + "".join(f'<!ENTITY {chr(98 + i)} "{f"&{chr(97 + i)};" * 10}">' for i in range(9))
          + ']><system version="1"><cpu numaid="0">&j;</cpu></system>').encode()
CARDS = b"".join(b'<pci busid="%04x:00:00.0" class="0x030200"/>' % i for i in range(30_000))
HOSTILE = {
    "billion laughs": (LAUGHS, "declares entities"),
    "an entity of a file": (
        b'<!DOCTYPE system [<!ENTITY x SYSTEM "/etc/passwd">]><system>&x;</system>',
        "declares entities"),
    "laughs in another alphabet": (
        LAUGHS.decode().replace("?>", ' encoding="utf-16"?>').encode("utf-16"), "not XML"),
    "an unknown entity": (b"<system>&x;</system>", "not XML"),
    "deep": (b"<system><cpu>" + b"<pci>" * 50_000 + b"</pci>" * 50_000 + b"</cpu></system>",
             "nested deeper"),
    "cut": (DUMP.encode()[:-20], "not XML"),
    "another encoding": (b"<?xml version='1.0' encoding='x-none'?><system/>", "not XML"),
    "another document": (b"<svg/>", "outermost element is <svg>, not <system>"),
    "more GPUs than a host": (b"<system><cpu>" + CARDS + b"</cpu></system>", "no host has"),
    "blanks": (b" \n\t", "not XML"),
    "bytes": (bytes(range(256)) * 100, "not XML"),
    "large": (bytes(5 << 20), "larger than 4 MiB"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_a_sentence(name, tmp_path, capsys):
  content, sentence = HOSTILE[name]
  (tmp_path / "x").write_bytes(content)
  status = main(["doctor", "--topology", str(tmp_path / "x")])
  out, err = capsys.readouterr()
  assert status == 2 and out == "" and sentence in err and len(err.strip().splitlines()) == 1


def test_laughs_cost_no_memory():
  tracemalloc.start()
  try:
    with pytest.raises(TopologyError):
      parse_topology(LAUGHS)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
  finally:
    tracemalloc.stop()


def test_what_is_no_file_is_not_waited_for(tmp_path, capsys):
  os.mkfifo(tmp_path / "pipe")
  for path, sentence in ((tmp_path / "pipe", "a pipe or a device"),
                         ("/dev/zero", "a pipe or a device"), (tmp_path, "Is a directory"),
                         (tmp_path / "a\x1b[31m\nb", "a?[31m?b can't be read: No such file")):
    assert main(["doctor", "--topology", str(path)]) == 2
    assert sentence in capsys.readouterr().err


def test_names_can_not_steer_a_terminal(tmp_path, capsys):
  file = tmp_path / "topo.xml"
  net = f'<net name="mlx5&#x9b;31m&#x202e;{"y" * 500}" speed="{"9" * 400}" guid="0x1"/>'
  file.write_text('<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" '
                  f'class="0x020700"><nic>{net}</nic></pci></cpu></system>')
  assert main(["doctor", "--topology", str(file), "--root", str(tmp_path)]) == 0
  out = capsys.readouterr().out
  assert ("mlx5" in out and "\x9b" not in out and "\u202e" not in out
          and "y" * 65 not in out.replace("\n", ""))


@pytest.mark.parametrize("mask, expected", [
    ("00000000,0000ffff", "0-15"), ("0x00000001,0x00000000", "32"), ("0x1,,0x1", "0,64"),
    ("0xf...f", None), ("", None), (None, None), ("f" * 9, None), ("0," * 10_000 + "1", None),
    ("0", "")])
def test_masks_of_processors(mask, expected):
  assert read_mask(mask) == expected


@st.composite
def machines_and_files(draw):
  """A machine that shows its switches, and a file with any of its cards, and others, in any
  places."""
  def path():
    node, switch = draw(st.integers(0, 1)), draw(st.integers(0, 3))
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
    told_nics.append(Nic(f"mlx5_{i}", draw(st.sampled_from(["infiniband", "ethernet"])),
                         pci=draw(st.sampled_from([None, f"0000:1{i}:00.0", "0000:77:00.0"])),
                         numa_node=node, path=way,
                         rate_gbps=draw(st.sampled_from([None, 10.0, 800.0]))))
  return tuple(gpus), tuple(nics), Described(tuple(told_gpus), tuple(told_nics))


@settings(max_examples=examples(300), deadline=None)
@given(machines_and_files())
def test_no_file_changes_what_a_machine_shows_of_its_switches(case):
  gpus, nics, described = case
  joined = join(Locality(gpus=gpus, nics=nics, numa=(NumaNode(0, "0"), NumaNode(1, "1"))),
                described, "x")
  before = [(gpu.pci, gpu.nic, gpu.nic_distance, gpu.numa_node) for gpu in nearest(gpus, nics)]
  after = [(gpu.pci, gpu.nic, gpu.nic_distance, gpu.numa_node) for gpu in joined.gpus]
  assert before == after
