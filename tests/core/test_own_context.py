"""The package's own programs run alike under whatever the training loop has set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpace.core import own_context


def _explicit():
  return jax.set_mesh(jax.make_mesh((2,), ("other",), axis_types=(AxisType.Explicit,),
                                    devices=jax.devices()[4:6]))


def _abstract():
  return jax.sharding.use_abstract_mesh(jax.make_mesh((2,), ("other",)).abstract_mesh)


SETTINGS = {
    "a mesh of others": _explicit, "an abstract mesh": _abstract,
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "explicit transfer guard": lambda: jax.transfer_guard("disallow_explicit"),
    "default device": lambda: jax.default_device(jax.devices()[7]),
    "matmul precision": lambda: jax.default_matmul_precision("highest"),
    "x64": lambda: jax.enable_x64(True), "no x64": lambda: jax.enable_x64(False),
    "NaNs": lambda: jax.debug_nans(True), "infinities": lambda: jax.debug_infs(True),
    "leaks": lambda: jax.check_tracer_leaks(True), "no jit": jax.disable_jit,
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "strict types": lambda: jax.numpy_dtype_promotion("strict"),
    "no tracing": lambda: jax.no_tracing(True),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_it_computes_the_same_whatever_is_set(setting):
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
  sharding = NamedSharding(mesh, P("data"))
  with jax.enable_x64(True):
    x = jax.device_put(np.array([1.0, 2.0, np.nan, np.inf]), sharding)
  with SETTINGS[setting](), own_context.on(x):
    put = jax.make_array_from_callback((4,), sharding, lambda index: np.arange(4.0)[index])
    # Types and ranks that need promotion, NaN, and a program that was never traced before.
    out = jax.jit(lambda a, b, c: (a * b + c).sum(keepdims=True))(
        x, put, np.ones((2, 4), np.int32))
    host = own_context.fetch(out)
  assert host.dtype == np.float64 and np.isnan(host).all()
  assert out.sharding.device_set <= set(mesh.devices.flat)


def test_an_array_on_one_device_is_taken_there():
  x = jax.device_put(jnp.float32(3), jax.devices()[5])
  with _explicit(), own_context.on(x):
    assert jax.jit(jnp.copy)(x).devices() == {jax.devices()[5]}
