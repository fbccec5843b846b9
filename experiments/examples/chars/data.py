"""Characters of a text file: bytes, windows, and the share of them that a process holds."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.examples.start import UserError

DEFAULT_TEXT = pathlib.Path(__file__).parent / "text" / "coriolanus.txt"
VOCABULARY = 256
"""A character is a byte, so any file will do."""
HELD_OUT = 0.1
"""Share of the text, its end, that is never trained on."""


def load(path: str | pathlib.Path, context: int) -> tuple[np.ndarray, np.ndarray]:
  """Reads a text.

  Args:
    path: any file.
    context: characters in a window; one more is needed for the last target.

  Returns:
    Characters to train on, [N] uint8, and the held-out end of the text, [M] uint8.

  Raises:
    UserError: the file cannot be read, or is too short to cut windows from both parts.
  """
  try:
    text = np.fromfile(path, np.uint8)
  except OSError as error:
    raise UserError(f"The text {path} cannot be read: {error.strerror or error}. "
                    "Give a file with --text=FILE, or none for the default.") from error
  cut = len(text) - int(len(text) * HELD_OUT)
  if len(text) - cut <= context:
    raise UserError(f"The text {path} has {len(text)} characters; with windows of {context} it "
                    f"takes at least {int((context + 2) / HELD_OUT)}. Give a longer file, or a "
                    "smaller --config.context.")
  return text[:cut], text[cut:]


def windows(text: np.ndarray, context: int) -> np.ndarray:
  """Cuts a text into windows whose targets do not overlap: [n, context + 1] int32."""
  starts = np.arange(0, len(text) - context, context)
  return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def batches(
    text: np.ndarray, context: int, batch_size: int, steps: int, seed: int, mesh: jax.sharding.Mesh
) -> Iterator[jax.Array]:
  """Yields global batches of random windows, of which every process builds only its own rows.

  Args:
    text: characters to draw from, [N] uint8.
    context: characters in a window.
    batch_size: windows of one batch over all devices, a multiple of their number.
    steps: batches to yield.
    seed: seed of the draws, the same on every process.
    mesh: one-dimensional mesh over all devices, in the order of their processes, with an axis
      "data".

  Yields:
    [batch_size, context + 1] int32, sharded along "data"; each row's targets are its own characters
    moved by one.

  Raises:
    UserError: `batch_size` does not divide among the devices.
  """
  if batch_size % mesh.size:
    raise UserError(f"batch_size {batch_size} does not divide among {mesh.size} devices; take a "
                    f"multiple of {mesh.size}, such as --config.batch_size={mesh.size * 16}.")
  rng = np.random.default_rng(seed)
  sharding = NamedSharding(mesh, P("data"))
  own = batch_size // jax.process_count()
  first = jax.process_index() * own
  for _ in range(steps):
    starts = rng.integers(len(text) - context, size=batch_size)[first:first + own]
    rows = text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    yield jax.make_array_from_process_local_data(sharding, rows)
