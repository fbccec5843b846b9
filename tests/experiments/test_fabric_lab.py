"""A lab of network namespaces: its commands, and a real one that leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from experiments.labs.fabric import commands, lab, machine
from experiments.labs.fabric.commands import Topology
from experiments.labs.fabric.machine import LabError
from tests.multiprocess import jobs

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
def possible() -> None:
  """Skips, with the reason, where no lab can be built."""
  try:
    with lab.Lab(_RACKS):
      pass
  except LabError as error:
    pytest.skip(str(error))


def left(name: str) -> list[str]:
  """Everything of a lab that is still there: namespaces, processes, files."""
  own = machine.namespaces(name)
  return (own + [str(pid) for pid in machine.pids(own)]
          + [str(machine.STATE / name)] * (machine.STATE / name).exists())


def links() -> str:
  return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def test_every_command_names_the_labs_own_namespaces_and_shapes_each_uplink() -> None:
  built = [" ".join(command) for command in commands.build(_RACKS, "abc")]
  assert all("jaxfab-abc-" in line for line in built)
  shaped = [line for line in built if line.startswith("tc ")]
  assert [line.split()[6] for line in shaped] == ["up0", "down0", "up1", "down1"]
  assert all("rate 40000000bit burst 16000b limit 128000b" in line for line in shaped)
  assert "10.0.2.1 a1\n" in _RACKS.hosts_file()
  with pytest.raises(ValueError, match="no host 'c0'"):
    _RACKS.address("c0")
  assert commands.lab_of("jaxfab-abc-a0") == "abc" and commands.lab_of("docker-abc-a0") is None


def test_a_missing_right_or_qdisc_is_explained() -> None:
  assert "modprobe sch_tbf" in machine.explain(["tc", "x"], "Specified qdisc kind is unknown.")
  assert "--privileged" in machine.explain(["ip", "x"], "Operation not permitted")


def test_popen_outside_of_with_names_the_fix() -> None:
  with pytest.raises(LabError, match="inside `with Lab"):
    lab.Lab(_RACKS).popen("a0", ["true"])


@pytest.mark.long
@pytest.mark.usefixtures("possible")
def test_an_exception_takes_the_lab_down() -> None:
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
def test_signals_take_the_lab_down_and_clean_finds_the_killed(number: signal.Signals) -> None:
  maker = subprocess.Popen([sys.executable, "-c", _MAKER], cwd=jobs.ROOT,
                           env=jobs.clean_environment(), text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL)
  assert maker.stdout is not None
  name = maker.stdout.readline().strip()
  try:
    assert name and left(name) and name not in list(machine.abandoned())
    maker.send_signal(number)
    assert maker.wait(timeout=300) == {signal.SIGTERM: 143}.get(number, -number)
    if number == signal.SIGKILL:
      deadline = time.monotonic() + 10
      while machine.pids(machine.namespaces(name)) and time.monotonic() < deadline:
        time.sleep(0.02)
      assert f"lab {name} removed" in lab.clean()
    assert left(name) == []
  finally:
    maker.kill()
    maker.communicate()
    machine.remove(name)
