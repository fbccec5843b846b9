"""The bench on the eight devices of the tests, and on two processes."""

import io
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxpace.cli.main import main
from jaxpace.costs import bench
from jaxpace.costs.bench import Group
from jaxpace.costs.fabric_file import KINDS, read_fabric
from tests.multiprocess.jobs import ROOT, clean_environment


def call(*arguments):
  return main(["bench", *map(str, arguments)])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_timed_is_the_collective_of_that_size_in_a_loop(kind):
  """The compiled loop holds one collective over all of the vector, and its turns depend on each
  other."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("group", "rank"))
  loop = bench._loop(kind, mesh)
  own = 512 if kind == "all_gather" else 1024
  shapes = jax.ShapeDtypeStruct((own * 4,), np.float32), jax.ShapeDtypeStruct((), np.int32)
  text = loop.lower(*shapes).compile().as_text()
  op = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather",
        "shift": "collective-permute"}[kind]
  lines = [line for line in text.splitlines() if f" {op}(" in line or f" {op}-start(" in line]
  assert len(lines) == 1, text
  assert f"f32[{512 if kind == 'reduce_scatter' else 1024}]" in lines[0]
  assert " while(" in text
  ones = jax.device_put(np.full(own * 4, 1, np.float32), jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec(("group", "rank"))))
  first = np.asarray(loop(ones, np.int32(3)))[0]  # 3 turns of x[0] = 0.5 * collective(x)[0]
  assert (first == {"all_reduce": 1.0, "reduce_scatter": 1.0, "all_gather": 0.125,
                    "shift": 0.125}[kind])


def test_groups_exchange_among_themselves():
  found = bench.measure("all_reduce", Group("process", ((0, 1), (2, 3)), 2), [1000, 64], 2,
                          jax.devices()[:4])
  assert [(size, len(samples)) for size, samples in found] == [(1000, 2), (64, 2)]


def test_on_the_devices_of_one_process(tmp_path, capsys):
  target = tmp_path / "bench.json"
  assert (call("--json", target, "--sizes", "1K,64K", "--kinds", "all_reduce,shift", "--repeats",
               "2") == 0)
  text = capsys.readouterr().out
  document = json.loads(target.read_text())
  [level] = document["levels"]
  assert level["level"] == "process" and level["measured"] == level["ranks"] == len(jax.devices())
  assert list(level["collectives"]) == ["all_reduce", "shift"]
  assert [p["bytes"] for p in level["collectives"]["shift"]["points"]] == [1024, 65536]
  assert max(p["seconds"] for p in level["collectives"]["all_reduce"]["points"]) > 0
  assert read_fabric(target).level(8).costs["all_reduce"].alpha.estimate >= 0
  assert "process, 8 ranks" in text and "64 KiB" in text


@pytest.mark.long
def test_two_processes_of_a_host(tmp_path):
  target = tmp_path / "bench.json"
  done = subprocess.run(
      [sys.executable, "-m", "jaxpace", "run", "--no-record", "--nproc", "2", "--logs",
       str(tmp_path / "logs"), "--", sys.executable, "-m", "jaxpace", "bench", "--json",
       str(target), "--sizes", "1K,16K", "--kinds", "all_reduce", "--repeats", "2"],
      cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=600)
  assert done.returncode == 0, done.stdout + done.stderr
  document = json.loads(target.read_text())
  assert document["processes"] == 2 and document["hosts"] == 1
  [level] = document["levels"]
  assert level["level"] == "host" and level["measured"] == 2
  assert all(p["seconds"] >= 0 for p in level["collectives"]["all_reduce"]["points"])


@pytest.mark.parametrize(("arguments", "words"), [
    (["--sizes", "1X"], "not a size in bytes"), (["--sizes", "0"], "not a size in bytes"),
    (["--sizes", ""], "not a size in bytes"),
    (["--kinds", "all_to_all"], "not a collective of bench"),
    (["--repeats", "0"], "must be at least 1")])
def test_slips_are_said(arguments, words, capsys):
  assert call(*arguments) == 2
  assert words in capsys.readouterr().err


def test_a_terminal_without_greek_letters_gets_the_figures(monkeypatch):
  screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
  monkeypatch.setattr("sys.stdout", screen)
  bound = {"estimate": 1e-6, "low": 1e-6, "high": 1e-6}
  level = {"level": "process", "measured": 8, "groups": 1, "collectives": {
      "all_reduce": {"alpha": bound, "beta": bound, "misfit": 0.0, "points": []}}}
  monkeypatch.setattr("jaxpace.cli.bench._measure", lambda *_, **__: {
      "devices": 8, "backend": "cpu", "processes": 1, "hosts": 1, "algorithm": "ring",
      "levels": [level], "notes": []})
  assert call() == 0
  assert rb"1.00 \xb5s" in screen.buffer.getvalue()


def test_one_device_is_a_sentence(monkeypatch, capsys):
  monkeypatch.setattr(jax, "devices", lambda *a: [object()])
  assert call() == 2
  assert "one device, which has no other to exchange with" in capsys.readouterr().err
