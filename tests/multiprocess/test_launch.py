"""The launcher with real processes that know nothing of JAX: how each kind of end is seen, told and
cleaned up."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.multiprocess.jobs import ROOT
from tests.patience import awaited

PROC = pathlib.Path("/proc")
needs_proc = pytest.mark.skipif(not (PROC / "self" / "stat").exists(),
                                reason="needs /proc to look for orphans")


WAIT = 300.0
"""Seconds for what takes one: half of what the workers would sleep, were they not ended."""
_started: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nothing_left():
  """A test that fails leaves no process and no pipe behind."""
  yield
  for process in _started:
    process.kill()
    process.wait(WAIT)
    for stream in (process.stdout, process.stderr):
      stream.close()
  _started.clear()


JAXPACE = ("-m", "jaxpace")
# A second after its followers a cause may still come; a busy machine needs longer to end a process.
PATIENT = ("-c", """
import sys
from jaxpace.cli.main import main
from jaxpace.hosts.launch import launcher
launcher._SETTLE_SECONDS = 300.0
sys.exit(main(sys.argv[1:]))
""")


def start(tmp_path, script, *options, nproc=3, program=JAXPACE, **kwargs):
  """Starts `jaxpace run` on a Python script given as text."""
  file = tmp_path / "worker.py"
  file.write_text(
      "import os, signal, subprocess, sys, time\ni = int(os.environ['JAX_PROCESS_ID'])\n" + script)
  command = [sys.executable, *program, "run", "--no-record", "--nproc", str(nproc),
             "--logs", str(tmp_path / "logs"), *options, "--", sys.executable, str(file)]
  process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True, **kwargs)
  _started.append(process)
  return process


def run(tmp_path, script, *options, **kwargs):
  """Runs the launcher to its end: exit status, stdout, stderr."""
  process = start(tmp_path, script, *options, **kwargs)
  try:
    out, err = process.communicate(timeout=WAIT)
  finally:
    process.kill()
  assert "Traceback" not in err.partition("--- last lines")[0]
  return process.returncode, out, err


def alive(pid):
  """Whether a process runs; a zombie does not."""
  try:
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
  except OSError:
    return False


def wait_for_files(paths):
  assert awaited(lambda: all(path.exists() and path.read_text().strip() for path in paths))
  return [int(path.read_text()) for path in paths]


def test_success_has_a_log_each_and_shows_process_0_only(tmp_path):
  status, out, err = run(tmp_path, "print('out', i); print('err', i, file=sys.stderr)\n")
  assert status == 0
  assert out == "out 0\nerr 0\n"
  assert [(tmp_path / "logs" / f"process-{i}.log").read_text() for i in range(3)] == [
      f"out {i}\nerr {i}\n" for i in range(3)]
  assert str(tmp_path / "logs") in err


def test_exit_status_stops_the_others_and_shows_the_end_of_the_log(tmp_path):
  status, _, err = run(tmp_path, """
if i == 1:
  for k in range(100): print('line', k)
  sys.exit(3)
time.sleep(600)
""")
  assert status == 3
  assert "process 1 (pid" in err and "ended with exit status 3" in err
  assert err.splitlines()[-20:] == [f"line {k}" for k in range(80, 100)]


def test_a_signal_names_it_and_gives_128_plus_its_number(tmp_path):
  status, _, err = run(tmp_path,
                          "if i == 2: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)\n")
  assert status == 128 + signal.SIGKILL
  assert "process 2 (pid" in err and "was killed by SIGKILL (signal 9)" in err
  assert "memory" in err  # the usual reason


def test_the_cause_is_named_though_the_launcher_saw_the_followers_first(tmp_path):
  status, _, err = run(tmp_path, f"""
mark = {str(tmp_path / 'mark')!r}
if i == 0: open(mark, 'w').close()
if i == 2:  # killed, but slow to die: its connections close first; the launcher waits for that
  while not os.path.exists(mark): time.sleep(.01)
  time.sleep(.25)
  os.kill(os.getpid(), signal.SIGKILL)
sys.exit('Gloo all-reduce failed: Connection closed by peer')
""", program=PATIENT)
  assert (status == 128 + signal.SIGKILL and "process 2 (pid" in err
          and "jaxpace run: process 0" not in err)


@needs_proc
def test_one_that_left_early_is_named_where_the_others_only_miss_it(tmp_path):
  status, _, err = run(tmp_path, f"""
mark = {str(tmp_path / 'mark')!r}
if i == 2:
  open(mark, 'w').write(str(os.getpid()))
  sys.exit(0)
