"""`jaxpace run` on jobs of several processes that know nothing of it."""

import shutil
import subprocess
import sys

import pytest

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.runs import rundir
from jaxpace.runs.reader import read_run
from tests.multiprocess.jobs import clean_environment, finish, free_high_port
from tests.multiprocess.own_programs import TRAIN, jaxpace_run
from tests.patience import patiently

LATE = 0.02


@pytest.mark.long
@patiently(LATE=0.02)
def test_of_two_processes_the_late_one_is_named(tmp_path):
  script = f"import jax\njax.distributed.initialize()\n{TRAIN}main(150, 1, {LATE})\n"
  job = jaxpace_run(tmp_path, script, "--out", "seen", "--nproc", "2", devices=1)
  _, errors = job.communicate(timeout=600)
  assert job.returncode == 0, errors
  run = read_run(tmp_path / "seen")
  assert len(run.processes) == 2 and len(run.steps) == 150
  late = [finding for finding in diagnose(run).findings
          if finding.mode == "persistent_straggler"]
  assert [finding.ranks for finding in late] == [(1,)]


SAMPLE = """
def grad(x):
  return x.sum()

if jax.process_index() == 0:
  mesh = jax.make_mesh((2,), ("data",), devices=jax.local_devices())
  jax.jit(grad)(jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("data"))))
"""


@pytest.mark.long
def test_what_one_process_alone_compiles_by_the_name_of_the_step_leaves_nobody_out(tmp_path):
  script = f"import jax\njax.distributed.initialize()\n{TRAIN}{SAMPLE}main(40, None)\n"
  job = jaxpace_run(tmp_path, script, "--out", "seen", "--nproc", "2", devices=2)
  out, errors = job.communicate(timeout=600)
  assert job.returncode == 0, out + errors
  run = read_run(tmp_path / "seen")
  assert run.ranks_in_all == 4 and len(run.steps) == 40 and (run.attempt >= 0).all()
  assert "jaxpace: The step is grad (train.py:" in out


LOCAL = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
jax.distributed.initialize()
mesh = jax.make_mesh((2,), ("data",), devices=jax.local_devices())
w = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("data")))

def act(w):
  return w.sum() ** 2

def learn(w):
  return jax.grad(act)(w)

role = "learn" if jax.process_index() else first
program = jax.jit(act if role == "act" else learn)
for _ in range(0 if role == "idle" else 60):
  program(w).block_until_ready()
"""


def local_roles(tmp_path, first):
  """Runs two processes, each on its own devices, process 0 in the role `first`; what they say."""
  job = jaxpace_run(tmp_path, f"first = '{first}'\n{LOCAL}", "--out", "seen", "--nproc", "2",
                    "--show", "all", devices=2)
  out, errors = job.communicate(timeout=600)
  assert job.returncode == 0, errors
  return out


@pytest.mark.long
def test_a_process_that_runs_nothing_of_the_step_has_no_ranks_and_says_so(tmp_path):
  out = local_roles(tmp_path, "act")
  assert ("Process 1 ran nothing of the step, act (train.py:9, without gradients): what it ran is "
          "not recorded, learn (train.py:12)." in out)
  run = read_run(tmp_path / "seen")
  assert (len(run.steps), run.ranks_in_all, run.silent.tolist()) == (60, 2, [])


@pytest.mark.long
def test_of_processes_that_train_each_on_its_own_devices_all_ranks_are_known(tmp_path):
  local_roles(tmp_path, "learn")
  run = read_run(tmp_path / "seen")
  assert (len(run.steps), run.ranks) == (60, 4) and not run.silent.size
  groups = run.collectives[0].rank_groups.groups
  assert groups[0] == groups[1] != groups[2] == groups[3]
  assert "Nothing is known" not in diagnose(run).verdict


@pytest.mark.long
def test_where_process_0_has_no_collectives_the_others_say_why_nothing_is_recorded(tmp_path):
  out = local_roles(tmp_path, "idle")
  assert ("[1] jaxpace: Not recording, training goes on: process 0, which says what is recorded, "
          "ran no program with collectives over several devices." in out)


JOINED = f"""
import sys, jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
{TRAIN}main(100, None)
"""


def started_apart(script, folders):
  """Runs `jaxpace run` in each folder as process 0, 1, ... of a job, as `srun` does; what each
  says."""
  address = f"127.0.0.1:{free_high_port()}"
  jobs = []
  for index, folder in enumerate(folders):
    (folder / "train.py").write_text(script)
    jobs.append(subprocess.Popen(
        [sys.executable, "-m", "jaxpace", "run", "--", sys.executable, "train.py", address,
         str(index)],
        cwd=folder, env=clean_environment(), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT))
  done = finish(jobs)
  assert [status for status, _ in done] == [0] * len(folders), done
  return [said for _, said in done]


@pytest.mark.long
def test_commands_of_one_job_that_name_no_directory_record_to_one(tmp_path):
  said = started_apart(JOINED, [tmp_path, tmp_path])
  assert "left nothing" not in said[0]
  recorded, = (tmp_path / "runs").iterdir()
  run = read_run(recorded)
  assert run.ranks == len(run.processes) == 2 and len(run.steps) == 100 and not run.problems


@pytest.mark.long
def test_where_hosts_share_no_disk_their_parts_have_one_name_and_make_one_run(tmp_path):
  disks = [tmp_path / "a", tmp_path / "b"]
  for disk in disks:
    disk.mkdir()
  said = started_apart(JOINED, disks)
  parts = [next((disk / "runs").iterdir()) for disk in disks]
  assert parts[0].name == parts[1].name
  assert f"1 process of 2 left nothing here (1): {rundir.TOGETHER}." in said[0]
  assert "left nothing" not in said[1]
  shutil.copytree(parts[1], parts[0], dirs_exist_ok=True)
  run = read_run(parts[0])
  assert run.ranks == len(run.processes) == 2 and len(run.steps) == 100 and not run.problems
