"""The GPU's clock as far as it can be seen without a GPU: what it is lowered to, and what it
refuses.

That its kernels compile, and where XLA puts them, is in docs/measurements/gpu_compiled.md: it needs
the CUDA compiler.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxpace
from jaxpace.core.varying import varying
from jaxpace.observation.clocks import ClockError, gate, resolve_clock, words
from tests.quick import long

P = PartitionSpec


@pytest.fixture
def clock():
  return resolve_clock("stream", "gpu")


def lowered(function, *arguments):
  return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
  """(result, operands, rest) of each kernel, in order."""
  found = []
  for line in text.splitlines():
    if "@__gpu$xla.gpu.ptx(" in line:
      result = line.split("=")[0].strip().split(":")[0]
      found.append((result, line.split("@__gpu$xla.gpu.ptx(")[1].split(")")[0].split(", "), line))
  return found


def test_stamps_are_kernels_on_the_stream_and_nothing_goes_to_the_host(clock):
  text = lowered(lambda x: clock.timestamp(clock.timestamp(words.zero(), x)), jnp.ones(3))
  assert len(calls(text)) == 2 and text.count("custom_call") == 2
  assert "callback" not in text and "globaltimer" in text


def test_a_stamp_is_given_what_it_comes_after_and_the_stamp_before_it(clock):
  (first, given, _), (_, again, _) = calls(lowered(
      lambda x, y: clock.timestamp(clock.timestamp(words.zero(), x), y), jnp.ones((3, 5)),
      jnp.ones(2)))
  assert given[0] == "%arg0" and again == ["%arg1", first]


def test_what_is_held_stays_in_its_memory_and_waits_for_the_stamp(clock):
  text = lowered(lambda x, y: gate(clock, clock.timestamp(words.zero()), [x, y]), jnp.ones(3),
                 jnp.ones(7, jnp.int32))
  (timestamp, _, _), (_, given, line) = calls(text)
  assert given == ["%arg0", "%arg1", timestamp]
  assert ("operand_index = 0" in line and "operand_index = 1" in line
          and "operand_index = 2" not in line)


def test_more_operands_than_a_kernel_takes(clock):
  many = [jnp.float32(i) for i in range(600)]

  def step(*xs):
    before, _ = clock.delay(jnp.float32(0), 0.1, clock.timestamp(words.zero(), *xs), *xs)
    return gate(clock, before, xs)

  found = calls(lowered(step, *many))
  assert max(len(given) for _, given, _ in found) < 300  # 512 addresses fill a kernel's parameters
  given = [operand for _, operands, _ in found[:3] for operand in operands]
  assert {f"%arg{i}" for i in range(600)} <= set(given), "the stamp waits for all of them"
  assert found[0][0] in found[1][1] and found[1][0] in found[2][1], "one kernel after the other"


@pytest.mark.parametrize("dtype, shape", [
    *((jnp.float32, shape) for shape in ((), (3,), (2, 3, 100), (0, 4))),
    *((dtype, (3,)) for dtype in (jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint32, jnp.bool_,
                                  jnp.complex64, jnp.float8_e4m3fn, jnp.int4))])
def test_operands_of_every_dtype_and_rank(clock, dtype, shape):
  def step(x):
    before, after = clock.delay(jnp.float32(1e-3), 0.1, clock.timestamp(words.zero(), x), x)
    return before, gate(clock, after, [x])

  assert len(calls(lowered(step, jax.ShapeDtypeStruct(shape, dtype)))) == 3


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map_with_replicated_and_varying_operands(clock, check_vma):
  def step(previous, shared, own):
    first = clock.timestamp(previous, shared)
    second = clock.timestamp(first, shared, own)
    (kept,) = gate(clock, second, [shared])
    assert (varying(first) == varying(second) == varying(kept)
            == frozenset()), "what is held keeps its type"
    return jnp.stack([first, second])[None], kept

  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P("data"), P()),
                       check_vma=check_vma)
  assert len(calls(lowered(step, words.zero(), jnp.ones(3), jnp.ones(8)))) == 3


def test_a_delay_is_capped_in_the_kernel_and_by_its_limit(clock):
  text = lowered(lambda seconds: clock.delay(seconds, 0.125, words.zero()), jnp.float32(1))
  for part in ("nanosleep.u32", "%clock64", "setp.gt.u64 over, cycles"):
    assert part in text
  with pytest.raises(ValueError, match=r"none may be longer than 2.0 s.*clock='callback'"):
    clock.delay(jnp.float32(1), 2.5, words.zero())
  with pytest.raises(ValueError, match="20 ms is 20e-3"):
    clock.delay(jnp.float32(1), -1.0, words.zero())


@pytest.mark.parametrize("limit", [0.0, 0.125])
def test_a_delay_s_limit_is_a_number_of_its_kernel(clock, limit):
  text = lowered(lambda seconds: clock.delay(seconds, limit, words.zero()), jnp.float32(1))
  capped = re.search(r"min.f32 asked, asked, 0f([0-9A-F]{8});", text)
  assert np.frombuffer(bytes.fromhex(capped[1]), ">f4")[0] == np.float32(limit * 1e9)
  billion = re.search(r"mul.f32 asked, asked, 0f([0-9A-F]{8});", text)
  assert np.frombuffer(bytes.fromhex(billion[1]), ">f4")[0] == 1e9


def test_it_is_for_gpus_of_one_maker(monkeypatch):
  with pytest.raises(ClockError, match="runs on gpu, cuda only, and the step runs on cpu"):
    resolve_clock("stream", "cpu")
  clock = resolve_clock("auto", "gpu")
  assert clock.name == "stream" and not clock.notice
  monkeypatch.setattr(jax, "devices", lambda backend=None: ["gfx942"])
  clock = resolve_clock("auto", "gpu")
  assert clock.name == "callback" and "AMD" in clock.notice
  with pytest.raises(ClockError, match="NVIDIA"):
    resolve_clock("stream", "gpu")


def four():
  return jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))


def lowered_for_gpus(monkeypatch, paced, *arguments, **settings):
  """What an instrumented step on four devices is lowered to, were they a GPU topology's."""
  mesh = four()
  pace, spec = paced.abstract(mesh), jaxpace.spec(mesh)
  monkeypatch.setattr(paced, "_platform", "gpu")
  return lowered(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                               out_specs=(spec, P()), **settings), pace, *arguments)


