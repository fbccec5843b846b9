
import io
import json

import msgspec
import pytest
import rich.console
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.cli import doctor
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.diagnosis import to_json
from jaxpace.files.plain import to_plain
from jaxpace.files.reading import check, parse
from jaxpace.hosts.locality import job
from jaxpace.hosts.locality.job import NOTE, WARNING, find_concerns
from jaxpace.hosts.locality.read import read_locality
from jaxpace.hosts.locality.types import Cgroup, Cpu, Device, Gpu, Link, Locality, Nic, NumaNode
from jaxpace.runs import rundir
from jaxpace.runs.reader import read_run
from tests.hosts.locality import machines
from tests.quick import examples
from tests.synthetic import synthetic_runs


def kinds(place, level=WARNING):
  return [concern.kind for concern in find_concerns(place) if concern.level == level]


def only(place, kind, level=WARNING):
  (concern,) = [c for c in find_concerns(place) if c.kind == kind]
  assert concern.level == level
  return concern.sentence


def test_a_machine_as_it_should_be_has_no_concern(tmp_path):
  assert find_concerns(read_locality(machines.dgx(tmp_path))) == []


def test_a_nic_in_the_wrong_socket_is_named_with_its_gpu(tmp_path):
  place = read_locality(machines.dgx(tmp_path, swapped=True))
  # GPU 1 goes to the free NIC, on the other socket or on its own: either way the host is not what
  # it should be.
  assert kinds(place) == ["shared_nic"]
  assert ("0000:29:00.0" in only(place, "shared_nic")
          and "mlx5_1 is nearest to none" in only(place, "shared_nic"))


def test_gpu_and_nic_on_different_nodes():
  place = Locality(gpus=(Gpu("0000:18:00.0", numa_node=0, nic="mlx5_0", nic_distance="SYS"),),
                   nics=(Nic("mlx5_0", numa_node=1),))
  assert kinds(place) == ["far_nic"]
  assert "GPU 0000:18:00.0 is on NUMA node 0, its nearest NIC mlx5_0 on node 1" in only(
      place, "far_nic")
  assert not find_concerns(place.replace(nics=(Nic("mlx5_0", numa_node=None),)))


def test_gpus_that_share_the_only_nic_are_a_note(tmp_path):
  place = read_locality(machines.cloud_vm(tmp_path))
  assert "has no other of its kind" in only(place, "shared_nic", NOTE)


def pinned(allowed, gpus=(), devices=(), nics=()):
  return Locality(cpu=Cpu(online="0-7", allowed=allowed),
                  numa=(NumaNode(0, "0-3"), NumaNode(1, "4-7")), gpus=gpus, devices=devices,
                  nics=nics)


def test_a_process_pinned_to_the_far_socket():
  near, far = Gpu("0000:18:00.0", numa_node=0), Gpu("0000:90:00.0", numa_node=1)
  assert kinds(pinned("4-7", (near,))) == ["far_socket"]
  assert "numactl --cpunodebind=0" in only(pinned("4-7", (near,)), "far_socket")
  assert not kinds(pinned("4-7", (far,))) and not kinds(pinned("0-7", (near,)))
  assert not kinds(pinned("4-7", (near, far))), "its own GPUs aren't known"
  assert kinds(pinned("4-7", (near, far), (Device(gpu=near.pci),))) == ["far_socket"]
  assert not kinds(pinned("4-7", (near, far), (Device(gpu=far.pci),)))
  assert kinds(pinned("0-3", nics=(Nic("eth0", numa_node=1),))) == ["far_socket"]
  assert not kinds(pinned("0-3", nics=(Nic("eth0", numa_node=1), Nic("eth1", numa_node=0))))


