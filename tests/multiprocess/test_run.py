"""`jaxpace run` on programs that know nothing of it."""

import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest

from jaxpace.cli.main import main
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.files.schemas import ProcessFile
from jaxpace.runs import rundir
from jaxpace.runs.reader import read_run
from tests.multiprocess.jobs import clean_environment, finish, free_high_port
from tests.patience import patiently
from tests.quick import long

LATE = 0.02

TRAIN = """
import os, signal, sys, time
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def main(steps, late, seconds=0):
  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  w = jax.jit(lambda: jnp.ones((16, 16)), out_shardings=NamedSharding(mesh, P()))()
  x = jax.jit(lambda: jnp.ones((16, 16)), out_shardings=NamedSharding(mesh, P("data")))()

  @jax.jit
  def grad(w, x):
    return jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

  @jax.jit
  def update(w, g):
    return w - 1e-3 * g

  @jax.jit
  def evaluate(w, x):
    return ((x @ w) ** 2).mean()

  for step in range(steps):
    w = update(w, grad(w, x))
    if step % 5 == 0:
      evaluate(w, x).block_until_ready()
    if jax.process_index() == late:
      w.block_until_ready()
      time.sleep(seconds)
  print(w.addressable_data(0).tobytes().hex())
"""
DATA_LOADER = """
import multiprocessing

def load(seed):
  import jax
  return float(jax.jit(lambda x: x * 2)(seed))
"""


def jaxpace_run(tmp_path, script, *options, python=("train.py",), devices=4):
  """Runs a script on so many forced devices under `jaxpace run`."""
  (tmp_path / "train.py").write_text(script)
  environment = clean_environment(XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}")
  return subprocess.Popen(
      [sys.executable, "-m", "jaxpace", "run", *options, "--", sys.executable, *python],
      cwd=tmp_path, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE)


def test_a_program_is_recorded_unchanged_and_ends_as_it_would(tmp_path):
  script = TRAIN + "print(input())\nmain(20, None)\nsys.exit(7)\n"
  seen = jaxpace_run(tmp_path, script, "--out", "seen")
  out, errors = seen.communicate("a line\n", timeout=600)
  bare = jaxpace_run(tmp_path, script, "--no-record")
  assert bare.communicate("a line\n", timeout=600) == (out, "")
  assert seen.returncode == bare.returncode == 7
  first, last = errors.splitlines()
  assert first.startswith("jaxpace: The step is grad") and "20 steps" in last
  run = read_run(tmp_path / "seen")
  assert len(run.steps) == 20 and run.ranks == 4


@pytest.mark.long
def test_workers_of_a_data_loader_and_forks_are_not_recorded(tmp_path):
  (tmp_path / "loader.py").write_text(DATA_LOADER)
  script = TRAIN + """
import loader
jax.device_count()  # by a worker as well, which imports this
if __name__ == "__main__":
  with loader.multiprocessing.get_context("spawn").Pool(1) as pool:
    assert pool.map(loader.load, [1.0, 2.0]) == [2.0, 4.0]
  main(10, None)
  if not os.fork():
    sys.exit(0)
  os.wait()
"""
  job = jaxpace_run(tmp_path, script, "--out", "seen", python=("-m", "train"))
  _, errors = job.communicate(timeout=600)
  assert job.returncode == 0, errors
  assert errors.count("jaxpace: ") == 2 and "Nothing was recorded" not in errors
  assert len(read_run(tmp_path / "seen").steps) == 10
  assert not (tmp_path / "seen" / ".previous").exists()


