"""A lab's topology and the commands that build it: pure, so no root is needed."""

from __future__ import annotations

import pathlib

import pytest

from configs import fabric
from experiments.labs.fabric import commands, machine
from experiments.labs.fabric.topology import ConfigError, Topology, from_config


def topology(**changes: object) -> Topology:
  config = fabric.get_config()
  with config.unlocked(), config.ignore_type():
    for name, value in changes.items():
      config[name] = value
  return from_config(config)


def lines(**changes: object) -> list[str]:
  return [" ".join(command) for command in commands.build(topology(**changes), "abc")]


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"racks": ()}, "at least one host in each rack"),
    ({"racks": (("a0",), ())}, "at least one host in each rack"),
    ({"racks": (("a0", "b0"), ("a1", "a0"))}, "a0 is in the racks more than once"),
    ({"racks": ("a0", "a1")}, "with a comma"),
    ({"racks": (("Host_0",),)}, "no name for a host"),
    ({"racks": (("fabric",),)}, "no name for a host"),
    ({"jobs": {"a": ("a0", "c7")}}, "'c7', which is in no rack"),
    ({"jobs": {"a": ()}}, "has no hosts"),
    ({"job_congestion": {"z": "reno"}}, "the jobs are a, b"),
    ({"job_congestion": {"a": "Reno; rm"}}, "no congestion control"),
    ({"jobs": {"a": ("a0", "a1"), "b": ("a0", "a1")},
      "job_congestion": {"a": "reno", "b": "cubic"}}, "from a0 to a1"),
    ({"trunk_mbit": -1.0}, "trunk_mbit=-1"),
    ({"link_mbit": float("nan")}, "link_mbit=nan"),
    ({"trunk_queue_kb": 1.0}, "a queue that holds no packet"),
    ({"burst_kb": 1.0}, "a packet must fit"),
    ({"burst_kb": 500.0}, "trunk_queue_kb=128"),
    ({"shaper": "netem"}, "one of tbf, htb"),
])
def test_a_config_of_no_lab_is_told_why(changes: dict[str, object], sentence: str) -> None:
  with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
    topology(**changes)


def test_addresses_are_the_racks_and_in_the_hosts_file() -> None:
  found = topology()
  assert ([found.address(host) for host in ("a0", "b0", "a1", "b1")]
          == ["10.0.1.1", "10.0.1.2", "10.0.2.1", "10.0.2.2"])
  assert ("10.0.2.1 a1\n" in found.hosts_file()
          and found.hosts_file().startswith("127.0.0.1 localhost\n"))
  with pytest.raises(ConfigError, match="no host 'c0'"):
    found.address("c0")


@pytest.mark.parametrize("shaper", ["tbf", "htb"])
def test_every_command_names_the_labs_own_namespaces(shaper: str) -> None:
  """The machine's own interfaces can't be touched: no command works outside of a namespace of this
  lab."""
  own = {f"jaxfab-abc-{place}" for place in ("fabric", "a0", "b0", "a1", "b1")}
  built = commands.build(topology(shaper=shaper, link_mbit=50.0, job_congestion={"a": "reno"}),
                         "abc")
  made = [command for command in built if command[:3] == ["ip", "netns", "add"]]
  assert {command[3] for command in made} == own and built[:5] == made
  for command in built[5:]:
    assert command[0] in ("ip", "tc") and command[1] == "-n" and command[2] in own, command
    assert all(command[i + 1] in own for i, word in enumerate(command) if word == "netns"), command


def test_interfaces_are_made_before_they_are_used_and_names_fit_the_kernel() -> None:
  racks = tuple(tuple(f"{letter}{rack}longxx" for letter in "abc") for rack in range(3))
  made: set[tuple[str, str]] = set()
  for command in commands.build(topology(racks=racks, jobs={}, link_mbit=10.0), "abc")[10:]:
    place = command[2]
    if command[3:5] == ["link", "add"]:
      made.add((place, command[5]))
      if "peer" in command:
        made.add((command[-1] if command[-2] == "netns" else place,
                  command[command.index("name") + 1]))
    elif "dev" in command:
      assert (place, command[command.index("dev") + 1]) in made, command
    elif command[3:5] == ["link", "set"] and command[5] != "lo":
      assert (place, command[5]) in made, command
      if "master" in command:
        assert (place, command[command.index("master") + 1]) in made, command
  assert max(len(name) for _, name in made) <= 15


