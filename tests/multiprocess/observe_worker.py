"""One of two processes of a data x FSDP job with a scanned, rematerialised model under plain
`jit`."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.observation.clocks import host_ring
from jaxpace.observation.partitioned import thunks
from tests.multiprocess import joining

joining.join()
LAYERS, WIDTH, BATCH = 3, 16, 8
mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
specs = {"w": NamedSharding(mesh, P(None, "fsdp")), "v": NamedSharding(mesh, P())}


def loss(params, x):
  layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w) + h, None))
  h, _ = jax.lax.scan(layer, x, params["w"])
  return ((h @ params["v"]) ** 2).mean()


def train_step(params, x):
  value, grads = jax.value_and_grad(loss)(params, x)
  return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def start():
  return jax.jit(
      lambda key: {"w": jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 4,
                   "v": jax.random.normal(key, (WIDTH, 4)) / 4},
      out_shardings=specs)(jax.random.key(0))


def run(step):
  params = start()
  for _ in range(10):
    params, value = step(params, x)
    jax.block_until_ready(value)
  return hashlib.sha256(b"".join(joining.local((params, value)))).hexdigest()


whole = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype(np.float32)
x = joining.laid_out(whole, mesh, P(("data", "fsdp")))
jitted = jax.jit(train_step, out_shardings=(specs, NamedSharding(mesh, P())), donate_argnums=0)
observed = jaxpace.observe(jitted)
bits = [run(jitted), run(observed)]
[program] = observed.plan.programs
counted = [host_ring.executions(buffer, program.number)
           for buffer in range(jax.local_device_count())]

# One process can't put timestamps in: then none does, or they would not run the same program.
if jax.process_index() == 1:
  def refuse(*_):
    raise OSError("no space left")
  thunks.timestamped = refuse
other = jaxpace.observe(jax.jit(train_step, out_shardings=(specs, NamedSharding(mesh, P()))))
bits.append(run(other))
[alone] = other.plan.programs
print("FACTS " + json.dumps({
    "bits": bits, "bare": [program.bare, alone.bare], "counted": counted,
    "runs": [len(observed.runs), len(other.runs)],
    "collectives": [[one.kind, one.axes, one.groups, [loop.trips for loop in one.loops]]
                    for one in program.collectives],
    "plan": observed.plan.to_json()["programs"][0]["collectives"]}))
