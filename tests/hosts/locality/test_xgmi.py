"""AMD's links between GPUs have a name of their own."""

from jaxpace.cli.main import main
from jaxpace.hosts.locality.nccl_topology import parse_topology
from jaxpace.hosts.locality.read import read_locality
from tests.hosts.locality import machines

NODES = "/sys/class/kfd/kfd/topology/nodes"


def kfd(root, node, *, bus=None, links=()):
  """A node of the driver's: a GPU on `bus`, or a processor; links are (type, node)."""
  place = "" if bus is None else f"location_id {bus << 8}\ndomain 0\n"
  units = f"cpu_cores_count {0 if bus else 8}\nsimd_count {256 if bus else 0}"
  machines.write(root, f"{NODES}/{node}/properties", f"{units}\n{place}")
  for i, (kind, to) in enumerate(links):
    machines.write(root, f"{NODES}/{node}/io_links/{i}/properties",
                   f"type {kind}\nnode_from {node}\nnode_to {to}")


def instinct(root, kind):
  """Two GPUs of AMD on one socket, joined by links of type `kind`."""
  machines.cpus(root, "AMD EPYC 9654", ["0-7"])
  machines.clock(root)
  kfd(root, 0)
  for i in range(2):
    machines.pci(root, f"pci0000:{i + 1}0/0000:{i + 1}0:01.0/0000:{i + 1}1:00.0", "0x120000",
                 "0x1002", numa=0)
    kfd(root, i + 1, bus=0x11 + 0x10 * i, links=[(2, 0), (kind, 2 - i)])
  return root


def test_sysfs_tells_xgmi_from_pcie(tmp_path, capsys):
  gpus = read_locality(instinct(tmp_path / "x", 11)).gpus
  assert [(gpu.pci, gpu.interconnect, gpu.xgmi_links) for gpu in gpus] == [
      ("0000:11:00.0", "xgmi", 1), ("0000:21:00.0", "xgmi", 1)]
  gpus = read_locality(instinct(tmp_path / "p", 2)).gpus
  assert [(gpu.interconnect, gpu.xgmi_links) for gpu in gpus] == [("pcie", 0)] * 2
  assert main(["doctor", "--root", str(tmp_path / "x")]) == 0
  assert capsys.readouterr().out.count("1 XGMI link") == 2


def test_an_nvswitch_says_nothing_of_amds_gpus(tmp_path):
  machines.pci(tmp_path, "pci0000:10/0000:10:01.0/0000:11:00.0", "0x120000", "0x1002", numa=0)
  machines.pci(tmp_path, "pci0000:f0/0000:f0:01.0/0000:f1:00.0", "0x068000", "0x10de", numa=0)
  assert read_locality(tmp_path).gpus[0].interconnect is None


def test_a_topology_file_tells_xgmi_from_pcie():
  first, second = parse_topology("""<system version="2"><cpu numaid="0">
    <pci busid="0000:0c:00.0" class="0x120000"><gpu dev="0">
      <xgmi target="0000:15:00.0" count="1"/><xgmi target="0000:1e:00.0" count="1"/></gpu></pci>
    <pci busid="0000:15:00.0" class="0x120000"><gpu dev="1"/></pci></cpu></system>""").gpus
  assert (first.interconnect, first.xgmi_links, first.nvlinks) == ("xgmi", 2, None)
  assert (second.interconnect, second.xgmi_links) == ("pcie", None)
