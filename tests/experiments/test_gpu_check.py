"""The GPU checks as far as they can be tried without a GPU: every section on the CPU's clock, how a
trace is read, what becomes of sections that fail. No time is asserted: what a check measures here
is this machine's business."""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.labs import gpu_check
from experiments.labs.gpu import (
    beside,
    compiled,
    delays,
    hosttime,
    injected,
    kernels,
    loops,
    machine,
    marks,
    pallas,
    stamps,
    steps,
    traced,
    transformer,
    whole_loop,
)
from experiments.labs.gpu.bench import Bench, plain, shown
from experiments.lib.paired import Estimate
from jaxpace.core import ring
from jaxpace.core.plan import Mark, Plan
from jaxpace.execution import words
from tests.multiprocess import jobs


def tiny() -> Bench:
  return Bench("cpu", "native", "tiny", 10.0)


def named(bench: Bench, part: str) -> list[dict[str, Any]]:
  return [one for one in (*bench.checks, *bench.figures) if part in one["name"]]


def passed(bench: Bench, part: str) -> bool:
  found = [one["passed"] for one in bench.checks if part in one["name"]]
  assert found, f"no check is called {part}"
  return all(found)


# Sections, on the CPU.


def test_stamps_are_in_order_and_their_cost_is_told() -> None:
  bench = tiny()
  stamps.run(bench)
  assert (passed(bench, "no stamp is earlier")
          and named(bench, "steps of the timer")[0]["value"] >= 1)
  assert named(bench, "with what it holds back") and len(bench.offsets) == 2
  beside = tiny()
  stamps.run_callback(beside)
  assert all(figure["value"][0] > 0 for figure in named(beside, "from one stamp to the next"))


def test_delays_are_as_long_as_asked_at_least_and_capped() -> None:
  bench = tiny()
  delays.run(bench)
  for sentence in ("a delay of 0 has", "no delay is shorter", "a delay of nan", "a delay of -inf",
                   "with a limit of 0"):
    assert passed(bench, sentence), sentence
  assert len(named(bench, "with a limit of 10 ms is 10 ms")) == 4


def test_the_offset_of_a_clock_to_itself_is_none() -> None:
  bench = tiny()
  hosttime.run(bench)
  assert len(bench.offsets) == 2
  for _, middle, half in bench.offsets:
    assert abs(middle) <= half + 1, "the native clock is the host's own: 0 lies in the interval"


def test_what_is_injected_is_read_off_the_stamps() -> None:
  bench = tiny()
  injected.run(bench)
  for where, name in (("before the collective", "arrival"),
                      ("before the collective", "start to enter"), ("after it", "exit to end"),
                      ("after it", "arrival of the next")):
    found = named(bench, f"injected {where}, in `{name}`")
    assert [one["limit"].split(" ")[0] for one in found] == ["2000", "5000"]
    assert all(float(one["value"].split(" ")[0]) > 0.8 * float(one["limit"].split(" ")[0])
               for one in found)
  assert passed(bench, "what the pacer asked for is what the ring says")


def test_bits_are_the_same_and_a_difference_would_be_seen() -> None:
  bench = tiny()
  steps.run_bits(bench)
  assert all(check["passed"] for check in bench.checks) and len(bench.checks) == 2
  one = [np.arange(4, dtype=np.uint32), np.zeros((), np.int32)]
  assert steps.differing(one, [one[0] ^ np.uint32([0, 1, 0, 2]), one[1] + 1]) == 3


@pytest.mark.long
def test_arms_take_turns_and_the_recorder_records() -> None:
  bench = tiny()
  steps.run(bench, "2ms")
  assert (set(bench.raw["seconds_a_step"]) == {"bare", "bare again", "stamped", "callback",
                                               "recorded"})
  assert {check["limit"] for check in bench.checks} == {"<= 1"} and len(bench.checks) == 2
  assert (transformer.SIZES.keys() >= steps.LIMITS.keys()
          and steps.LIMITS == {"20ms": 0.2, "2ms": 1.0})


