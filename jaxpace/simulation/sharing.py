"""Who gets how much of a link that several want: max-min fair shares, exact.

`max_min` is for messages on a fabric, in numpy, made once for each pattern of messages; `progress`
is for jobs inside a compiled loop. Both raise all rates together and fix those that meet a full
link (progressive filling; Bertsekas and Gallager, "Data Networks", 6.5.2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_CLOSE = 1e-12
"""Links whose fair share is this close to the smallest one's, as a share of it, are filled in the
same round."""


def max_min(paths: np.ndarray, capacities: np.ndarray) -> np.ndarray:
  """Shares links max-min fairly among messages.

  Args:
    paths: [F, H] int, links each message crosses; negative for none. A link twice in a path counts
      twice.
    capacities: [L] float64 bytes a second; may be infinite.

  Returns:
    [F] float64 bytes a second; infinite for a message that no finite link holds back.
  """
  paths, left = np.asarray(paths), np.asarray(capacities, np.float64).copy()
  flows, hops = paths.shape
  used = paths >= 0
  links = np.where(used, paths, len(left))
  rates = np.full(flows, np.inf)
  open_flows = np.ones(flows, bool)
  # One row beyond the last link takes what is no link.
  left = np.append(left, np.inf)
  while open_flows.any():
    crossing = np.bincount(links[open_flows].ravel(), minlength=len(left))[: len(left)]
    crossing[-1] = 0
    share = np.divide(left, crossing, out=np.full(len(left), np.inf), where=crossing > 0)
    least = share.min()
    if not np.isfinite(least):
      break  # nothing finite is left in the way of the others
    full = share <= least * (1 + _CLOSE)
    held = open_flows & full[links].any(axis=1)
    rates[held] = least
    taken = np.bincount(links[held].ravel(), minlength=len(left))[: len(left)] * least
    left = np.maximum(left - np.where(np.isfinite(left), taken, 0), 0)
    open_flows &= ~held
  return rates


def progress(usage: jax.Array, weights: jax.Array, sending: jax.Array) -> jax.Array:
  """How fast each job's collective goes, as a share of its speed on a quiet fabric.

  Speeds rise in proportion to the weights until a job has its full speed or meets a full link:
  weighted max-min. As many rounds as there are jobs suffice, each fixes one at least.

  Args:
    usage: [J, L] float32, the share of each link's capacity that a job takes at full speed; at most
      1.
    weights: [J] float32, positive.
    sending: [J] bool, who wants anything.

  Returns:
    [J] float32 from 0 to 1; 0 for those not sending.
  """
  one, zero = np.float32(1), np.float32(0)
  weights = jnp.where(sending, weights, zero)

  def turn(_: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    speed, fixed = state
    rising = jnp.where(fixed, zero, weights)
    room = jnp.maximum(one - jnp.sum(jnp.where(fixed, speed, zero)[:, None] * usage, axis=0), zero)
    wanted = jnp.sum(rising[:, None] * usage, axis=0)
    by_link = jnp.where(wanted > zero, room / jnp.where(wanted > zero, wanted, one),
                        np.float32(np.inf))
    own = jnp.where(rising > zero, one / jnp.where(rising > zero, rising, one), np.float32(np.inf))
    level = jnp.minimum(jnp.min(by_link), jnp.min(own))
    near = level * np.float32(1 + 1e-6)
    meets = jnp.any((usage > zero) & (by_link <= near)[None], axis=1) | (own <= near)
    newly = ~fixed & meets
    speed = jnp.where(newly, jnp.minimum(rising * level, one), speed)
    return speed, fixed | newly

  begin = jnp.zeros_like(weights), ~sending
  return jax.lax.fori_loop(0, usage.shape[0], turn, begin)[0]
