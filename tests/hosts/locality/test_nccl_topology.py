import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.hosts.locality.nccl_topology import TopologyError, parse_topology
from jaxpace.hosts.locality.read import read_locality
from tests.hosts.locality import machines

XML = """<system version="1">
  <cpu numaid="0" affinity="00000000,0000ffff" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1">
    <pci busid="ffff:ff:01.0" class="0x060400" vendor="0xffff" device="0xffff" link_speed="" link_width="0">
      <pci busid="0000:00:04.0" class="0x030200" device="0x20b2" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="80" rank="0" gdr="1"><nvlink target="0000:00:05.0" count="12" tclass="0x030200"/></gpu>
      </pci>
      <pci busid="0101:00:00.0" class="0x020700" device="0x101c" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="200000" port="1" guid="0x8c15030003fd1500" gdr="1"/></nic>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="1" arch="x86_64">
    <pci busid="0000:00:05.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16"><gpu dev="1" sm="80"/></pci>
    <nic><net name="eth0" dev="1" speed="10000" guid="0x0"/></nic>
  </cpu>
</system>"""  # noqa: E501


def test_gpus_nics_and_their_places():
  topology = parse_topology(XML)
  first, second = topology.gpus
  assert (first.pci, first.numa_node, first.switch, first.nvlinks, first.interconnect) == (
      "0000:00:04.0", 0, "ffff:ff:01.0", 12, "nvlink")
  assert (first.link.speed, first.link.width) == (16.0, 16)
  assert (second.numa_node, second.switch, second.interconnect) == (1, None, "pcie")
  fabric, ethernet = topology.nics
  # Where it has no place on the bus, NCCL puts a NIC below a processor, and nobody knows on which
  # node it is.
  assert ((fabric.name, fabric.rate_gbps, fabric.kind, fabric.switch)
          == ("mlx5_0", 200.0, "infiniband", "ffff:ff:01.0"))
  assert ((ethernet.name, ethernet.rate_gbps, ethernet.kind, ethernet.numa_node)
          == ("eth0", 10.0, "ethernet", None))


def test_a_socket_is_no_rdma_device_whatever_its_number():
  """NCCL writes the number of a socket's interface as its guid."""
  veth = XML.replace('name="eth0" dev="1" speed="10000" guid="0x0"',
                     'name="veth0a1" dev="3" speed="10000" guid="0x3"')
  assert [nic.kind for nic in parse_topology(veth).nics] == ["infiniband", "ethernet"]
  either = XML.replace('class="0x020700"', 'class="0x028000"')
  assert [nic.kind for nic in parse_topology(either).nics] == ["rdma", "ethernet"]


def test_the_file_tells_what_a_flat_guest_does_not(tmp_path):
  file = tmp_path / "topology.xml"
  file.write_text(XML)
  root = machines.cloud_vm(tmp_path / "root")
  place = read_locality(root, topology=str(file))
  assert [(gpu.pci, gpu.numa_node, gpu.nic, gpu.nic_distance) for gpu in place.gpus] == [
      ("0000:00:04.0", 0, "mlx5_0", "PIX"), ("0000:00:05.0", 1, "mlx5_0", "SYS")]
  assert {nic.name: nic.rate_gbps for nic in place.nics} == {"eth0": 10.0, "mlx5_0": 200.0}
  assert place.gpus[0].name == "NVIDIA GPU", "sysfs still says what the file does not"
  assert "topology file" in place.sources
  assert len(read_locality(tmp_path / "empty", topology=str(file)).gpus) == 2


@pytest.mark.parametrize("text, sentence", [
    ("", "no XML"), ("<system", "no XML"),
    ("<graphs version='1'/>", "outermost element is <graphs>")])
def test_other_documents_are_named(text, sentence, tmp_path):
  file = tmp_path / "x.xml"
  file.write_text(text)
  with pytest.raises(TopologyError, match=sentence):
    read_locality(tmp_path, topology=str(file))


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(TopologyError, match="none.xml can't be read: No such file"):
    read_locality(tmp_path, topology=str(tmp_path / "none.xml"))


@given(st.data())
def test_a_mutated_file_is_read_or_refused(data):
  at = data.draw(st.integers(0, len(XML) - 1))
  text = XML[:at] + data.draw(st.text(max_size=3)) + XML[at + data.draw(st.integers(0, 40)):]
  with contextlib.suppress(TopologyError):
    parse_topology(text)
