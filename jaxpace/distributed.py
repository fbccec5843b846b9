"""Joining the processes of a job, by the name that scripts use:
`jaxpace.distributed.initialize()`."""

from jaxpace.hosts.distributed import *  # noqa: F403
from jaxpace.hosts.distributed import __all__ as __all__