# Until it is reaped: the launcher has seen its end.
while not os.path.exists(mark) or not open(mark).read(): time.sleep(.01)
while os.path.exists('/proc/' + open(mark).read()): time.sleep(.01)
sys.exit('Gloo all-reduce failed: Connection closed by peer')
""")
  assert status == 1 and "ended with exit status 1 after" in err
  said = [line for line in err.splitlines() if "before that" in line]
  assert len(said) == 1 and said[0].startswith("jaxpace run: process 2 (pid ")


def test_sigkill_after_the_grace_time_for_those_that_ignore_sigterm(tmp_path):
  status, _, err = run(tmp_path, f"""
if i == 0:
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  open({str(tmp_path / 'deaf')!r}, 'w').close()
if i == 1:
  while not os.path.exists({str(tmp_path / 'deaf')!r}): time.sleep(.01)
  sys.exit(4)
time.sleep(600)
""", "--grace", "0.7")
  assert status == 4
  assert "killed, as SIGTERM did not end them in 0.7 s: process 0" in err


@pytest.mark.long
def test_huge_output_reaches_log_and_terminal_whole(tmp_path):
  status, out, _ = run(tmp_path, "for k in range(200_000): print('0123456789 abcdefghij', k)\n",
                          nproc=1)
  assert status == 0
  assert out == (tmp_path / "logs" / "process-0.log").read_text()
  assert out.endswith("199999\n") and len(out) > 5_000_000


def test_a_reader_that_leaves_or_stands_still_stops_nothing(tmp_path):
  process = start(tmp_path, "for k in range(50_000): print('x' * 40)\nif i == 1: sys.exit(5)\n",
                  nproc=2)
  time.sleep(0.3)  # nobody reads, so the pipe is full
  process.stdout.close()
  err = process.stderr.read()
  process.stderr.close()
  assert process.wait(timeout=WAIT) == 5
  assert "BrokenPipe" not in err


def test_a_full_terminal_does_not_keep_a_death_from_being_seen(tmp_path):
  process = start(tmp_path, f"""
if i == 0:
  for k in range(50_000): print('x' * 40)
  open({str(tmp_path / 'full')!r}, 'w').close()
  time.sleep(600)
while not os.path.exists({str(tmp_path / 'full')!r}): time.sleep(.01)
sys.exit(6)
""", nproc=2)
  first = process.stderr.readline() + process.stderr.readline()
  assert "ended with exit status 6" in first  # and stdout has not been read at all
  process.communicate(timeout=WAIT)
  assert process.returncode == 6


CHILDREN = """
deaf = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'
child = subprocess.Popen([sys.executable, '-c', deaf], start_new_session=i == 1)
open({directory!r} + f'/child-{{i}}.tmp', 'w').write(str(child.pid))
os.rename({directory!r} + f'/child-{{i}}.tmp', {directory!r} + f'/child-{{i}}')
open({directory!r} + f'/worker-{{i}}', 'w').write(str(os.getpid()))
"""


def family(tmp_path, nproc=2):
  return [tmp_path / f"{kind}-{i}" for kind in ("child", "worker") for i in range(nproc)]


@needs_proc
@pytest.mark.parametrize("ending", ["success", "failure"])
def test_grandchildren_go_too_even_in_a_session_of_their_own(tmp_path, ending):
  script = (CHILDREN.format(directory=str(tmp_path))
            + ("sys.exit(0)" if ending == "success" else "sys.exit(9)"))
  status, _, _ = run(tmp_path, script, "--grace", "0.3", nproc=2)
  assert status == (0 if ending == "success" else 9)
  # One that was ended between opening its file and writing to it has left it empty.
  written = [int(text) for p in family(tmp_path) if p.exists() and (text := p.read_text())]
  assert written and awaited(lambda: not any(alive(pid) for pid in written))


@pytest.mark.skipif(not sys.platform.startswith("linux"),
                    reason="only Linux kills children with their parent")
def test_no_worker_outlives_a_launcher_that_is_killed(tmp_path):
  process = start(tmp_path, f"""
open({str(tmp_path / 'worker-')!r} + str(i), 'w').write(str(os.getpid()))
time.sleep(600)
""", nproc=2)
  pids = wait_for_files([tmp_path / "worker-0", tmp_path / "worker-1"])
  process.kill()
  assert process.communicate(timeout=WAIT)[0] == ""  # nothing of the launch holds the pipe open
  assert awaited(lambda: not any(alive(pid) for pid in pids))


@needs_proc
@pytest.mark.parametrize("number", [
    signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long),
    pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_a_signal_to_the_launcher_ends_the_job_in_order(tmp_path, number):
  process = start(tmp_path, CHILDREN.format(directory=str(tmp_path)) + """
try:
  signal.signal(signal.SIGTERM, lambda *_: sys.exit('told to stop'))
  print('ready', flush=True)
  time.sleep(600)
