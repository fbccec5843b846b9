"""Installs the package the way a user does, through pip's isolated build, and looks at what came
out."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
OFFLINE = ("No matching distribution found", "Could not find a version", "NewConnectionError",
           "Read timed out")
PROGRAM = (
    "import jaxpace, jax\n"
    "from jaxpace.observation.clocks import resolve_clock, words\n"
    "clock = resolve_clock()\n"
    "stamp = jax.jit(clock.timestamp)(words.zero())\n"
    "assert int(words.to_ns(stamp)) > 0\n"
    "print(jaxpace.__file__, clock.name, clock.notice, sep='|')\n")


def install(folder: pathlib.Path, *options: str, **environment: str) -> pathlib.Path:
  """Installs a copy of the source into `folder`/site and returns that; skips where there is no
  package index."""
  source, site = folder / "source", folder / "site"
  source.mkdir()
  for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md"):
    if (ROOT / name).exists():
      shutil.copy(ROOT / name, source)
  for name in ("jaxpace", "experiments", "configs", "tests"):
    shutil.copytree(ROOT / name, source / name,
                    ignore=shutil.ignore_patterns("*.so", "__pycache__"))
  pip = [sys.executable, "-m", "pip", "install", "--no-deps"]
  command = [*pip, *options, "--target", str(site), str(source)]
  result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True,
                          text=True, timeout=600)
  log = result.stdout + result.stderr
  if result.returncode and any(text in log for text in OFFLINE):
    pytest.skip(
        f"the package index can't be reached for the build's own requirements: {log[-300:]}")
  assert result.returncode == 0, log
  return site


def clock_of(site: pathlib.Path) -> tuple[str, str]:
  """Takes a timestamp with the package in `site`; returns the clock's name and notice."""
  environment = {**os.environ, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
  result = subprocess.run(
      [sys.executable, "-c", PROGRAM], env=environment, cwd=site, capture_output=True, text=True,
      timeout=600)
  assert result.returncode == 0, result.stderr
  file, name, notice = result.stdout.strip().split("|")
  assert pathlib.Path(file).is_relative_to(site), "the installed package is the one that ran"
  return name, notice


@pytest.mark.long
@pytest.mark.skipif(not any(shutil.which(name) for name in ("c++", "g++", "clang++")),
                    reason="this machine has no C++ compiler; the next test covers that case")
def test_an_isolated_install_has_the_native_clock_and_nothing_else_at_top_level(tmp_path):
  site = install(tmp_path)
  assert clock_of(site) == ("native", "")
  assert {path.name for path in site.iterdir()} <= {"jaxpace", "jaxpace-0.1.0.dist-info", "bin"}
  assert (site / "bin" / "jaxpace").exists()
  assert (site / "jaxpace" / "py.typed").exists()


@pytest.mark.long
def test_an_install_without_a_compiler_works_and_says_which_clock_it_has(tmp_path):
  # isolation would take half a minute more
  site = install(tmp_path, "--no-build-isolation", CC="false", CXX="false")
  name, notice = clock_of(site)
  assert name == "callback"
  assert "not part of this installation" in notice
