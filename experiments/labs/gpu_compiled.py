r"""What XLA makes of an instrumented step for eight GPUs, with no GPU there: it compiles, and
nothing runs.

    pip install "jax[cuda13]"      # in an environment of its own: it brings the compiler; a driver is not needed
    python -m experiments.labs.gpu_compiled

Compiles transformer steps for eight H200 of one host, bare and instrumented with `clock="stream"`,
and reads the schedule: which kernels and copies instrumenting adds, whether each stamp stands where
it must, whether the collectives are the same and start as early, whether anything goes to the host
or would make it wait, and what runs as CUDA graphs. It says nothing of time. Writes
docs/measurements/gpu_compiled.json and .md. Takes some minutes.
"""  # noqa: E501

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpace
from experiments.examples.chars.model import Transformer
from experiments.labs import gpu_schedule
from experiments.lib import measured

P = PartitionSpec
_MODULE = "experiments.labs.gpu_compiled"
_RANKS = 8
_FOLDER = "JAXPACE_GPU_DUMP"

# Of an NVIDIA H200, as its properties are published; XLA asks for them where no device answers.
_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535  block_dim_limit_z: 65535  memory_bandwidth: 4800000000000  l2_cache_size: 62914560
  clock_rate_ghz: 1.98  device_memory_size: 150754820096  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H200"
