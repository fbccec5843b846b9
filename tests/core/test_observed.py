"""The plan of an observed step counts its timestamps."""

import dataclasses

from jaxpace.core.observed import ObservedProgram
from jaxpace.core.plan import Collective, Loop, Untimed

GATHER = Collective(
    index=0, name="all-gather.11", kind="all-gather", bytes=4096, operands=2, dtypes=("float32",),
    axes=("fsdp",), groups=((0, 1), (2, 3)), pairs=(), phase="forward",
    loops=(Loop("while.3", 4), Loop("while.1", 8)), source="model.py:12",
    operation="jit(step)/while/body/dot_general", enter_tag=2)
SEND = dataclasses.replace(
    GATHER, index=1, name="collective-permute.1", kind="collective-permute", groups=(),
    pairs=((0, 1), (1, 0)), loops=(), enter_tag=6, conditional=True)
PROGRAM = ObservedProgram(
    number=3, name="step", ranks=(2, 3, 0, 1), mesh_axes={"data": 2, "fsdp": 2},
    collectives=(GATHER, SEND), notices=("said",), bare_compile_s=0.5, stamped_compile_s=0.25,
    unstamped=(Untimed("all-reduce.4", "all-reduce", 8, "because"),))


def test_marks_are_counted_over_turns():
  # Start and end; 4 x 8 turns of an enter and an exit timestamp; two timestamps of the permute.
  assert PROGRAM.marks == 2 + 4 * 8 * 2 + 2
  assert GATHER.iterations == 32
  assert SEND.iterations == 1


def test_marks_of_a_loop_of_unknown_length_are_not_counted():
  unknown = dataclasses.replace(GATHER, loops=(Loop("while.3", None),))
  program = dataclasses.replace(PROGRAM, collectives=(unknown,))
  assert unknown.iterations is None
  assert program.marks is None
  assert dataclasses.replace(program, bare="as it was.").marks == 0
