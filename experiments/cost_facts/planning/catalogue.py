"""Devices and fabrics, each number with its source. Rates are one way; bytes and seconds; a GB is
1e9 bytes."""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
  """An accelerator."""

  name: str
  peak: float  # FLOP/s, dense, 16-bit
  memory: float  # bytes
  memory_rate: float  # B/s
  link: str
  # B/s to its node's other devices (or neighbours in the torus), each way, all links together
  link_rate: float
  per_node: int  # usual number in a node
  source: str


class Network(NamedTuple):
  """What joins nodes, for each device."""

  name: str
  rate: float  # B/s of a device's card, each way
  latency: float  # s a message; assumed
  source: str


DEVICES = {d.name: d for d in (
    Device("a100", 312e12, 80e9, 2.039e12, "NVLink 3", 300e9, 8,
           "NVIDIA A100 80GB SXM datasheet: 312 TFLOP/s fp16/bf16, 2,039 GB/s, NVLink 600 GB/s "
           "both ways together"),
    Device("h100", 989.4e12, 80e9, 3.35e12, "NVLink 4", 450e9, 8,
           "NVIDIA H100 SXM datasheet: 989.4 TFLOP/s bf16 dense (half of the figure with "
           "sparsity), 3.35 TB/s, NVLink 900 GB/s both ways together"),
    Device("h200", 989.4e12, 141e9, 4.8e12, "NVLink 4", 450e9, 8,
           "NVIDIA H200 SXM datasheet: as H100, with 141 GB at 4.8 TB/s"),
    Device("tpu-v4", 275e12, 32 * 2**30, 1.2e12, "ICI, 3D torus", 300e9, 4,
           "Cloud TPU v4 documentation: 275 TFLOP/s bf16, 32 GiB at 1,200 GB/s; six links of 50 "
           "GB/s each way (Jouppi et al., 2023)"),
)}

NETWORKS = {n.name: n for n in (
    Network("ib-200", 25e9, 5e-6,
            "InfiniBand HDR, 200 Gb/s a port; latency of a collective's message: assumed"),
    Network("ib-400", 50e9, 5e-6, "InfiniBand NDR, 400 Gb/s a port; latency assumed"),
    Network("ethernet-100", 12.5e9, 15e-6, "100 Gb/s a port, RoCE; latency assumed"),
    Network("ethernet-200", 25e9, 15e-6, "200 Gb/s a port, RoCE; latency assumed"),
    Network("ethernet-400", 50e9, 15e-6, "400 Gb/s a port, RoCE; latency assumed"),
    Network("ici", 100e9, 2e-6,
            "TPU v4: two links of 50 GB/s along one dimension of the torus; latency assumed"),
)}

LINK_LATENCY = 3e-6
"""s a message inside a node; assumed."""