except KeyboardInterrupt:
  print('interrupted')
finally:
  print('cleaned up', i)
""", "--grace", "600", "--show", "none", nproc=2)
  pids = wait_for_files(family(tmp_path))
  logs = [tmp_path / "logs" / f"process-{i}.log" for i in range(2)]
  assert awaited(lambda: all(log.exists() and "ready" in log.read_text() for log in logs))
  process.send_signal(number)
  _, err = process.communicate(timeout=WAIT)
  assert process.returncode == 128 + number
  assert f"stopped by {number.name}" in err and "Traceback" not in err
  log = (tmp_path / "logs" / "process-1.log").read_text()
  assert "cleaned up 1" in log and ("interrupted" in log) == (number == signal.SIGINT)
  assert awaited(lambda: not any(alive(pid) for pid in pids))


@needs_proc
def test_a_second_interrupt_kills_at_once(tmp_path):
  process = start(tmp_path, """
signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('deaf', flush=True)
time.sleep(600)
""", "--grace", "600", "--show", "first", nproc=1)
  assert process.stdout.readline() == "deaf\n"
  process.send_signal(signal.SIGINT)
  assert "Ctrl-C again" in process.stderr.readline() + process.stderr.readline()
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=WAIT)
  assert process.returncode == 130 and "killing all processes." in err
  assert "1 of 1 processes had to be killed" in err


def test_an_interrupt_a_parent_chose_to_ignore_stays_ignored(tmp_path):
  before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited
  try:
    process = start(tmp_path, "print('up', flush=True); time.sleep(.5)", nproc=1)
  finally:
    signal.signal(signal.SIGINT, before)
  assert process.stdout.readline() == "up\n"
  process.send_signal(signal.SIGINT)
  process.communicate(timeout=WAIT)
  assert process.returncode == 0


def test_environment_of_the_workers(tmp_path):
  process = start(tmp_path, """
for name in ('JAX_NUM_PROCESSES', 'JAX_PROCESS_ID', 'XLA_FLAGS', 'JAX_NUM_CPU_DEVICES', 'SLURM_PROCID', 'SLURM_NTASKS'):
  print(name, os.environ.get(name))
print(os.getpgid(0) == os.getpid(), sys.stdin.read() == '')
""", "--devices-per-process", "4", "--show", "none", nproc=2,  # noqa: E501
                  env={**os.environ, "XLA_FLAGS":
                       "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false"})
  process.communicate(timeout=WAIT)
  assert (tmp_path / "logs" / "process-1.log").read_text().splitlines() == [
      "JAX_NUM_PROCESSES 2", "JAX_PROCESS_ID 1",
      "XLA_FLAGS --xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=4",
      "JAX_NUM_CPU_DEVICES 4", "SLURM_PROCID 1", "SLURM_NTASKS 2", "True True"]


@pytest.mark.parametrize(("option", "words"), [
    (["--nproc", "1000000"], "more than this machine of"),
    (["--nproc", "1", "--threads", "1000000"], "must be at most 4096")])
def test_more_than_a_machine_can_run_is_refused_before_anything_starts(tmp_path, option, words):
  """A slip of the finger started processes until the machine gave up."""
  done = subprocess.run([sys.executable, "-m", "jaxpace", "run", "--no-record", *option,
                         "--logs", str(tmp_path / "logs"), "--", sys.executable, "-c", "pass"],
                        cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
  assert done.returncode == 2 and words in done.stderr and not (tmp_path / "logs").exists()


def test_a_job_of_one_process_is_one(tmp_path):
  status, _, err = run(tmp_path, "", nproc=1)
  assert status == 0 and err.startswith("jaxpace run: 1 process, logs in")


def test_each_of_several_tasks_says_that_it_starts_a_job_of_its_own(tmp_path):
  """`srun jaxpace run --nproc 4` on three hosts trained three models, and said nothing."""
  process = start(tmp_path, "", nproc=1, env={**os.environ, "SLURM_STEP_NUM_TASKS": "3"})
  _, err = process.communicate(timeout=WAIT)
  first, second = err.splitlines()
  assert "one of 3 commands" in first and "of its own, of 1 process." in first
  assert process.returncode == 0 and second.startswith("jaxpace run: 1 process, logs in")


def test_a_link_in_the_place_of_a_log_is_not_followed(tmp_path):
  (tmp_path / "logs").mkdir()
  (tmp_path / "victim").write_text("mine")
  (tmp_path / "logs" / "process-0.log").symlink_to(tmp_path / "victim")
  assert run(tmp_path, "print(i)", nproc=1)[0] == 0
  assert ((tmp_path / "victim").read_text() == "mine"
          and (tmp_path / "logs" / "process-0.log").read_text() == "0\n")