@pytest.mark.long
def test_the_loop_is_on_the_device_and_a_callback_would_be_seen() -> None:
  bench = tiny()
  whole_loop.run(bench)
  failed = [check["name"] for check in bench.checks if not check["passed"]]
  assert not failed
  assert len(named(bench, "control: host callbacks are seen")) == 2


def test_a_step_of_the_transformer_trains() -> None:
  size = transformer.SIZES["tiny"]._replace(layers=1)
  batch = jnp.asarray(transformer.tokens(size))
  start = jax.tree.map(jnp.asarray, transformer.fresh(size))

  def step(state: Any, _: Any) -> tuple[Any, jax.Array]:
    value, slopes = jax.value_and_grad(transformer.loss)(state[0], batch, size)
    return transformer.adam(state, slopes), value

  final, losses = jax.jit(lambda state: jax.lax.scan(step, state, None, 300))(start)
  assert losses[0] > 0.5 * math.log(size.vocabulary) and losses[-1] < 0.9 * losses[0]
  assert int(final[3]) == 300


def test_gradients_are_clipped_by_their_global_norm() -> None:
  slopes = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}
  assert (jax.tree.map(lambda leaf: leaf.tolist(), transformer.clipped(slopes, 10.0))
          == {"a": [3.0, 0.0], "b": 4.0})
  found = transformer.clipped(slopes, 1.0)
  np.testing.assert_allclose([*found["a"], found["b"]], [0.6, 0.0, 0.8], rtol=1e-6)


def test_adam_is_the_formula() -> None:
  state = ({"w": jnp.float32(1.0)}, {"w": jnp.float32(0.2)}, {"w": jnp.float32(0.03)}, jnp.int32(4))
  moved, first, second, count = transformer.adam(state, {"w": jnp.float32(0.5)})
  m, v = 0.9 * 0.2 + 0.1 * 0.5, 0.999 * 0.03 + 0.001 * 0.25
  expected = (1.0 - transformer.RATE * (m / (1 - 0.9**5))
              / (math.sqrt(v / (1 - 0.999**5)) + transformer.EPSILON))
  assert (float(first["w"]), float(second["w"]), int(count)) == pytest.approx((m, v, 5))
  assert float(moved["w"]) == pytest.approx(expected, abs=1e-7)


# What they compute with.


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


def test_where_no_offset_fits_the_narrowest_bracket_is_taken() -> None:
  before = np.array([0, 10**9])
  found = hosttime.bracketed(before, before + np.array([5, 7_000]), before + np.array([20, 6]))
  assert (found.low, found.high) == (6_994, 7_000)


@given(ppm=st.floats(-200, 200), start=st.integers(0, 10**15))
def test_a_drift_is_found(ppm: float, start: int) -> None:
  seconds = np.array([0.0, 10.0, 45.0, 300.0])
  rows = [[start + s * 1e9, 3e8 + ppm * 1e3 * s, 100.0] for s in seconds]
  slope, over, residual = hosttime.drift(rows)
  assert slope == pytest.approx(ppm, abs=0.01) and over == pytest.approx(300) and residual < 300
  assert math.isnan(hosttime.drift(rows[:1])[0])


@given(step=st.integers(1, 2000), counts=st.lists(st.integers(0, 10**6), min_size=3, max_size=30))
def test_the_timers_steps_are_a_whole_multiple_of_what_is_found(
    step: int, counts: list[int]) -> None:
  times = 10**15 + step * np.cumsum(np.asarray([1, 2, *counts], np.int64))
  found = stamps.resolution(times)
  assert found and found % step == 0 and (np.diff(times) % found == 0).all()


def test_carries_are_counted() -> None:
  times = np.array([2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 3 * 2**32], np.int64)
  assert stamps.carries(times) == 2
  np.testing.assert_array_equal(stamps.gaps(words.from_ns(times)), np.diff(times))


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


def test_growth_is_above_what_is_there_with_nothing_injected() -> None:
  values = np.array([10.0, 12.0, 11.0, 31.0, np.nan, 33.0, 5.0])
  assert injected.grown(values, np.array([0, 0, 0, 2, 2, 2, 1])) == {1: -6.0, 2: 21.0}


