"""A step's time from a model, a way to divide it, hardware and a fabric; and how it scales.

    step = compute + skew + tensor + pipeline + data

compute: FLOPs of a device over what it sustains. tensor: the all-reduces of activations, four a
layer and micro-batch, all exposed. pipeline: the bubble, (p - 1) / m of the compute and these, and
the sends between stages. data: the gradients' all-reduce, less what hides behind the backward pass.
skew: waiting for the slowest of N devices, the compute's deviation times E[max of N normals].
Collectives cost what the closed forms say (`jaxpace.simulation.allreduce`): inside a node a ring,
across nodes hierarchical.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from experiments.cost_facts.planning import model as models
from experiments.cost_facts.planning.catalogue import LINK_LATENCY, Device, Network
from jaxpace.simulation import allreduce

CAUSES = ("compute", "skew", "tensor", "pipeline", "data")
GAINS = 1.5
"""The knee: the last scale from which doubling the devices still brings this much throughput.
Doubled would be 2."""


class PlanError(ValueError):
  """These settings make no job: a sentence that names the field and its range."""


@dataclasses.dataclass(frozen=True)
class Setting:
  """A job to plan. Make it with checked values: an impossible one raises `PlanError`.

  Attributes:
    model: what is trained.
    device: on what.
    network: between nodes.
    per_node: devices of a node.
    data, tensor, pipeline: degrees; their product is the number of devices.
    examples: per data-parallel replica and step (weak scaling), or None.
    global_examples: of all replicas together (strong scaling), or None. One of the two.
    micro_batches: of a replica's step, for the pipeline.
    precision: of parameters, activations and gradients.
    sustained: share of the peak that compute reaches by itself.
    achieved: share of the links' rate that collectives reach.
    overlap: share of the backward pass behind which gradients can be sent.
    jitter: deviation of a device's compute from step to step, as a share of it.
    launch: s that each collective takes to be launched.
  """

  model: models.Model
  device: Device
  network: Network
  per_node: int
  data: int = 1
  tensor: int = 1
  pipeline: int = 1
  examples: float | None = 1
  global_examples: float | None = None
  micro_batches: int = 1
  precision: str = "bf16"
  sustained: float = 0.5
  achieved: float = 0.9
  overlap: float = 0.5
  jitter: float = 0.02
  launch: float = 10e-6

  def __post_init__(self) -> None:
    for name in ("per_node", "data", "tensor", "pipeline", "micro_batches"):
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{name}={value!r} must be a whole number, at least 1.")
    for name, least, most in (("sustained", 0.01, 1), ("achieved", 0.01, 1), ("overlap", 0, 1),
                              ("jitter", 0, 1), ("launch", 0, 1)):
      value = getattr(self, name)
      if not math.isfinite(value) or not least <= value <= most:
        raise PlanError(f"{name}={value!r} must be a number from {least:g} to {most:g}.")
    if self.precision not in models.BYTES:
      raise PlanError(f"precision={self.precision!r} must be one of {', '.join(models.BYTES)}.")
    if self.pipeline > self.model.layers:
      raise PlanError(
          f"pipeline={self.pipeline} has more stages than the model has layers, "
          f"{self.model.layers}.")
    if self.tensor > self.model.hidden:
      raise PlanError(
          f"tensor={self.tensor} must be at most the model's width, {self.model.hidden}.")
    if (self.examples is None) == (self.global_examples is None):
      raise PlanError(
          "Give examples (of each replica) or global_examples (of all together), one of the two.")
    if self.pipeline > 1 and self.examples is not None and self.micro_batches > self.examples:
      raise PlanError(f"micro_batches={self.micro_batches} must be at most "
                      f"examples={self.examples:g}: a micro-batch has one example at least.")
    if not (self.batch > 0 and math.isfinite(self.batch)):
      raise PlanError(
          f"examples={self.examples!r} (global_examples={self.global_examples!r}) must be above 0.")

  @property
  def devices(self) -> int:
    """Of the whole job."""
    return self.data * self.tensor * self.pipeline

  @property
  def batch(self) -> float:
    """Examples of one replica and step."""
    return self.examples if self.examples is not None else (self.global_examples or 0.0) / self.data


class Step(NamedTuple):
  """One step of a plan. Seconds."""

  devices: int
  seconds: float
  parts: dict[str, float]  # s by cause; they add up to `seconds`
  tokens_per_second: float
  hidden: float  # s of gradient traffic that hides behind the backward pass
  memory: float  # bytes of parameters, gradients and optimiser state on a device
  fits: bool  # in the device's memory


class Scaling(NamedTuple):
  """A plan over a number of devices."""

  steps: list[Step]
  # throughput a device over that of one replica without communication or jitter
  efficiency: list[float]
  # devices; None where every doubling brought `GAINS`, or fewer than two scales were asked for
  knee: int | None


def step(setting: Setting) -> Step:
  """Adds up one step."""
  model, device = setting.model, setting.device
  split = setting.tensor * setting.pipeline
  tokens = setting.batch * model.sequence
  compute = models.flops(model, tokens) / split / (device.peak * setting.sustained)
  tensor = _tensor(setting)
  bubble = (setting.pipeline - 1) / setting.micro_batches * (compute + tensor)
  pipeline = bubble + _stages(setting)
  skew = setting.jitter * compute * expected_maximum(setting.devices)
  gradients = _gradients(setting)
  # Two thirds of the compute are backward.
  hidden = min(gradients, setting.overlap * 2 / 3 * compute)
  parts = {"compute": compute, "skew": skew, "tensor": tensor, "pipeline": pipeline,
           "data": gradients - hidden}
  seconds = sum(parts.values())
  memory = models.state_bytes(model, setting.precision) / split
  return Step(setting.devices, seconds, parts, setting.data * tokens / seconds, hidden, memory,
              memory <= device.memory)


def scale(setting: Setting, replicas: list[int]) -> Scaling:
  """Plans the job with other numbers of data-parallel replicas.

  Args:
    setting: the job; its `data` is replaced.
    replicas: data-parallel degrees, in rising order.
  """
  steps = [step(dataclasses.replace(setting, data=n)) for n in replicas]
  ideal = [s.parts["compute"] / s.seconds for s in steps]
  knee = None
  for first, second in zip(steps, steps[1:], strict=False):
    doublings = math.log2(second.devices / first.devices)
    if knee is None and second.tokens_per_second / first.tokens_per_second < GAINS**doublings:
      knee = first.devices
  return Scaling(steps, ideal, knee)


def expected_maximum(count: int) -> float:
  """E[max of N standard normals]: the integral of x d Phi(x)^N.

  >>> [round(expected_maximum(n), 3) for n in (1, 2, 64, 1024, 4096)]
  [0.0, 0.564, 2.344, 3.248, 3.626]
  """
  x = np.linspace(-9.0, 9.0, 18_001)
  phi = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])
  return max(float(np.trapezoid(np.heaviside(x, 0.5) - phi**count, x)), 0.0)


def _rates(setting: Setting) -> tuple[float, float]:
  """Seconds a byte inside a node and across nodes."""
  return (1 / (setting.device.link_rate * setting.achieved),
          1 / (setting.network.rate * setting.achieved))


def _all_reduce(setting: Setting, ranks: int, inside: int, size: float) -> float:
  """An all-reduce of `ranks` devices of which each `inside` share a node."""
  if ranks == 1:
    return 0.0
  inner, outer = _rates(setting)
  if ranks <= inside:
    return setting.launch + allreduce.ring(ranks, size, LINK_LATENCY, inner)
  return setting.launch + allreduce.hierarchical(
      inside, math.ceil(ranks / inside), size, (LINK_LATENCY, inner),
      (setting.network.latency, outer))


def _tensor(setting: Setting) -> float:
  """Four all-reduces of activations a layer and micro-batch, two forward and two backward
  (Megatron)."""
  if setting.tensor == 1:
    return 0.0
  size = models.activation_bytes(setting.model, setting.batch / setting.micro_batches,
                                 setting.precision)
  each = _all_reduce(setting, setting.tensor, min(setting.tensor, setting.per_node), size)
  return 4 * setting.model.layers / setting.pipeline * setting.micro_batches * each


def _stages(setting: Setting) -> float:
  """A micro-batch's activations on to the next stage, and their gradients back: until the first one
  is through."""
  if setting.pipeline == 1:
    return 0.0
  inner, outer = _rates(setting)
  examples = setting.batch / setting.micro_batches
  size = models.activation_bytes(setting.model, examples, setting.precision) / setting.tensor
  within = setting.tensor * setting.pipeline <= setting.per_node
  latency, beta = (LINK_LATENCY, inner) if within else (setting.network.latency, outer)
  return 2 * (setting.pipeline - 1) * (setting.launch + latency + size * beta)


def _gradients(setting: Setting) -> float:
  """The all-reduce of a device's share of the gradients over the replicas."""
  split = setting.tensor * setting.pipeline
  size = setting.model.parameters * models.BYTES[setting.precision] / split
  return _all_reduce(setting, setting.data, max(1, setting.per_node // split), size)