def compiled_for_gpus(monkeypatch, pacer, **settings):
  """An instrumented step of four devices that are not there: described, traced and lowered here."""
  mesh = four()

  def step(w, x):
    loss, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** jnp.float32(2)))(w)
    return w - jax.lax.pmean(slope, "data"), jax.lax.pmean(loss, "data")

  paced = jaxpace.instrument(step, "data", pacer, clock="stream", **settings)
  pace = paced.abstract(mesh)
  made = jaxpace.instrument(step, "data", pacer).init(mesh)
  assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), pace) == jax.tree.map(
      lambda a: (a.shape, a.dtype, a.sharding), made)
  return paced, lowered_for_gpus(monkeypatch, paced, jnp.ones((3, 2)), jnp.ones((8, 3)))


@pytest.mark.parametrize("pacer", [
    jaxpace.guard(jaxpace.pace_early_ranks()), *long(
        jaxpace.chain(jaxpace.pace_early_ranks(), jaxpace.interleave_jobs())), None],
    ids=["guard", "chain", "none"])
def test_an_instrumented_step_asks_nothing_of_the_host(monkeypatch, pacer):
  paced, text = compiled_for_gpus(monkeypatch, pacer)
  assert paced.plan.clock == "stream"
  assert len(calls(text)) >= len(paced.plan.marks), ("a stamp for each mark, the first two by one "
                                                     "kernel, and holds")
  assert "callback" not in text
  assert ("stablehlo.if" not in text
          and "stablehlo.while" not in text), "the host would read which way to go"
  known = set(re.findall(r"(%\w+) = stablehlo.constant", text))
  for made, which in re.findall(r'(?:(%\w+)\S* = )?"stablehlo.case"\((%\w+)\)', text):
    assert which in known, "only what depends on the platform, which XLA folds"
    known.add(made)


def test_stamps_of_a_collective_take_all_of_it_whole(monkeypatch):
  """An element of a gradient would be a copy of its own; and of one group XLA may make several
  collectives."""
  _, text = compiled_for_gpus(monkeypatch, None)
  gradient = re.findall(r"(%\w+) = stablehlo.transpose .*-> tensor<3x2xf32>", text)
  sums = re.findall(r'(%\w+) = "stablehlo.all_reduce"', text)
  assert len(gradient) == 1 and len(sums) == 3  # JAX's own, of the gradient, and the user's two
  assert any(gradient[0] in given for _, given, _ in calls(text))
  assert any(set(sums[1:]) <= set(given) for _, given, _ in calls(text))


def test_arrivals_are_shared_for_a_pacer_alone(monkeypatch):
  assert compiled_for_gpus(monkeypatch, jaxpace.pace_early_ranks())[0].plan.share
  recorded = compiled_for_gpus(monkeypatch, None)[0].plan
  assert not recorded.share and "no pacer would see it" in recorded.share_reason
  assert compiled_for_gpus(monkeypatch, None, share=True)[0].plan.share


def test_the_last_stamp_does_not_wait_for_what_a_step_hands_back_as_it_came(monkeypatch):
  """Kept to the end of the step it would be copied before its memory is written to."""
  def step(state, x):
    return (state[0] - jax.lax.pmean(jnp.mean(x), "data"), state[1]), state[0]

  paced = jaxpace.instrument(step, "data", clock="stream")
  found = calls(lowered_for_gpus(monkeypatch, paced, (jnp.ones((3, 2)), jnp.ones(5)),
                                 jnp.ones((8, 3)), check_vma=False))
  _, given, _ = [call for call in found if "jaxpace_stamp" in call[2]][-1]
  # The entry timestamp, what is new, and the timestamp before it.
  assert len(given) == 3 and not any(operand.startswith("%arg") for operand in given)
