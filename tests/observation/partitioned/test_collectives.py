"""Collectives of compiled programs: in loops and branches, started on other streams, through calls
of installed packages."""

import importlib.util
import json
import os
import sysconfig

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpace.core.plan import Loop
from jaxpace.observation.partitioned import collectives, compiling, wire
from jaxpace.observation.partitioned.wire import message, text, whole

F32, S32, BF16, S8, TUPLE = 11, 4, 16, 2, 13


def packed(number, *values):
  return text(number, b"".join(map(wire.of_number, values)))


def array(kind, *sizes):
  return [whole(2, kind), packed(3, *sizes)]


def pair(*shapes):
  return [whole(2, TUPLE), *(message(4, *shape) for shape in shapes)]


def instruction(number, opcode, shape, operands=(), called=(), config=None, said=(), more=()):
  return message(
      2, text(1, f"{opcode}.{number}"), text(2, opcode), message(3, *shape), message(7, *said),
      whole(35, number), packed(36, *operands), packed(38, *called),
      *([text(43, json.dumps(config))] if config else []), *more)


def computation(number, *instructions):
  return message(3, *instructions, whole(5, number))


def found_in(*fields):
  return collectives.found_in(collectives.Program(wire.written(fields)), 4)


X, CARRIED = array(F32, 8, 4), pair(array(S32), array(F32, 8, 4))
FRAMES = message(
    17, text(1, "/usr/lib/python3.11/site-packages/flax/linear.py"), text(1, "/home/me/model.py"),
    *(message(3, whole(1, file), whole(3, line)) for file, line in [(2, 100), (2, 120), (1, 7)]),
    *(message(4, whole(1, place), whole(2, parent)) for place, parent in [(1, 0), (2, 1), (3, 2)]))
LOOPS = [
    computation(
        1, instruction(10, "parameter", CARRIED),
        instruction(11, "get-tuple-element", X, [10]),
        instruction(12, "all-gather", array(F32, 16, 4), [11], said=[
            text(2, "jit(step)/while/body/dot_general"), whole(15, 3)], more=[
                message(92, whole(1, 2), whole(2, 2), packed(3, 2, 2), packed(4, 1, 0))])),
    computation(2, instruction(20, "parameter", CARRIED)),
    computation(3, instruction(30, "parameter", array(F32, 4)), instruction(
        31, "collective-permute", array(F32, 4), [30],
        said=[text(3, "/home/me/loss.py"), whole(4, 9)],
        more=[message(52, whole(2, 1)), message(52, whole(1, 1))])),
    computation(4, instruction(40, "parameter", array(F32, 4))),
    computation(
        5, instruction(50, "parameter", CARRIED),
        instruction(51, "while", CARRIED, [50], [1, 2], {"known_trip_count": {"n": "32"}}),
        instruction(52, "while", CARRIED, [51], [1, 2]),
        instruction(53, "constant", array(BF16, 4)), instruction(54, "constant", array(S8, 2, 2)),
        instruction(55, "all-reduce", pair(array(BF16, 4), array(S8, 2, 2)), [53, 54]),
        instruction(56, "conditional", array(F32, 4), [50, 50], [3, 4])),
    whole(6, 5), FRAMES]


def test_collectives_are_found_where_they_run():
  found = found_in(*LOOPS)
  assert [one.kind for one in found] == [
      "all-gather", "all-gather", "all-reduce", "collective-permute"]
  known, unknown, both, permute = found
  assert known.loops == (Loop("while.51", 32),)
  assert unknown.loops == (Loop("while.52", None),)
  assert known.groups == ((0, 2), (1, 3))
  assert (known.operands, known.dtypes, known.bytes) == (1, ("float32",), 128)
  assert known.operation == "jit(step)/while/body/dot_general"
  assert known.source == "model.py:120"
  assert both.groups == ((0, 1, 2, 3),)
  assert both.dtypes == ("bfloat16", "int8")
  assert both.bytes == 4 * 2 + 4
  assert permute.pairs == ((0, 1), (1, 0)) and permute.groups == ()
  assert permute.conditional and not known.conditional
  assert permute.source == "loss.py:9"


def test_they_are_in_the_order_in_which_they_run():
  scheduled = message(7, message(1, whole(1, 5), message(
      2, packed(1, 50, 53, 54, 55, 56, 52, 51))))
  assert [one.name for one in found_in(*LOOPS, scheduled)] == [
      "all-reduce.55", "collective-permute.31", "all-gather.12", "all-gather.12"]


def test_what_is_started_goes_by_the_name_of_its_start():
  summed = instruction(11, "all-reduce", array(F32, 4), [10])
  [one] = found_in(
      computation(1, instruction(10, "parameter", array(F32, 4)), summed),
      computation(2, instruction(20, "parameter", array(F32, 4)),
                  instruction(21, "async-start", pair(array(F32, 4)), [20], [1]),
                  instruction(22, "async-done", array(F32, 4), [21])), whole(6, 2))
  assert (one.kind, one.name) == ("all-reduce", "async-start.21")
  [one] = found_in(computation(
      1, instruction(10, "parameter", array(F32, 4)),
      instruction(11, "all-reduce-start", array(F32, 4), [10]),
      instruction(12, "all-reduce-done", array(F32, 4), [11])), whole(6, 1))
  assert (one.kind, one.name) == ("all-reduce", "all-reduce-start.11")


