"""The absl switches: defined on call only, checked, and read back as one small value."""

import dataclasses
import math
import pathlib
import subprocess
import sys

import pytest
from absl import flags as absl_flags

import jaxpace.flags
from jaxpace.flags import Switches

ROOT = pathlib.Path(__file__).resolve().parents[1]


def parsed(*arguments, defaults=Switches()):
  holder = absl_flags.FlagValues()
  jaxpace.flags.define(holder, defaults)
  assert holder(["program", *arguments]) == ["program"]
  return jaxpace.flags.values(holder)


def test_defaults():
  assert parsed() == Switches(enabled=True, directory=None, clock="auto", threshold=0.05, max_delay=0.02, share="auto")
  mine = Switches(False, "runs/a", "native", 0.1, 0.0, True)
  assert parsed(defaults=mine) == mine
  assert parsed(defaults=Switches(share=False)).share is False


def test_every_flag_is_read():
  assert parsed("--nojaxpace", "--jaxpace_dir=runs/b", "--jaxpace_clock=callback", "--jaxpace_threshold=0.5",
                "--jaxpace_max_delay=1.5", "--jaxpace_share=off") == Switches(
                    False, "runs/b", "callback", 0.5, 1.5, False)
  assert parsed("--jaxpace_share=on").share is True
  with pytest.raises(dataclasses.FrozenInstanceError):
    parsed().clock = "native"


@pytest.mark.parametrize("argument", [
    "--jaxpace_threshold=-0.01", "--jaxpace_threshold=1.01", "--jaxpace_threshold=nan", "--jaxpace_threshold=much",
    "--jaxpace_max_delay=-1", "--jaxpace_max_delay=inf", "--jaxpace_max_delay=nan",
    "--jaxpace_clock=sundial", "--jaxpace_share=maybe", "--jaxpace_dir= "])
def test_values_out_of_range_are_absl_errors_that_name_the_flag(argument):
  with pytest.raises(absl_flags.IllegalFlagValueError, match=argument.partition("=")[0]):
    parsed(argument)


@pytest.mark.parametrize("argument", ["--jaxpace_threshold=0", "--jaxpace_threshold=1", "--jaxpace_max_delay=0"])
def test_bounds_are_inside(argument):
  assert math.isfinite(parsed(argument).threshold)


def test_defining_twice_is_once_and_forgetting_it_is_explained():
  holder = absl_flags.FlagValues()
  with pytest.raises(RuntimeError, match=r"jaxpace\.flags\.define\(\)"):
    jaxpace.flags.values(holder)
  jaxpace.flags.define(holder)
  jaxpace.flags.define(holder)
  with pytest.raises(absl_flags.UnparsedFlagAccessError):
    jaxpace.flags.values(holder)


def test_nothing_is_defined_at_import_and_jax_is_not_imported():
  subprocess.run([sys.executable, "-c", """
import sys
import jaxpace.flags
from absl import flags
assert not [name for name in flags.FLAGS if name.startswith('jaxpace')]
assert 'jax' not in sys.modules
"""], cwd=ROOT, check=True)


def test_a_script_shows_them_in_its_help_and_a_slip_is_a_sentence(tmp_path):
  script = tmp_path / "train.py"
  script.write_text("from absl import app\nimport jaxpace.flags\njaxpace.flags.define()\n"
                    "app.run(lambda argv: print(jaxpace.flags.values()))\n")

  def run(*arguments):
    return subprocess.run([sys.executable, str(script), *arguments], cwd=ROOT, env={"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, check=False)

  for name in ("jaxpace", "jaxpace_dir", "jaxpace_clock", "jaxpace_threshold", "jaxpace_max_delay", "jaxpace_share"):
    assert f"--{name}" in run("--help").stdout.replace("[no]", "")
  assert "threshold=0.25" in run("--jaxpace_threshold=0.25").stdout
  slip = run("--jaxpace_threshold=7")
  assert slip.returncode == 1 and "FATAL Flags parsing error" in slip.stderr and "Traceback" not in slip.stderr