def test_a_share_above_bare() -> None:
  figures = {"bare": np.array([10.0, 20.0, 40.0]), "x": np.array([10.1, 20.2, 40.4])}
  assert steps.extra_percent(figures, "x").value == pytest.approx(1.0)


# Compiled programs and traces.

SEQUENCE = """000: kCommandBuffer [source | sink]
    001: kCopy         [source       | next=003 (2)] kCopy
    002: kCustomKernel [source       | next=003 (1)] loop_add_fusion grid: [1, 1, 1] threads: [2, 1, 1]
    003: kCustomKernel [prev=002 (1) | next=004 (1)] jaxpace_stamp grid: [1, 1, 1] threads: [32, 1, 1]
004: kCustomKernel [prev=003 (1) | sink] jaxpace_hold__1 grid: [1, 1, 1] threads: [32, 1, 1]
"""  # noqa: E501


def test_a_sequence_of_thunks_is_counted_and_what_is_in_no_command_buffer_is_seen() -> None:
  assert compiled.thunks(SEQUENCE) == {"kCommandBuffer": 1, "kCopy": 1, "kCustomKernel": 1,
                                       "kCustomKernel of jaxpace": 2}
  assert compiled.outside_graphs(SEQUENCE) == (1, 1)
  assert compiled.outside_graphs(SEQUENCE.replace("\n004", "\n    004")) == (1, 0)


def test_operations_of_the_entry_are_counted() -> None:
  text = jax.jit(lambda x: jnp.sin(x) @ x.T).lower(jnp.ones((4, 4))).compile().as_text()
  found = compiled.operations(text)
  assert found["parameter"] == 1 and found["dot"] + found["fusion"] + found["custom-call"] >= 1
  assert sum(found.values()) <= sum(" = " in line for line in text.splitlines())


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


@pytest.mark.parametrize("name", ["MemcpyD2H", "cuMemcpyDtoHAsync_v2", "Memcpy DtoH",
                                  "TransferDeviceToHost"])
def test_a_copy_to_the_host_is_seen(name: str) -> None:
  assert traced.look(profile(Event(name, 200.0, 2.0))).to_host == {name: 1}
  assert traced.look(profile(host=(Event(name, 200.0, 2.0),))).to_host == {name: 1}


def test_a_trace_without_the_steps_is_refused() -> None:
  with pytest.raises(ValueError, match="no annotation"):
    traced.look(Profile([]))


def test_the_spinning_kernel_is_lowered_in_its_own_memory() -> None:
  text = jax.jit(kernels.spin).trace(jnp.ones(3), jnp.int32(5), jnp.ones(2)).lower(
      lowering_platforms=("cuda",)).as_text()
  assert text.count("__gpu$xla.gpu.ptx") == 1 and "globaltimer" in text and "%clock64" in text
  assert "operand_index = 0" in text


def test_kernels_of_pallas_are_lowered() -> None:
  if jax.__version_info__ >= (0, 11):
    pytest.skip("this jax lowers a kernel of Triton only for a GPU that is there or named")
  kernel = pallas.Kernels()

  def both(previous: jax.Array, seconds: jax.Array) -> tuple[jax.Array, ...]:
    first = kernel.stamp(previous, seconds)
    return kernel.delay(seconds, 0.25, first)

  text = jax.jit(both).trace(words.zero(),
                             jnp.float32(1)).lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("__gpu$xla.gpu.triton") == 2


def test_what_is_measured_beside_is_measured_alike() -> None:
  bench = tiny()
  beside.measure(bench, bench.timer(), "native")
  wanted = [check["limit"].split(" ")[0] for check in bench.checks]
  assert wanted == ["0", "10", "100", "1000", "20000", "0", "100000"]
  assert ([check["passed"] for check, value in zip(bench.checks, wanted, strict=True)
           if value == "0"] == [True, True])


# The program.


