"""What to do about a finding, in one table: by its mode, and by its cause as far as that shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxpace.diagnose.words.codes import Verdict

ADVICE: Mapping[str, Mapping[str, str]] = {
    Verdict.PERSISTENT: {
        "preempted":
            "Find what else runs on the processors of {subject}, and move it or pin the job to "
            "cores of its own.",
        "throttled":
            "Raise the CPU limit of the control group of {subject}: it is used up before the "
            "period ends.",
        "steal":
            "Move {subject} to a host whose processors are not shared with other guests.",
        "gpu_clock":
            "Compare temperature, power limit and clock settings of the GPU of {subject} with the "
            "others'.",
        "data":
            "Speed up or prefetch the data of {subject}: storage, decoding, the shard it reads.",
        "gc":
            "Freeze what lives for good (gc.freeze) and collect garbage less often on {subject}.",
        "checkpoint":
            "Write the checkpoints of {subject} in the background, or spread them over the "
            "processes.",
        "work":
            "Even out the work: {subject} has more of it than the others (longer sequences, uneven "
            "shards, experts).",
        "gap":
            "See what the process of {subject} does between steps: data loading, logging, "
            "checkpoints, garbage collection, other load on its host's processors.",
        "gap_unmeasured":
            "See what the process of {subject} does between steps: data loading, logging, "
            "checkpoints, garbage collection, other load on its host's processors. "
            '`with recorder.measure("data")` around the loader shows whether it is that.',
        "compute":
            "Compare {subject} with the others: clocks and throttling, other load on the host, a "
            "slower device; or more work than the others get (longer sequences, uneven shards). "
            "Replace or relieve what is slow."},
    Verdict.LOCALITY: {
        "cpu_limit":
            "Raise the CPU limit of the control group, or give all processes the same one.",
        "clock_source":
            "Give these hosts the same, quick clock source as the others.",
        "far_socket":
            "Bind the process to the socket of its GPU and NIC; `jaxpace doctor` shows which that "
            "is.",
        "":
            "Move the GPU or the NIC so that both hang on the same switch or socket, or tell the "
            "collective library which NIC to use; `jaxpace doctor` shows the tree."},
    Verdict.AMPLIFICATION: {
        "one_varies":
            "See what it does that varies from step to step: data that it loads, work that it gets "
            "more of than the others.",
        "one_stops":
            "Look for what stops it: host interrupts, garbage collection, checkpoints, "
            "recompilation.",
        "pauses":
            "Look for what stops ranks now and then for long: host interrupts, garbage collection, "
            "checkpoints, recompilation; let all ranks do it in the same step.",
        "everyday":
            "Even out the work of a step (sequence lengths, padding, experts) and steady the hosts "
            "(pinned processors, no other load); fewer synchronisations a step mean fewer chances "
            "to wait.",
        "shared_cores":
            "{devices} devices take turns on {cores} cores, so that another one is last in each "
            "step: that is the machine, whatever the job's work. Give each device a core of its "
            "own, and see what waiting is left."},
    Verdict.CONTENTION: {
        "link":
            "Look at the link of {hosts}: its rate and errors, its cable and port, other traffic "
            "on it.",
        "host":
            "Look for other programs on the host, and give each device a core of its own: what "
            "else runs there takes processors and memory from the collectives.",
        "fabric":
            "Look for other traffic on the links that all hosts share (other jobs, storage, "
            "checkpoints): place the job under one switch, shift the jobs' phases "
            "(`jaxpace.interleave_jobs`), or send less."},
    Verdict.JITTER: {
        "gc":
            "collect garbage in the same step everywhere and freeze what lives for good "
            "(gc.freeze)",
        "data":
            "prefetch data further ahead, and look at the storage it comes from",
        "checkpoint":
            "write checkpoints in the background, or less often (Young and Daly: every sqrt(2 C "
            "MTBF))",
        "others":
            "evaluate, write checkpoints and gather values of all processes less often, if that "
            "takes more than is meant",
        "between":
            "see what the loop does between steps (`recorder.measure` names it): prefetch data, "
            "move logging and checkpoints off the loop",
        "":
            "steady what processes do between steps: prefetch data, move logging and checkpoints "
            "off the loop, collect garbage in the same step everywhere"},
}


def advise(mode: Verdict, why: str, **values: object) -> str:
  """What to do about a finding of a mode, by a cause that the table has."""
  return ADVICE[mode][why].format(**values)


def against_pauses(causes: Iterable[str]) -> str:
  """What to do about pauses of several causes at once."""
  words = ADVICE[Verdict.JITTER]
  text = "; ".join([words[cause] for cause in causes if cause in words] or [words[""]])
  return f"{text[0].upper()}{text[1:]}."
