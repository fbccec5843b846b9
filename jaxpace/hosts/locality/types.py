"""What is known of the place a process runs in. None: not known; an empty tuple: there is none, or
none was found."""

from __future__ import annotations

from typing import Any, Self

import msgspec

SCHEMA = 1


class Known(msgspec.Struct, frozen=True, order=True):
  """Values that `jaxpace.files.reading` checks against their types when they are read."""

  def replace(self, **changes: Any) -> Self:
    """Returns the same with some other values."""
    return msgspec.structs.replace(self, **changes)


class Link(Known, frozen=True):
  """A PCIe link: what it runs at, what the device could do, what the slot above it offers."""

  speed: float | None = None  # GT/s per lane
  width: int | None = None  # lanes
  max_speed: float | None = None
  max_width: int | None = None
  slot_speed: float | None = None
  slot_width: int | None = None


class Gpu(Known, frozen=True):
  """A GPU of this host, or another accelerator on its PCIe bus."""

  pci: str  # bus id, "0000:17:00.0"
  name: str | None = None
  uuid: str | None = None
  numa_node: int | None = None
  path: tuple[str, ...] = ()  # from the host bridge to the GPU, both included
  switch: str | None = None  # upstream port of the PCIe switch it hangs on
  link: Link = Link()
  nvlinks: int | None = None
  interconnect: str | None = None  # to its peers: "nvlink" or "pcie"
  nic: str | None = None  # name of the nearest NIC
  # PIX, PXB, PHB, NODE or SYS as `nvidia-smi topo` calls them; "?": unknown
  nic_distance: str | None = None


class Nic(Known, frozen=True):
  """A network interface with hardware behind it."""

  name: str  # of the RDMA device if it is one ("mlx5_0"), else of the interface ("eth0")
  kind: str = "ethernet"  # "ethernet", "roce" or "infiniband"
  interfaces: tuple[str, ...] = ()  # network interfaces of the same PCI device
  pci: str | None = None
  rate_gbps: float | None = None
  up: bool | None = None
  numa_node: int | None = None
  path: tuple[str, ...] = ()
  switch: str | None = None
  link: Link = Link()


class NumaNode(Known, frozen=True):
  """Processors and memory that are near each other."""

  node: int
  cpus: str  # a kernel list, "0-31,64-95"
  memory_bytes: int | None = None


class Cpu(Known, frozen=True):
  """The host's processors, and those this process may use."""

  model: str | None = None
  online: str = ""
  allowed: str = ""  # this process's affinity
  sockets: tuple[str, ...] = ()  # CPUs of each socket


class Cgroup(Known, frozen=True):
  """Limits of the control groups this process is in, the tightest from its own up to the outermost
  visible one."""

  version: int | None = None
  path: str | None = None
  cpu_limit: float | None = None  # CPUs' worth of time
  memory_limit_bytes: int | None = None


class Device(Known, frozen=True):
  """A JAX device of this process."""

  id: int | None = None
  kind: str | None = None
  platform: str | None = None
  process: int | None = None
  local_hardware_id: int | None = None
  slice_index: int | None = None
  coords: tuple[int, ...] | None = None
  gpu: str | None = None  # PCI bus id, as far as the order of GPUs and CUDA_VISIBLE_DEVICES show


class Locality(Known, frozen=True):
  """Everything read of one process's place."""

  schema: int = SCHEMA
  process: int | None = None
  hostname: str | None = None
  kernel: str | None = None
  cpu: Cpu = Cpu()
  numa: tuple[NumaNode, ...] = ()
  cgroup: Cgroup = Cgroup()
  memory_bytes: int | None = None
  clock_source: str | None = None
  clock_sources: tuple[str, ...] = ()
  huge_pages: str | None = None  # transparent ones: "always", "madvise" or "never"
  allocator: str | None = None  # a malloc preloaded in place of the C library's
  gpus: tuple[Gpu, ...] = ()
  nics: tuple[Nic, ...] = ()
  devices: tuple[Device, ...] = ()
  sources: tuple[str, ...] = ()
  notes: tuple[str, ...] = ()  # what could not be read, and why
