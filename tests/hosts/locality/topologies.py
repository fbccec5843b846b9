"""Topology files with the structure of those that clouds, NCCL, hwloc and nvidia-smi write, made up
for tests."""

from __future__ import annotations


def bare(gpus: str = "0000:10:1{i:x}.0", nics: str = "0000:20:1{i:x}.0", *,
         classes: bool = True) -> str:
  """A file as clouds ship it: two sockets with two switches each, two GPUs and a NIC on each,
  nothing but <pci>."""
  lines = ["<!-- made for a type of virtual machine -->", '<system version="1">']
  for node in range(2):
    lines.append(
        f'  <cpu numaid="{node}" affinity="{"0000000f" if node == 0 else "000000f0"}" '
        'arch="x86_64">')
    for switch in range(2):
      at = 2 * node + switch
      lines.append(
          f'    <pci busid="ffff:ff:0{at + 1}.0" class="0x060400" link_speed="16 GT/s" '
          'link_width="16">')
      for i in (2 * at, 2 * at + 1):
        lines.append(_device(gpus.format(i=i), "0x030200", classes))
      lines.append(_device(nics.format(i=at), "0x020000", classes))
      lines.append("    </pci>")
    lines.append(f'    <pci busid="0000:{node}c:00.0" class="0x010802"/>')
    lines.append("  </cpu>")
  return "\n".join([*lines, "</system>"])


def _device(address: str, cls: str, classes: bool) -> str:
  said = f' class="{cls}" vendor="0xffff"' if classes else ""
  return f'      <pci busid="{address}"{said} link_speed="16 GT/s" link_width="16"/>'


MATRIX = {
    "GPU0": ["X", "NV12", "NV12", "NV12", "PXB", "NODE", "SYS"],
    "GPU1": ["NV12", "X", "NV12", "NV12", "NODE", "PXB", "SYS"],
    "GPU2": ["NV12", "NV12", "X", "NV12", "SYS", "SYS", "PIX"],
    "GPU3": ["NV12", "NV12", "NV12", "X", "SYS", "SYS", "NODE"],
    "NIC0": ["PXB", "NODE", "SYS", "SYS", "X", "NODE", "SYS"],
    "NIC1": ["NODE", "PXB", "SYS", "SYS", "NODE", "X", "SYS"],
    "NIC2": ["SYS", "SYS", "PIX", "NODE", "SYS", "SYS", "X"],
}
CPUS = ["0-3", "0-3", "4-7", "4-7"]


