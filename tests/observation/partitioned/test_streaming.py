"""Timestamps for GPUs as they are put into programs: here with the handler for CPUs in place of
each kernel, so they run."""

import re

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.core import ring_layout
from jaxpace.core.observed import ObservedPlan
from jaxpace.observation.clocks import kernels
from jaxpace.observation.clocks.native import library
from jaxpace.observation.everywhere import DifferentError
from jaxpace.observation.partitioned import collectives, dump, mlir, program, streaming
from tests.observation import observed_steps as steps
from tests.observation.test_observe import events_of, expected_events
from tests.quick import long

pytestmark = pytest.mark.optimized


def mark_on_cpu(name, number, tag, operands, handed_on):
  """What the kernel of a timestamp is here: a call of the CPU's handler, in the same place."""
  results = [value.type for value in operands[:handed_on]]
  aliases = [stablehlo.OutputOperandAlias.get(
      output_tuple_indices=[] if handed_on == 1 else [place], operand_index=place,
      operand_tuple_indices=[]) for place in range(handed_on)]
  return ir.Operation.create(
      "stablehlo.custom_call", results=results, operands=list(operands), attributes={
          "call_target_name": ir.StringAttr.get(library.MARK), "api_version": mlir.integer(4),
          "has_side_effect": ir.BoolAttr.get(False),
          "backend_config": ir.DictAttr.get({
              "mark": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number << 32 | tag),
              "name": ir.StringAttr.get(name)}),
          "output_operand_aliases": ir.ArrayAttr.get(aliases),
          "operand_layouts": mlir.layouts([value.type for value in operands]),
          "result_layouts": mlir.layouts(results)})


@pytest.fixture(autouse=True)
def launched(monkeypatch):
  """Kernels that were put in: (name, operands, handed on, text); each a timestamp of the CPU, or
  nothing but a wait."""
  found = []

  def launch(kernel, operands, handed_on):
    found.append((kernel.name, len(operands), handed_on, kernel.text))
    name, word = re.fullmatch(r"jaxpace_(mark_\d+|wait)",
                              kernel.name)[1], re.search(r"mov.u32 slot, (\d+);\n.*\n.*\n",
                                                         kernel.text)
    if name == "wait":
      tag, number = ring_layout.NUMBER - 1, 4000
    else:
      tag = int(name.removeprefix("mark_"))
      number = int(word[1]) >> 20
    return mark_on_cpu(kernel.name, number, tag, operands, handed_on)

  def buffer():
    words = np.zeros(kernels.BLOCK_WORDS, np.uint32)
    return stablehlo.ConstantOp(
        ir.DenseElementsAttr.get(words, type=ir.IntegerType.get_unsigned(32)))

  monkeypatch.setattr(streaming, "_launch", launch)
  monkeypatch.setattr(streaming, "_buffer", buffer)
  monkeypatch.setattr(program, "_on_host", program._on_stream)
  # optax promotes.
  with jax.numpy_dtype_promotion("standard"):
    yield found


@pytest.mark.parametrize("make", [
    lambda: steps.fsdp(remat=True), *long(steps.data_parallel, steps.everything)],
    ids=["remat", "data", "everything"])
def test_steps_have_the_same_bits_and_every_mark_in_its_place(make):
  step, args = make()
  bare, observed = jax.jit(step), jaxpace.observe(jax.jit(step))
  for _ in range(3):
    one = observed(*args)
    assert steps.bits(one) == steps.bits(bare(*args))
  (made,) = observed.plan.programs
  assert not made.bare and made.clock == "stream" and not made.unstamped
  wanted = expected_events(made)
  buffers = events_of(lambda: observed(*args))
  for rank in made.ranks:
    tags = [tag for tag, _ in buffers[rank]]
    assert {tag: tags.count(tag) for tag in set(tags)} == wanted
    assert tags[0] == made.start_tag and tags[-1] == made.end_tag
  assert msgspec.convert(observed.plan.to_json(), ObservedPlan) == observed.plan


