import pytest

from jaxpace.hosts.locality.read import read_locality
from jaxpace.hosts.locality.topology_file import parse_topology
from tests.hosts.locality import topologies


@pytest.mark.parametrize("version", ["1", "2.0", "3.0"])
def test_every_version_gives_cards_their_places(version):
  found = parse_topology(topologies.lstopo(version).encode())
  first, second = found.gpus
  assert ((first.pci, first.name, first.numa_node, first.switch)
          == ("0000:13:00.0", "NVIDIA H100", 0, "0000:11:00.0"))
  assert (first.path == ("pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:00.0",
                         "0000:13:00.0")), "as sysfs has it"
  assert ((second.pci, second.name, second.numa_node, second.switch)
          == ("0000:81:00.0", "NVIDIA GPU", 1, None))
  assert {gpu.interconnect for gpu in found.gpus} == {"nvlink"}
  fabric, ethernet = found.nics
  assert ((fabric.name, fabric.kind, fabric.interfaces, fabric.up)
          == ("mlx5_0", "infiniband", ("ibs1",), True))
  assert (fabric.numa_node, fabric.switch) == (0, "0000:11:00.0")
  assert (ethernet.name, ethernet.kind, ethernet.numa_node) == ("eno1", "ethernet", 1)
  assert found.others == 2, "NVMe, and the display of the main board"
  assert (found.hostname, found.cpu.model, found.cpu.online) == ("node17", "Some CPU", "0-7")
  assert found.cpu.sockets == ("0-3", "4-7")


def test_a_node_of_memory_alone_is_no_place_of_cards():
  found = parse_topology(topologies.lstopo().encode())
  assert [(node.node, node.cpus, node.memory_bytes >> 30) for node in found.numa] == [
      (0, "0-3", 270), (1, "4-7", 270), (2, "", 64)]
  assert found.gpus[0].numa_node == 0


def test_without_bridges_only_the_node_is_known(tmp_path):
  file = tmp_path / "x.xml"
  file.write_text("""<topology version="2.0"><object type="Machine" nodeset="0x3">
    <object type="Package" nodeset="0x1">
      <object type="PCIDev" pci_busid="0000:13:00.0" pci_type="0302 [10de:2330]"/>
      <object type="PCIDev" pci_busid="0000:14:00.0" pci_type="0207 [15b3:1021]"/></object>
    <object type="PCIDev" pci_busid="0000:15:00.0" pci_type="1200 [1002:74a1]">
      <object type="OSDev" name="rsmi0" osdev_type="5"/></object>
    <object type="PCIDev" pci_busid="torn" pci_type="1200 [1002:74a1]"/></object></topology>""")
  place = read_locality(tmp_path / "empty", topology=str(file))
  near, nowhere = place.gpus
  assert (near.path, near.numa_node, near.nic, near.nic_distance) == ((), 0, "0000:14:00.0", "NODE")
  assert ((nowhere.name, nowhere.numa_node,
           nowhere.nic_distance) == ("AMD GPU", None, "?")), "on no node, or on all"
