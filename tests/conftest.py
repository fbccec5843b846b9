"""Set-up of every test: eight CPU devices in this process, and strict dtype promotion."""

import os
import signal

# Read once, when jax first touches its devices: so before anything imports jax.
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")

# No deadline: an example that compiles takes a thousand times as long as the next. Derandomized: CI repeats itself.
hypothesis.settings.register_profile("jaxpace", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("jaxpace")

# Where the tests run in the background of a shell, it has SIGINT ignored, `nohup` has SIGHUP, and their children would
# ignore them too. A handler of Python's ends at exec, so children have the default.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
  signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(autouse=True)
def _width_of_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
  """Commands fold their text to the width a terminal has; the tests' workers may have inherited one."""
  monkeypatch.delenv("COLUMNS", raising=False)