@pytest.mark.parametrize("link, expected", [
    (Link(32.0, 16, 32.0, 16, 32.0, 16), []),
    (Link(32.0, 8, 32.0, 16, 32.0, 16), ["link_width"]),
    (Link(32.0, 8, 32.0, 16, 32.0, 8), []),  # the slot offers no more: a note
    (Link(32.0, 8, 32.0, 8, 32.0, 16), []),
    (Link(16.0, 16, 32.0, 16, 32.0, 16), ["link_speed"]),
    (Link(16.0, 16, 16.0, 16, 32.0, 16), []),
    (Link(), []),
])
def test_links_below_what_card_and_slot_offer(link, expected):
  assert kinds(Locality(nics=(Nic("mlx5_0", pci="0000:01:00.0", link=link),))) == expected
  gpu = Locality(gpus=(Gpu("0000:01:00.0", link=link),))
  assert (kinds(gpu) == [kind for kind in expected
                         if kind == "link_width"]), "an idle GPU lowers its link's speed"


def test_width_is_told_as_a_share():
  place = Locality(nics=(Nic("mlx5_0", link=Link(32.0, 4, 32.0, 16, 32.0, 16)),))
  assert "x4 where card and slot offer x16, 25% of" in only(place, "link_width")


def test_limits_of_the_control_group():
  place = Locality(cpu=Cpu(allowed="0-7"), cgroup=Cgroup(cpu_limit=4.0))
  assert "grants 4 CPUs' worth of time, but the process sees 8 CPUs" in only(place, "cpu_limit")
  assert "8 devices" in only(place.replace(devices=(Device(),) * 8), "cpu_limit")
  assert not find_concerns(place.replace(cgroup=Cgroup(cpu_limit=8.0)))
  assert not find_concerns(place.replace(cpu=Cpu(allowed="0-3")))


@pytest.mark.parametrize("source, offered, level", [
    ("tsc", (), None), (None, (), None), ("hpet", ("hpet",), WARNING),
    ("xen", ("xen", "tsc"), WARNING), ("kvm-clock", ("kvm-clock", "tsc"), NOTE),
    ("kvm-clock", ("kvm-clock",), None), ("arch_sys_counter", (), None)])
def test_clock_sources(source, offered, level):
  place = Locality(clock_source=source, clock_sources=offered)
  assert [c.level for c in find_concerns(place)] == ([level] if level else [])


def test_a_laptop(tmp_path):
  place = read_locality(machines.laptop(tmp_path))
  assert kinds(place) == ["cpu_limit", "clock_source"] and kinds(place, NOTE) == ["huge_pages"]


def host(name, process, **changes):
  place = Locality(process=process, hostname=name, cpu=Cpu("EPYC", "0-7", "0-7"),
                   gpus=(Gpu("0000:01:00.0", "H100", nic="mlx5_0"),
                         Gpu("0000:02:00.0", "H100", nic="mlx5_0")),
                   nics=(Nic("mlx5_0", rate_gbps=400.0),), clock_source="tsc", kernel="6.1")
  return place.replace(**changes)


def test_hosts_of_one_job_that_differ():
  places = [host(f"h{i}", i) for i in range(3)]
  assert not [c for c in job.job_concerns(places) if c.kind == "hosts_differ"]
  odd = host("h3", 3, gpus=(Gpu("0000:01:00.0", "H100", nic="mlx5_0"),), kernel="5.15")
  differing = [c for c in job.job_concerns([*places, odd]) if c.kind == "hosts_differ"]
  assert [c.level for c in differing] == [WARNING, NOTE]
  assert "differ in GPUs: 2 × H100 on 3 of 4, but 1 × H100 on h3." in differing[0].sentence
  assert differing[0].processes == (3,)


def test_processes_of_one_host_that_share_a_nic_are_told_together():
  places = [host("h0", i, devices=(Device(gpu=f"0000:0{i + 1}:00.0"),)) for i in range(2)]
  assert not find_concerns(places[0]), "by itself it uses one GPU"
  (concern,) = job.job_concerns(places)
  assert (concern.kind, concern.level, concern.processes) == ("shared_nic", NOTE, (0, 1))
  idle = (Nic("mlx5_0", rate_gbps=400.0), Nic("mlx5_1", rate_gbps=400.0))
  (concern,) = job.job_concerns([place.replace(nics=idle) for place in places])
  assert concern.level == WARNING and "mlx5_1 is nearest to none" in concern.sentence


