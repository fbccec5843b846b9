"""Set-up of every test: eight CPU devices in this process, and strict dtype promotion."""

import ctypes
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator

# Read once, when jax first touches its devices: so before anything imports jax.
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from tests import quick  # noqa: E402

_USUAL = gc.get_threshold()
# What is imported and collected stays: nothing to look for until the first test.
gc.disable()

# Run by their names, in processes of their own: they would begin to when imported in search of
# doctests.
collect_ignore_glob = ["*_worker.py"]

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Most tests run a program a few times: LLVM's passes take longer than they save. Tests of what they
# can change, the rounding above all, are marked `optimized` and compile as a user's job does; so
# does whatever tests start.
jax.config.update("jax_disable_most_optimizations", True)
MOST = 950 * 2**20
"""Bytes resident beyond which a file of tests gives back, when it is done, what it has compiled."""

# No deadline, and no limit to how long an example takes to draw: a busy machine takes any time.
# Derandomized: CI repeats itself.
hypothesis.settings.register_profile("jaxpace", deadline=None, derandomize=True, database=None,
                                     suppress_health_check=[hypothesis.HealthCheck.too_slow],
                                     max_examples=quick.examples(100))
hypothesis.settings.load_profile("jaxpace")

# Where the tests run in the background of a shell, it has SIGINT ignored, `nohup` has SIGHUP, and
# their children would ignore them too. A handler of Python's ends at exec, so children have the
# default.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
  signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(autouse=True, scope="session")
def _quickly() -> Iterator[None]:
  """Compiles quickly; what was imported and collected stays, so no collection of garbage need look
  at it again.

  Tracing makes many objects that are gone at once: ten times as many as usual before garbage is
  looked for.
  """
  quick.install()
  gc.collect()
  gc.freeze()
  gc.enable()
  gc.set_threshold(10_000, 20, 20)
  yield
  # Extensions report what Python does not collect at its end as leaked: programs that are kept, and
  # modules that are frozen.
  gc.unfreeze()
  quick.forget()


@pytest.fixture
def usual_collector() -> Iterator[None]:
  """Garbage is looked for as often as where nobody chose."""
  ours = gc.get_threshold()
  gc.set_threshold(*_USUAL)
  yield
  gc.set_threshold(*ours)


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
  """What has no thread start any more, as Python 3.12 once a program is over."""
  def start(_: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")

  return lambda: monkeypatch.setattr(threading.Thread, "start", start)


@pytest.fixture(autouse=True)
def _width_of_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
  """Commands fold their text to the width a terminal has; the tests' workers may have inherited
  one."""
  monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True, scope="module")
def _compiled_as_marked(request: pytest.FixtureRequest) -> Iterator[None]:
  """Optimizes where the file is marked so, and keeps what is compiled for one file from filling the
  worker."""
  marker = request.node.get_closest_marker("optimized")
  optimized = marker is not None and (not quick.QUICK or "always" in marker.kwargs)
  if optimized:
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", True)
  if _resident() > MOST:
    quick.forget()
    gc.collect()
    _give_back()


def _resident() -> int:
  """Bytes of this process in memory; 0 where the system doesn't say."""
  try:
    with open("/proc/self/statm") as file:
      return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
  except OSError:
    return 0


def _give_back() -> None:
  """Hands freed memory back to the system, where the C library keeps it otherwise."""
  if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
    trim(0)
