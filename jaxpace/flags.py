"""jaxpace's switches as absl flags, for a script that wants them on its command line.

    import jaxpace.flags

    jaxpace.flags.define()          # beside the script's own DEFINE_... lines

    def main(argv):
      switches = jaxpace.flags.values()
      paced = jaxpace.instrument(train_step, axis_name="data", clock=switches.clock, share=switches.share)

Nothing is defined by importing this module, and it does not import JAX.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from absl import flags

Clock = Literal["auto", "native", "callback"]
Share = Literal["auto"] | bool


@dataclasses.dataclass(frozen=True)
class Switches:
  """What the command line said.

  Attributes:
    enabled: whether to instrument the step at all.
    directory: run directory for the recorder; None records nothing.
    clock: "auto", "native" or "callback", as `jaxpace.instrument` takes it.
    threshold: persistent slack above which pacing begins, as a share of the median step, 0 to 1.
    max_delay: longest delay pacing may add to a step, in seconds.
    share: whether arrivals ride in the gradient all-reduce, as `jaxpace.instrument` takes it: "auto", True or False.
  """

  enabled: bool = True
  directory: str | None = None
  clock: Clock = "auto"
  threshold: float = 0.05
  max_delay: float = 20e-3
  share: Share = "auto"


_SHARES: dict[str, Share] = {"auto": "auto", "on": True, "off": False}


def define(flag_values: flags.FlagValues = flags.FLAGS, defaults: Switches = Switches()) -> None:
  """Defines --jaxpace, --jaxpace_dir, --jaxpace_clock, --jaxpace_threshold, --jaxpace_max_delay and --jaxpace_share.

  They appear in `--help` as the calling module's own. Calling it again for the same `flag_values` does nothing.

  Args:
    flag_values: where to define them.
    defaults: values for flags that are not given.

  Raises:
    absl.flags.DuplicateFlagError: if the script has a flag of one of these names already.
  """
  if "jaxpace_max_delay" in flag_values:  # the last one defined below
    return
  flags.disclaim_key_flags()  # so that `--help` counts them among the caller's
  flags.DEFINE_bool("jaxpace", defaults.enabled, "Instrument the train step with jaxpace.", flag_values=flag_values)
  flags.DEFINE_string("jaxpace_dir", defaults.directory,
                      "Run directory for jaxpace's recording; none records nothing.", flag_values=flag_values)
  flags.DEFINE_enum("jaxpace_clock", defaults.clock, ["auto", "native", "callback"],
                    "Clock inside the compiled step.", flag_values=flag_values)
  flags.DEFINE_enum("jaxpace_share", _name_of(defaults.share), list(_SHARES),
                    "Whether the ranks' arrivals ride in the gradient all-reduce.", flag_values=flag_values)
  flags.DEFINE_float("jaxpace_threshold", defaults.threshold,
                     "Persistent slack above which pacing begins, as a share of the median step.",
                     flag_values=flag_values)
  flags.DEFINE_float("jaxpace_max_delay", defaults.max_delay, "Longest delay pacing may add to a step, in seconds.",
                     flag_values=flag_values)
  # bounds of DEFINE_float let NaN through
  flags.register_validator("jaxpace_threshold", lambda x: 0 <= x <= 1,
                           "must be a share between 0 and 1, such as 0.05 for 5 %", flag_values=flag_values)
  flags.register_validator("jaxpace_max_delay", lambda x: math.isfinite(x) and x >= 0,
                           "must be finite seconds, not negative, such as 0.02", flag_values=flag_values)
  flags.register_validator("jaxpace_dir", lambda x: x is None or bool(x.strip()),
                           "must name a directory; leave the flag out to record nothing", flag_values=flag_values)


def values(flag_values: flags.FlagValues = flags.FLAGS) -> Switches:
  """Returns what the command line said.

  Args:
    flag_values: where `define` defined the flags.

  Raises:
    RuntimeError: if `define` was not called.
    absl.flags.UnparsedFlagAccessError: if the command line has not been parsed yet, which `absl.app.run` does.
  """
  if "jaxpace_max_delay" not in flag_values:
    raise RuntimeError("jaxpace's flags are not defined: call jaxpace.flags.define() at the top of the script, "
                       "before absl.app.run.")
  return Switches(
      enabled=flag_values.jaxpace,
      directory=flag_values.jaxpace_dir, clock=flag_values.jaxpace_clock, threshold=flag_values.jaxpace_threshold,
      max_delay=flag_values.jaxpace_max_delay, share=_SHARES[flag_values.jaxpace_share])


def _name_of(share: Share) -> str:
  return next(name for name, value in _SHARES.items() if value is share or value == share)
