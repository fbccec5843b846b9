"""Synthetic topology files with the structure of those that clouds and NCCL write."""

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
