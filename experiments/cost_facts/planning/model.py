"""A dense transformer's sizes: parameters to FLOPs, bytes and messages. Pure arithmetic."""

from __future__ import annotations

import math
from typing import NamedTuple

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Model(NamedTuple):
  """A dense transformer."""

  parameters: float
  layers: int
  hidden: int
  sequence: int  # tokens of an example


def shaped(parameters: float, layers: int | None = None, hidden: int | None = None,
           sequence: int = 2048) -> Model:
  """Fills in what is not given: parameters = 12 layers hidden^2, hidden = 128 layers (Kaplan et al.
  2020, eq. 2.1).

  >>> model = shaped(175e9, layers=96)
  >>> model.hidden
  12325
  """
  if layers is None and hidden is None:
    layers = max(1, round((parameters / (12 * 128**2)) ** (1 / 3)))
  if hidden is None:
    assert layers is not None
    hidden = round(math.sqrt(parameters / (12 * layers)))
  if layers is None:
    layers = max(1, round(parameters / (12 * hidden**2)))
  return Model(parameters, layers, hidden, sequence)


def flops(model: Model, tokens: float) -> float:
  """Forward and backward: 6 a parameter and token, and 12 layers hidden sequence a token for
  attention.

  (Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021, section
  5.1, without recomputation and without the output layer.)
  """
  return tokens * (6 * model.parameters + 12 * model.layers * model.hidden * model.sequence)


def state_bytes(model: Model, precision: str) -> float:
  """Parameters, gradients, and Adam's two moments and master copy in float32: 16 bytes a parameter
  in 16-bit training.

  (Rajbhandari et al., "ZeRO", 2020, section 3.1.)
  """
  size = BYTES[precision]
  return model.parameters * (2 * size + (12 if size < 4 else 8))


def activation_bytes(model: Model, examples: float, precision: str) -> float:
  """What one tensor-parallel collective carries: examples x sequence x hidden."""
  return examples * model.sequence * model.hidden * BYTES[precision]