def test_the_trunk_is_shaped_each_way_and_no_more_than_asked() -> None:
  shapers = [line for line in lines(trunk_mbit=80.0, trunk_queue_kb=64.0, burst_kb=10.0)
             if line.startswith("tc")]
  assert shapers == [f"tc -n jaxfab-abc-fabric qdisc add dev {interface} root handle 1: tbf rate "
                     "80000000bit burst 10000b limit 64000b"
                     for interface in ("up0", "down0", "up1", "down1")]
  assert not [line for line in lines(trunk_mbit=0.0) if line.startswith("tc")]
  assert not [line for line in lines(racks=(("a0", "a1", "b0", "b1"),)) if line.startswith("tc")]
  htb = [line for line in lines(shaper="htb", trunk_mbit=80.0) if line.startswith("tc")]
  assert len(htb) == 12 and ("class add dev up0 parent 1: classid 1:1 htb rate 80000000bit ceil "
                             "80000000bit") in htb[1]


def test_a_hosts_own_link_is_shaped_each_way() -> None:
  found = [way for way in commands.shaped(topology(link_mbit=20.0)) if way.mbit == 20.0]
  assert len(found) == 8
  assert {(way.place, way.interface) for way in found if way.name.startswith("a1")} == {
      ("a1", "eth0"), ("fabric", "h-a1")}


def test_congestion_control_is_of_every_route_or_of_a_jobs_own() -> None:
  assert ("ip -n jaxfab-abc-b1 route replace 10.0.0.0/16 dev eth0 src 10.0.2.2 "
          "congctl cubic") in lines()
  found = [line for line in lines(congestion="", job_congestion={"b": "reno"}) if "congctl" in line]
  assert found == [
      "ip -n jaxfab-abc-b0 route replace 10.0.2.2/32 dev eth0 src 10.0.1.2 congctl reno",
      "ip -n jaxfab-abc-b1 route replace 10.0.1.2/32 dev eth0 src 10.0.2.2 congctl reno"]
  assert not [line for line in lines(congestion="") if "congctl" in line]


def test_namespaces_tell_their_lab_and_others_are_nobodys() -> None:
  assert commands.lab_of(commands.namespace("abc", "a0")) == "abc"
  assert ([commands.lab_of(name) for name in ("jaxfab", "jaxfab-abc", "jaxfab--a0", "other-abc-a0",
                                              "")] == [None] * 5)


@pytest.mark.parametrize(("command", "said", "sentence"), [
    ("tc -n x qdisc add dev up0 root handle 1: tbf rate 1bit",
     "Error: Specified qdisc kind is unknown.",
     "no tbf qdisc, with which the trunk is shaped. Try: modprobe sch_tbf; or shaper='htb'"),
    ("tc -n x qdisc add dev up0 root handle 1: htb default 1",
     "Error: Specified qdisc kind is unknown.",
     "no htb qdisc, with which the trunk is shaped. Try: modprobe sch_htb; or shaper='tbf'"),
    ("ip netns add x", "mount --make-shared /run/netns failed: Operation not permitted",
     "a container needs"),
    ("ip -n x link add rack0 type bridge", 'Error: Unknown device type.', "modprobe bridge"),
    ("ip -n x link add eth0 type veth peer name y", "RTNETLINK answers: Operation not supported",
     "modprobe veth"),
    ("ip -n x link set lo up", "", "it said nothing"),
])
def test_a_failed_command_is_a_sentence(command: str, said: str, sentence: str) -> None:
  assert sentence in machine.explain(command.split(), said)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  monkeypatch.setenv("PATH", str(tmp_path))
  monkeypatch.setattr(machine, "_SYSTEM", "")
  assert "apt-get install" in (machine.why_not() or "") and "iproute2" in (machine.why_not() or "")
  for program in machine._PACKAGES:
    (tmp_path / program).touch(mode=0o755)
  monkeypatch.setattr("os.geteuid", lambda: 1000)
  assert "Only root" in (machine.why_not() or "")
  monkeypatch.setattr("os.geteuid", lambda: 0)
  assert machine.why_not() is None
  monkeypatch.setattr(machine, "_AVAILABLE", tmp_path / "available")
  (tmp_path / "available").write_text("reno cubic\n")
  assert machine.why_not(["reno", "cubic"]) is None
  assert "no TCP congestion control vegas, it has reno, cubic" in (machine.why_not(["vegas"]) or "")
  monkeypatch.setattr("sys.platform", "darwin")
  assert "Run it on Linux" in (machine.why_not() or "")


def test_programs_are_found_where_path_does_not_lead(monkeypatch: pytest.MonkeyPatch,
                                                     tmp_path: pathlib.Path) -> None:
  folder = tmp_path / "sbin"
  folder.mkdir()
  (folder / "tc").touch(mode=0o755)
  monkeypatch.setenv("PATH", str(tmp_path))
  monkeypatch.setattr(machine, "_SYSTEM", str(folder))
  assert machine.found(["tc", "-V"]) == [str(folder / "tc"), "-V"]
  (tmp_path / "tc").touch(mode=0o755)
  assert machine.found(["tc", "-V"]) == [str(tmp_path / "tc"), "-V"], "PATH goes first"
  assert machine.found(["ip", "link"]) == ["ip", "link"], "so that the error is the usual one"
