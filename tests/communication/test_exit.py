"""The exit stamp of a group waits for the group's own all-reduce, also where XLA moves some of its
operands away."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxpace
from jaxpace.execution import clock_notice

pytestmark = pytest.mark.optimized

P = PartitionSpec


def normalised(w, batch):
  """A convolution, batch norm over all ranks, a layer: its scale's gradient is ready before the
  norm's own sums."""
  def loss(w):
    h = jax.lax.conv(batch, w["kernel"], (1, 1), "SAME")
    m = jax.lax.pmean(jnp.stack([h.mean((0, 2, 3)), (h * h).mean((0, 2, 3))]), "data")
    spread = jax.lax.rsqrt(m[1] - m[0] ** jnp.float32(2) + jnp.float32(1e-5))
    h = (h - m[0][None, :, None, None]) * spread[None, :, None, None]
    h = jax.nn.relu(h * w["scale"][None, :, None, None] + w["bias"][None, :, None, None])
    return (h.mean((2, 3)) @ w["out"]).var()

  value, slopes = jax.lax.pmean(jax.value_and_grad(loss)(w), "data")
  return jax.tree.map(lambda a, b: a - jnp.float32(0.1) * b, w, slopes), value


def compiled(how, share):
  w = {"kernel": jnp.ones((8, 1, 3, 3)), "scale": jnp.ones(8), "bias": jnp.zeros(8),
       "out": jnp.ones((8, 10))}
  x = jnp.ones((4, 1, 8, 8))
  paced = jaxpace.instrument(normalised, "data", share=share, clock="native")
  if how == "pmap":
    step, devices = jax.pmap(paced, axis_name="data", devices=jax.devices()[:2]), jax.devices()[:2]
    pace = paced.init(devices=devices)
    arguments = (pace, jax.tree.map(lambda a: jnp.stack([a, a]), w), x.reshape(2, 2, 1, 8, 8))
  else:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    spec = jaxpace.spec(mesh)
    step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                                 out_specs=(spec, P()), check_vma=False))
    arguments = (paced.init(mesh), w, x)
  return step.lower(*arguments).compile().as_text(), paced.plan


def sources(made, name, kinds, seen):
  """Names of the instructions of some kinds that an instruction reads, by way of others that are
  none of these."""
  text = made.get(name, "").split(", metadata")[0].split("calls=")[0].split("to_apply")[0]
  for read in re.findall(r"%[\w.\-]+", text):
    if read in seen:
      continue
    seen.add(read)
    if any(kind in made.get(read, "") for kind in kinds):
      yield read
    else:
      yield from sources(made, read, kinds, seen)


@pytest.mark.parametrize("share", [True, None], ids=["shared", "not shared"])
@pytest.mark.parametrize("how", ["pmap", "shard_map"])
def test_the_last_exit_is_after_the_last_all_reduce(how, share):
  if clock_notice("cpu"):
    pytest.skip(clock_notice("cpu"))
  text, plan = compiled(how, share)
  entry = text[text.index("\nENTRY"):].splitlines()
  made = dict(match.groups() for line in entry
              if (match := re.match(r"\s*(?:ROOT )?(%[\w.\-]+) = (.*)", line)))
  sums = [name for name, line in made.items() if " all-reduce(" in line]
  stamps = [name for name, line in made.items() if "jaxpace_stamp" in line]
  assert len(plan.collectives) == 3 and len(sums) >= 3
  after = {stamp: set(sources(made, stamp, [" all-reduce(", "jaxpace_stamp"], set()))
           for stamp in stamps}
  end = next(stamp for stamp in stamps if not any(stamp in read for read in after.values()))
  last_exit = next(name for name in after[end] if name in stamps)
  # The kernel's gradient comes after all other sums: the all-reduce that no other one waits for.
  last = {name for name in sums if not any(
      name in set(sources(made, other, [" all-reduce("], set()))
      for other in sums if other != name)}
  assert last & after[last_exit], (f"{last_exit} waits for {after[last_exit]} only, and the group "
                                   f"ends with {last}")
