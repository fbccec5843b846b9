"""Trees of sysfs and procfs as real machine types have them, for the readers to read."""

import os
import pathlib
from typing import Any

MAX = 1 << 63


def write(root: pathlib.Path, path: str, text: Any) -> None:
  file = root / path.lstrip("/")
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(f"{text}\n")


def link(root: pathlib.Path, path: str, target: str) -> None:
  """A relative link, as sysfs has them."""
  file = root / path.lstrip("/")
  file.parent.mkdir(parents=True, exist_ok=True)
  file.symlink_to(os.path.relpath(root / target.lstrip("/"), file.parent))


def pci(root: pathlib.Path, way: str, cls: str, vendor: str, *, numa: int = -1,
        speed: float | None = 32.0, width: int = 16) -> str:
  """A PCI device; `way` reads host bridge/…/address. Returns its folder."""
  directory = f"/sys/devices/{way}"
  address = way.rpartition("/")[2]
  write(root, f"{directory}/class", cls)
  write(root, f"{directory}/vendor", vendor)
  write(root, f"{directory}/numa_node", numa)
  if speed is not None:
    write(root, f"{directory}/current_link_speed", f"{speed} GT/s PCIe")
    write(root, f"{directory}/current_link_width", width)
    write(root, f"{directory}/max_link_speed", f"{speed} GT/s PCIe")
    write(root, f"{directory}/max_link_width", width)
  if not (root / f"sys/bus/pci/devices/{address}").is_symlink():
    link(root, f"/sys/bus/pci/devices/{address}", directory)
  return directory


def rdma(root: pathlib.Path, name: str, device: str, rate: int, *, state: str = "4: ACTIVE",
         layer: str = "InfiniBand") -> None:
  """An RDMA device on the PCI device at `device`."""
  write(root, f"{device}/infiniband/{name}/ports/1/rate", f"{rate} Gb/sec (4X NDR)")
  write(root, f"{device}/infiniband/{name}/ports/1/state", state)
  write(root, f"{device}/infiniband/{name}/ports/1/link_layer", layer)
  link(root, f"{device}/infiniband/{name}/device", device)
  link(root, f"/sys/class/infiniband/{name}", f"{device}/infiniband/{name}")


def net(root: pathlib.Path, name: str, device: str | None, *, speed: int | None = None,
        state: str = "up") -> None:
  """A network interface, without hardware if `device` is None."""
  directory = f"{device or '/sys/devices/virtual'}/net/{name}"
  write(root, f"{directory}/operstate", state)
  write(root, f"{directory}/statistics/rx_bytes", 0)
  write(root, f"{directory}/statistics/tx_bytes", 0)
  if speed is not None:
    write(root, f"{directory}/speed", speed)
  if device is not None:
    link(root, f"{directory}/device", device)
  link(root, f"/sys/class/net/{name}", directory)


def cpus(root: pathlib.Path, model: str, sockets: list[str], *, allowed: str | None = None,
         numa: bool = True) -> None:
  from jaxpace.hosts.locality.host import format_list, parse_list
  everything = format_list(tuple(cpu for socket in sockets for cpu in parse_list(socket)))
  write(root, "/proc/cpuinfo", f"processor\t: 0\nmodel name\t: {model}\nflags\t\t: fpu tsc")
  write(root, "/proc/self/status",
        f"Name:\tpython\nCpus_allowed_list:\t{allowed or everything}\nThreads:\t9")
  write(root, "/proc/meminfo", "MemTotal:       2113410000 kB\nMemFree: 1 kB")
  write(root, "/sys/devices/system/cpu/online", everything)
  for i, socket in enumerate(sockets):
    for cpu in parse_list(socket):
      write(root, f"/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", i)
    if numa:
      write(root, f"/sys/devices/system/node/node{i}/cpulist", socket)
      write(root, f"/sys/devices/system/node/node{i}/meminfo",
            f"Node {i} MemTotal:       1056705000 kB")


def clock(root: pathlib.Path, source: str = "tsc", available: str = "tsc hpet acpi_pm") -> None:
  write(root, "/sys/devices/system/clocksource/clocksource0/current_clocksource", source)
  write(root, "/sys/devices/system/clocksource/clocksource0/available_clocksource", available)


def cgroup2(root: pathlib.Path, path: str = "/", limits: dict[str, str] | None = None) -> None:
  """Version 2; `limits` are files of the group at `path`."""
  write(root, "/proc/self/cgroup", f"0::{path}")
  write(root, "/proc/self/mountinfo",
        "30 20 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate")
  for name, text in (limits or {}).items():
    write(root, f"/sys/fs/cgroup{path.rstrip('/')}/{name}", text)


