"""`jaxpace doctor` as a user meets it."""

import json

import pytest

from jaxpace.cli.main import main
from jaxpace.files.plain import to_plain
from jaxpace.hosts.locality.read import read_locality
from jaxpace.runs import rundir
from tests.hosts.locality import machines


def doctor(capsys, *arguments):
  status = main(["doctor", *map(str, arguments)])
  out, err = capsys.readouterr()
  return status, " ".join(out.split()), err


def record(directory, places, run="a"):
  rundir.write_json(directory / "run.json", {"run": run, "schema_version": 1})
  for i, place in enumerate(places):
    rundir.write_json(directory / "locality" / f"{i}.json",
                      {"run": run, **to_plain(place.replace(process=i))})


def test_a_sound_machine_as_a_tree(tmp_path, capsys):
  status, out, _ = doctor(capsys, "--root", machines.dgx(tmp_path), "--strict")
  assert status == 0 and out.endswith("No warnings.")
  assert (out.count("GPU 0000:") == 8 and out.count("infiniband, 400") == 8
          and out.count("PCIe switch") == 8)
  assert "NUMA node 1: CPUs 4-7, 1008 GiB" in out
  assert "NVIDIA H100 80GB HBM3, x16 at 32 GT/s, NVLink, nearest NIC mlx5_0" in out


@pytest.mark.parametrize("strict, expected", [((), 0), (("--strict",), 1)])
def test_warnings_count_only_when_asked(tmp_path, capsys, strict, expected):
  status, out, _ = doctor(capsys, "--root", machines.laptop(tmp_path), *strict)
  assert status == expected
  assert ("Warnings" in out and "The clock source is hpet" in out and "no GPU found" in out
          and "No warn" not in out)


def test_json_says_the_same(tmp_path, capsys):
  file = tmp_path / "doctor.json"
  status, _, _ = doctor(capsys, "--root", machines.cloud_vm(tmp_path / "root"), "--json", file)
  document = json.loads(file.read_text())
  assert status == 0 and document["schema"] == 1 and document["problems"] == []
  (place,) = document["processes"]
  assert place["gpus"][1]["nic"] == "eth0" and place["cgroup"]["cpu_limit"] == 4.0
  assert ([(c["level"], c["kind"]) for c in document["concerns"]]
          == [("warning", "cpu_limit"), ("note", "shared_nic")])
  status = main(["doctor", "--root", str(tmp_path / "root"), "--json", "-"])
  assert json.loads(capsys.readouterr().out) == document and status == 0


def test_hosts_of_a_run_are_told_together_and_compared(tmp_path, capsys):
  good = read_locality(machines.dgx(tmp_path / "good"))
  bad = read_locality(machines.dgx(tmp_path / "bad", swapped=True))
  places = [good.replace(hostname=f"node{i}", devices=()) for i in range(3)]
  places.append(bad.replace(hostname="node3", clock_source="hpet"))
  record(tmp_path / "run", places)
  status, out, _ = doctor(capsys, tmp_path / "run", "--strict")
  assert status == 1
  assert "3 equal hosts: node0, node1, node2" in out and out.count("GPU 0000:18:00.0") == 2
  assert "node3 process 3: 2 GPUs" in out
  assert "The hosts differ in clock source: tsc on 3 of 4, but hpet on node3." in out


def test_torn_files_of_a_run_are_named(tmp_path, capsys):
  record(tmp_path, [read_locality(machines.laptop(tmp_path / "root"))])
  (tmp_path / "locality" / "1.json").write_text('{"gpus": [')
  status, out, _ = doctor(capsys, tmp_path)
  assert status == 0 and "locality/1.json can't be read (torn" in out


def test_processes_that_left_nothing_are_named(tmp_path, capsys):
  record(tmp_path, [read_locality(machines.laptop(tmp_path / "root"))])
  rundir.write_json(tmp_path / "run.json", {"run": "a", "schema_version": 1, "processes": 3})
  status, out, _ = doctor(capsys, tmp_path)
  assert status == 0 and f"2 processes of 3 left nothing here (1, 2): {rundir.TOGETHER}." in out


@pytest.mark.parametrize("arguments, sentence", [
    (["none"], "There is no run at none"),
    (["empty"], "nothing was recorded there"), (["run"], "does not say where its processes ran"),
    ([".", "--devices"], "Leave RUN or them out"),
    (["--root", "none"], "--root none is not a directory"),
    (["--json", "none/x.json"], "none"),
])
def test_mistakes_are_sentences(tmp_path, capsys, monkeypatch, arguments, sentence):
  record(tmp_path / "run", [])
  (tmp_path / "empty").mkdir()
  monkeypatch.chdir(tmp_path)
  status, out, err = doctor(capsys, *arguments)
  assert status == 2 and out == "" and err.startswith("jaxpace doctor: ") and sentence in err
