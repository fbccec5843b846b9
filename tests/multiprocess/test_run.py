"""`jaxpace run` on programs that know nothing of it."""

import errno
import os
import signal
import sys

import pytest

from jaxpace.cli.main import main
from jaxpace.files.schemas import ProcessFile
from jaxpace.runs import rundir
from jaxpace.runs.reader import read_run
from tests.multiprocess.own_programs import TRAIN, jaxpace_run
from tests.quick import long

DATA_LOADER = """
import multiprocessing

def load(seed):
  import jax
  return float(jax.jit(lambda x: x * 2)(seed))
"""


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