def test_types_that_nobody_knows_have_no_size():
  sizes = {number: found_in(computation(
      1, instruction(10, "parameter", array(number, 6)),
      instruction(11, "all-gather", array(number, 6), [10])), whole(6, 1))[0]
      for number in (1, 21, 19, 15, 99)}
  assert {one.dtypes[0]: one.bytes for one in sizes.values()} == {
      "bool": 6, "int4": 3, "float8_e5m2": 6, "complex64": 48, "type 99": 0}


def test_the_line_is_the_user_s_whatever_installed_package_calls(tmp_path):
  """XLA prints a frame's parent as one too many; as a message it is right."""
  file = tmp_path / "site-packages" / "layers.py"
  file.parent.mkdir()
  file.write_text("import jax\ndef summed(x):\n  return jax.lax.psum(x, 'data')\n")
  spec = importlib.util.spec_from_file_location("layers", file)
  layers = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(layers)

  def step(x):
    return layers.summed(x)

  line = step.__code__.co_firstlineno + 1
  mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
  compiled = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P())).lower(
      jnp.ones(2)).compile()
  program = collectives.Program(compiling.program_of(compiled.runtime_executable()))
  [one] = collectives.found_in(program, 2)
  assert one.source == f"tests/observation/partitioned/test_collectives.py:{line}"
  assert one.groups == ((0, 1),) and not program.has_tokens


@pytest.mark.parametrize("broken", [b"", b"\x1a\x02\x08", b"\x1a\xff"])
def test_a_broken_program_has_no_collectives(broken):
  try:
    assert collectives.found_in(collectives.Program(broken), 2) == []
  except wire.WireError:
    assert broken


# Which line of the calls that led to an operation a report names, and how.

JAX = ("/opt/base/lib/python3.12/site-packages/jax/_src/lax/parallel.py", 7)
FLAX = ("/usr/lib/python3/dist-packages/flax/linen/linear.py", 287)
TRAINER = ("/venv/lib/python3.12/site-packages/brax/training/gradients.py", 58)
STANDARD = (os.path.join(sysconfig.get_paths()["stdlib"], "contextlib.py"), 81)


@pytest.mark.parametrize(("frames", "shown"), [
    ([JAX, FLAX, ("/home/me/job/models/layer.py", 12), ("/home/me/job/train.py", 3)],
     "models/layer.py:12"),
    ([JAX, FLAX, STANDARD, TRAINER], "flax/linen/linear.py:287"),
    ([JAX, TRAINER], "brax/training/gradients.py:58"), ([JAX], "jax/_src/lax/parallel.py:7"),
    ([JAX, TRAINER, ("<frozen runpy>", 88)], "brax/training/gradients.py:58"),
    ([JAX, ("<stdin>", 4), TRAINER], "<stdin>:4"), ([JAX, STANDARD], "contextlib.py:81"),
    ([("/elsewhere/train.py", 9)], "train.py:9"),
    ([("/home/me/job/jaxpace/step/instrument.py", 4), ("/home/me/job/train.py", 3)], "train.py:3"),
    ([], None)])
def test_the_line_named_is_the_innermost_of_the_user_and_its_path_that_of_its_import(
    monkeypatch, frames, shown):
  monkeypatch.setattr("sys.path", ["/home/me", "/home/me/job",
                                   "/venv/lib/python3.12/site-packages"])
  assert collectives.source_line([collectives.Frame(*each) for each in frames]) == shown


def test_a_file_is_looked_up_once_for_all_collectives_of_a_program(monkeypatch):
  looked, paths = [], sysconfig.get_paths()
  monkeypatch.setattr(sysconfig, "get_paths", lambda: looked.append(1) or paths)
  for line in range(50):
    frame = collectives.Frame("/looked/up/once.py", line)
    assert collectives.source_line([frame]) == f"once.py:{line}"
  assert len(looked) == 1


@pytest.mark.parametrize(("frames", "shown"), [
    ([JAX, FLAX, (*TRAINER, "Trainer.step"), ("/job/train.py", 3)], "flax/linen/linear.py:287"),
    ([JAX, FLAX, ("/job/layer.py", 12), ("/job/train.py", 3, "step"), ("/job/main.py", 9)],
     "layer.py:12"),
    ([JAX, ("/job/train.py", 3, "main")], "train.py:3")])
def test_no_line_that_leads_to_the_call_of_the_step_is_named_unless_there_is_no_other(
    monkeypatch, frames, shown):
  monkeypatch.setattr("sys.path", ["/job", "/venv/lib/python3.12/site-packages"])
  assert collectives.source_line([collectives.Frame(*each) for each in frames], "step") == shown
