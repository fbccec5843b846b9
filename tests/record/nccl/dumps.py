"""A job made up, as NCCL's Inspector would dump it."""

import json


def batches(lines, size=7):
  """The same objects as format v4.3 has them: after a marker that counts them, without header and
  metadata.

  One communicator's objects come together, `size` at a time.
  """
  of = {}
  for text in lines:
    value = json.loads(text)
    of.setdefault(value["header"]["id"], []).append(value)
  written = []
  for own in of.values():
    for at in range(0, len(own), size):
      batch = own[at:at + size]
      stats = {f"{kind}_{what}": 0 for kind in ("coll", "p2p", "proxy")
               for what in ("records", "dropped_total", "dropped_since_last_dump")}
      stats |= {"coll_records": len(batch), "proxy_records": 1, "proxy_ops_dropped_total": 0,
                "proxy_ops_dropped_since_last_dump": 0, "proxy_pxn_skipped_process_total": 0,
                "proxy_steps_enabled": 1}
      context = {"header": {**batch[0]["header"], "comm_name": "unknown"},
                 "metadata": {**batch[0]["metadata"], "inspector_output_format_version": "v4.3",
                              "rec_mechanism": "nccl_profiler_interface"}}
      written.append(json.dumps({**context, "dump_stats": stats}))
      written += [json.dumps({"coll_perf": {"coll": each["coll_perf"]["coll"], "coll_algo": "RING",
                                            "coll_proto": "LL", **each["coll_perf"]}})
                  for each in batch]
      written.append(json.dumps({"proxy_trace": {"record_type": "proxy_op", "record_sn": at}}))
  return written


def line(comm, rank, ranks, kind, number, size, enter, leave, *, host="a", pid=1, verbose=True):
  perf = {"coll": kind, "coll_sn": number, "coll_msg_size_bytes": size,
          "coll_exec_time_us": leave - enter, "coll_timing_source": "kernel_gpu",
          "coll_algobw_gbs": 1.0, "coll_busbw_gbs": 1.0}
  if verbose:
    # Two channels: the first to start and the last to stop count.
    perf["event_trace_ts"] = {"coll_start_ts": enter - 50, "coll_stop_ts": enter - 45,
                              "kernel_events": [
                                  {"channel_id": 0, "kernel_start_ts": enter,
                                   "kernel_stop_ts": leave - 3, "kernel_record_ts": leave - 3},
                                  {"channel_id": 1, "kernel_start_ts": enter + 2,
                                   "kernel_stop_ts": leave, "kernel_record_ts": leave}]}
  return json.dumps({
      "header": {"id": comm, "rank": rank, "n_ranks": ranks, "nnodes": 1},
      "metadata": {"inspector_output_format_version": "v4.0", "git_rev": "",
                   "rec_mechanism": "profiler_plugin", "dump_timestamp_us": leave + 400,
                   "hostname": host, "pid": pid}, "coll_perf": perf})


class Job:
  """Four ranks, a process each, on two hosts with clocks of their own; tensor groups are (0, 1),
  (2, 3).

  A step: per layer an all-reduce over each tensor group, then one over all, of other sizes. Rank 3
  computes longer.
  """

  def __init__(self, steps=60, layers=3, late_us=900, verbose=True, start=True):
    self.lines = {rank: [] for rank in range(4)}
    self.truth = {}
    numbers = {}
    clock = dict.fromkeys(range(4), 1_700_000_000_000_000)
    base = {rank: 5_000_000 * (rank // 2) for rank in range(4)}

    def meet(comm, kind, group, size, transfer, step, slot):
      done = max(clock[rank] for rank in group) + transfer
      number = numbers.setdefault((comm, kind), 0)
      numbers[comm, kind] += 1
      for at, rank in enumerate(group):
        enter, leave = clock[rank] + base[rank], done + base[rank]
        self.lines[rank].append(line(comm, at, len(group), kind, number, size, enter, leave,
                                     pid=100 + rank, host="ab"[rank // 2], verbose=verbose))
        self.truth[rank, step, slot] = enter * 1000, leave * 1000
        clock[rank] = done
    if start:
      # What a framework does once, before its loop.
      meet("0xw", "Broadcast", range(4), 8, 100, -1, 0)
      meet("0xw", "AllReduce", range(4), 4, 100, -1, 1)
    for step in range(steps):
      for layer in range(layers):
        for rank in range(4):
          clock[rank] += 1000 + (late_us if rank == 3 else 0) + 7 * ((step + rank) % 3)
        for comm, group in (("0xt0", (0, 1)), ("0xt1", (2, 3))):
          meet(comm, "AllReduce", group, 4096 + layer, 50, step, layer)
      meet("0xw", "AllReduce", range(4), 1 << 20, 300, step, layers)

  def write(self, folder):
    folder.mkdir(exist_ok=True)
    for rank, lines in self.lines.items():
      (folder / f"{'ab'[rank // 2]}-pid{100 + rank}.log").write_text("\n".join(lines) + "\n")
    return folder
