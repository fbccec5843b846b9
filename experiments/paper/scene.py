"""Scenes beyond the recorded worlds: more buckets, incast inside the job, several neighbours, a
fabric of two tiers. What each switch does to what the jobs of a scene do by themselves.

What a rank computes is drawn by a recorded world's own laws (`experiments.paper.world`). What is
sent, and what is lost where several send, are numbers beside that (`Sends`), so that they can be
fitted to the paper's baseline again without new draws.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.paper import on_one_link as turns
from experiments.paper import quick
from experiments.paper import world as worlds
from jaxpace.simulation import noise, schedules
from jaxpace.simulation.fabric import Fabric
from jaxpace.simulation.job import Job, Shape

LISTENING = 0.005
"""What listening takes on a quiet link, as a share of what this job sends in a step: the recorded
worlds' 1 % of a bucket where there are two. It doesn't shrink with the buckets."""
STEADY = 32
"""Nodes at which a neighbour whose volume does not grow sends what it sends at every size."""
TIMEOUT = 0.2
"""Units of compute that a message waits that was dropped, until it is sent again. Assumed."""
DROPS = 8e-4
"""Chance that incast drops one of a bucket's messages, for each node that sends. Assumed: 5 % of
the buckets at 64 nodes, 10 % where a neighbour as large sends to the same ports."""
BYTES, CARD = 1e9, 50e9
"""Of the all-reduce whose time on a fabric is compared with the same one's on another; and bytes a
second of a node's card."""
RACK, RACKS = 16, 8
"""Nodes below one switch; switches below the spine."""


class Scene(NamedTuple):
  """A kind of scene. Static."""

  about: str
  buckets: int = worlds.BUCKETS  # of all jobs
  # of each neighbour, what it sends as a share of the world's neighbour's, and its period over that
  neighbours: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
  steady: bool = False  # what the last neighbour sends does not grow with the nodes
  incast: bool = False
  fabric: tuple[str, int, float] | None = None  # placement, oversubscription, slowest path


SCENES = {
    "buckets": Scene("12 buckets", buckets=12),
    "incast": Scene("12 buckets, incast inside the job", buckets=12, incast=True),
    "steady": Scene("12 buckets, a neighbour that does not grow", buckets=12, steady=True),
    "three": Scene("12 buckets, three neighbours, one of which does not grow", buckets=12,
                   neighbours=((0.5, 1.0), (0.4, 1.37), (0.4, 0.79)), steady=True),
}
"""Fitted to the baseline again, each by itself."""
FABRICS = [Scene(f"{placement}, {over}:1{'' if path == 1 else ', one path at half rate'}",
                 buckets=12, fabric=(placement, over, path))
           for placement, over, path in (
               ("packed", 1, 1.0), ("packed", 8, 1.0), ("spread", 1, 1.0), ("spread", 2, 1.0),
               ("spread", 4, 1.0), ("spread", 4, 0.5), ("spread", 8, 1.0))]
"""Swept, fitted to nothing."""


class Sends(NamedTuple):
  """What is sent, and what sharing does: float32, each with a leading axis where scenes are many.
  As the fields of `World` of these names."""

  growth: Any
  power: Any
  ratio: Any
  mass: Any
  claim: Any
  lost: Any
  load: Any


class Draws(NamedTuple):
  """What is drawn of one world at one size, whatever is sent. K steps, B buckets, J - 1
  neighbours."""

  ready: Any  # [K, B] units of compute after the last exit, the last rank's
  traffic: Any  # [K] bool, whether others' traffic is there
  factors: Any  # [J - 1, K] of each neighbour's compute
  luck: Any  # [J, K, B] uniform, of drops
  start: Any  # [J - 1] uniform, of each neighbour's start


def draws(scene: Scene, nodes: int, steps: int, pauses: tuple[float, float]) -> Any:
  """Makes a function (key, world) -> `Draws`."""
  others = len(scene.neighbours)

  def one(key: jax.Array, world: worlds.World) -> Draws:
    first, second, third = jax.random.split(key, 3)
    full = worlds.job(world, nodes, pauses, worlds.ON)
    # A load that shows, whatever the world's is: only when it is there is kept.
    full = full._replace(transfers=jnp.ones((scene.buckets,)),
                         traffic=full.traffic._replace(load=jnp.float32(0.5)))
    ours = quick.drafts(Shape(nodes * worlds.PER_NODE, worlds.PER_NODE), steps, first, full,
                        scene.buckets)
    zero = jnp.float32(0)
    alone = Job(jnp.float32(1), zero, zero, zero, jnp.ones((1,)),
                (noise.Normal(world.jitter), noise.Common(world.common)))
    theirs = jax.vmap(lambda k: quick.drafts(Shape(1, overlap=False), steps, k, alone, 1))(
        jax.random.split(second, others))
    luck = jax.random.split(third)
    return Draws(ours.ready, ours.transfers[:, 0] > np.float32(1.5), theirs.ready[:, :, 0],
                 jax.random.uniform(luck[0], (1 + others, steps, scene.buckets)),
                 jax.random.uniform(luck[1], (others,)))

  return one


