"""Kernels that write timestamps on an NVIDIA GPU: PTX, one thread each.

A timestamp takes the GPU's timer, a place in this device's ring, and stores one event there, 16
bytes in one store. The ring lies in the host's memory, which the GPU writes to past its caches, so
nothing is copied and nobody waits. The place is counted in the GPU's own memory. All of this is
found through a block of 8 words, which every timestamp is given:

* words 0, 1: address of the ring's events in the host's memory, low word first; 0: timestamps go
  nowhere
* words 2, 3: address of the counters in the GPU's memory
* word 4: events of the ring less one; their count is a power of two
* word 5: 0
* words 6, 7: what is added to the GPU's timer, so that times are of the host's monotonic clock

Counters: 8 bytes of events begun so far, 8 of nothing, then 4 bytes for each program: executions of
it that have started. An event is that of `jaxpace.core.ring_layout`.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxpace.core import ring_layout
from jaxpace.core.observed import TAG_BITS

TARGET = "__gpu$xla.gpu.ptx"
"""XLA's custom call that takes a kernel as it is. JAX doesn't document it, so nothing
but this module and those that call its kernels know of it."""
DEVICE_BUFFER = "jaxpace_device_buffer"
"""The handler that gives a program its device's block; see native/gpu.cc."""
BLOCK_WORDS = 8
COUNTERS = 16
"""Where the counters of programs begin."""
COUNTERS_BYTES = COUNTERS + 4 * 4096


class Kernel(NamedTuple):
  """A kernel of one thread. Its parameters are the addresses of all operands, then of all
  results."""

  name: str
  text: str


_HEAD = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry "

# The timer comes first: what follows takes part of a microsecond.
_TIME = """
  .reg .u64 time, block, ring, counters, index, place, shift;
  .reg .u32 low, high, mask, slot, number;
  .reg .pred none;
  mov.u64 time, %globaltimer;
  ld.param.u64 block, [p{block}];
  ld.global.u64 ring, [block];
  setp.eq.u64 none, ring, 0;
  @none bra DONE;
  ld.global.u64 counters, [block+8];
  ld.global.u32 mask, [block+16];
  ld.global.u64 shift, [block+24];
  add.u64 time, time, shift;
"""

# The number of the event is stored with it: the reader knows by it whether an event is there.
_STORE = """
  cvt.u32.u64 number, index;
  and.b32 slot, number, mask;
  mul.wide.u32 place, slot, 16;
  add.u64 place, place, ring;
  add.u32 number, number, 1;
  mov.b64 {{low, high}}, time;
  mov.u32 slot, {tag};
  st.relaxed.sys.global.v4.u32 [place], {{low, high, slot, number}};
"""

# Words that differ from timestamp to timestamp are parameters.
_OWN = _TIME.replace("low, high", "low, high, word, count").replace(
    "time, block", "time, block, given").format(block=0) + """  ld.param.u64 given, [p1];
  cvt.u32.u64 word, given;
"""
_MARK = _OWN + "  atom.global.add.u64 index, [counters], 1;" + _STORE.format(tag="word")

# Two events: how many executions had started before, and when this one started.
_START = (_OWN + """  ld.param.u64 given, [p2];
  add.u64 given, given, counters;
  atom.global.add.u32 count, [given], 1;
  atom.global.add.u64 index, [counters], 2;
  mov.u64 shift, time;
  cvt.u64.u32 time, count;
  ld.param.u64 given, [p3];
  cvt.u32.u64 count, given;
""" + _STORE.format(tag="count") + "  add.u64 index, index, 1;\n  mov.u64 time, shift;"
          + _STORE.format(tag="word"))


def mark() -> Kernel:
  """The kernel of a timestamp of an observed program. Its parameters: the block; the tag, with the
  number of the program."""
  return kernel("jaxpace_mark", _MARK + "DONE:\n  ret;\n", 2)


def start() -> Kernel:
  """The kernel of a start timestamp. Its parameters: the block; the tag; where among the counters
  that of the program is, in bytes; the tag of the number of earlier executions."""
  return kernel("jaxpace_start", _START + "DONE:\n  ret;\n", 4)


def tagged(program: int, tag: int) -> list[int]:
  """The parameters of a timestamp's kernel, but for the block."""
  word = program << TAG_BITS | tag
  return [word, COUNTERS + 4 * program, word | ring_layout.NUMBER] if tag == 0 else [word]


# What is written is read from memory, (high, low) words.
_PUT = """
  ld.param.u64 from, [p1];
  ld.global.u32 high, [from+{high}];
  ld.global.u32 low, [from+{low}];
  mov.b64 time, {{low, high}};
  {shifted}
  atom.global.add.u64 index, [counters], 1;
"""


def put(program: int, tag: int, count: int, timed: bool) -> str:
  """The body of a kernel that writes numbers as events.

  Its parameters are a chain of its own, the numbers and the block.

  Args:
    tag: the program's own tag of the first number; 0 is its start.
    count: numbers, (high, low) words each.
    timed: whether they are of the GPU's timer, and become times of the host's clock.
  """
  head = _TIME.replace("low, high", "low, high, count").replace(
      "time, block", "time, from, block").replace("  mov.u64 time, %globaltimer;\n", "")
  head = head.replace("  add.u64 time, time, shift;\n", "").format(block=2)
  shifted = "add.u64 time, time, shift;" if timed else ""
  body = ""
  for place in range(count):
    own = program << TAG_BITS | tag + place
    if own & (1 << TAG_BITS) - 1 == 0:
      body += (f"  atom.global.add.u32 count, [counters+{COUNTERS + 4 * program}], 1;\n"
               "  cvt.u64.u32 time, count;\n  atom.global.add.u64 index, [counters], 1;\n"
               + _STORE.format(tag=own | ring_layout.NUMBER))
    body += (_PUT + _STORE).replace("{tag}", str(own)).format(
        high=8 * place, low=8 * place + 4, shifted=shifted)
  return head + body + "DONE:\n  ret;\n"


NOTHING = "\n  ret;\n"
"""The body of a kernel that does nothing."""


def kernel(name: str, body: str, parameters: int) -> Kernel:
  """A kernel of one thread, for any GPU since Volta.

  Args:
    body: PTX instructions. p0, p1, ... are the addresses of its operands, then of its results.
    parameters: operands and results together.
  """
  addresses = ", ".join(f".param .u64 p{place}" for place in range(parameters))
  return Kernel(name, f"{_HEAD}{name}({addresses})\n{{{body}}}\n")


ONE_THREAD = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
"""Attributes of the custom call that are 1."""