def dgx(root: pathlib.Path, *, swapped: bool = False) -> pathlib.Path:
  """Eight GPUs and eight 400 Gbit/s NICs on two sockets, a pair on each PCIe switch, NVSwitches, a
  slow Ethernet card; `swapped`: the NIC of GPU 1 sits on the other socket."""
  cpus(root, "Intel(R) Xeon(R) Platinum 8480C", ["0-3", "4-7"])
  clock(root)
  cgroup2(root, "/user.slice", {"cpu.max": "max 100000", "memory.max": "max"})
  for i in range(8):
    node, bus = i // 4, 0x15 + 0x11 * i
    base = f"pci0000:{bus:02x}"
    ports = f"{base}/0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0"
    up = f"{ports[0]}/{ports[1]}"
    pci(root, ports[0], "0x060400", "0x8086", numa=node)
    pci(root, up, "0x060400", "0x1000", numa=node)
    for slot in range(2):
      pci(root, f"{up}/0000:{bus + 2:02x}:{slot:02x}.0", "0x060400", "0x1000", numa=node)
    pci(root, f"{up}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0", "0x030200", "0x10de",
        numa=node)
    write(root, f"/proc/driver/nvidia/gpus/0000:{bus + 3:02x}:00.0/information",
          f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 1\nGPU UUID: \t GPU-{i}f3a\nBus Type: "
          "\t PCIe")
    if swapped and i == 1:
      other = pci(root, "pci0000:a0/0000:a0:01.0/0000:a1:00.0", "0x020700", "0x15b3", numa=1)
    else:
      other = pci(root, f"{up}/0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0", "0x020700",
                  "0x15b3", numa=node)
    rdma(root, f"mlx5_{i}", other, 400)
    net(root, f"ib{i}", other, speed=400000)
  for i in range(4):
    pci(root, f"pci0000:f0/0000:f0:0{i + 1}.0/0000:f{i + 1}:00.0", "0x068000", "0x10de", numa=1,
        width=2)
  # the main board's display
  pci(root, "pci0000:00/0000:00:10.0/0000:05:00.0", "0x030000", "0x1a03", numa=0, width=1)
  slow = pci(root, "pci0000:00/0000:00:11.0/0000:06:00.0", "0x020000", "0x8086", numa=0, speed=8.0,
             width=4)
  net(root, "eno1", slow, speed=10000)
  net(root, "lo", None)
  net(root, "docker0", None, state="down")
  return root


def cloud_vm(root: pathlib.Path) -> pathlib.Path:
  """Two GPUs passed through to a guest whose bus is flat and whose firmware says nothing of NUMA;
  in a container."""
  cpus(root, "AMD EPYC 7V13", ["0-7"], numa=False)
  clock(root, "hyperv_clocksource_tsc_page", "hyperv_clocksource_tsc_page acpi_pm")
  cgroup2(root, "/../../kubepods/pod7", None)
  write(root, "/proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw")
  write(root, "/sys/fs/cgroup/cpu.max", "400000 100000")
  write(root, "/sys/fs/cgroup/memory.max", 64 << 30)
  write(root, "/sys/fs/cgroup/cpu.stat", "usage_usec 100\nnr_throttled 3\nthrottled_usec 1500")
  for i in range(2):
    pci(root, f"pci0000:00/0000:00:0{4 + i}.0", "0x030200", "0x10de", speed=None)
  card = pci(root, "pci0000:00/0000:00:03.0", "0x020000", "0x1af4", speed=None)
  net(root, "eth0", card, speed=-1)
  # As virtio has it: the interface's device lies below the PCI device.
  (root / f"{card}/net/eth0/device".lstrip("/")).unlink()
  write(root, f"{card}/virtio0/uevent", "")
  link(root, f"{card}/net/eth0/device", f"{card}/virtio0")
  net(root, "lo", None)
  return root


def laptop(root: pathlib.Path) -> pathlib.Path:
  """No GPU that computes, a wireless card, version 1 and 2 of control groups at once, no huge
  pages."""
  cpus(root, "Intel(R) Core(TM) i7-1260P", ["0-7"])
  clock(root, "hpet", "hpet acpi_pm")
  pci(root, "pci0000:00/0000:00:02.0", "0x030000", "0x8086", speed=None)
  card = pci(root, "pci0000:00/0000:00:14.3", "0x028000", "0x8086", speed=None)
  net(root, "wlp0s20f3", card)
  net(root, "lo", None)
  write(root, "/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
  write(root, "/proc/self/cgroup", "12:cpu,cpuacct:/user\n11:memory:/user/a\n0::/user.slice")
  write(root, "/proc/self/mountinfo",
        "33 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "34 25 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 25 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory")
  for path, quota in (("", -1), ("/user", 250000)):
    write(root, f"/sys/fs/cgroup/cpu,cpuacct{path}/cpu.cfs_quota_us", quota)
    write(root, f"/sys/fs/cgroup/cpu,cpuacct{path}/cpu.cfs_period_us", 100000)
  write(root, "/sys/fs/cgroup/cpu,cpuacct/user/cpu.stat",
        "nr_periods 9\nnr_throttled 2\nthrottled_time 7000")
  for path, limit in (("", MAX - 4096), ("/user", 8 << 30), ("/user/a", 16 << 30)):
    write(root, f"/sys/fs/cgroup/memory{path}/memory.limit_in_bytes", limit)
  return root
