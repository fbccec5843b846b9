"""The order of a compiled step by its dataflow: a small one runs in order anyway, so that times
would show nothing."""

import re

import jax
import jax.numpy as jnp
import pytest

from tests.instrumentation import models
from tests.instrumentation.cases import Case, by_autodiff, by_user, sharpness_aware
from tests.instrumentation.running import extra_operands, mesh_of, pair, restless
from tests.quick import long

pytestmark = pytest.mark.optimized


def averaged_twice():
  """Under `check_vma` JAX sums the gradients of parameters that are the same everywhere; the step
  averages the sums."""
  return Case(models.plain_step, models.mlp_params(), check_vma=True)


def halves():
  """No operand may be held back: one of ours is added, and must not be dropped."""
  return Case(models.halves_step, models.mlp_params(dtype=jnp.bfloat16))


def operands_of(hlo):
  """What each instruction of a compiled program reads, by name."""
  return {name: re.findall(r"%[\w.-]+", rest)
          for name, rest in re.findall(r"(%[\w.-]+) = (.*)", hlo)}


@pytest.mark.parametrize("make, axes, share", [
    (sharpness_aware, {}, True), (halves, {}, None), (averaged_twice, {"model": 2}, None),
    *long((by_user, {}, None), (halves, {}, True), (averaged_twice, {}, True),
          (by_autodiff, {"model": 2}, True))])
def test_every_all_reduce_is_held_back_by_its_entry_stamp(make, axes, share):
  """Without that it may start before the timestamp; seldom enough to be missed by a test of
  times."""
  case = make()
  data = models.batches(2, dtype=jax.tree.leaves(case.state)[0].dtype)
  both = pair(case.step, mesh_of(data=2, **axes), case.state, data[0], check_vma=case.check_vma,
              share=share)
  if both.paced.plan.clock != "native":
    pytest.skip("callbacks hold by loops, which compiled programs don't name")
  reduced = re.findall(r" all-reduce\((.*?)\)", both.hlo)
  assert len(reduced) == len(both.paced.plan.collectives)
  held = set(re.findall(r'(%[\w.-]+) = .* custom_call_target="jaxpace_hold"', both.hlo))
  reads = operands_of(both.hlo)
  for operands in reduced:
    names = re.findall(r"%[\w.-]+", operands)
    # XLA on CPU adds up halves as float32: between what is held and the sum stands a conversion.
    names += [read for name in names if make is halves for read in reads[name]]
    assert held.intersection(names), f"none of {operands} is held"
  # two sums for each leaf, which XLA interleaves; timestamps between them leave two in all
  if make is averaged_twice:
    both.check_bits(case.state, [data[0]], 2)
  else:
    assert len(extra_operands(both.bare_hlo, both.hlo)) == (share is True or make is halves)


@pytest.mark.parametrize("make", [by_autodiff, *long(by_user)])
def test_every_gradient_comes_after_the_delay(make):
  """By dataflow in the compiled program: a small one runs in order anyway, so that times would show
  nothing."""
  case = make()
  both = pair(case.step, mesh_of(data=2), case.state, models.batches(2)[0],
              check_vma=case.check_vma, pacer=restless())
  if both.paced.plan.clock != "native":
    pytest.skip("callbacks hold by loops, which compiled programs don't name")
  reads = operands_of(both.hlo)
  delays = {name for name, _ in re.findall(r'(%[\w.-]+) = (.*"jaxpace_delay")', both.hlo)}
  assert delays

  def behind(name):
    found, waiting = set(), [name]
    while waiting:
      value = waiting.pop()
      if value not in found:
        found.add(value)
        waiting += reads.get(value, [])
    return found

  (operands,) = re.findall(r" all-reduce\((.*?)\)", both.hlo)
  early = [operand for operand in re.findall(r"%[\w.-]+", operands) if not delays & behind(operand)]
  assert not early