def test_an_all_reduce_that_is_cut_right_away_is_left_together(monkeypatch, launched):
  # XLA for GPUs makes one reduce-scatter of the two.
  seen = []
  put_in = streaming._after

  def after(op, *rest):
    seen.append(op.name)
    put_in(op, *rest)

  monkeypatch.setattr(streaming, "_after", after)
  step, args = steps.fsdp()
  observed = jaxpace.observe(jax.jit(step))
  assert steps.bits(observed(*args)) == steps.bits(jax.jit(step)(*args))
  assert "stablehlo.dynamic_slice" in seen and "stablehlo.all_gather" in seen


def test_marks_of_gpus_are_found_in_the_compiled_text():
  kernel = kernels.mark(5, 12, 1, 3)
  call = ('%custom-call.4 = f32[4]{0} custom-call(%a, %lane), '
          'custom_call_target="__gpu$xla.gpu.ptx", api_version=API_VERSION_TYPED_FFI, '
          'backend_config={grid_x = 1 : i32, kernel_data = "'
          + kernel.text.replace("\n", "\\0A") + f'", name = "{kernel.name}"}}')
  text = f"ENTRY %main (a: f32[4]) -> f32[4] {{\n  ROOT {call}\n}}\n"
  assert collectives.timestamps_in(text) == [12]
  assert collectives.timestamps_in(text.replace("jaxpace_mark_12", "jaxpace_stamp")) == []


def test_a_sum_of_all_reduces_is_left_to_become_one_and_has_one_exit(monkeypatch, launched):
  # XLA for GPUs reduces the sum once; the one of which more is used stays as it is.
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
  placed = []
  put_in = streaming._after
  monkeypatch.setattr(streaming, "_after",
                      lambda op, *rest: (placed.append((op.name, rest[1])), put_in(op, *rest)))

  def each(x):
    total = (jax.lax.psum(x, "data") + jax.lax.psum(2 * x, "data")
             + jax.lax.psum(3 * x, "data").astype(jnp.float32))
    alone = jax.lax.psum(x * x, "data")
    return total, alone + 1, alone * 2

  step = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False))
  observed = jaxpace.observe(step, different="marked")
  x = jnp.arange(8.0)
  for one, other in zip(observed(x), step(x), strict=True):
    np.testing.assert_array_equal(one, other)
  names = [name for name, *_ in launched]
  assert sorted(name for name, _ in placed) == ["stablehlo.add", "stablehlo.all_reduce"]
  assert len([name for name in names if name.startswith("jaxpace_mark_")]) == 2 + 4 + 2


def test_dumps_are_removed(tmp_path, monkeypatch):
  monkeypatch.setattr(dump.tempfile, "tempdir", str(tmp_path))
  step, args = steps.data_parallel()
  jaxpace.observe(jax.jit(step))(*args)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [collectives.TimestampError])
def test_a_dump_that_fails(monkeypatch, caplog, wrong):
  monkeypatch.setattr(dump, "partitioned",
                      lambda request: (_ for _ in ()).throw(wrong("no space left on device")))
  step, args = steps.data_parallel()
  observed = jaxpace.observe(jax.jit(step))
  assert steps.bits(observed(*args)) == steps.bits(jax.jit(step)(*args))
  assert "no space left on device" in observed.plan.programs[0].bare and len(caplog.records) == 1


@pytest.mark.parametrize(("different", "marked"), [("bare", False), ("marked", True),
                                                   ("raise", None)])
def test_collectives_that_differ(monkeypatch, caplog, different, marked):
  monkeypatch.setattr(program, "differences", lambda bare, found: ("With timestamps it has one "
                                                                   "less.",))
  step, args = steps.data_parallel()
  observed = jaxpace.observe(jax.jit(step), different=different)
  if marked is None:
    with pytest.raises(DifferentError, match="one less"):
      observed(*args)
    return
  assert steps.bits(observed(*args)) == steps.bits(jax.jit(step)(*args))
  assert "With timestamps it has one less. So it runs" in caplog.text
  assert bool(observed.runs) == marked
