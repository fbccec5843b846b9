"""The job's processes: joining them, and the few words they exchange outside the training step.

`initialize()` lets one script run unchanged under plain `python`, `jaxpace run`, `srun`,
`mpirun` and Kubernetes.
"""

from jaxpace.hosts.distributed.client import (
    asks_for_preemption,
    barrier,
    coordinator_port,
    key_value_delete,
    key_value_directory,
    key_value_get,
    key_value_set,
    process_count,
    process_index,
    share_string,
)
from jaxpace.hosts.distributed.joining import (
    Place,
    end_when_failed,
    initialize,
    place_from_environment,
)
from jaxpace.hosts.distributed.rounds import NEVER, Round, Rounds

__all__ = [
  "NEVER", "Place", "Round", "Rounds", "asks_for_preemption", "barrier",
  "coordinator_port", "end_when_failed", "initialize", "key_value_delete", "key_value_directory",
  "key_value_get", "key_value_set", "place_from_environment", "process_count", "process_index",
  "share_string",
]
