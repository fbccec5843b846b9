"""Tables of a recorded run, long and narrow, so that any SQL engine can query them.

A run directory:

    run.json                                    run id, versions, mesh, axis, clock, pacer, plan, config
    process/<process>.json                      that process's host, pid, ranks, and what it lost, if anything
    steps/<run>-<process>.<first>-<last>.parquet         rolling parts, `first` to `last` merged
    collectives/<run>-<process>.<first>-<last>.parquet
    listening/<run>-<process>.<first>-<last>.parquet     where a pacer listened before collectives
    hosts/<run>-<process>.<first>-<last>.parquet
    locality/<process>.json

Times are int64 nanoseconds of that process's monotonic clock: never compare two processes' absolute
times. A duration that is not known is null.
"""  # noqa: E501

from __future__ import annotations

import pyarrow as pa

from jaxpace.runs.run import HOST_CAUSES

SCHEMA_VERSION = 1

_NS = pa.int64()
_WHOSE = (
    pa.field("step", pa.int64(), nullable=False),
    pa.field("rank", pa.int32(), nullable=False),
    pa.field("process", pa.int32(), nullable=False),
    pa.field("attempt", pa.int32(), nullable=False))  # 0, then 1, 2, ... after restarts

STEPS = pa.schema([
    *_WHOSE,
    pa.field("start_ns", _NS),
    pa.field("end_ns", _NS),
    pa.field("forward_ns", _NS),
    pa.field("backward_ns", _NS),
    pa.field("compute_ns", _NS),  # compute that can't be split into phases
    pa.field("sync_ns", _NS),
    pa.field("update_ns", _NS),
    # of the step's collectives, of observed steps: see jaxpace.observe
    pa.field("last_exit_ns", _NS),
    pa.field("gap_ns", _NS),  # from the previous step's end to this one's start; null after a hole
    pa.field("delay_ns", _NS),  # asked
    pa.field("delay_applied_ns", _NS),
    # before its collectives, by a pacer that holds them back; null without one
    pa.field("held_ns", _NS),
    *(pa.field(cause.column, pa.int64()) for cause in HOST_CAUSES),
])
"""One row a rank and step. A user's own phases add `phase_<name>_ns`, a pacer's columns
`decision_<name>` (float32)."""

COLLECTIVES = pa.schema([
    *_WHOSE,
    pa.field("collective", pa.int32(), nullable=False),  # slot
    pa.field("name", pa.dictionary(pa.int16(), pa.string())),
    pa.field("axis", pa.dictionary(pa.int16(), pa.string())),
    pa.field("bytes", pa.int64()),
    pa.field("enter_ns", _NS),
    pa.field("exit_ns", _NS),
])
"""One row a rank, step and collective.

Where a pacer holds collectives back there are more: `held_ns`, what that took before this one,
which its `enter_ns` comes after, and `heard_ns`, the last reading when it was listened; null where
it was not. `asked_ns`, what the pacer asked for and listening took, and `listened`, how often it
did, are the same on all ranks; null where it wasn't asked, or its answer not followed."""

LISTENING = pa.schema([
    *_WHOSE,  # rank: who wrote it down
    pa.field("collective", pa.int32(), nullable=False),  # slot, before which it was listened
    pa.field("turn", pa.int32(), nullable=False),  # 0 for the first time before this one
    # the shortest wait of any rank in a tiny collective
    pa.field("heard_ns", _NS),
    # the shortest time that telling all ranks of it took the time before; 0 the first time
    pa.field("told_ns", _NS),
])
"""One row a reading, the same on all ranks: by the first rank of process 0 alone. Of a step the
first 64 are kept; `listened` of its collectives counts all."""

HOSTS = pa.schema([
    pa.field("time_ns", _NS, nullable=False),
    pa.field("process", pa.int32(), nullable=False),
    pa.field("attempt", pa.int32(), nullable=False),
    # of this process's connections: data sent or to be sent, not acknowledged
    pa.field("tcp_busy_ns", _NS),
    pa.field("tcp_receiver_limited_ns", _NS),  # of it, with the receiver's window full
    pa.field("retransmits", pa.int64()),
    # Of the connections that were busy since the last sample, weighted by how long; null where none
    # was.
    pa.field("tcp_rtt_ns", _NS),  # round trip, smoothed as the kernel does
    # the shortest one that the kernel remembers: 5 minutes, by default
    pa.field("tcp_min_rtt_ns", _NS),
    pa.field("nic_rx_bytes", pa.int64()),
    pa.field("nic_tx_bytes", pa.int64()),
    pa.field("loopback_bytes", pa.int64()),
    pa.field("throttled_ns", _NS),  # by CPU limits of control groups
    pa.field("steal_ns", _NS),  # given to other guests by the hypervisor, over all CPUs
    pa.field("nivcsw", pa.int64()),  # involuntary context switches of this process
    pa.field("gpu_clock_mhz", pa.float32()),
    pa.field("gpu_power_w", pa.float32()),
])
"""Samples of one process's host. Counters go up from 0 at the attempt's first sample; round trips,
clock and power are of now. Runs of before a column was known have it null."""

TABLES = {"steps": STEPS, "collectives": COLLECTIVES, "hosts": HOSTS, "listening": LISTENING}
