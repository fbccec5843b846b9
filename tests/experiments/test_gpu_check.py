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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.labs import gpu_check
from experiments.labs.gpu import (
    delays,
    hosttime,
    injected,
    loops,
    machine,
    marks,
    stamps,
    steps,
    transformer,
    whole_loop,
)
from experiments.labs.gpu.bench import Bench, plain, shown
from experiments.lib.paired import Estimate
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


@pytest.mark.long
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


@pytest.mark.long
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
