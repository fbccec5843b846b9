"""What a checkpoint holds of work that is shared by speed, and what is taken of it after a
restart."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpace.core import packing

_LOG = logging.getLogger("jaxpace")


class ShareState(NamedTuple):
  """What a checkpoint holds of work that is shared by speed. R ranks; the same on all processes."""

  step: np.ndarray  # [] int64, number of the next step
  counts: np.ndarray  # [R] int32, micro-batches of each rank in it
  ran: np.ndarray  # [R] int64, micro-batches that each rank has been given so far
  balancer: tuple[np.ndarray, ...]  # what the balancer knows: the leaves of its state, in order


def restored(state: Any, fresh: Callable[[int], tuple[ShareState, Any]],
             sound: Callable[[np.ndarray], bool]) -> ShareState:
  """Returns what training goes on from: what a checkpoint holds; of other ranks, another balancer,
  or one whose numbers are damaged the step alone, with a notice.

  Args:
    state: what the checkpoint gave back.
    fresh: from a step, where it begins anew there; and the balancer's state, as a tree.
    sound: whether counts can be.

  Raises:
    TypeError: it is something else, or its numbers are damaged.
  """
  if state is None:
    _LOG.warning("The checkpoint holds no shares: counts begin evenly, at step 0.")
    return fresh(0)[0]
  stored = _stored(state)
  anew, tree = fresh(int(stored.step))
  counts, leaves = np.asarray(stored.counts), [*map(np.asarray, jax.tree.leaves(stored.balancer))]
  if counts.shape != anew.counts.shape:
    wrong = f"are of {counts.size} ranks, and this job has {anew.counts.size}"
  elif not sound(counts) or [leaf.shape for leaf in leaves] != [
      leaf.shape for leaf in anew.balancer]:
    wrong = "are of another balancer or another global batch"
  elif damaged := packing.not_finite(tree, jax.tree.unflatten(jax.tree.structure(tree), leaves)):
    wrong = f"hold NaN or infinity as the balancer's {', '.join(damaged[:4])}"
  else:
    return anew._replace(counts=counts.astype(np.int32), ran=stored.ran, balancer=tuple(
        leaf.astype(like.dtype) for leaf, like in zip(leaves, anew.balancer, strict=True)))
  _LOG.warning("The checkpoint's shares %s: counts begin evenly, at step %d. What was known of "
               "speeds is lost, no training state is.", wrong, int(anew.step))
  return anew


def _stored(state: Any) -> ShareState:
  """What a checkpoint gave back, its numbers checked; TypeError, in words, where it is damaged or
  something else."""
  # As a tuple, or a dict of its fields, which named tuples may come back as.
  fields = list(ShareState._fields)
  given = dict(zip(fields, state, strict=False)) if isinstance(state, (tuple, list)) else state
  if not isinstance(given, dict) or sorted(given) != sorted(fields) or len(state) != len(fields):
    raise TypeError("feed.restore takes what feed.state() returned, or None where a checkpoint has "
                    f"none: {', '.join(fields)}. This is a {type(state).__name__}"
                    + (f" of {', '.join(map(str, given))}." if isinstance(given, dict) else "."))
  stored = ShareState(**given)
  step, ran, counts = np.asarray(stored.step), np.asarray(stored.ran), np.asarray(stored.counts)
  for name, value in (("step", step), ("ran", ran), ("counts", counts)):
    numbers = value.dtype.kind in "iuf" and bool(np.all(np.isfinite(value)))
    if not numbers or not bool(np.all((value == np.rint(value)) & (value >= 0))):
      raise TypeError(f"The checkpoint's shares have no whole numbers from 0 as {name} but "
                      f"{np.array2string(value, threshold=8)}: they are damaged. "
                      "feed.restore(None) begins anew.")
  if step.size != 1 or ran.shape != counts.shape:
    raise TypeError(f"The checkpoint's shares have a step of the shape {list(step.shape)}, counts "
                    f"{list(counts.shape)} and ran {list(ran.shape)}: they are damaged. "
                    "feed.restore(None) begins anew.")
  return stored._replace(step=step.reshape(()), ran=ran.astype(np.int64), counts=counts)