@pytest.mark.long
def test_without_a_gpu_one_line_says_so_and_the_status_is_0(tmp_path: pathlib.Path) -> None:
  done = subprocess.run([sys.executable, str(jobs.ROOT / "experiments/labs/gpu_check.py"),
                         f"--out={tmp_path / 'gpu.json'}"],
                        cwd=tmp_path, env=jobs.clean_environment(JAX_PLATFORMS="cpu"), text=True,
                        capture_output=True, timeout=300)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1].startswith(
      "No GPU is visible to JAX, so nothing was checked: ")
  assert not list(tmp_path.iterdir()), "nothing is claimed"


@pytest.mark.parametrize(("flag", "sentence"), [
    ("--only=stamp,dealy", "no section is called dealy; there are machine, stamp"),
    ("--out=gpu.txt", "must end in .json"),
    ("--limit_s=0", "must be positive"), ("--limit_s=nan", "must be positive"),
    ("--sections=stamp", "unrecognized")])
def test_a_bad_argument_is_a_sentence(flag: str, sentence: str,
                                      capsys: pytest.CaptureFixture[str]) -> None:
  with pytest.raises(SystemExit) as ended:
    gpu_check.main([flag])
  assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_the_sections_are_those_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
  assert gpu_check.main(["--list"]) == 0
  assert ([line.split()[0] for line in capsys.readouterr().out.splitlines()]
          == list(gpu_check.SECTIONS))
  for section in gpu_check.SECTIONS.values():
    module = __import__(f"experiments.labs.gpu.{section.module}", fromlist=[section.function])
    assert callable(getattr(module, section.function))
  chosen = gpu_check.arguments([])
  assert "alone_2ms" not in chosen.sections and (chosen.platform, chosen.clock) == ("gpu", "stream")
  assert gpu_check.arguments(["--only=alone_2ms", "--platform=cpu", "--quick"]).clock == "native"


def test_an_exception_is_kept_and_so_is_what_came_before(monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[
                                                             str]) -> None:
  def fails(bench: Bench) -> None:
    bench.at_most("before it", 1.0, 2.0, "us")
    raise RuntimeError("the GPU fell off the bus")

  monkeypatch.setattr(machine, "run", fails)
  result = gpu_check.run_section("machine", tiny())
  assert (result["error"] == "RuntimeError: the GPU fell off the bus"
          and result["checks"][0]["passed"])
  assert "Traceback" in capsys.readouterr().err


def results(**errors: str) -> Callable[..., dict[str, Any]]:
  def start(name: str, *_: Any) -> dict[str, Any]:
    bench = tiny()
    bench.at_most("a stamp | on the stream", Estimate(2.0, 1.5, 3.5), 3.0, "us")
    bench.figure("drawn", float("nan"), "W")
    bench.offsets.append([1e9 * len(name), 5.0, 1.0])
    return bench.to_json() | ({"error": errors[name]} if name in errors else {})

  return start


@pytest.mark.parametrize(("errors", "status"),
                         [({}, 0), ({"delay": "took longer than 60 s and was ended"}, 1)])
def test_a_failed_section_counts_and_the_others_go_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    errors: dict[str, str], status: int) -> None:
  monkeypatch.setattr(gpu_check, "start", results(**errors))
  out = tmp_path / "deep" / "gpu.json"
  assert gpu_check.main([f"--out={out}", "--only=stamp,delay,machine"]) == status
  written = json.loads(out.read_text())
  assert list(written["sections"]) == ["stamp", "delay", "machine"] and written["not_run"] == []
  table = out.with_suffix(".md").read_text()
  assert ("| a stamp \\| on the stream | 2 [1.5, 3.5] us | <= 3 | passed |" in table
          and "| drawn | nan W |" in table)
  said = capsys.readouterr().out
  assert ("All checks passed." in said) == (status == 0)
  assert ("delay: took longer than 60 s and was ended" in table) == (status == 1)


