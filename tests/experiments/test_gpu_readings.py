"""What the GPU checks compute, and how they read compiled programs and traces."""


from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.labs.gpu import (
    hosttime,
    injected,
    kernels,
    traced,
    whole_loop,
)
from jaxpace.core import ring
from jaxpace.core.plan import Mark, Plan
from jaxpace.execution import words


@given(offset=st.integers(-10**15, 10**15),
       ways=st.lists(st.tuples(st.integers(0, 10**5), st.integers(0, 10**5)),
                     min_size=1, max_size=20))
def test_the_true_offset_is_in_the_interval_and_no_wider_one_is_given(
    offset: int, ways: list[tuple[int, int]]) -> None:
  there, back = np.asarray(ways, np.int64).T
  before = 10**12 + np.arange(len(ways)) * 10**6
  found = hosttime.bracketed(before, before + there + offset, before + there + back)
  assert found.low <= offset <= found.high
  assert found.high - found.low <= int((there + back).min())


MARKS = (Mark("start", "gap"), Mark("delay", "delay"), Mark("enter", "compute", 0),
         Mark("exit", "sync", 0), Mark("end", "update"))


def rows_of(times: np.ndarray) -> np.ndarray:
  """A ring's rows from stamps [n, marks] ns, last step first."""
  table = np.zeros((len(times), ring.row_width(1)), np.uint32)
  table[:, ring.STEP], table[:, ring.FLAGS] = np.arange(len(times)) + 7, ring.VALID
  table[:, ring.STAMPS:ring.STAMPS + 2 * times.shape[1]] = words.from_ns(times).reshape(
      len(times), -1)
  return table[::-1]


def test_readings_of_a_ring() -> None:
  # delay 10, 100 to the collective, 40 in it, 50 after it
  base = np.array([0, 10, 110, 150, 200], np.int64)
  times = (2**32 * 5 - 300
           + np.stack([base, base + 1000, base + 2000 + np.array([0, 5, 25, 25, 25])]))
  plan = Plan("data", 1, "native", MARKS, ())
  found = {name: np.round(values * 1e9).tolist() for name, values in
           injected.readings(plan, rows_of(times)).items() if name != "arrival of the next"}
  assert found == {"arrival": [950, 970], "start to enter": [100, 120], "wait": [40, 40],
                   "exit to end": [50, 50], "delay": [10, 15]}
  following = injected.readings(plan, rows_of(times))["arrival of the next"]
  assert following[0] == pytest.approx(970e-9) and np.isnan(following[1])


# Compiled programs and traces.


@pytest.mark.parametrize(("line", "seen"), [
    ('%c = (f32[2]) custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"', True),
    ("%o = token[] outfeed(f32[2] %x, token[] %t)", True),
    ("%s = (f32[2], u32[], token[]) send(f32[2] %x, token[] %t), is_host_transfer=true", True),
    ("%p = f32[8]{0:S(5)} copy-start(f32[8] %x)", True),
    ('%c = u32[2] custom-call(%x), custom_call_target="__gpu$xla.gpu.ptx"', False),
    ("%a = f32[2] all-reduce(f32[2] %x), replica_groups={{0,1}}", False)])
def test_what_goes_through_the_host_is_seen_in_a_program(line: str, seen: bool) -> None:
  assert bool(whole_loop.host_operations(f"ENTRY %main {{\n  {line}\n}}")) == seen


class Event(NamedTuple):
  name: str
  start_ns: float
  duration_ns: float


class Line(NamedTuple):
  name: str
  events: list[Event]


class Plane(NamedTuple):
  name: str
  lines: list[Line]


class Profile(NamedTuple):
  planes: list[Plane]


def profile(*device: Event, host: tuple[Event, ...] = ()) -> Profile:
  window = Event(traced.WINDOW, 100.0, 1000.0)
  repeated = [Event("fusion.1", event.start_ns, event.duration_ns) for event in device]
  return Profile([Plane("/device:GPU:0", [Line("Stream #13(Compute,MemcpyD2H)", list(device)),
                                          Line("XLA Ops", repeated)]),
                  Plane("/host:CPU", [Line("python3", [window, *host])])])


def test_a_trace_of_a_gpu_is_read_within_the_window() -> None:
  kernel = Event("jaxpace_stamp", 200.0, 2.0)
  seen = traced.look(profile(
      kernel, kernel, Event("gemm", 300.0, 50.0), Event("MemcpyD2H", 50.0, 3.0),
      Event("MemcpyD2H", 1101.0, 3.0), Event("MemcpyD2D", 400.0, 1.0),
      host=(Event("cuGraphLaunch", 150.0, 5.0), Event("cuGraphLaunch", 90.0, 5.0),
            Event("cudaGraphLaunch", 160.0, 1))))
  assert seen.kernels == {"jaxpace_stamp": (2, 4.0), "gemm": (1, 50.0), "MemcpyD2D": (1, 1.0)}
  assert ((seen.to_host, seen.callbacks, seen.graphs) == ({}, {}, 2)
          and seen.seconds == pytest.approx(1e-6))


def test_the_spinning_kernel_is_lowered_in_its_own_memory() -> None:
  text = jax.jit(kernels.spin).trace(jnp.ones(3), jnp.int32(5), jnp.ones(2)).lower(
      lowering_platforms=("cuda",)).as_text()
  assert text.count("__gpu$xla.gpu.ptx") == 1 and "globaltimer" in text and "%clock64" in text
  assert "operand_index = 0" in text
