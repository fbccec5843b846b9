"""A program that knows nothing of jaxpace, and `jaxpace run` on it."""

import subprocess
import sys

from tests.multiprocess.jobs import clean_environment

TRAIN = """
import os, signal, sys, time
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def main(steps, late, seconds=0):
  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  w = jax.jit(lambda: jnp.ones((16, 16)), out_shardings=NamedSharding(mesh, P()))()
  x = jax.jit(lambda: jnp.ones((16, 16)), out_shardings=NamedSharding(mesh, P("data")))()

  @jax.jit
  def grad(w, x):
    return jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

  @jax.jit
  def update(w, g):
    return w - 1e-3 * g

  @jax.jit
  def evaluate(w, x):
    return ((x @ w) ** 2).mean()

  for step in range(steps):
    w = update(w, grad(w, x))
    if step % 5 == 0:
      evaluate(w, x).block_until_ready()
    if jax.process_index() == late:
      w.block_until_ready()
      time.sleep(seconds)
  print(w.addressable_data(0).tobytes().hex())
"""


def jaxpace_run(tmp_path, script, *options, python=("train.py",), devices=4):
  """Runs a script on so many forced devices under `jaxpace run`."""
  (tmp_path / "train.py").write_text(script)
  environment = clean_environment(XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}")
  return subprocess.Popen(
      [sys.executable, "-m", "jaxpace", "run", *options, "--", sys.executable, *python],
      cwd=tmp_path, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE)