def test_what_there_is_no_time_for_is_named(tmp_path: pathlib.Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(gpu_check, "start", results())
  monkeypatch.setattr(gpu_check, "_left", lambda begun, limit: limit - 10)
  out = tmp_path / "gpu.json"
  gpu_check.main([f"--out={out}", "--only=stamp,delay", "--limit_s=20"])
  assert json.loads(out.read_text())["not_run"] == ["stamp", "delay"]


def test_a_section_that_crashes_leaves_what_it_had(tmp_path: pathlib.Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
  """Its process writes as it goes; here a process that writes one figure and is gone."""
  text = ("import json, os, sys; out = [a for a in sys.argv if a.startswith('--child=')][0][8:]; "
          "open(out, 'w').write(json.dumps({'figures': [1]})); os._exit(3)")
  real = subprocess.Popen
  monkeypatch.setattr(subprocess, "Popen",
                      lambda command, **rest: real([sys.executable, "-c", text, *command[3:]],
                                                   **rest))
  found = gpu_check.start("machine", gpu_check.arguments([]), str(tmp_path), 60.0)
  assert found == {"figures": [1], "error": "its process ended with status 3"}
  monkeypatch.setattr(subprocess, "Popen",
                      lambda command, **rest: real([sys.executable, "-c", "pass"], **rest))
  found = gpu_check.start("machine", gpu_check.arguments([]), str(tmp_path), 60.0)
  assert found == {"error": "its process left nothing"}


def test_a_section_that_hangs_is_ended(tmp_path: pathlib.Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
  real = subprocess.Popen
  started: list[Any] = []

  def hangs(command: list[str], **rest: Any) -> Any:
    process = real([sys.executable, "-c", "import time; time.sleep(600)"], **rest)
    started.append(process)
    wait = process.wait
    monkeypatch.setattr(process, "wait", lambda timeout=None: wait(timeout and 0.2))
    return process

  monkeypatch.setattr(subprocess, "Popen", hangs)
  found = gpu_check.start("machine", gpu_check.arguments([]), str(tmp_path), 60.0)
  assert (found == {"error": "took longer than 60 s and was ended"}
          and started[0].returncode is not None)


def test_flags_of_xla_and_the_shared_cache_are_a_sections_own(
    monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("XLA_FLAGS", "--mine")
  own = gpu_check.environment(gpu_check.SECTIONS["compiled"], "/cache", "/folder")
  assert (own["XLA_FLAGS"] == "--mine --xla_dump_to=/folder"
          and "JAX_COMPILATION_CACHE_DIR" not in own)
  shared = gpu_check.environment(gpu_check.SECTIONS["alone_2ms"], "/cache", "/folder")
  assert (shared["JAX_COMPILATION_CACHE_DIR"] == "/cache"
          and shared["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false")


def test_one_loop_in_a_process_of_its_own() -> None:
  found = steps.one_loop(tiny(), "2ms", "bare", 2, 0.0)
  assert found["arm"] == "bare" and 0 < found["median_s"] < 10 and found["blocks"] == 1


def test_what_is_kept_and_shown() -> None:
  assert plain(Estimate(1.0, float("inf"), 2.0)) == [1.0, "inf", 2.0]
  assert plain(np.bool_(True)) is True and plain(np.int64(3)) == 3 and plain({"a": 1}) == "{'a': 1}"
  assert shown(plain([0.5, 2.0])) == "0.5, 2"
  bench = tiny()
  bench.at_most("nothing", float("nan"), 3.0, "us")
  bench.within("small", 14e-6, 10e-6)
  bench.within("small, off", 16e-6, 10e-6)
  bench.within("large", 1.04e-3, 1e-3)
  bench.within("large, off", 0.94e-3, 1e-3)
  assert [check["passed"] for check in bench.checks] == [False, True, False, True, False]


def test_a_loops_state_is_donated() -> None:
  loop = loops.Loop(loops.Program(tiny(), transformer.SIZES["tiny"], "stamped"))
  before = [loop.pace.ring, *jax.tree.leaves(loop.state)]
  jax.block_until_ready(loop.call())
  assert all(leaf.is_deleted() for leaf in before)


@pytest.mark.parametrize("section", [marks.run, marks.run_observed])
def test_marks_of_gpus_are_not_tried_on_a_cpu(section):
  bench = tiny()
  section(bench)
  assert len(bench.notes) == 1 and not bench.checks
