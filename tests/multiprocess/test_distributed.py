"""Joining a job in every way a script may be started, with real processes, and what they
exchange."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.multiprocess import jobs

JOIN = """
import json, os, sys
import jax
from jaxpace import distributed

place = distributed.initialize(timeout=300)
# known without a backend: then these are the last to know
index, count = distributed.process_index(), distributed.process_count()
"""

PSUM = JOIN + """
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

n = jax.device_count()
mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))
x = jax.make_array_from_callback(
    (n,), NamedSharding(mesh, P("data")), lambda i: np.arange(1, n + 1, dtype=np.float32)[i])
value = float(total(x).addressable_shards[0].data[0])
assert (index, count) == (jax.process_index(), jax.process_count())
assert distributed.initialize().source == ("joined" if count > 1 else "alone")
found = {"index": index, "count": count, "source": place.source, "devices": n, "psum": value}
print("FACTS", json.dumps(found), flush=True)
"""  # noqa: E501


def script(tmp_path, text):
  file = tmp_path / "job.py"
  file.write_text(text)
  return file


def assert_joined(results, source, devices_each=1):
  count = len(results)
  devices = count * devices_each
  for index, (status, output) in enumerate(results):
    assert status == 0, output
    assert jobs.facts(output) == {"index": index, "count": count, "source": source,
                                  "devices": devices, "psum": devices * (devices + 1) / 2}


def launch(tmp_path, file, *options, arguments=(), before=()):
  """Runs two processes of a file: status, output and their logs."""
  process = subprocess.Popen(
      [*before, sys.executable, "-m", "jaxpace", "run", "--no-record", "--nproc", "2",
       "--logs", str(tmp_path / "logs"), *options, "--", sys.executable, str(file), *arguments],
      cwd=jobs.ROOT, env=jobs.clean_environment(), text=True, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT)
  [(status, output)] = jobs.finish([process])
  return status, output, [(tmp_path / "logs" / f"process-{i}.log").read_text() for i in range(2)]


@pytest.mark.long
def test_launched_processes_sum_over_gloo_and_exchange_strings(tmp_path):
  status, output, logs = launch(tmp_path, script(tmp_path, PSUM + """
import time

def refused(kind, call):
  try:
    call()
  except kind as error:
    return str(error)
  raise AssertionError("no error")

shared = [distributed.share_string("run id", f"{word} of 0" if index == 0 else f"ignored {index}", 100) for word in "ab"]
assert shared == ["a of 0", "b of 0"], shared
if index == 0:
  distributed.key_value_set("k", "1")
  assert "overwrite=True" in refused(KeyError, lambda: distributed.key_value_set("k", "2"))
  distributed.key_value_set("k", "3", overwrite=True)
  assert "must have a value" in refused(ValueError, lambda: distributed.share_string("none", None, 1))
distributed.barrier("k is set", 100)
assert distributed.key_value_get("k", 1) == "3"
distributed.barrier("k was read", 100)
if index == 1:
  distributed.key_value_delete("k")
  distributed.key_value_delete("never there")
distributed.barrier("k is gone", 100)
words = refused(TimeoutError, lambda: distributed.key_value_get("k", 0.2))
assert words == f"process {index} of 2 waited 0.2 s for 'k', which no process published", words
if index == 0:
  words = refused(TimeoutError, lambda: distributed.barrier("the other one", 0.3))
  assert words == "process 0 of 2 waited 0.3 s for 'the other one': process 1 did not come", words
distributed.barrier("the end", 100)
print("all said")
"""), "--devices-per-process", "2")  # noqa: E501
  assert status == 0, output + "".join(logs)
  assert_joined([(status, log) for log in logs], "environment", devices_each=2)
  assert all("all said" in log for log in logs)


@pytest.mark.long
def test_an_uncaught_exception_ends_the_job_at_once_and_is_named(tmp_path):
  begun = time.monotonic()
  status, output, _ = launch(tmp_path, script(tmp_path, PSUM + """
import atexit, logging, time
atexit.register(print, "recorded the rest")
if index == 1:
  raise ArithmeticError("loss is NaN")
time.sleep(0.2)  # not yet in the collective when the other one dies
for _ in range(1000):
  total(x).block_until_ready()
"""), "--grace", "20")
  assert status == 1
  # by itself it waits for minutes at exit, for peers that wait for it
  assert time.monotonic() - begun < 250
  assert "process 1 (pid" in output and "ArithmeticError: loss is NaN" in output
  assert "recorded the rest" in (tmp_path / "logs" / "process-1.log").read_text()


@pytest.mark.long
def test_a_script_that_asks_jax_itself_runs_under_launch(tmp_path):
  status, output, logs = launch(tmp_path, script(tmp_path, """
