"""A real lab, small and short: bytes at the shaped rate, names and addresses, and nothing left
behind."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import ml_collections
import pytest

from configs import fabric
from experiments.labs.fabric import commands, lab, machine, run
from experiments.labs.fabric.machine import LabError
from experiments.labs.fabric.topology import ConfigError
from tests.multiprocess import jobs

_SLOW_MBIT = 40.0

_MAKER = """
import sys, time
from configs import fabric
from experiments.labs.fabric.lab import Lab
with Lab(fabric.get_config()) as lab:
  lab.popen("a0", ["sleep", "600"])
  print(lab.name, flush=True)
  time.sleep(600)
"""


def config(**changes: object) -> ml_collections.ConfigDict:
  made = fabric.get_config()
  made.congestion = ""
  made.update(changes)
  return made


@pytest.fixture(scope="module")
def possible() -> Iterator[None]:
  """Skips, with the reason, where no lab can be built."""
  reason = machine.why_not()
  if reason is None:
    try:
      with lab.Lab(config()):
        pass
    except LabError as error:
      reason = str(error)
  if reason is not None:
    pytest.skip(reason)
  yield


def left(name: str) -> list[str]:
  """Everything of a lab that is still there: namespaces, processes, files."""
  own = machine.namespaces(name)
  return (own + [str(pid) for pid in machine.pids(own)]
          + [str(machine.STATE / name)] * (machine.STATE / name).exists())


def links() -> str:
  return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def test_a_config_of_no_lab_is_refused_before_anything_is_built() -> None:
  with pytest.raises(ConfigError):
    lab.Lab(config(trunk_mbit=-1.0))


def test_popen_outside_of_with_is_told_so() -> None:
  with pytest.raises(LabError, match="inside `with Lab"):
    lab.Lab(config()).popen("a0", ["true"])


@pytest.mark.long
@pytest.mark.parametrize("shaper", ["tbf", "htb"])
def test_bytes_cross_the_trunk_at_its_rate_and_nothing_is_left(possible: None, shaper: str) -> None:
  before, hostname, hosts = links(), os.uname().nodename, pathlib.Path("/etc/hosts").read_text()
  with lab.Lab(config(trunk_mbit=_SLOW_MBIT, shaper=shaper)) as built:
    assert links() == before, "the machine's own interfaces are the same while the lab is up"
    within, across = built.measure("a0", "b0", seconds=0.4), [built.measure("a0", "b1")]
    # a sender that got no processor fills no link
    while across[-1].mbit < 0.8 * _SLOW_MBIT and len(across) < 4:
      across.append(built.measure("a0", "b1"))
    assert 0.8 * _SLOW_MBIT <= across[-1].mbit <= 1.05 * _SLOW_MBIT
    assert within.mbit > 2 * _SLOW_MBIT, "the rack itself isn't shaped"
    selected = built.counters()
    assert (selected["rack0 up"]["bytes"] > 0.5 * 1e6 * _SLOW_MBIT / 8
            > selected["rack1 up"]["bytes"])
    said = built.run("b1", [sys.executable, "-c", "import socket; name = socket.gethostname(); "
                            "print(name, socket.gethostbyname(name), socket.gethostbyname('a0'))"])
    assert said.split() == ["b1", "10.0.2.2", "10.0.1.1"]
    with pytest.raises(LabError, match="status 3"):
      built.run("a0", ["sh", "-c", "exit 3"])
    forgotten = built.popen("a1", ["sleep", "600"])
  assert forgotten.poll() is not None
  assert left(built.name) == [] and links() == before
  assert (os.uname().nodename, pathlib.Path("/etc/hosts").read_text()) == (hostname, hosts)


@pytest.mark.long
def test_congestion_control_is_the_routes_own(possible: None) -> None:
  if reason := machine.why_not(["reno"]):
    pytest.skip(reason)
  with lab.Lab(config(job_congestion={"b": "reno"})) as built:
    assert built.measure("b0", "b1", seconds=0.2).congestion == "reno"
    default = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    assert built.measure("a0", "a1", seconds=0.2).congestion == default


@pytest.mark.long
def test_an_exception_takes_the_lab_down(possible: None) -> None:
  with pytest.raises(ZeroDivisionError), lab.Lab(config()) as built:
    built.popen("a0", ["sleep", "600"])
    raise ZeroDivisionError
  assert left(built.name) == []


@pytest.mark.long
def test_a_lab_that_cannot_be_built_to_the_end_leaves_nothing(
    possible: None, monkeypatch: pytest.MonkeyPatch) -> None:
  build = commands.build
  monkeypatch.setattr(commands, "build",
                      lambda *arguments: [*build(*arguments)[:-2], ["tc", "nonsense"]])
  broken = lab.Lab(config())
  with pytest.raises(LabError, match="tc nonsense"):
    broken.__enter__()
  assert left(broken.name) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_signals_take_the_lab_down_and_clean_finds_the_killed(possible: None,
                                                              number: signal.Signals) -> None:
  maker = subprocess.Popen([sys.executable, "-c", _MAKER], cwd=jobs.ROOT,
                           env=jobs.clean_environment(), text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL)
  assert maker.stdout is not None
  name = maker.stdout.readline().strip()
  try:
    assert name and left(name)
    assert name not in list(machine.abandoned()), "it is in use"
    processes = machine.pids(machine.namespaces(name))
    maker.send_signal(number)
    assert maker.wait(timeout=30) == {signal.SIGTERM: 143, signal.SIGHUP: 129}.get(number, -number)
    if number == signal.SIGKILL:
      deadline = time.monotonic() + 10
      while machine.pids(machine.namespaces(name)) and time.monotonic() < deadline:
        time.sleep(0.02)
      assert processes and not machine.pids(machine.namespaces(name)), "its processes died with it"
      assert machine.namespaces(name)
      assert f"lab {name} removed" in lab.clean()
    assert left(name) == []
  finally:
    maker.kill()
    maker.communicate()
    machine.remove(name)


@pytest.mark.long
def test_run_joins_a_jobs_ranks_and_tells_which_failed(possible: None, tmp_path: pathlib.Path,
                                                       capfd: pytest.CaptureFixture[str]) -> None:
  program = ("import jaxpace.distributed as d, jax, numpy as np\n"
             "from jax.experimental import multihost_utils as m\n"
             "place = d.initialize()\n"
             "print('sum', m.process_allgather(np.int32(10 + place.index)).sum(), '{job} {rank} "
             "{host}', flush=True)\n")
  with lab.Lab(config()) as built:
    assert run.run(built, ["a"], [sys.executable, "-c", program], tmp_path) == 0
    assert "sum 21 a 1 a1" in (tmp_path / "a-1.log").read_text()
    assert "[a] sum 21 a 0 a0" in capfd.readouterr().out
    status = run.run(built, ["a", "b"],
                     ["sh", "-c", "echo {host}; test {host} != b1 || exit 7; sleep 600"], tmp_path)
    assert status == 7
    assert "b-1 ended with status 7" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="no job 'c'"):
      run.run(built, ["c"], ["true"], tmp_path)
