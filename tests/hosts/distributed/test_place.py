"""A process's place as environment variables tell it."""

import atexit
import logging
import os
import re
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.hosts.distributed import joining
from jaxpace.hosts.distributed.client import missing_at_barrier
from jaxpace.hosts.distributed.joining import (
  Place,
  address_of,
  better_address,
  is_own,
  place_from_environment,
  refuse_to_split,
)

A, N, IDX, POD = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID",
                  "JOB_COMPLETION_INDEX")
OMPI5 = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5",
         "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PMIX_NAMESPACE": "prterun-host-77@1"}


def test_nothing_given_is_left_to_jax():
  assert place_from_environment({}) is None
  assert place_from_environment({A: "host:1"}) is None  # JAX adds what it detects
  assert place_from_environment({"SLURM_STEP_NODELIST": "n[1-2]", "PMI_SIZE": "4",
                                 "PMI_RANK": "1"}) is None
  assert place_from_environment({**OMPI5, "OMPI_MCA_orte_hnp_uri": "0.0;tcp://10.0.0.1:1"}) is None
  assert place_from_environment({**OMPI5, "OMPI_COMM_WORLD_SIZE": "1"}) is None
  assert place_from_environment({POD: "0"}) is None


@given(st.integers(1, 999).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))),
       st.integers(1, 65535))
def test_variables_give_the_place(numbers, port):
  index, count = numbers
  env = {A: f"node:{port}", N: str(count), IDX: str(index)}
  assert place_from_environment(env) == Place(index, count, "environment", f"node:{port}")
  pod = {A: f"node:{port}", N: str(count), POD: str(index)}
  assert place_from_environment(pod) == Place(index, count, "environment", f"node:{port}")
  assert (place_from_environment({**env, **OMPI5, "SLURM_PROCID": "3"})
          == place_from_environment(env))


@pytest.mark.parametrize(("env", "words"), [
    ({N: "2"}, f"{A} and {IDX}"), ({IDX: "0"}, f"{A} and {N}"), ({N: "2", IDX: "0"}, f"not {A}"),
    ({A: "h:1", N: "2"}, f"not {IDX}"), ({A: "h:1", N: "two", IDX: "0"}, "whole numbers"),
    ({A: "h:1", N: "2", IDX: "2"}, "less than"), ({A: "h:1", N: "2", IDX: "-1"}, "at least 0"),
    ({A: "h", N: "2", IDX: "0"}, "host:port"), ({A: "h:99999", N: "2", IDX: "0"}, "host:port"),
    ({**OMPI5, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "mpirun -x")])
def test_contradictions_name_the_variable(env, words):
  with pytest.raises(RuntimeError, match=re.escape(words)):
    place_from_environment(env)


def test_open_mpi_5_on_one_host_agrees_on_a_port_of_its_own():
  places = [place_from_environment({**OMPI5, "OMPI_COMM_WORLD_RANK": str(i)}) for i in range(8)]
  assert [p.index for p in places] == list(range(8)) and {p.count for p in places} == {8}
  assert len({p.coordinator for p in places}) == 1
  other = place_from_environment({**OMPI5, "PMIX_NAMESPACE": "prterun-host-78@1"})
  assert other.coordinator != places[0].coordinator
  assert all(61440 <= int(p.coordinator.rpartition(":")[2]) <= 65535 for p in (*places, other))


# As MPICH starts processes: one itself and one by way of a shell; each says its number, and stays
# what it is: in the moment of an `exec` a process has no variables.
MPICH = """
PMI_RANK=0 sh -c 'echo $$; sleep 60; :' &
PMI_RANK=1 sh -c "sh -c 'echo \\$\\$; sleep 60; :'; exit" &
wait
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="there is no /proc")
def test_mpich_gives_jobs_no_names_and_each_has_a_port_of_its_own(monkeypatch):
  launchers = [subprocess.Popen(["sh", "-c", MPICH], stdout=subprocess.PIPE, text=True,
                                start_new_session=True) for _ in range(2)]
  env = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}
  try:
    names, ports = [], []
    for launcher in launchers:
      for pid in [int(launcher.stdout.readline()) for _ in range(2)]:
        monkeypatch.setattr(joining.os, "getppid", lambda pid=pid: pid)
        names.append(joining._launcher("PMI_RANK"))
        ports.append(place_from_environment(env).coordinator)
  finally:
    for launcher in launchers:
      os.killpg(launcher.pid, signal.SIGKILL)
      launcher.communicate()
  assert names == [launcher.pid for launcher in launchers for _ in range(2)]
  assert ports[0] == ports[1] and ports[2] == ports[3]


def test_mpich_on_several_hosts_with_an_address():
  env = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2", A: "node1:5000"}
  assert place_from_environment(env) == Place(3, 4, "mpi", "node1:5000")


def test_a_pod_that_knows_nothing_of_the_others_is_refused():
  with pytest.raises(RuntimeError, match=r"indexed Kubernetes Job"):
    refuse_to_split({"KUBERNETES_SERVICE_HOST": "10.0.0.1", POD: "1"})
  refuse_to_split({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})  # a single pod, a notebook


def test_a_batch_script_without_srun_is_warned_of(caplog):
  with caplog.at_level(logging.WARNING, "jaxpace"):
    refuse_to_split({"SLURM_NTASKS": "1"})
    assert not caplog.records
    refuse_to_split({"SLURM_NTASKS": "8"})
  assert "srun python" in caplog.text


def test_missing_processes_are_read_from_the_barriers_message():
  message = ("DEADLINE_EXCEEDED: Barrier timed out. Id: b1::0. This usually happens because a task "
             "triggered the barrier too early.\n# of tasks that reached the barrier: 2/12.\nThe "
             "first task at the barrier: 0. Some timed out task names:\n1\n11\n\n\nRPC: "
             "/xla.coordination.CoordinationService/Barrier [error='']")
  assert missing_at_barrier(message) == [1, 11]
  assert missing_at_barrier("DEADLINE_EXCEEDED: something else 3") == []


def test_gloo_moves_only_where_its_own_address_does_not_do():
  assert better_address("no-such-host.invalid", "127.0.0.1:5") == "127.0.0.1"
  assert better_address("localhost", "127.0.0.1:5") is None
  assert address_of("no-such-host.invalid") is None
  assert is_own("127.0.0.1") and not is_own("192.0.2.77")  # TEST-NET-1, never anyone's


def test_gloo_moves_off_loopback_when_the_coordinator_is_on_the_network(monkeypatch):
  monkeypatch.setattr("jaxpace.hosts.distributed.joining.address_towards", lambda host: "10.1.2.3")
  # Debian's 127.0.1.1, which peers cannot reach
  assert better_address("localhost", "10.1.2.9:5") == "10.1.2.3"


def test_a_second_interrupt_while_the_traceback_is_printed_is_no_error(monkeypatch):
  def interrupted(kind, error, trace):
    raise KeyboardInterrupt

  monkeypatch.setattr(sys, "excepthook", interrupted)
  monkeypatch.setattr(atexit, "register", lambda function: function)
  joining._end_when_failed.__wrapped__(0)
  assert sys.excepthook is not interrupted
  sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