import jax
jax.distributed.initialize()
print("place", jax.process_index(), jax.process_count())
"""), "--show", "none")
  assert status == 0, output + "".join(logs)
  assert ["place 0 2" in logs[0], "place 1 2" in logs[1]] == [True, True]


@pytest.mark.long
@pytest.mark.skipif(not (hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("unshare")),
                    reason="giving this test a host name of its own needs root and the "
                           "unshare command")
def test_launch_works_where_the_host_name_does_not_resolve(tmp_path):
  if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
    pytest.skip("this system allows no UTS namespace")
  status, output, logs = launch(
      tmp_path, script(tmp_path, PSUM),
      before=("unshare", "--uts", "sh", "-c", 'hostname nowhere.invalid && exec "$@"', "sh"))
  assert status == 0, output + "".join(logs)
  assert_joined([(status, log) for log in logs], "environment")


def slurm(port, i):
  return {"SLURM_JOB_ID": str(4096 * 7 + port - 61440), "SLURM_STEP_NODELIST": "localhost",
          "SLURM_NTASKS": "2", "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}


def open_mpi_4(port, i):
  return {"OMPI_MCA_orte_hnp_uri": f"{(port - 61440) * 4096}.0;tcp://127.0.0.1:34911",
          "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(i),
          "OMPI_COMM_WORLD_LOCAL_RANK": str(i)}


def open_mpi_5(port, i):
  """JAX does not detect it."""
  return {"PMIX_NAMESPACE": f"prterun-host-{os.getpid()}@1", "OMPI_COMM_WORLD_SIZE": "2",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(i),
          "OMPI_COMM_WORLD_LOCAL_RANK": str(i)}


def kubernetes(port, i):
  """As in docs/examples/job.yaml."""
  return {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
          "JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": str(i)}


@pytest.mark.long
@pytest.mark.parametrize("variables, source", [
    (slurm, "cluster"), (open_mpi_4, "cluster"), (open_mpi_5, "mpi"), (kubernetes, "environment")])
def test_processes_join_by_the_variables_of_a_cluster(tmp_path, variables, source):
  port = jobs.free_high_port()
  environments = [jobs.clean_environment(**variables(port, i)) for i in range(2)]
  assert_joined(jobs.run(script(tmp_path, PSUM), environments), source)


@pytest.mark.long
def test_plain_python_is_a_job_of_one_in_which_nothing_is_waited_for(tmp_path):
  results = jobs.run(script(tmp_path, PSUM + """
distributed.barrier("nobody else", 1)
distributed.key_value_set("k", "1")
distributed.key_value_delete("k")
assert distributed.key_value_get("k", 1) is None
assert distributed.share_string("id", "mine", 1) == "mine" and distributed.share_string("id", None, 1) is None
"""), [jobs.clean_environment()])  # noqa: E501
  assert_joined(results, "alone")


@pytest.mark.long
@pytest.mark.parametrize("before, place, kind, words", [
    ("import jax; jax.devices()", {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, RuntimeError,
     ("refused: jaxpace.distributed.initialize() comes too late", "first in main()")),
    ("", {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, TimeoutError,
     ("refused: process 1 of 2 waited 0.3 s for process 0 at 127.0.0.1:{port}",))],
                         ids=["too late", "no process 0"])
def test_what_can_not_join_is_a_sentence_and_not_a_crash(tmp_path, before, place, kind, words):
  port = jobs.free_high_port()
  [(status, output)] = jobs.run(script(tmp_path, f"""
{before}
from jaxpace import distributed
try:
  distributed.initialize(timeout=0.3)
except {kind.__name__} as error:
  print("refused:", error)
"""), [jobs.clean_environment(JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}", **place)])
  assert status == 0, output
  assert all(each.format(port=port) in output for each in words)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_with_4_ranks(tmp_path):
  version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True,
                           check=False).stdout
  options = ["--oversubscribe", "--allow-run-as-root"] if "Open MPI" in version else []
  process = subprocess.Popen(
      ["mpirun", *options, "-n", "4", sys.executable, str(script(tmp_path, PSUM))], cwd=jobs.ROOT,
      env=jobs.clean_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  [(status, output)] = jobs.finish([process])
  assert status == 0, output
  found = [jobs.facts(line) for line in output.splitlines() if "FACTS " in line]
  assert sorted(f["index"] for f in found) == [0, 1, 2, 3]
  assert {(f["count"], f["devices"], f["psum"]) for f in found} == {(4, 4, 10.0)}