def smi(*, tabs: bool = True, ansi: bool = False, names: tuple[str, ...] = (), legend: bool = True,
        columns: int = 3, old: bool = False) -> str:
  """`nvidia-smi topo -m` of four GPUs and three NICs.

  Args:
    tabs: whether columns stand apart by tabs, as the program writes them, or by blanks, as they
      come out of a browser.
    ansi: whether the header is underlined.
    names: of the NICs in the header itself, as older drivers have them.
    legend: whether the NICs' names follow.
    columns: how many of CPU affinity, NUMA affinity and the GPU's own NUMA node there are.
    old: whether "SYS" is called "SOC".
  """
  labels = {f"NIC{i}": name for i, name in enumerate(names)}
  between = "\t" if tabs else "   "
  head = ([labels.get(label, label) for label in MATRIX]
          + ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"][:columns])
  header = between.join(["", *head])
  lines = [f"\x1b[4m{header}\x1b[0m" if ansi else header]
  for i, (label, cells) in enumerate(MATRIX.items()):
    cells = [" X " if cell == "X" else "SOC" if old and cell == "SYS" else cell for cell in cells]
    tail = ([CPUS[i], str(i // 2), "\tN/A" if tabs else "N/A"][:columns] if label.startswith("GPU")
            else [""] * columns)
    lines.append(between.join([labels.get(label, label), *cells, *tail]))
  lines += ["", "Legend:", "", "  X    = Self", "  SYS  = Connection between NUMA nodes",
            "  NV#  = NVLinks", ""]
  if legend and not names:
    lines += ["NIC Legend:", "", *(f"  NIC{i}: mlx5_{i}" for i in range(3)), ""]
  return "\n".join(lines)


def lstopo(version: str = "2.0") -> str:
  """hwloc's XML: a GPU and an InfiniBand card on one switch, a GPU on the other socket, HBM as a
  node of its own."""
  v1, v3 = version == "1", version.startswith("3")
  gpu, net, rdma = ("12", "16", "32") if v3 else ("5", "2", "3")
  head = "<topology>" if v1 else f'<topology version="{version}">'
  first = _bridges("0000", "10", f"""
    <object type="PCIDev" pci_busid="0000:13:00.0" pci_type="0302 [10de:2330] [10de:16c1] a1">
      <object type="OSDev" name="cuda0" osdev_type="{gpu}"><info name="GPUModel" value="NVIDIA H100"/></object>
      <object type="OSDev" name="nvml0" osdev_type="{gpu}"/>
    </object>""", f"""
    <object type="PCIDev" pci_busid="0000:14:00.0" pci_type="0207 [15b3:1021] [15b3:0023] 00">
      <object type="OSDev" name="ibs1" osdev_type="{net}"/>
      <object type="OSDev" name="mlx5_0" osdev_type="{rdma}"><info name="Port1State" value="4"/></object>
    </object>""")  # noqa: E501
  second = f"""
    <object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="0000:[80-81]">
      <object type="PCIDev" pci_busid="0000:81:00.0" pci_type="0302 [10de:2330] [10de:16c1] a1"/>
      <object type="PCIDev" pci_busid="0000:82:00.0" pci_type="0200 [8086:1521] [8086:0001] 01">
        <object type="OSDev" name="eno1" osdev_type="{net}"/></object>
      <object type="PCIDev" pci_busid="0000:83:00.0" pci_type="0108 [144d:a808] [144d:a801] 00"/>
      <object type="PCIDev" pci_busid="0000:84:00.0" pci_type="0300 [1a03:2000] [1a03:2000] 41"/>
    </object>"""
  nodes = [_node(0, "0x0000000f", 0x1, 270), _node(1, "0x000000f0", 0x2, 270),
           _node(2, "0x0000000f", 0x4, 64)]
  packages = []
  for i, (cards, cpuset) in enumerate(((first, "0x0000000f"), (second, "0x000000f0"))):
    own = [nodes[i], nodes[2]] if i == 0 and not v1 else [nodes[i]]
    nodeset = "0x00000005" if i == 0 and not v1 else f"0x0000000{i + 1}"
    inner = own[0].replace("/>", f">{cards}</object>") if v1 else "".join(own) + cards
    package = "Socket" if v1 else "Package"
    packages.append(f'<object type="{package}" os_index="{i}" cpuset="{cpuset}" '
                    f'nodeset="{nodeset}"><info name="CPUModel" value="Some CPU"/>{inner}</object>')
  return ('<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE topology SYSTEM '
          f'"hwloc{version[0]}.dtd">\n{head}\n'
          '<object type="Machine" os_index="0" cpuset="0x000000ff" nodeset="0x00000007"><info '
          f'name="HostName" value="node17"/>{"".join(packages)}</object>\n'
          '<distances2hetero nbobjs="2" kind="25" name="NVLinkBandwidth"/></topology>\n')


def _bridges(domain: str, bus: str, *cards: str) -> str:
  """A host bridge, a root port and a switch with a card below each of its ports."""
  at = int(bus, 16)
  ports = "".join('<object type="Bridge" bridge_type="1-1" '
                  f'pci_busid="{domain}:{at + 2:02x}:0{i}.0" bridge_pci="{domain}:[13-13]" '
                  f'pci_type="0604 [1000:c030] [1000:a064] b0">{card}</object>'
                  for i, card in enumerate(cards))
  return (f'<object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="{domain}:[{bus}-14]">'
          f'<object type="Bridge" bridge_type="1-1" pci_busid="{domain}:{bus}:01.0" '
          'pci_type="0604 [8086:352a] [0:0] 11">'
          f'<object type="Bridge" bridge_type="1-1" pci_busid="{domain}:{at + 1:02x}:00.0" '
          f'pci_type="0604 [1000:c030] [1000:a064] b0">{ports}</object></object></object>')


def _node(number: int, cpuset: str, nodeset: int, gigabytes: int) -> str:
  return (f'<object type="NUMANode" os_index="{number}" cpuset="{cpuset}" '
          f'nodeset="0x{nodeset:08x}" local_memory="{gigabytes << 30}"/>')
