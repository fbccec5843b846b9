"""One of two processes that observe a step under settings of JAX, one after the other.

Prints as FACTS, for each setting: whether parameters are those of the bare step, why the step runs
unmodified, and what the recording lost.
"""

import contextlib
import json
import os
import sys

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpace
from tests.multiprocess import joining
from tests.multiprocess.joining import laid_out, local, train_step

joining.join()
STEPS = 3
auto = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
explicit = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
ones = np.ones(4, np.float32)


@contextlib.contextmanager
def updated(name, value):
  """As `jax.config.update`, which holds in all threads."""
  before = getattr(jax.config, name)
  jax.config.update(name, value)
  try:
    yield
  finally:
    jax.config.update(name, before)


@contextlib.contextmanager
def cached(folder):
  with (updated("jax_compilation_cache_dir", folder),
        updated("jax_persistent_cache_min_compile_time_secs", 0.0),
        updated("jax_persistent_cache_min_entry_size_bytes", 0)):
    yield


SETTINGS = {
    "none": contextlib.nullcontext,
    "mesh": lambda: jax.set_mesh(auto),
    "explicit mesh": lambda: jax.set_mesh(explicit),
    "guard": lambda: updated("jax_transfer_guard", "disallow"),
    "explicit guard": lambda: jax.transfer_guard("disallow_explicit"),
    "device": lambda: updated("jax_default_device", jax.local_devices()[1]),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "x64": lambda: jax.enable_x64(True),
    "NaNs": lambda: updated("jax_debug_nans", True),
    "infinities": lambda: updated("jax_debug_infs", True),
    "leaks": lambda: updated("jax_check_tracer_leaks", True),
    "no jit": lambda: jax.disable_jit(),
    "ranks": lambda: updated("jax_numpy_rank_promotion", "raise"),
    "types": lambda: updated("jax_numpy_dtype_promotion", "strict"),
    "misses": lambda: updated("jax_explain_cache_misses", True),
    "cache": lambda: cached(os.path.join(sys.argv[1], "cache")),
    "cache again": lambda: cached(os.path.join(sys.argv[1], "cache")),
}


facts = {}
for number, (name, setting) in enumerate(SETTINGS.items()):
  mesh = explicit if name == "explicit mesh" else auto
  w, x = laid_out(ones, mesh, P()), laid_out(rows, mesh, P("data"))
  bare, step = jax.jit(train_step), jax.jit(train_step)
  observed = jaxpace.observe(step, exact=number % 2 == 1)
  with setting():
    wanted, found = w, w
    for _ in range(STEPS):
      wanted = bare(wanted, x)
    with jaxpace.recorded(os.path.join(sys.argv[1], name), observed) as recorded:
      for _ in range(STEPS):
        found = recorded(found, x)
  facts[name] = [local(found) == local(wanted), [one.bare for one in observed.plan.programs],
                 recorded.recorder.lost]
print("FACTS " + json.dumps(facts))
