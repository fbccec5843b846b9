"""Synthetic topology files with the structure of those that clouds, NCCL and nvidia-smi write."""

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


DUMP = """<system version="1">
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
"""What NCCL dumps: a GPU and an InfiniBand card on one switch, a GPU on the other socket, a NIC
without a place."""
