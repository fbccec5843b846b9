import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.hosts.locality.described import TopologyError
from jaxpace.hosts.locality.read import read_locality
from jaxpace.hosts.locality.topology_file import parse_topology
from tests.hosts.locality import machines, topologies


def nearest(tmp_path, text):
  file = tmp_path / "topo.txt"
  file.write_text(text)
  place = read_locality(tmp_path / "empty", topology=str(file))
  return [(gpu.pci, gpu.numa_node, gpu.nic, gpu.nic_distance, gpu.nvlinks) for gpu in place.gpus]


NAMED = [("GPU0", 0, "mlx5_0", "PXB", 12), ("GPU1", 0, "mlx5_1", "PXB", 12),
         ("GPU2", 1, "mlx5_2", "PIX", 12), ("GPU3", 1, "mlx5_2", "NODE", 12)]
"""Nearest NICs of the matrix of `topologies`. With three peers, 36 links are more than a GPU has:
it's a switch."""


@pytest.mark.parametrize("text", [
    topologies.smi(),
    topologies.smi(ansi=True),
    topologies.smi(ansi=True).replace("\x1b", ""),
    topologies.smi(tabs=False),
    topologies.smi(names=("mlx5_0", "mlx5_1", "mlx5_2"), columns=2),
    topologies.smi(old=True),
    "$ nvidia-smi topo -m\n" + topologies.smi() + "\n$ exit\n",
    topologies.smi(tabs=False).replace("SYS   SYS   PIX",
                                       "SYSSYSPIX").replace("NODE   SYS", "NODESYS"),
    topologies.smi().replace("\nNIC0", "\nNIC9"),
], ids=["tabs", "underlined", "escape lost", "blanks", "names in the header", "SOC", "in a log",
        "run together", "cut"])
def test_matrices_of_all_drivers(tmp_path, text):
  assert nearest(tmp_path, text) == NAMED


def test_nics_without_a_legend_keep_their_numbers(tmp_path):
  found = nearest(tmp_path, topologies.smi(legend=False))
  assert [row[2] for row in found] == ["NIC0", "NIC1", "NIC2", "NIC2"]
  assert "without a legend" in " ".join(parse_topology(topologies.smi(legend=False).encode()).notes)


def test_without_columns_of_affinity_nodes_are_not_known(tmp_path):
  assert ([row[1:4] for row in nearest(tmp_path, topologies.smi(columns=1))]
          == [(None, *row[2:4]) for row in NAMED])


def test_a_blank_column_is_not_taken_for_the_next(tmp_path):
  # As where the process may not use any CPU of the second node.
  assert nearest(tmp_path, topologies.smi().replace("\t4-7\t1", "\t\t1")) == NAMED
  blanks = topologies.smi(tabs=False).replace("4-7   1", "1")
  assert [row[1] for row in nearest(tmp_path, blanks)] == [0, 0, None, None]


def test_links_without_a_switch_add_up():
  text = ("\tGPU0\tGPU1\tGPU2\tCPU Affinity\nGPU0\t X \tNV4\tNV2\t0-3\n"
          "GPU1\tNV4\t X \tPHB\t0-3\nGPU2\tNV2\tPHB\t X \t0-3\n")
  found = parse_topology(text.encode()).gpus
  assert ([(gpu.nvlinks, gpu.interconnect) for gpu in found]
          == [(6, "nvlink"), (4, "nvlink"), (2, "nvlink")])
  assert (parse_topology(text.replace("NV4", "SYS").replace("NV2", "SYS").encode()).gpus[
      0].interconnect == "pcie")


@pytest.mark.parametrize("text", [
    "", "hello\n", "\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n",
    "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPIX\t0-3\n"])
def test_other_text_is_refused_in_a_sentence(text):
  with pytest.raises(TopologyError, match="no XML"):
    parse_topology(text.encode())


@given(st.data())
def test_a_mutated_matrix_is_read_or_refused(data):
  text = topologies.smi()
  at = data.draw(st.integers(0, len(text) - 1))
  text = text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 40)):]
  try:
    found = parse_topology(text.encode(errors="replace"))
  except TopologyError:
    return
  assert found.gpus


def four_gpus(root):
  """A guest with four GPUs and three NICs on a flat bus, named as in the matrix."""
  machines.cpus(root, "x", ["0-3", "4-7"])
  for i in range(4):
    machines.pci(root, f"pci0000:0{i + 1}/0000:0{i + 1}:00.0", "0x030200", "0x10de")
  for i in range(3):
    card = machines.pci(root, f"pci0000:1{i + 1}/0000:1{i + 1}:00.0", "0x020700", "0x15b3")
    machines.rdma(root, f"mlx5_{i}", card, 200)
  return root


def test_beside_a_machine_its_gpus_are_those_of_the_bus(tmp_path):
  file = tmp_path / "topo.txt"
  file.write_text(topologies.smi(ansi=True))
  place = read_locality(four_gpus(tmp_path / "root"), topology=str(file))
  assert [(gpu.pci, gpu.numa_node, gpu.nic, gpu.nic_distance) for gpu in place.gpus] == [
      (f"0000:0{i + 1}:00.0", *NAMED[i][1:4]) for i in range(4)]
  assert place.gpus[0].nvlinks == 12 and [nic.numa_node for nic in place.nics] == [0, 0, 1]
  assert ("4 GPUs and 3 NICs are on this machine" in place.topology_used[0]
          and place.topology_ignored is None)


def test_a_matrix_of_other_gpus_or_nics_is_not_used(tmp_path):
  root, file = four_gpus(tmp_path / "root"), tmp_path / "topo.txt"
  alone = read_locality(root)
  file.write_text(topologies.smi(names=("mlx5_7", "mlx5_8", "mlx5_9")))
  place = read_locality(root, topology=str(file))
  assert place.gpus == alone.gpus and "none of its NICs has the name" in place.topology_ignored
  file.write_text("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPIX\t0-3\nGPU1\tPIX\t X \t0-3\n")
  place = read_locality(root, topology=str(file))
  assert place.gpus == alone.gpus and "it has 2 GPUs and this machine 4" in place.topology_ignored
