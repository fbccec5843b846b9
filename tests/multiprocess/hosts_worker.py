"""One of several processes that add up a megabyte each step over gloo while a Recorder samples the
host.

Usage: hosts_worker.py DIRECTORY STEPS, with the variables of `jaxpace.distributed.initialize`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxpace
from tests.instrumentation.running import instrumented
from tests.multiprocess.joining import laid_out

FLOATS = 1 << 18


def main() -> None:
  jaxpace.distributed.initialize()
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  paced, step, pace = instrumented(lambda batch: jnp.sum(jax.lax.psum(batch, "data")), mesh,
                                   P("data"), check_vma=True)
  batch = laid_out(np.ones(jax.device_count() * FLOATS, np.float32), mesh, P("data"))
  with jaxpace.Recorder(sys.argv[1], paced, hosts=0.1) as recorder:
    for _ in range(int(sys.argv[2])):
      pace, total = step(pace, batch)
      recorder.record()
    jax.block_until_ready(total)


if __name__ == "__main__":
  main()
