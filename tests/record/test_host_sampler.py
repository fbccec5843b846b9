import contextlib
import os
import socket
import struct
import sys
import threading
import time
import types

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpace.hosts.locality import host, job
from jaxpace.hosts.locality.host import Tree
from jaxpace.record import describe, host_sampler
from jaxpace.record.host_sampler import HostCounters, HostSampler, find_interfaces
from jaxpace.record.recorder import Recorder
from jaxpace.runs import rundir, table_reader
from jaxpace.runs.dense import read_host_samples
from tests.hosts.locality import machines
from tests.record import fake_step as fake
from tests.record.recording import assert_complete, table, train

linux = pytest.mark.skipif(not sys.platform.startswith("linux"),
                           reason="the kernel's counters are Linux's")


def connected():
  with socket.create_server(("127.0.0.1", 0)) as server:
    left = socket.create_connection(server.getsockname())
    return left, server.accept()[0]


def send(left, right, size):
  """Sends `size` bytes, which the other end reads late: they wait unacknowledged or for its
  window."""
  def drain():
    time.sleep(0.2)
    rest = size
    while rest:
      rest -= len(right.recv(1 << 20))
  reader = threading.Thread(target=drain)
  reader.start()
  left.sendall(bytes(size))
  reader.join()


@linux
def test_traffic_of_this_process_is_counted(monkeypatch):
  monkeypatch.setattr(host_sampler, "find_interfaces", lambda tree: (("lo",), ()))
  counters = HostCounters()
  left, right = connected()
  with left, right:
    first = counters.read()
    assert {name for name, value in first.items() if value not in (0, None)} == set()
    send(left, right, 32 << 20)
    second = counters.read()
    assert 50_000_000 < second["tcp_busy_ns"] < 60_000_000_000
    assert 0 < second["tcp_receiver_limited_ns"] <= second["tcp_busy_ns"]
    assert 0 < second["tcp_min_rtt_ns"] <= second["tcp_rtt_ns"] < 10_000_000_000
    assert (second["nic_rx_bytes"] >= 32 << 20 <= second["nic_tx_bytes"]
            and second["loopback_bytes"] >= 32 << 20)
  third = counters.read()
  assert third["tcp_busy_ns"] >= second["tcp_busy_ns"], "closed connections keep their part"
  assert third["tcp_rtt_ns"] is None, "a round trip is of now, no counter"


@linux
def test_a_connection_made_between_two_readings_counts_from_its_beginning():
  sockets = host_sampler.OwnSockets()
  before, other = connected()
  with before, other:
    send(before, other, 16 << 20)
    assert [*sockets.read().values()] == [0, 0, 0, None, None]
    left, right = connected()
    with left, right:
      send(left, right, 16 << 20)
      assert sockets.read()["tcp_busy_ns"] > 50_000_000


def kernel_says(connection):
  """Busy time, round trip and shortest one of a connection in microseconds, as Python's own call
  reads them."""
  info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
  return (struct.unpack_from("=Q", info, 168)[0],
          *(struct.unpack_from("=I", info, at)[0] for at in (68, 148)))


