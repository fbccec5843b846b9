"""The files of docs/examples, run or taken apart: an example that is not run does not exist."""

import os
import subprocess
import sys

import pytest
import yaml

from jaxpace.hosts.distributed.joining import Place, place_from_environment
from tests.multiprocess import jobs
from tests.multiprocess.test_distributed import PSUM, assert_joined

EXAMPLES = jobs.ROOT / "docs" / "examples"

SRUN = """#!{python}
# What srun does for one step of two tasks on this host, with the variables that SLURM 22.05 sets.
import os, subprocess, sys
arguments = sys.argv[1:]
assert arguments.pop(0) == "--kill-on-bad-exit=1"
log = arguments.pop(0).removeprefix("--output=")
step = {{"SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1",
         "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NTASKS": "2"}}
tasks = [subprocess.Popen(arguments, stdout=open(log.replace("%t", str(i)), "w"), stderr=subprocess.STDOUT,
                          env={{**os.environ, **step, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}})
         for i in range(2)]
sys.exit(max(task.wait() for task in tasks))
"""  # noqa: E501


@pytest.mark.long
def test_the_batch_script_gives_every_task_its_place_and_a_log(tmp_path):
  (tmp_path / "bin").mkdir()
  srun = tmp_path / "bin" / "srun"
  srun.write_text(SRUN.format(python=sys.executable))
  srun.chmod(0o755)
  (tmp_path / "job.py").write_text(PSUM + "\nassert sys.argv[1:] == ['--workdir=a b']\n")
  number = str(jobs.free_high_port() - 61440 + 4096)
  done = subprocess.run(
      ["bash", str(EXAMPLES / "train.sbatch"), "job.py", "--workdir=a b"], cwd=tmp_path, text=True,
      capture_output=True, check=False, timeout=300, env=jobs.clean_environment(
          SLURM_JOB_ID=number, SLURM_NTASKS="2", PYTHON=sys.executable,
          PATH=f"{srun.parent}:{os.environ['PATH']}"))
  assert done.returncode == 0, done.stderr
  logs = [(tmp_path / "logs" / number / f"process-{i}.log").read_text() for i in range(2)]
  assert_joined([(0, log) for log in logs], "cluster")


def test_the_batch_script_outside_a_job_says_how_to_start_it(tmp_path):
  done = subprocess.run(["bash", str(EXAMPLES / "train.sbatch"), "job.py"], cwd=tmp_path, text=True,
                        capture_output=True, check=False, env=jobs.clean_environment())
  assert (done.returncode != 0 and "start this with sbatch" in done.stderr
          and not list(tmp_path.iterdir()))


def test_the_manifest_gives_every_pod_its_place():
  service, job = yaml.safe_load_all((EXAMPLES / "job.yaml").read_text())
  name, spec = job["metadata"]["name"], job["spec"]
  pod = spec["template"]["spec"]
  [container] = pod["containers"]
  env = {variable["name"]: variable["value"] for variable in container["env"]}
  # the pod's own name and the service's make the address of pod 0
  assert service["metadata"]["name"] == pod["subdomain"]
  # the label the Job controller puts on its pods
  assert service["spec"]["selector"] == {"job-name": name}
  assert (service["spec"]["clusterIP"] == "None"
          and service["spec"]["publishNotReadyAddresses"] is True)
  port = container["ports"][0]["containerPort"]
  assert env["JAX_COORDINATOR_ADDRESS"] == f"{name}-0.{pod['subdomain']}:{port}"
  assert (service["kind"], job["kind"], spec["completionMode"]) == ("Service", "Job", "Indexed")
  assert spec["completions"] == spec["parallelism"] == int(env["JAX_NUM_PROCESSES"])
  assert (pod["restartPolicy"], spec["backoffLimit"]) == ("Never", 0)
  for index in range(spec["completions"]):
    found = place_from_environment({**env, "KUBERNETES_SERVICE_HOST": "10.0.0.1",
                                    "JOB_COMPLETION_INDEX": str(index)})
    assert found == Place(index, 4, "environment", f"train-0.train:{port}")
