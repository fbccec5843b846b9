"""Documents of different length for the character example: speeches, their windows, and which rank
gets which.

A document is trained on window by window, so what it costs is its number of windows. A rank runs
the windows of its documents, padded ones never: `jaxpace.accumulate` with weights, so that the loss
is the mean over all characters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpace
from experiments.examples.chars.model import Transformer


class Batch(NamedTuple):
  """R ranks with room for C windows of T characters each."""

  windows: np.ndarray  # [R * C, T + 1] int32
  # [R * C, T] float32, 1 where a character is trained on, 0 in what fills a document's last window
  weights: np.ndarray
  counts: np.ndarray  # [R] int32, windows of each rank


def split(text: np.ndarray, shortest: int = 2) -> list[np.ndarray]:
  """Cuts a text at its empty lines: speeches, each [n] uint8 with n >= `shortest`."""
  parts = bytes(text).split(b"\n\n")
  return [np.frombuffer(part, np.uint8) for part in parts if len(part) >= shortest]


def cost(document: np.ndarray, context: int) -> int:
  """Windows of a document."""
  return -(-(len(document) - 1) // context)


def batches(documents: list[np.ndarray], context: int, ranks: int, each: int, seed: int,
            balanced: bool
            ) -> Iterator[Batch]:
  """Draws global batches of documents, `each` a rank; as drawn, or evened out by `jaxpace.balance`.

  The same batches on every process, and the same documents in each step however they are shared
  out.
  """
  rng = np.random.default_rng(seed)
  longest = sorted((cost(one, context) for one in documents), reverse=True)
  room = sum(longest[:each])
  while True:
    drawn = [documents[i] for i in rng.choice(len(documents), ranks * each, replace=False)]
    order = np.arange(ranks * each)
    if balanced:
      with warnings.catch_warnings():
        # Of some batches: as drawn it is as good.
        warnings.simplefilter("ignore", UserWarning)
        order = jaxpace.balance([cost(one, context) for one in drawn], ranks)
    yield laid_out([[drawn[i] for i in part] for part in order.reshape(ranks, each)], context, room)


def laid_out(parts: list[list[np.ndarray]], context: int, room: int) -> Batch:
  """Puts each rank's documents into its room, window by window."""
  windows = np.zeros((len(parts), room, context + 1), np.int32)
  weights = np.zeros((len(parts), room, context), np.float32)
  counts = np.zeros(len(parts), np.int32)
  for rank, part in enumerate(parts):
    for document in part:
      for start in range(0, len(document) - 1, context):
        row = document[start:start + context + 1]
        windows[rank, counts[rank], :len(row)] = row
        weights[rank, counts[rank], :len(row) - 1] = 1
        counts[rank] += 1
  return Batch(windows.reshape(-1, context + 1), weights.reshape(-1, context), counts)


def loss_fn(graphdef: nnx.GraphDef[Transformer], params: Any,
            window: Any) -> tuple[jax.Array, jax.Array]:
  """Sum of the cross-entropies of a window's characters, in nats, and their number."""
  row, weight = window
  logits = nnx.merge(graphdef, params)(row[None, :-1])[0]
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, row[1:])
  return jnp.sum(losses * weight), jnp.sum(weight)
