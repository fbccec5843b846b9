"""The communication facts of a much-cited text ("Communication bottlenecks and scaling limits in
distributed training", System Overflow), each worked out again here: what it says, what the formulas
give, and where the two part."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from experiments.cost_facts.planning import model as models
from experiments.cost_facts.planning.catalogue import DEVICES, NETWORKS
from experiments.cost_facts.planning.plan import Setting, Step, expected_maximum, step
from jaxpace.simulation import allreduce


class Fact(NamedTuple):
  """One figure."""

  about: str
  said: tuple[float, float]  # lowest and highest that the text allows
  found: float
  unit: str
  how: str  # the computation, in a line
  note: str  # where it parts from the text, or ""

  @property
  def agrees(self) -> bool:
    """Whether what was found lies within what the text allows."""
    return self.said[0] * (1 - 1e-9) <= self.found <= self.said[1] * (1 + 1e-9)


def facts() -> list[Fact]:
  """Works them all out."""
  a100, slow, fast = DEVICES["a100"], NETWORKS["ib-200"], NETWORKS["ib-400"]
  gradients = 10e9 * models.BYTES["fp16"]
  one_pass = gradients / fast.rate
  ring = allreduce.ring(512, gradients, fast.latency, 1 / fast.rate)
  activations = allreduce.ring(8, 200e6, 3e-6, 1 / a100.link_rate) + 20e-6
  large = Setting(models.shaped(10e9), a100, slow, per_node=8, data=512, examples=1,
                  precision="fp16", sustained=0.5, achieved=1.0, overlap=0.0, jitter=0.0)
  planned = step(large)
  # Each GPU of a node has a card of its own there; the text's "512 GPUs and 200 Gb/s links" may
  # mean one a node too.
  one_card = step(dataclasses.replace(large, per_node=1))
  torus, tree = 24e12, 4096 / 2 * slow.rate
  return [
      Fact("bytes of 10 B parameters in fp16", (20e9, 20e9), gradients, "B", "10e9 x 2", ""),
      Fact("a 400 Gb/s link", (50e9, 50e9), fast.rate, "B/s", "400e9 / 8", ""),
      Fact("one pass of 20 GB over it", (0.4, 0.4), one_pass, "s", "20e9 / 50e9", ""),
      Fact("gradient all-reduce of 10 B parameters, at least", (0.4, math.inf), ring, "s",
           "ring over 512: 2 (N - 1) (alpha + S / (N B))",
           "the text's 400 ms is one pass; a ring moves 2 (N - 1) / N of the bytes, so the least "
           "is twice that"),
      Fact("ring all-reduce for large N, in units of S / B", (2, 2.03), ring / one_pass, "",
           "the same / 0.4 s", ""),
      Fact("on-chip against network bandwidth", (1000, 1000), a100.memory_rate / fast.rate, "times",
           "HBM 2,039 GB/s / 50 GB/s",
           "\"three orders of magnitude\" holds for registers and caches at best; device memory is "
           "41 times as fast"),
      Fact("NCCL on 8 A100 with NVSwitch, of 300 GB/s", (0.93, 0.94), 280e9 / a100.link_rate, "",
           "280 / 300", ""),
      Fact("all-reduce of 200 MB in a node of 8, launch included", (1e-3, 2e-3), activations, "s",
           "ring at 300 GB/s each way, 20 us to launch",
           "the 600 GB/s of the text are both directions together; one way, it is 1.2 ms"),
      Fact("96 layers x 2 of them", (0.192, 0.384), 192 * activations, "s", "192 x the same",
           "two a layer are the forward pass alone; the backward pass has two more (Megatron): a "
           "step pays twice this"),
      Fact("efficiency of 512 GPUs with 200 Gb/s links, below", (0, 0.5), _efficiency(one_card), "",
           "10 B parameters, 2,048 tokens a GPU, half of the peak sustained, one card a GPU, flat "
           "ring, no overlap",
           "with eight cards a node and a hierarchical all-reduce it is "
           f"{_efficiency(planned):.0%}; with more tokens a GPU, or overlap, it is above one half: "
           "the statement depends on all three"),
      Fact("chance that some of 512 is slow in a step", (0.99, 1), 1 - (1 - 0.01) ** 512, "",
           "1 - (1 - 0.01)^512, each slow in 1 % of its steps", ""),
      Fact("what waiting for the slowest of 512 costs", (0.10, 0.20), _waiting(0.05, 512), "",
           "s E[max of 512] / (1 + s E[max]), s = 5 %", "for jitter of 4 to 8 %; at 1 % it is 3 %"),
      Fact("OPT-175B on 992 A100", (0.5, 0.5), 147e12 / a100.peak, "",
           "147 TFLOP/s a GPU (Zhang et al. 2022, section 2.4) / 312",
           "the paper reports utilisation, 47 % of the peak; kernels that reach half of it leave "
           "little to communication: this is not a scaling efficiency"),
      Fact("network of a DGX A100 with 8 x 200 Gb/s", (200e9, 200e9), 8 * slow.rate, "B/s",
           "8 x 25e9",
           "per node; and \"560\" are nodes of such a SuperPOD (Selene), of 8 GPUs each, not GPUs"),
      Fact("TPU v4 pod's bisection against InfiniBand", (10, 10), torus / tree, "times",
           "24 TB/s of a pod (Cloud TPU v4 documentation) / 2,048 x 25 GB/s of a full fat tree of "
           "200 Gb/s",
           "it is about half; what is 12 times as fast is a chip's own links (300 GB/s "
           "against 25)"),
  ]


def _efficiency(planned: Step) -> float:
  return planned.parts["compute"] / planned.seconds


def _waiting(jitter: float, ranks: int) -> float:
  late = jitter * expected_maximum(ranks)
  return late / (1 + late)
