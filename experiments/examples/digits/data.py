"""The digits images of scikit-learn: 1,797 images of 8 x 8 pixels, bundled with it, nothing to
download."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.examples.start import UserError


class Batch(TypedDict):
  image: jax.Array  # [B, 8, 8, 1] float32 in [0, 1]
  label: jax.Array  # [B] int32


class Split(TypedDict):
  image: np.ndarray  # [N, 8, 8, 1] float32 in [0, 1]
  label: np.ndarray  # [N] int32


TEST_IMAGES = 360


def load(seed: int = 0) -> tuple[Split, Split]:
  """Loads the images, shuffled by a fixed seed.

  Args:
    seed: the same on every process, so that all agree on which images are held out.

  Returns:
    Training split of 1,437 images and test split of 360.
  """
  from sklearn import datasets  # takes a second to import: only when the data is wanted

  digits = datasets.load_digits()
  order = np.random.default_rng(seed).permutation(len(digits.target))
  image = (digits.images[order, :, :, None] / 16).astype(np.float32)
  label = digits.target[order].astype(np.int32)
  train, test = slice(TEST_IMAGES, None), slice(TEST_IMAGES)
  return ({"image": image[train], "label": label[train]},
          {"image": image[test], "label": label[test]})


def batches(split: Split, batch_size: int, steps: int, seed: int,
            mesh: jax.sharding.Mesh) -> Iterator[Batch]:
  """Yields global batches, of which every process builds only the rows its own devices hold.

  Args:
    split: the whole split; each process draws the same rows and keeps its share.
    batch_size: rows of one batch over all devices, a multiple of their number.
    steps: batches to yield.
    seed: seed of the draws, the same on every process.
    mesh: one-dimensional mesh over all devices, in the order of their processes, with an axis
      "data".

  Yields:
    `Batch` of global arrays, sharded along "data".

  Raises:
    UserError: `batch_size` does not divide among the devices.
  """
  if batch_size % mesh.size:
    raise UserError(f"batch_size {batch_size} does not divide among {mesh.size} devices; take a "
                    f"multiple of {mesh.size}, such as --config.batch_size={mesh.size * 64}.")
  rng = np.random.default_rng(seed)
  sharding = NamedSharding(mesh, P("data"))
  own = batch_size // jax.process_count()
  first = jax.process_index() * own
  for _ in range(steps):
    rows = rng.choice(len(split["label"]), batch_size, replace=False)[first:first + own]
    image, label = (jax.make_array_from_process_local_data(sharding, x[rows])
                    for x in (split["image"], split["label"]))
    yield {"image": image, "label": label}
