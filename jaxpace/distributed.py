"""Joining the processes of a job, by the name that scripts use:
`jaxpace.distributed.initialize()`."""

from jaxpace.hosts.distributed import (
    NEVER,
    NotHeard,
    Place,
    Round,
    Rounds,
    asks_for_preemption,
    barrier,
    initialize,
    key_value_delete,
    key_value_directory,
    key_value_get,
    key_value_set,
    place_from_environment,
    process_count,
    process_index,
    share_string,
)

__all__ = [
    "NEVER",
    "NotHeard",
    "Place",
    "Round",
    "Rounds",
    "asks_for_preemption",
    "barrier",
    "initialize",
    "key_value_delete",
    "key_value_directory",
    "key_value_get",
    "key_value_set",
    "place_from_environment",
    "process_count",
    "process_index",
    "share_string",
]