def test_equal_concerns_of_a_host_are_told_once():
  places = [host("h0", i, clock_source="hpet") for i in range(4)]
  (clock,) = [c for c in job.job_concerns(places) if c.kind == "clock_source"]
  assert clock.processes == (0, 1, 2, 3) and clock.host == "h0"


def test_places_of_a_run_are_read_whatever_lies_there(tmp_path):
  for i in range(3):
    rundir.write_json(tmp_path / "locality" / f"{i}.json",
                      {"run": "a", **to_plain(host(f"h{i}", i))})
  rundir.write_json(tmp_path / "locality" / "3.json", {"run": "b", **to_plain(host("h3", 3))})
  rundir.write_json(tmp_path / "locality" / "4.json",
                    {"gpus": "many", "numa": [{"node": 0}], "memory_bytes": 1 << 70,
                     "cgroup": {"cpu_limit": float("nan")}})
  rundir.write_json(tmp_path / "locality" / "5.json", {"schema": 99})
  (tmp_path / "locality" / "6.json").write_text('{"sche')
  (tmp_path / "locality" / "7.json").write_text("[" * 100_000)
  (tmp_path / "locality" / "8.json").write_bytes(b"\xff\xfe")
  (tmp_path / "locality" / "9.json").mkdir()
  (tmp_path / "locality" / "notes.txt").write_text("mine")
  places, problems = job.read_places(tmp_path, "a")
  assert [place.hostname for place in places] == ["h0", "h1", "h2", None]
  assert places[3] == Locality(process=4), "what does not fit costs only itself, and is named"
  assert len(problems) == 10 and "3.json belongs to another run" in problems[0]
  assert "4.json: 'gpus' is left out: expected `array`, got `str`" in " ".join(problems)
  assert job.read_places(tmp_path / "none") == ([], [])


for of in (Link, Gpu, Nic, NumaNode, Cpu, Cgroup, Device, Locality):
  st.register_type_strategy(of, st.builds(
      of, **{field.name: st.from_type(field.type) for field in msgspec.structs.fields(of)}))


@settings(max_examples=examples(60))
@given(st.lists(st.from_type(Locality), max_size=3))
def test_no_place_is_an_error(places):
  """A document of the right types says anything at all: it is shown, compared, and survives its way
  through JSON."""
  console = rich.console.Console(file=io.StringIO())
  doctor.render(places, job.job_concerns(places), [], console)
  for place in places:
    text = json.dumps(to_plain(place))
    back, _ = check(parse(text.encode()), Locality)
    if any(len(word) > 18 for word in text.split()):  # numbers beyond 64 bits are not known
      continue
    # What is no finite number is not known afterwards.
    assert to_plain(msgspec.convert(back, Locality)) == to_plain(place)


def test_the_report_carries_the_warnings_of_where_the_run_ran(tmp_path):
  synthetic_runs.write(tmp_path / "run",
                       synthetic_runs.SyntheticJob(ranks=4, steps=30, processes=2))
  assert (to_json(diagnose(read_run(tmp_path / "run")))["locality"]
          == {"processes": 0, "warnings": []})
  place = read_locality(machines.laptop(tmp_path / "root")).replace(hostname="host0")
  for process in range(2):
    rundir.write_json(tmp_path / "run" / "locality" / f"{process}.json",
                      to_plain(place.replace(process=process)))
  locality = to_json(diagnose(read_run(tmp_path / "run")))["locality"]
  assert locality["processes"] == 2
  assert [(w["kind"], w["host"], w["processes"]) for w in locality["warnings"]] == [
      ("cpu_limit", "host0", [0, 1]), ("clock_source", "host0", [0, 1])]