"""  # noqa: E501

PACERS: dict[str, Callable[[], Any]] = {
    "recording": lambda: None,
    "early": jaxpace.pace_early_ranks,
    "guarded": lambda: jaxpace.guard(jaxpace.pace_early_ranks()),
    "chain": lambda: jaxpace.chain(jaxpace.guard(jaxpace.pace_early_ranks()),
                                   jaxpace.interleave_jobs()),
}


def define_flags() -> None:
  flags.DEFINE_list("sizes", ["4x256", "12x768"], "Transformers, as blocks x width.")
  flags.DEFINE_string("out", "docs/measurements/gpu_compiled.json",
                      "File the figures are written to.")


def mesh_of_gpus() -> Mesh:
  """Eight GPUs that are not there.

  Raises:
    SystemExit: JAX has no compiler for them.
  """
  try:
    topology = topologies.get_topology_desc(platform="cuda", target_config=_TARGET,
                                            topology=f"1x1x{_RANKS}")
  except (NotImplementedError, RuntimeError) as error:
    raise SystemExit(
        f"JAX can't compile for GPUs here ({error}). Install its compiler in an environment of "
        'its own: pip install "jax[cuda13]". No GPU and no driver is needed.') from None
  return topologies.make_mesh(topology, (_RANKS,), ("data",))


def _step(blocks: int, width: int) -> tuple[Callable[..., Any], Any, Any]:
  """A training step with AdamW, and the types of its state and batch."""
  model = nnx.eval_shape(lambda: Transformer(32_000, 512, width, max(width // 64, 1), blocks,
                                             rngs=nnx.Rngs(0)))
  graph, weights = nnx.split(model)
  tx = optax.adamw(1e-3)

  def step(state: Any, batch: Any) -> Any:
    params, opt = state

    def loss(params: Any) -> Any:
      half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
      logits = nnx.merge(graph, half)(batch[:, :-1]).astype(jnp.float32)
      return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    value, slopes = jax.value_and_grad(loss)(params)
    value, slopes = jax.lax.pmean((value, slopes), "data")
    updates, opt = tx.update(slopes, opt, params)
    return (optax.apply_updates(params, updates), opt), value

  state = (weights, jax.eval_shape(tx.init, weights))
  return step, state, jax.ShapeDtypeStruct((_RANKS * 4, 513), jnp.int32)


def _placed(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
  sharding = NamedSharding(mesh, spec)
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                      tree)


def _compiled(mesh: Mesh, blocks: int, width: int, pacer: str | None,
              folder: pathlib.Path) -> dict[str, Any]:
  step, state, batch = _step(blocks, width)
  state, batch = _placed(state, mesh, P()), _placed(batch, mesh, P("data"))
  arguments: tuple[Any, ...] = (state, batch)
  function: Callable[..., Any] = step
  specs: tuple[Any, ...] = (P(), P("data"))
  results: Any = P()
  if pacer is not None:
    paced = jaxpace.instrument(step, "data", PACERS[pacer](), clock="stream")
    spec = jaxpace.spec(mesh)
    function, arguments, specs, results = (paced, (paced.abstract(mesh), *arguments),
                                           (spec, *specs), (spec, P()))
  mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
  mapped.__name__ = name = f"{pacer or 'bare'}_{blocks}x{width}"
  text = jax.jit(mapped, donate_argnums=tuple(range(len(arguments) - 1))).lower(
      *arguments).compile().as_text()
  found = gpu_schedule.schedule(text)
  launched = gpu_schedule.thunks(folder, f"jit_{name}")
  return {"text": text, "schedule": found, "thunks": launched}


def _row(name: str, one: dict[str, Any], bare: dict[str, Any]) -> dict[str, Any]:
  found, plain, launched = one["schedule"], bare["schedule"], one["thunks"]
  return {
      "step": name,
      "operations": len(found.operations), "products": found.count("product"),
      "stamps": found.count("stamp", "delay"), "holds": found.count("hold"),
      "copies_added": found.count("copy") - plain.count("copy"),
      "kernels_added": len(found.operations) - found.count("copy") - len(plain.operations)
      + plain.count("copy"),
      "fused": sum(gpu_schedule.kernels(one["text"]).values()),
      "changed": gpu_schedule.changed(bare["text"], one["text"]),
      "collectives": found.count("start"), "reduced": found.reduced,
      "reduced_more": found.reduced - plain.reduced, "starts": found.starts(),
      "beside_collectives": found.beside_collectives(), "before_exit": found.before_exit(),
      "branches": found.branches, "to_the_host": found.host, "graphs": launched and launched.graphs,
      "in_graphs": launched and launched.inside,
      "outside_graphs": launched and sorted(launched.outside),
      "problems": [] if one is bare else found.problems(name.split()[1] != "recording"),
  }


def _measure(folder: pathlib.Path) -> list[dict[str, Any]]:
  mesh, rows = mesh_of_gpus(), []
  for size in flags.FLAGS.sizes:
    blocks, width = map(int, size.split("x"))
    bare: dict[str, Any] = {}
    for pacer in (None, *PACERS):
      print(f"  {size}, {pacer or 'bare'}", file=sys.stderr, flush=True)
      one = _compiled(mesh, blocks, width, pacer, folder)
      bare = bare or one
      rows.append(_row(f"{size} {pacer or 'bare'}", one, bare))
  return rows


def _span(shares: list[float]) -> str:
  return (", ".join(f"{share:.0%}" for share in shares[:3])
          + (f", ..., {shares[-1]:.0%}" if len(shares) > 3 else ""))


def _tally(kinds: list[str]) -> str:
  return ", ".join(f"{count} {kind.removeprefix('k')}"
                   for kind, count in sorted(collections.Counter(kinds).items()))


def _lines(figures: dict[str, Any]) -> list[str]:
  lines = measured.introduction("An instrumented step, compiled for eight GPUs", figures)
  lines += [
      "Compiled for eight H200 of one host by XLA's GPU compiler; nothing ran, and nothing here is "
      "a time.", ""]
  header = ["step", "kernels added", "copies added", "of them stamps", "holds",
            "kernels that calculate, changed", "collectives", "numbers more in them",
            "start after, of the products", "kernels beside collectives",
            "kernels before the exit stamp", "branches", "to the host", "CUDA graphs",
            "thunks in them", "outside", "out of order"]
  lines += measured.table(header, [[
      row["step"], row["kernels_added"], row["copies_added"], row["stamps"], row["holds"],
      row["changed"], row["collectives"], row["reduced_more"], _span(row["starts"]),
      row["beside_collectives"], row["before_exit"], row["branches"], row["to_the_host"],
      row["graphs"], row["in_graphs"],
      None if row["outside_graphs"] is None else _tally(row["outside_graphs"]),
      "; ".join(row["problems"]) or "nothing"] for row in figures["steps"]])
  return lines


@contextlib.contextmanager
def dumped(module: str) -> Iterator[pathlib.Path]:
  """Starts a program over with the folder into which XLA writes what it compiles, and removes that
  at the end."""
  folder = os.environ.get(_FOLDER)
  if folder is None:  # XLA reads where to dump once, when it starts
    folder = tempfile.mkdtemp(prefix="jaxpace-gpu-")
    options = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_gpu_autotune_level=0"
    os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]],
              {**os.environ, _FOLDER: folder, "XLA_FLAGS": options.strip(), "JAX_PLATFORMS": "cpu"})
  try:
    yield pathlib.Path(folder)
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def main(_: list[str]) -> None:
  with dumped(_MODULE) as folder:
    figures = {**measured.circumstances(_MODULE), "steps": _measure(folder)}
  measured.write(figures, _lines(figures), pathlib.Path(flags.FLAGS.out))
  wrong = [row["step"] for row in figures["steps"] if row["problems"] or row["to_the_host"]
           or row["branches"]]
  if wrong:
    raise SystemExit(f"Not as it should be: {', '.join(wrong)}.")


if __name__ == "__main__":
  define_flags()
  app.run(main)