@linux
def test_round_trips_are_those_of_the_connections_that_were_busy_weighted_by_how_long():
  idle, quick, slow = pairs = [connected() for _ in range(3)]
  with contextlib.ExitStack() as stack:
    for end in (end for pair in pairs for end in pair):
      stack.enter_context(end)
    send(*idle, 1 << 20)
    sockets = host_sampler.OwnSockets()
    assert sockets.read()["tcp_rtt_ns"] is None, "nothing was sent since the first reading"
    before = [kernel_says(left) for left, _ in pairs]
    for left, right in (quick, slow):
      send(left, right, (8 if left is quick[0] else 24) << 20)
    *sums, rtt, least = sockets.read().values()
    after = [kernel_says(left) for left, _ in pairs]
    rise = [now[0] - then[0] for now, then in zip(after, before, strict=True)]
    assert rise[0] == 0 < min(rise[1:]) and sums[0] == 1000 * sum(rise)
    for found, at in ((rtt, 1), (least, 2)):
      assert (found == 1000 * sum(weight * own[at] for weight, own in zip(rise, after, strict=True))
              // sum(rise))
    assert 0 < least <= rtt
    assert [*sockets.read().values()] == [*sums, None, None]


@linux
@pytest.mark.parametrize("end", [0, 1], ids=["of a process", "of the service"])
def test_the_coordination_service_does_not_count(end):
  """Neither where it is asked, nor in process 0, where it answers."""
  left, right = connected()
  with left, right, contextlib.ExitStack() as stack:
    port = left.getpeername()[1]
    mine, other = (stack.enter_context(one) for one in connected())
    sockets, all_sockets = host_sampler.OwnSockets(port), host_sampler.OwnSockets()
    assert {sockets.read()["tcp_busy_ns"], all_sockets.read()["tcp_busy_ns"]} == {0}
    send(*((left, right) if end == 0 else (right, left)), 4 << 20)
    assert sockets.read()["tcp_busy_ns"] == 0 < all_sockets.read()["tcp_busy_ns"]
    send(mine, other, 4 << 20)
    assert sockets.read()["tcp_busy_ns"] > 0


@linux
def test_sockets_of_others_are_left_alone():
  """No descriptor is taken over or closed, and what is no TCP socket is passed by."""
  left, right = connected()
  unix = socket.socketpair()
  with left, right, unix[0], unix[1], socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
    sockets = host_sampler.OwnSockets()
    for _ in range(3):
      sockets.read()
    left.sendall(b"x")
    assert right.recv(1) == b"x" and datagram.fileno() > 0 and len(sockets._seen) >= 2


def test_where_the_kernel_says_nothing_nothing_is_known(monkeypatch, tmp_path):
  def missing(path):
    raise FileNotFoundError(path)
  with monkeypatch.context() as patch:
    patch.setattr(os, "listdir", missing)
    assert host_sampler.OwnSockets().read() == {}
  values = HostCounters(tmp_path).read()
  assert values.pop("nivcsw") == 0 and set(values.values()) == {None}


def test_fixture_of_control_groups_interfaces_and_steal(tmp_path):
  machines.cloud_vm(tmp_path)
  machines.write(tmp_path, "/proc/stat", "cpu  10 0 5 100 1 0 0 7 0 0\ncpu0 1 2 3")
  header = ("Inter-|   Receive\n face |bytes    packets errs drop fifo frame compressed "
            "multicast|bytes\n")
  machines.write(tmp_path, "/proc/net/dev",
                 f"{header}    lo: 5 0 0 0 0 0 0 0 5 0\n  eth0:100 1 0 0 0 0 0 0 40 1")
  counters = HostCounters(tmp_path)
  assert counters.read()["throttled_ns"] == 0
  machines.write(tmp_path, "/sys/fs/cgroup/cpu.stat", "nr_throttled 4\nthrottled_usec 4500")
  machines.write(tmp_path, "/proc/stat", "cpu  10 0 5 100 1 0 0 9 0 0\ncpu0 1 2 3")
  machines.write(tmp_path, "/proc/net/dev",
                 f"{header}    lo: 6 0 0 0 0 0 0 0 5 0\n  eth0:175 1 0 0 0 0 0 0 90 1")
  values = counters.read()
  assert values["throttled_ns"] == 3_000_000
  assert (values["nic_rx_bytes"], values["nic_tx_bytes"], values["loopback_bytes"]) == (75, 50, 1)
  assert values["steal_ns"] == 2 * counters._tick_ns
  tree = Tree(tmp_path)
  assert host.chain(tree, "cpu")[0] == 2


def test_which_interfaces_count(tmp_path):
  machines.dgx(tmp_path)
  tree = Tree(tmp_path)
  assert find_interfaces(tree) == (("eno1", *(f"ib{i}" for i in range(8))), ())
  for i in range(8):
    machines.write(tmp_path, f"/sys/class/infiniband/mlx5_{i}/ports/1/counters/port_rcv_data", 0)
    machines.write(tmp_path, f"/sys/class/infiniband/mlx5_{i}/ports/1/counters/port_xmit_data", 0)
  names, ports = find_interfaces(tree)
  assert names == ("eno1",) and len(ports) == 8, ("InfiniBand's ports count their interfaces' "
                                                  "bytes already")
  machines.write(tmp_path, "/sys/class/infiniband/mlx5_3/ports/1/link_layer", "Ethernet")
  assert find_interfaces(tree)[0] == ("eno1", "ib3")
  counters = HostCounters(tmp_path)
  counters.read()
  machines.write(tmp_path, "/sys/class/infiniband/mlx5_5/ports/1/counters/port_rcv_data", 1000)
  values = counters.read()
  assert (values["nic_rx_bytes"], values["nic_tx_bytes"]) == (4000, 0), "counted in words"


class Counting:
  def __init__(self):
    self.readings, self.began = 0, threading.Event()

  def read(self):
    self.readings += 1
    self.began.set()
    return {"retransmits": self.readings, "nic_rx_bytes": None if self.readings == 1 else 7}


def test_samples_become_columns_and_the_last_one_is_taken_at_the_end():
  counters = Counting()
  sampler = HostSampler(2, 1, 3600.0, make=lambda: counters)
  sampler.start()
  # A thread that the end comes before takes one sample alone.
  assert counters.began.wait(60)
  sampler.stop(60)
  assert not sampler._thread.is_alive()
  assert sampler.take(force=False) == {}, "too soon"
  columns = sampler.take(force=True)
  assert columns["retransmits"].tolist() == [1, 2] and columns["nic_rx_bytes"].tolist() == [None, 7]
  assert columns["process"].tolist() == [2, 2] and columns["attempt"].tolist() == [1, 1]
  assert columns["gpu_power_w"].tolist() == [None, None] and sampler.take(force=True) == {}


def test_a_reading_that_hangs_does_not_hold_the_end_up():
  release = threading.Event()
  sampler = HostSampler(0, 0, make=lambda: types.SimpleNamespace(read=release.wait))
  sampler.start()
  sampler.stop(0.05)
  assert sampler._thread.is_alive() and sampler.take(force=True) == {}
  release.set()
  sampler._thread.join(300)


def test_opting_out(tmp_path):
  with Recorder(tmp_path, fake.FakePaced(), hosts=False) as recorder:
    assert not [t for t in threading.enumerate() if t.name == "jaxpace-hosts"]
    train(recorder, 5)
  assert not (tmp_path / "hosts").exists()
  with pytest.raises(ValueError, match="hosts=-1"):
    Recorder(tmp_path, fake.FakePaced(), hosts=-1)


def test_trouble_is_a_quiet_line_and_recording_goes_on(tmp_path, monkeypatch, caplog):
  def broken(*_, **__):
    raise OSError(5, "Input/output error")
  caplog.set_level("INFO", "jaxpace")
  monkeypatch.setattr(HostCounters, "read", broken)
  monkeypatch.setattr(describe, "read_locality", broken)
  real = rundir.write_json
  monkeypatch.setattr(describe.rundir, "write_json",
                      lambda path, *a, **k: broken() if path.parent.name == "locality"
                      else real(path, *a, **k))
  with Recorder(tmp_path, fake.FakePaced()) as recorder:
    train(recorder, 20)
  assert_complete(tmp_path, range(20))
  assert table(tmp_path, "hosts") == [] and not (tmp_path / "locality").exists()
  assert [r.levelname for r in caplog.records] == ["INFO"] * 3, caplog.text
  assert "counters are no longer sampled: OSError" in caplog.text


def test_samples_and_where_it_ran_are_read_back(tmp_path, monkeypatch):
  threads, sampled, read = set(threading.enumerate()), threading.Event(), HostCounters.read

  def noted(counters):
    values = read(counters)
    sampled.set()
    return values
  monkeypatch.setattr(HostCounters, "read", noted)
  for attempt in range(2):
    sampled.clear()
    with Recorder(tmp_path, fake.FakePaced(), resume=attempt > 0, hosts=0.05) as recorder:
      train(recorder, 5)
      left, right = connected()
      assert sampled.wait(60)  # counters are from 0 at the first sample on
      with left, right:
        send(left, right, 1 << 20)
  assert set(threading.enumerate()) <= threads
  (place,), problems = job.read_places(tmp_path, recorder.run)
  assert len(place.devices) == jax.local_device_count() and place.cpu.online
  assert place.devices[0].platform == "cpu"
  samples = read_host_samples(tmp_path, recorder.run, problems)
  rows = table(tmp_path, "hosts")
  assert problems == [] and len(samples.time_ns) == len(rows) > 3
  assert sorted(zip(samples.attempt.tolist(), samples.time_ns.tolist(), strict=True)) == sorted(
      (r["attempt"], r["time_ns"]) for r in rows)
  assert np.isnan(samples.columns["gpu_power_w"]).all()
  last = {r["attempt"]: r["loopback_bytes"] for r in sorted(rows, key=lambda r: r["time_ns"])}
  sent = samples.columns["loopback_bytes"]
  # Counters start anew with each attempt.
  assert {a: sent[samples.attempt == a].max() for a in last} == last
  assert min(last.values()) >= 1 << 20
  assert len(samples.of(0).time_ns) == len(rows) and len(samples.of(1).time_ns) == 0


def test_unreadable_samples_are_named_and_left_out(tmp_path):
  assert read_host_samples(tmp_path, None, []) is None
  names = [table_reader.Part("r", process, 0, 0).file_name for process in range(3)]
  columns = {"time_ns": np.array([5, 3]), "process": np.array([0, 0]),
             "retransmits": np.array([2, 1])}
  (tmp_path / "hosts").mkdir()
  pq.write_table(pa.table(columns), tmp_path / "hosts" / names[0])
  (tmp_path / "hosts" / names[1]).write_text("torn")
  pq.write_table(pa.table({**columns, "retransmits": ["many", "few"]}),
                 tmp_path / "hosts" / names[2])
  problems = []
  samples = read_host_samples(tmp_path, "r", problems)
  assert len(problems) == 1 and "hosts/" in problems[0] and "torn" in problems[0]
  assert samples.time_ns.tolist() == [3, 3, 5, 5] and np.nansum(samples.columns["retransmits"]) == 3
  assert np.isnan(samples.columns["retransmits"]).sum() == 2
