"""What is known of JAX's primitives by name: which send, which compute, which hide what they do.

One table for all who ask. A name that it lacks counts as the more careful case: it is not sent over
an axis unless it has one, not held back, not read early, and its work is guessed from its sizes.
"""

from __future__ import annotations

_VIEWS = frozenset({"pvary", "reshape", "squeeze", "expand_dims", "stop_gradient"})
_LOOPS = frozenset({"scan", "while", "cond"})
_CALLS = frozenset({"pure_callback", "io_callback", "ffi_call"})
_REMAT = "remat2"
"""`jax.checkpoint`."""

SUMS = frozenset({"psum", "psum_invariant"})
"""Sums over the ranks."""

COLLECTIVES = SUMS | {"all_gather", "reduce_scatter", "all_to_all", "ppermute"}
"""Their results are in memory, rounded."""

LOCAL = frozenset({"pvary", "axis_index", "preduced", "vary_unreduced_cast", "reduced_vary_cast"})
"""Name an axis and send nothing."""

TRANSPARENT = _VIEWS | {"copy"}
"""The same values in another shape or type of varying: as good as what they come from."""

WEIGHTLESS = _VIEWS | {"bitcast_convert_type", "random_wrap", "random_unwrap"}
"""Another shape or type of the same data: no work."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""Kernels of their own, whose layouts XLA chooses."""

IN_MEMORY = _LOOPS | _CALLS | {"sort"}
"""XLA fuses nothing into these or after them."""

UNKNOWN_WORK = _LOOPS | _CALLS | {_REMAT, "shard_map", "pallas_call", "debug_callback", "run_state"}
"""Inside one of these anything may happen: a loop, a kernel, a call to the host."""

ELEMENTWISE = _VIEWS | SUMS | {
    "add", "sub", "mul", "div", "neg", "max", "min", "add_any", "concatenate", "stack", "pad",
    "broadcast_in_dim", "convert_element_type", "select_n", "eq", "gt", "lt", "ge", "le", "rsqrt",
    "sqrt", "square", "integer_pow", "slice"}
"""Keep XLA's default layout if their operands have it."""

OPENABLE = {"jit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr",
            "custom_vjp_call": "call_jaxpr"}
"""Calls whose body runs exactly once, where the call stands, by the parameter that holds it:
opening them changes nothing that is computed."""

NOT_STAMPED = {
    _REMAT: "inside jax.checkpoint: a timestamp would change what is recomputed",
    "scan": "inside jax.lax.scan: it runs many times per step",
    "while": "inside jax.lax.while_loop: it runs an unknown number of times per step",
    "cond": "inside jax.lax.cond: it may not run on every step",
    "shard_map": "inside a nested jax.shard_map",
}
"""Why a collective inside one of these has no timestamps."""


def reduces(name: str) -> bool:
  """Whether a primitive reduces whole axes of an array on one rank.

  Its result has the default layout.
  """
  others = ("reduce_window", "reduce_precision", "reduce_scatter")
  return name.startswith("reduce_") and not name.startswith(others)
