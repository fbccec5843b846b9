"""The labs: one of network namespaces, which leaves nothing behind, and the GPU checks as far as
they run on a CPU. No time is asserted: what a check measures here is this machine's business."""

import signal
import subprocess
import sys

import pytest

from experiments.labs.fabric import commands, lab, machine
from experiments.labs.fabric.commands import Topology
from experiments.labs.fabric.machine import LabError
from experiments.labs.gpu import compiled, injected, steps, whole_loop
from experiments.labs.gpu.bench import Bench
from tests.multiprocess import jobs
from tests.patience import awaited

_RACKS = Topology((("a0", "b0"), ("a1", "b1")), trunk_mbit=40.0)
_MAKER = """
import time
from experiments.labs.fabric.commands import Topology
from experiments.labs.fabric.lab import Lab
with Lab(Topology((("a0",), ("a1",)), trunk_mbit=100.0)) as lab:
  lab.popen("a0", ["sleep", "600"])
  print(lab.name, flush=True)
  time.sleep(600)
"""


@pytest.fixture(scope="module")
def possible():
  """Skips, with the reason, where no lab can be built."""
  try:
    with lab.Lab(_RACKS):
      pass
  except LabError as error:
    pytest.skip(str(error))


def left(name):
  """Everything of a lab that is still there: namespaces, processes, files."""
  own = machine.namespaces(name)
  return (own + [str(pid) for pid in machine.pids(own)]
          + [str(machine.STATE / name)] * (machine.STATE / name).exists())


def test_every_command_names_the_labs_own_namespaces_and_shapes_each_uplink():
  built = [" ".join(command) for command in commands.build(_RACKS, "abc")]
  assert all("jaxfab-abc-" in line for line in built)
  shaped = [line for line in built if line.startswith("tc ")]
  assert [line.split()[6] for line in shaped] == ["up0", "down0", "up1", "down1"]
  assert all("rate 40000000bit burst 16000b limit 128000b" in line for line in shaped)
  assert "10.0.2.1 a1\n" in _RACKS.hosts_file()
  assert commands.lab_of("jaxfab-abc-a0") == "abc" and commands.lab_of("docker-abc-a0") is None


@pytest.mark.long
@pytest.mark.usefixtures("possible")
def test_an_exception_takes_the_lab_down():
  def links():
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout

  before = links()
  with pytest.raises(ZeroDivisionError), lab.Lab(_RACKS) as built:
    assert links() == before, "the machine's own interfaces are the same while the lab is up"
    talker = built.popen("b1", [sys.executable, "-c", "import socket; name = socket.gethostname(); "
                                "print(name, socket.gethostbyname(name))"],
                         stdout=subprocess.PIPE, text=True)
    assert talker.communicate(timeout=300)[0].split() == ["b1", "10.0.2.2"]
    built.popen("a0", ["sleep", "600"])
    raise ZeroDivisionError
  assert left(built.name) == [] and links() == before


@pytest.mark.long
@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_take_the_lab_down_and_clean_finds_the_killed(number):
  maker = subprocess.Popen([sys.executable, "-c", _MAKER], cwd=jobs.ROOT,
                           env=jobs.clean_environment(), text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL)
  name = maker.stdout.readline().strip()
  try:
    assert name and left(name) and name not in list(machine.abandoned())
    maker.send_signal(number)
    assert maker.wait(timeout=300) == {signal.SIGTERM: 143}.get(number, -number)
    if number == signal.SIGKILL:
      awaited(lambda: not machine.pids(machine.namespaces(name)))
      assert f"lab {name} removed" in lab.clean()
    assert left(name) == []
  finally:
    maker.kill()
    maker.communicate()
    machine.remove(name)


def test_a_compiled_schedule_says_what_is_out_of_order():
  sound = ["stamp", "product", "stamp", "hold", "start", "kernel", "done", "stamp", "stamp"]
  assert compiled.problems(sound, False) == [] and compiled.starts(sound) == [1.0]
  assert compiled.problems(["delay", *sound[1:]], True) == []
  for wrong, said in (
      (sound[1:2] + sound[:1] + sound[2:], "a matrix product is scheduled before the first"),
      (sound[:2] + sound[4:], "between the last matrix product and the start"),
      (sound[:-1], "no timestamp after the last collective but"),
      ([*sound, "branch"], "branches or goes to the host"), (["kernel"], "no timestamps")):
    assert [said in each for each in compiled.problems(wrong, False)] == [True], said
  assert "the delay is not" in compiled.problems(sound, True)[0]
  assert compiled.starts(["product", "start", "done", "product", "start", "done"]) == [0.5, 1.0]
  assert compiled.beside(["kernel", "start", "kernel", "copy", "product", "done", "kernel"]) == 2


def test_kernels_are_the_same_by_what_they_compute():
  def text(name, operation):
    return "\n".join((
        f"%{name}.body (p.{name}: f32[4]) -> f32[4] {{", f"  %p.{name} = f32[4] parameter(0)",
        f"  ROOT %r.{name} = f32[4] {operation}(%p.{name}, %p.{name}), metadata={{a={name}}}", "}",
        "", "ENTRY %main (x: f32[4]) -> f32[4] {",
        f"  ROOT %f = f32[4] fusion(%x), kind=kLoop, calls=%{name}.body", "}"))

  one = compiled.kernels(text("one", "add"))
  assert one.total() == 1 and one == compiled.kernels(text("two", "add"))
  assert not one & compiled.kernels(text("one", "multiply"))
  assert not compiled.kernels(text("one", "concatenate")), "that only moves"


@pytest.mark.long
def test_the_gpu_checks_run_on_a_cpu():
  def bench(run, *arguments):
    made = Bench("cpu", "native", "tiny", 10.0)
    run(made, *arguments)
    return made

  sections = bench(injected.run)
  for name in ("before the collective, in `arrival`", "before the collective, in `start to enter`",
               "after it, in `exit to end`", "after it, in `arrival of the next`"):
    found = [one for one in (*sections.checks, *sections.figures)
             if f"injected {name}" in one["name"]]
    assert [one["limit"].split(" ")[0] for one in found] == ["2000", "5000"]
    assert all(float(one["value"].split(" ")[0]) > 0.8 * float(one["limit"].split(" ")[0])
               for one in found)
  asked = [one["passed"] for one in sections.checks
           if "what the pacer asked for is what the ring says" in one["name"]]
  assert asked and all(asked)
  timed = bench(steps.run, "2ms")
  assert set(timed.raw["seconds_a_step"]) == {"bare", "bare again", "stamped", "callback",
                                              "recorded"}
  assert {check["limit"] for check in timed.checks} == {"<= 1"} and len(timed.checks) == 2
  loop = bench(whole_loop.run)
  assert not [check["name"] for check in loop.checks if not check["passed"]]
  assert sum("control: host callbacks are seen" in check["name"] for check in loop.checks) == 2


@pytest.mark.long
def test_without_a_gpu_one_line_says_so_and_the_status_is_0(tmp_path):
  done = subprocess.run([sys.executable, str(jobs.ROOT / "experiments/labs/gpu_check.py"),
                         f"--out={tmp_path / 'gpu.json'}"],
                        cwd=tmp_path, env=jobs.clean_environment(JAX_PLATFORMS="cpu"), text=True,
                        capture_output=True, timeout=300)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1].startswith(
      "No GPU is visible to JAX, so nothing was checked: ")
  assert not list(tmp_path.iterdir()), "nothing is claimed"