@functools.cache
def on_fabric(nodes: int, placement: str, over: int, path: float) -> tuple[float, float]:
  """Returns how long an all-reduce takes on the two tiers, s, and the speed of each of two jobs of
  that size that send there at once, as a share of its own.

  A ring of one rank a node. *Packed*: each job has its own nodes side by side, this job's from the
  middle of a rack on, so that both have nodes below one switch. *Spread*: each job has as many
  nodes below every switch, in turn, so that every message crosses the spine. `path`: share of its
  rate of the path of this job's first node to its card.
  """
  total = RACK * RACKS
  if placement == "packed":
    ours = RACK // 2 + np.arange(nodes)
    theirs = (ours + nodes) % total
  else:
    at = np.arange(total).reshape(RACKS, RACK)
    ours, theirs = at.T.ravel()[:nodes], at.T[::-1].ravel()[:nodes]
  fabric = Fabric(total, per_node=1, card_rate=CARD, rack=RACK, uplinks=1,
                  uplink_rate=RACK * CARD / over,
                  slow_paths={} if path == 1 else {int(ours[0]): path})
  ring = schedules.ring(ours.tolist(), BYTES)
  alone = schedules.load(ring, fabric).seconds
  others = schedules.ring(theirs.tolist(), BYTES)
  both = [schedules.MessageRound(np.concatenate([a.sources, b.sources]),
                          np.concatenate([a.targets, b.targets]), a.bytes, a.times)
          for a, b in zip(ring, others, strict=True)]
  return alone, min(1.0, alone / schedules.load(both, fabric).seconds)


def sent(scene: Scene, sends: Sends, nodes: int) -> Any:
  """[] units of compute, what the job sends in a step on a quiet link."""
  if scene.fabric is not None:
    placement, over, path = scene.fabric
    of_all = on_fabric(worlds.NODES[-1], "spread", 4, 1.0)[0]
    return sends.growth * np.float32(on_fabric(nodes, placement, over, path)[0] / of_all)
  return sends.growth * ((nodes - 1) / 63.0) ** sends.power


def assemble(scene: Scene, nodes: int, drawn: Draws, sends: Sends) -> turns.Drawn:
  """One world at one size, as `on_one_link` takes it."""
  buckets = scene.buckets
  ours = sent(scene, sends, nodes)
  exposed = jnp.maximum(ours / buckets, ours - (2 / 3) * (1 - 1 / buckets))
  alone = 1.0 + exposed
  slower = jnp.where(drawn.traffic, 1 / (1 - sends.load), np.float32(1))
  ready = [drawn.ready]
  work = [jnp.broadcast_to((ours / buckets * slower)[:, None], drawn.ready.shape)]
  starts = [jnp.float32(0)]
  for place, (mass, period) in enumerate(scene.neighbours):
    grows = not (scene.steady and place == len(scene.neighbours) - 1)
    theirs = mass * sends.mass * (ours if grows else sent(scene, sends, STEADY))
    whole = sends.ratio * np.float32(period) * alone
    compute = jnp.maximum(whole - theirs, 0.05 * whole) * drawn.factors[place]
    ready.append(jnp.broadcast_to(compute[:, None], drawn.ready.shape))
    work.append(jnp.full(drawn.ready.shape, 1.0) * (theirs / buckets))
    starts.append(drawn.start[place] * alone)
  works, crowded = jnp.stack(work), ()
  if scene.incast:
    alone_drops, together = (1 - (1 - DROPS) ** (count * (nodes - 1)) for count in (1, 2))
    own = drawn.luck < alone_drops
    works = works + TIMEOUT * own
    crowded = TIMEOUT * ((drawn.luck < together) & ~own)
  jobs = 1 + len(scene.neighbours)
  if scene.fabric is None:
    each = [jnp.minimum(1 / (count * sends.claim), 1.0) * (1 - sends.lost)
            for count in range(2, jobs + 1)]
  else:
    each = [jnp.float32(on_fabric(nodes, *scene.fabric)[1])]
  return turns.Drawn(jnp.stack(ready), works, jnp.stack(starts),
                     jnp.stack([jnp.float32(1), *each]).astype(jnp.float32),
                     jnp.full((jobs,), 1.0) * (LISTENING * ours), jnp.ones((jobs,), bool), crowded)