@pytest.mark.long
@pytest.mark.parametrize("ready, end, status", [
    ("True", "raise RuntimeError('boom')", 1),
    ("signal.getsignal(signal.SIGTERM)", "os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ("written()", "os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ("written()", "os._exit(3)", 3)])
def test_however_early_a_program_ends_its_run_can_be_read(tmp_path, ready, end, status):
  script = TRAIN + f"""
import json, pathlib
from jaxpace.record import writer
from jaxpace.record.ring import found
found._SURE_SECONDS = 1e9
if {status} == -signal.SIGTERM:
  writer._FIRST_SECONDS = 1e9
main(100, None)

def written():
  said = pathlib.Path("seen/process/0.json")
  return said.exists() and json.loads(said.read_text())["rows_written"] == 400

while not {ready}:
  time.sleep(0.1)
{end}
"""
  job = jaxpace_run(tmp_path, script, "--out", "seen")
  _, errors = job.communicate(timeout=600)
  assert job.returncode == status, errors
  assert len(read_run(tmp_path / "seen").steps) == 100
  assert rundir.read_json(tmp_path / "seen" / "process" / "0.json", ProcessFile)["ended_by"] == {
      1: "RuntimeError: boom", -signal.SIGTERM: "SIGTERM"}.get(status)


@pytest.mark.long
def test_an_uncaught_exception_ends_a_job_that_joined_by_itself(tmp_path):
  job = jaxpace_run(tmp_path, """
import atexit, time
import jax
atexit.register(print, "the program's own end")
jax.distributed.initialize(shutdown_timeout_seconds=20)
jax.device_count()
if jax.process_index() == 1:
  raise ArithmeticError("loss is NaN")
time.sleep(1000)
""", "--out", "seen", "--nproc", "2", "--logs", "logs", "--grace", "1", devices=1)
  _, errors = job.communicate(timeout=600)
  assert job.returncode == 1 and "process 1 (pid" in errors
  log = (tmp_path / "logs" / "process-1.log").read_text()
  assert "ArithmeticError: loss is NaN" in log and "the program's own end" in log
  # By itself JAX waits at exit for the other process, which waits for this one.
  assert "DEADLINE_EXCEEDED" not in log


@pytest.mark.long
def test_sigterm_is_the_programs_own_where_it_handles_it(tmp_path):
  script = TRAIN + """
main(10, None)
while not signal.getsignal(signal.SIGTERM):
  time.sleep(0.1)
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
main(10, None)
sys.exit(4)
"""
  job = jaxpace_run(tmp_path, script, "--out", "seen")
  out, errors = job.communicate(timeout=600)
  assert job.returncode == 4 and "asked" in out, errors
  assert len(read_run(tmp_path / "seen").steps) == 20


@pytest.mark.long
def test_a_program_that_is_stopped_can_be_read_and_goes_on(tmp_path):
  script = TRAIN + """
import glob
main(100, None)
while not glob.glob("seen/steps/*.parquet"):
  time.sleep(0.1)
os.kill(os.getpid(), signal.SIGSTOP)
main(50, None)
"""
  job = jaxpace_run(tmp_path, script, "--out", "seen")
  # Without reaping it: it goes on.
  os.waitid(os.P_PID, job.pid, os.WSTOPPED | os.WNOWAIT)
  stopped = len(read_run(tmp_path / "seen").steps)
  job.send_signal(signal.SIGCONT)
  _, errors = job.communicate(timeout=600)
  assert job.returncode == 0, errors
  assert 0 < stopped <= 100 and len(read_run(tmp_path / "seen").steps) == 150


NOBODY = "no process of this command used a device through JAX"
WORKERS_ALONE = """import multiprocessing
def count():
  import jax
  jax.devices()
if __name__ == "__main__":
  worker = multiprocessing.get_context("spawn").Process(target=count)
  worker.start()
  worker.join()
  print(1)
"""


@pytest.mark.parametrize("script, status, why", [
    ("import jax\njax.numpy.ones(3).sum()\nprint(1)", 0, ""),
    (WORKERS_ALONE, 0, "only workers of multiprocessing used a device"),
    ("print(1)", 0, NOBODY), ("print(1, flush=True)\nraise SystemExit(3)", 3, NOBODY),
    *long(("import jax\nprint(1)", 0, NOBODY),
          ("import os\nprint(1, flush=True)\nos.kill(os.getpid(), 9)", -9, NOBODY))])
def test_where_nothing_can_be_recorded_one_sentence_says_so(tmp_path, script, status, why):
  job = jaxpace_run(tmp_path, script, "--out", "seen")
  out, errors = job.communicate(timeout=600)
  assert (job.returncode, out) == (status, "1\n")
  assert errors.startswith(f"jaxpace: Nothing was recorded: {why}") and errors.count("\n") == 1
  assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize("lacking", ["tempfile.mkstemp", "os.pidfd_open", "os.fork"])
def test_where_nobody_could_say_so_at_the_end_the_command_runs_all_the_same(monkeypatch, lacking):
  def refused(*_, **__):
    raise OSError(errno.ENOSYS, "Function not implemented")

  def become(_, command):
    raise SystemExit(command)

  monkeypatch.setattr(os, "environ", dict(os.environ))
  monkeypatch.setattr(lacking, refused)
  monkeypatch.setattr(os, "execvp", become)
  with pytest.raises(SystemExit, match="train.py"):
    main(["run", "--", sys.executable, "train.py"])
  assert not os.path.exists(os.environ["JAXPACE_RUN_UNSEEN"])


DAEMON = """
import os, time
if os.fork():
  os._exit(0)
os.setsid()
if os.fork():
  os._exit(0)
while not os.path.exists("begin"):
  time.sleep(0.1)
"""


def test_of_a_daemon_it_is_not_said_that_nothing_was_recorded(tmp_path):
  job = jaxpace_run(tmp_path, DAEMON + TRAIN + "main(20, None)\n", "--out", "seen")
  first = job.stderr.readline()
  assert job.wait(600) == 0
  (tmp_path / "begin").touch()
  _, errors = job.communicate(timeout=600)
  assert first.startswith("jaxpace: Nothing was recorded so far: ") and "left running (pid" in first
  assert len(errors.splitlines()) == 2 and len(read_run(tmp_path / "seen").steps) == 20


@pytest.mark.long
def test_a_program_that_empties_its_environment_is_recorded(tmp_path):
  script = TRAIN + """
jax.config.update("jax_num_cpu_devices", 4)
os.environ.clear()
main(20, None)
"""
  job = jaxpace_run(tmp_path, script, "--out", "seen")
  _, errors = job.communicate(timeout=600)
  assert job.returncode == 0 and errors.splitlines()[-1].startswith("jaxpace: Recorded 20 steps")
  assert len(read_run(tmp_path / "seen").steps) == 20


def test_where_jaxpace_can_not_be_imported_one_sentence_says_so(tmp_path):
  script = "import sys\nsys.modules['jaxpace.record'] = None\n" + TRAIN + "main(5, None)\n"
  job = jaxpace_run(tmp_path, script, "--out", "seen")
  _, errors = job.communicate(timeout=600)
  assert job.returncode == 0 and errors.count("\n") == 1
  assert errors.startswith("jaxpace: nothing is recorded: ") and "Is jaxpace installed" in errors


def test_where_it_is_too_late_to_record_the_sentence_says_why(tmp_path):
  late = """
import threading
import jax
def count():
  threading.main_thread().join()
  print(jax.device_count())
threading.Thread(target=count).start()
"""
  job = jaxpace_run(tmp_path, late, "--out", "seen")
  out, errors = job.communicate(timeout=600)
  assert (job.returncode, out) == (0, "4\n")
  assert errors == "jaxpace: nothing is recorded: can't register atexit after shutdown.\n"


def test_of_several_processes_without_jax_one_sentence_is_said(tmp_path):
  job = jaxpace_run(tmp_path, "print(1)", "--out", "seen", "--nproc", "2")
  out, errors = job.communicate(timeout=600)
  assert (job.returncode, out) == (0, "1\n")
  assert errors.splitlines()[-1].startswith(f"jaxpace: Nothing was recorded: {NOBODY}")
  assert errors.count(NOBODY) == 1


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
