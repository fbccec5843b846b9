"""An observed step made by hand: marks where `jaxpace.observe` would put them, and what they
mean."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpace.core.observed import ObservedFunction, ObservedPlan, ObservedProgram
from jaxpace.core.plan import Loop
from jaxpace.observation.clocks import host_ring, native
from tests import marks
from tests.record.ring.programs import collective

# From the top, for observed steps of the same process count from the bottom.
_numbers = iter(range(3899, 99, -1))


class Handmade(ObservedFunction):
  """`step(x, delays) -> x`, a scan of layers with an all-reduce each, and one after it.

  `delays` [layers + 1] seconds on each device before each all-reduce, by a sleep of the native
  clock.
  """

  def __init__(self, devices=None, layers=3, name="step", unknown=False):
    assert host_ring.unavailable() == ""
    devices = jax.devices() if devices is None else devices
    self.layers = layers
    self.mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    self.number = next(_numbers)
    ranks = tuple(jax.devices().index(device) for device in devices)
    loop = Loop("while.1", None if unknown else layers)
    self._program = ObservedProgram(
        number=self.number, name=name, ranks=ranks, mesh_axes={"data": len(devices)}, collectives=(
            collective(0, loops=[loop], phase="forward", groups=(ranks,)),
            collective(1, groups=(ranks,))))
    self.plan = None
    self.runs = frozenset({self.number})
    self._run = jax.jit(jax.shard_map(self._each, mesh=self.mesh, in_specs=(P("data"), P("data")),
                                      out_specs=P("data"), check_vma=False))

  def settings_json(self):
    return {"clock": "native", "pacer": None, "source": "observe"}

  def _sum(self, x, delay, tags, *waited):
    word = jnp.zeros(2, jnp.uint32)
    before, after = native.delay(delay, 10.0, word, x)
    x, = marks.mark([x], after, *waited, program=self.number, tag=tags[0])
    x = jax.lax.psum(x, "data") / jnp.float32(self.mesh.size)
    x, = marks.mark([x], program=self.number, tag=tags[1])
    return x

  def _each(self, x, delays):
    began = marks.start(self.number)
    def layer(x, delay):
      return self._sum(jnp.tanh(x), delay, (2, 3), began), None
    x, _ = jax.lax.scan(layer, x, delays[0, :-1])
    x = self._sum(x, delays[0, -1], (4, 5), began)
    return marks.mark([x], program=self.number, tag=1)[0]

  def __call__(self, x, delays=None):
    if delays is None:
      delays = jnp.zeros((self.mesh.size, self.layers + 1), jnp.float32)
    # As with an observed step, what the timestamps mean is known before the first one is written.
    self.plan = ObservedPlan((self._program,))
    return self._run(x, delays)

  def inputs(self, size=4):
    return jnp.ones((self.mesh.size, size), jnp.float32)


def delays(step, *late):
  """[devices, places] seconds; `late` are (device, place, seconds)."""
  table = np.zeros((step.mesh.size, step.layers + 1), np.float32)
  for device, place, seconds in late:
    table[device, place] = seconds
  return jnp.asarray(table)
