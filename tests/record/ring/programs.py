"""Programs and executions made up, for tests of reading timestamps."""

from hypothesis import strategies as st

from jaxpace.core.observed import ObservedProgram, of_primitives
from jaxpace.core.plan import Collective, Loop
from jaxpace.core.ring_layout import slot_tags


def collective(index, *, name=None, loops=(), phase="backward", kind="all-reduce",
               groups=((0, 1, 2, 3),), pairs=(), conditional=False):
  return Collective(
      index=index, name=name or f"{kind}.{index}", kind=kind, bytes=64 * (index + 1), operands=1,
      dtypes=("float32",), axes=("data",), groups=groups, pairs=pairs, phase=phase,
      loops=tuple(loops), source=f"model.py:{10 + index}", operation=f"jit(step)/psum{index}",
      enter_tag=slot_tags(index)[0], conditional=conditional)


def traced(index, name, primitives=("psum",), **other):
  """A collective of an instrumented step: one with a slot, unless `other` says more."""
  return Collective(**{
      "index": index, "name": name, "primitives": primitives, "kind": of_primitives(primitives),
      "bytes": 4, "operands": 1, "dtypes": ("float32",), "axes": ("data",), "phase": "backward",
      "enter_tag": slot_tags(index)[0], **other})


def program(*collectives, number=7, ranks=(0, 1, 2, 3), name="step"):
  return ObservedProgram(number=number, name=name, ranks=ranks, mesh_axes={"data": len(ranks)},
                         collectives=collectives)


@st.composite
def programs(draw, unknown=True):
  """Programs whose collectives lie in loops within loops."""
  count = draw(st.integers(0, 5))
  trips = st.integers(0, 3) | st.none() if unknown else st.integers(0, 3)
  made = []
  outer = [Loop("outer", draw(trips)), Loop("inner", draw(trips))]
  for index in range(count):
    made.append(collective(index, loops=outer[:draw(st.integers(0, 2))],
                           phase=draw(st.sampled_from(["forward", "backward", "update",
                                                       "compute"]))))
  return program(*made)
