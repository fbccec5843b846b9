"""Set-up of every test: eight CPU devices in this process, and strict dtype promotion."""

import os

# Read once, when jax first touches its devices: so before anything imports jax.
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis  # noqa: E402
import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")

# No deadline: an example that compiles takes a thousand times as long as the next. Derandomized: CI repeats itself.
hypothesis.settings.register_profile("jaxpace", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("jaxpace")
