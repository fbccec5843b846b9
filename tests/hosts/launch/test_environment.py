"""What a worker is told about its place, devices and threads; the coordinator's port."""

import shlex
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.hosts.launch.environment import (
    count_gpus,
    reserve_port,
    threads_for,
    with_device_count,
    worker_environment,
)

FLAG = "--xla_force_host_platform_device_count"


def env_of(base=None, **options):
  settings = {"index": 1, "nproc": 4, "port": 1234, "launch_id": "abc", **options}
  return worker_environment(base or {}, **settings)


@given(st.lists(st.from_regex(r"--xla_[a-z_]{1,12}(=[a-z0-9 ]{1,6})?", fullmatch=True)),
       st.integers(1, 64))
def test_the_device_count_is_replaced_and_every_other_flag_kept(flags, devices):
  others = [f for f in flags if f.partition("=")[0] != FLAG]
  given_flags = " ".join(map(shlex.quote, [*others[:1], f"{FLAG}=3", *others[1:]]))
  assert shlex.split(with_device_count(given_flags, devices)) == [*others, f"{FLAG}={devices}"]


def test_place_and_loopback_only():
  base = {"PATH": "/bin", "JAX_COORDINATOR_PORT": "9", "JAX_PROCESS_ID": "7"}
  env = env_of(base)
  assert env["JAX_COORDINATOR_ADDRESS"] == env["JAX_COORDINATOR_BIND_ADDRESS"] == "127.0.0.1:1234"
  assert (env["JAX_NUM_PROCESSES"], env["JAX_PROCESS_ID"]) == ("4", "1")
  assert (env["PATH"] == "/bin" and env["JAX_COORDINATOR_PORT"] == "1234"
          and env["PYTHONUNBUFFERED"] == "1")
  assert "XLA_FLAGS" not in env and "PJRT_NPROC" not in env
  assert base == {"PATH": "/bin", "JAX_COORDINATOR_PORT": "9", "JAX_PROCESS_ID": "7"}  # untouched


def test_slurm_variables_lead_jax_to_the_same_coordinator():
  env = env_of()
  assert (env["SLURM_STEP_NODELIST"], env["JAX_COORDINATOR_PORT"]) == ("127.0.0.1", "1234")
  assert (env["SLURM_NTASKS"], env["SLURM_PROCID"], env["SLURM_LOCALID"]) == ("4", "1", "1")
  # JAX would give each of them one GPU, and there are too few.
  assert "SLURM_PROCID" not in env_of(gpus=2, devices=2)
  assert "JAX_COORDINATOR_PORT" not in env_of(gpus=2, devices=2)
  assert "SLURM_PROCID" in env_of({"JAX_PLATFORMS": "cpu"}, gpus=2)


def test_processes_share_gpus_that_are_fewer_as_hosts_of_their_own_to_nccl():
  made = [env_of({"NCCL_SOCKET_IFNAME": "eth1"}, index=index, gpus=2) for index in range(4)]
  assert [env["JAX_LOCAL_DEVICE_IDS"] for env in made] == ["0", "1", "0", "1"]
  assert len({env["NCCL_HOSTID"] for env in made}) == 4
  assert {env["NCCL_SOCKET_IFNAME"] for env in made} == {"eth1"}, "what the user says stays"
  assert {env["XLA_PYTHON_CLIENT_PREALLOCATE"] for env in made} == {"false"}
  assert "NCCL_HOSTID" not in env_of(gpus=4)


@pytest.mark.parametrize(("options", "base", "ids"), [
    ({"gpus": 4}, {}, "1"), ({"gpus": 8, "devices": 2}, {}, "2,3"),
    ({"gpus": 7, "devices": 2}, {}, None), ({"gpus": 0}, {}, None),  # too few: JAX's own choice
    ({"gpus": 4}, {"JAX_PLATFORMS": "cpu"}, None),
    ({"gpus": 4}, {"JAX_LOCAL_DEVICE_IDS": "0"}, "0")])
def test_gpus_are_shared_out_where_there_are_enough(options, base, ids):
  assert env_of(base, **options).get("JAX_LOCAL_DEVICE_IDS") == ids


def test_gpus_are_counted_from_the_device_files_or_what_is_visible(tmp_path):
  for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm"):
    (tmp_path / name).touch()
  assert count_gpus({}, str(tmp_path)) == 3
  assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,2"}, str(tmp_path)) == 2
  assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, str(tmp_path)) == 0
  assert count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, str(tmp_path)) == 0
  assert count_gpus({}, str(tmp_path / "nothing")) == 0


@pytest.mark.parametrize(("nproc", "devices", "cores", "threads"), [
    (1, 1, 8, None), (4, 1, 2, None), (4, 2, 2, None), (2, 1, 8, 4), (3, 1, 8, 2), (8, 1, 8, 2),
    (8, 4, 16, 5)])
def test_cores_are_divided_but_devices_and_a_callback_have_a_thread_each(
    nproc, devices, cores, threads):
  assert threads_for(nproc, devices, cores) == threads


def test_the_users_own_thread_count_wins():
  assert env_of(threads=2)["PJRT_NPROC"] == "2"
  assert "PJRT_NPROC" not in env_of({"NPROC": "5"}, threads=2)
  assert env_of({"PJRT_NPROC": "5"}, threads=2)["PJRT_NPROC"] == "5"


def test_a_reserved_port_is_given_to_nobody_else_but_can_be_listened_on():
  with reserve_port() as held:
    place = held.getsockname()
    with socket.socket() as stranger, pytest.raises(OSError):
      stranger.bind(place)
    with pytest.raises(OSError):
      reserve_port(place[1])
    with socket.socket() as server:  # as gRPC binds
      server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
      server.bind(place)
      server.listen()
      with socket.create_connection(place, timeout=300):
        server.accept()[0].close()
