"""What commands import: help waits for no library, and a small run is reported on in less time than
JAX takes to be imported."""

import subprocess
import sys

from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob

_SLOW = {"jax", "numpy", "pyarrow", "rich"}
_NOT_NEEDED = {"jax", "jaxlib", "scipy", "optax", "absl", "matplotlib", "pandas",
               "pyarrow.compute", "pyarrow.dataset", "numpy.random"}


def test_commands_import_no_library_that_they_do_not_use(tmp_path):
  run = tmp_path / "run"
  synthetic_runs.write(run, SyntheticJob(ranks=2, steps=30, collectives=2, host_columns=True))
  said = subprocess.run(
      [sys.executable, "-c", f"""
import sys
from jaxpace.cli.main import main
for argv in (["--help"], ["run", "--help"], ["replay", "--help"],
             ["control", {str(run)!r}, "--off"]):
  assert main(argv) == 0
  assert not {_SLOW!r} & set(sys.modules), argv
assert main(["report", {str(run)!r}]) == 0
assert main(["watch", {str(run)!r}, "--once"]) == 0
print(*sys.modules, sep=",", file=sys.stderr, flush=True)
assert main(["doctor"]) == 0 and "jax" not in sys.modules
"""], capture_output=True, text=True, check=True)
  loaded = set(said.stderr.splitlines()[-1].split(","))
  assert {"numpy", "pyarrow.parquet", "rich"} <= loaded
  assert not loaded & _NOT_NEEDED
