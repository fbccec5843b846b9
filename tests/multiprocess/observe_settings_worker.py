"""One of two processes that observe and record a step, again and again: under settings of JAX, or
with one part after another failing in the second process.

Usage: observe_settings_worker.py DIRECTORY settings|failures. Prints as FACTS, for each setting or
part: whether parameters are those of the bare step, why the step runs unmodified, and what the
recording lost.
"""

import contextlib
import json
import os
import sys

import jax
import numpy as np

from tests.multiprocess import joining
from tests.multiprocess.joining import laid_out, local, train_step

joining.join()

from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxpace  # noqa: E402
from jaxpace.observation import comparing  # noqa: E402
from jaxpace.observation.clocks import host_ring  # noqa: E402
from jaxpace.observation.partitioned import compiling, program  # noqa: E402
from jaxpace.record.ring import collect, intake  # noqa: E402
from jaxpace.record.ring.copier import RingCopier  # noqa: E402

STEPS = 3
DIRECTORY, WHAT = sys.argv[1:]
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
    "cache": lambda: cached(os.path.join(DIRECTORY, "cache")),
    "cache again": lambda: cached(os.path.join(DIRECTORY, "cache")),
}
PARTS = {
    "nothing": [], "read": [(program, "program_of")], "load": [(compiling.Request, "load")],
    "clock": [(host_ring, "unavailable")], "agree": [(comparing.distributed, "barrier")],
    "vote": [(program, "program_of"), (comparing.distributed, "key_value_set")],
    "compare": [(comparing, "copied")], "ring": [(RingCopier, "start")],
    "record": [(intake.Intake, "record")], "collect": [(collect.Collector, "collect")],
    "observe": [],
}


@contextlib.contextmanager
def failing(parts):
  """These parts raise in the second process."""
  def fails(*_, **__):
    raise RuntimeError("no luck")

  working = [(*part, getattr(*part)) for part in parts]
  if jax.process_index() == 1:
    for part in parts:
      setattr(*part, fails)
  yield
  for one in working:
    setattr(*one)


def found(name, around, exact, observing=True):
  """What comes of steps that are observed and recorded within `around`, beside the bare ones."""
  mesh = explicit if name == "explicit mesh" else auto
  w, x = laid_out(ones, mesh, P()), laid_out(rows, mesh, P("data"))

  def run(step):
    new = w
    for _ in range(STEPS):
      new = jax.block_until_ready(step(new, x))
    return local(new)

  step = jax.jit(train_step)
  if not observing:
    return [run(jax.jit(train_step)) == run(step), [], {}]
  observed = jaxpace.observe(step, exact=exact)
  with around:
    wanted = run(jax.jit(train_step))
    with jaxpace.recorded(os.path.join(DIRECTORY, name), observed) as recorded:
      same = run(recorded) == wanted
  return [same, [one.bare for one in observed.plan.programs], recorded.recorder.lost]


if WHAT == "settings":
  facts = {name: found(name, setting(), exact=number % 2 == 1)
           for number, (name, setting) in enumerate(SETTINGS.items())}
else:
  # The others need not wait that long in a test.
  comparing.WAIT_SECONDS = 5.0
  facts = {name: found(name, failing(parts), exact=name == "compare",
                       # One process does not call it.
                       observing=name != "observe" or jax.process_index() == 0)
           for name, parts in PARTS.items()}
print("FACTS " + json.dumps(facts))
