"""Which clock is chosen, and what is said when it is not the best one."""

import shutil
import subprocess
import sys

import pytest

from jaxpace.observation.clocks import CLOCKS, ClockError, resolve_clock
from jaxpace.observation.clocks.native import library

built = pytest.mark.skipif(library.built_as("clock") is None,
                           reason="this environment was installed without a C++ compiler")


@pytest.fixture
def fresh():
  """Lets each test find the library anew; handlers already registered stay so."""
  library.unavailable.cache_clear()
  yield
  library.unavailable.cache_clear()


@pytest.fixture
def no_library(fresh, monkeypatch):
  monkeypatch.setattr(library, "built_as", lambda name: None)


@built
def test_auto_takes_the_native_clock_where_it_is_built():
  assert resolve_clock("auto", "cpu").name == "native"
  assert resolve_clock("auto", "cpu").notice == "" == resolve_clock().notice


def test_auto_falls_back_to_callbacks_and_says_why(no_library):
  clock = resolve_clock("auto", "cpu")
  assert clock.name == "callback"
  assert "not part of this installation" in clock.notice and "C++ compiler" in clock.notice
  assert clock.notice == resolve_clock().notice


def test_asking_for_the_native_clock_where_there_is_none_names_the_fix(no_library):
  with pytest.raises(ClockError, match=r"Install a C\+\+ compiler .* Or pass clock='auto'"):
    resolve_clock("native", "cpu")


def test_where_no_clock_is_made_for_the_devices_callbacks_are_taken_and_why():
  clock = resolve_clock("auto", "tpu")
  assert clock.name == "callback"
  assert "native clock runs on cpu only, and the step runs on tpu" in clock.notice


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_native_clock_is_for_cpus(platform):
  with pytest.raises(ClockError, match="runs on cpu only"):
    resolve_clock("native", platform)


def test_an_unknown_clock_lists_the_known_ones():
  assert CLOCKS == ("auto", "native", "stream", "callback")
  with pytest.raises(ValueError,
                     match="Unknown clock 'atomic'. Use one of: auto, native, stream, callback"):
    resolve_clock("atomic")


@pytest.mark.parametrize("built, running, fine", [
    ((0, 3), (0, 3), True),
    ((0, 1), (0, 3), True),  # older headers on a newer jaxlib work
    ((0, 4), (0, 3), False),  # newer ones would break the CPU backend
    ((1, 0), (0, 3), False),
    ((0, 3), (1, 3), False),
    ((0, 3), None, False),
])
def test_only_handlers_built_on_headers_no_newer_than_jaxlib_s_are_compatible(built, running, fine):
  assert (library.incompatibility(built, running) == "") == fine


@built
def test_a_library_built_on_newer_headers_is_never_registered(fresh, monkeypatch):

  def forbidden(*_, **__):
    raise AssertionError("registered")

  monkeypatch.setattr(library.jax.ffi, "register_ffi_target", forbidden)
  monkeypatch.setattr(library, "running_api", lambda: (0, 0))
  clock = resolve_clock("auto", "cpu")
  assert clock.name == "callback"
  assert ("was built on XLA FFI 0." in clock.notice and "has 0.0" in clock.notice
          and "Reinstall" in clock.notice)


@built
def test_a_library_cut_short_at_any_length_is_a_reason_and_the_process_lives(tmp_path):
  """The linker maps what the headers speak of: the first touch beyond the end of the file was a
  SIGBUS."""
  program = """
import pathlib, sys
from jaxpace.observation.clocks import resolve_clock
from jaxpace.observation.clocks.native import library
whole = library.built_as("clock").read_bytes()
def try_out(data, fine=False):
  target = pathlib.Path(sys.argv[1]) / f"clock{try_out.number}.so"
  try_out.number += 1
  target.write_bytes(data)
  library.built_as = lambda name: target
  library.unavailable.cache_clear()
  assert (resolve_clock().notice == "") == fine, (len(data), resolve_clock().notice)
  assert fine or (resolve_clock("auto", "cpu").name == "callback" and "einstall" in resolve_clock().notice)
  target.unlink()
try_out.number = 0
steps = [*range(0, 200, 7), *range(200, len(whole), 2048), len(whole) - 100, len(whole) - 1]
for length in steps:
  try_out(whole[:length])
for length in steps:
  if 64 < length < len(whole) - 64:
    try_out(whole[:length] + bytes(len(whole) - length))  # its room was taken, the rest never came
try_out(whole, fine=True)
print("lives", len(steps))
"""  # noqa: E501
  done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True,
                        text=True, timeout=600)
  assert (done.returncode == 0
          and done.stdout.startswith("lives")), (done.returncode, done.stderr[-2000:])


@pytest.mark.parametrize("handlers, words", [
    ("", "jaxpace_handlers"),  # older than that function
    (f"int jaxpace_handlers(void) {{ return {library.HANDLERS - 1}; }}",
     "left over from another version of jaxpace"),
    (f"int jaxpace_handlers(void) {{ return {library.HANDLERS + 1}; }}",
     "left over from another version of jaxpace"),
    # and yet without its handlers
    (f"int jaxpace_handlers(void) {{ return {library.HANDLERS}; }}", "jaxpace_stamp"),
], ids=["none", "older", "newer", "empty"])
def test_a_library_of_another_version_of_jaxpace_is_a_reason_not_a_crash(
    fresh, monkeypatch, tmp_path, handlers, words):
  compiler = shutil.which("cc") or shutil.which("gcc")
  if compiler is None:
    pytest.skip("needs a C compiler to make such a library")
  source = tmp_path / "clock.c"
  source.write_text(
      "int jaxpace_ffi_major(void) { return 0; }\nint jaxpace_ffi_minor(void) { return 0; }\n"
      + handlers)
  subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "clock.so")],
                 check=True)
  monkeypatch.setattr(library, "built_as", lambda name: tmp_path / "clock.so")
  assert resolve_clock("auto", "cpu").name == "callback"
  assert words in resolve_clock().notice and "reinstall jaxpace" in resolve_clock().notice


def test_the_running_version_is_read_from_jaxlib_s_own_headers(tmp_path, monkeypatch):
  major, minor = library.running_api()
  assert major == 0 and minor >= 3  # jaxlib 0.10.0 has 0.3
  header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
  monkeypatch.setattr(library.jax.ffi, "include_dir", lambda: str(tmp_path))
  assert library.running_api() is None
  header.parent.mkdir(parents=True)
  header.write_text("#define XLA_FFI_API_MAJOR 2\n#define XLA_FFI_API_MINOR 71\n")
  assert library.running_api() == (2, 71)
  header.write_text("nothing of the kind")
  assert library.running_api() is None


def test_importing_touches_no_device_and_registers_nothing():
  program = (
      "import jax\n"
      "def forbidden(*a, **k): raise AssertionError('at import')\n"
      "jax.ffi.register_ffi_target = forbidden\n"
      "jax.devices = forbidden\n"
      "import jaxpace.observation.clocks\n"
      "from jaxpace.observation.clocks.native import library\n"
      "assert library.unavailable.cache_info().currsize == 0\n")
  subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
