"""What shows that a finding is one, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxpace.diagnose.words.codes import Code, Verdict

_PAUSE = {
    "late": "{who} {pauses} for {mean} per step, {more} more than the others.",
    "pauses":
        "In its long gaps a process {pauses}: {held} per step, {part} of the pauses, in {often} "
        "of the steps, up to {longest} at a time."}


class Evidence(Code):
  """What a sentence of a finding's evidence shows."""

  LATE = ("late", "how late a rank arrives, and when",
      "{rank} reaches the collectives {late}{otherwise}{persistence}; the job waited for it in "
      "{often} of all steps.")
  AT = ("at", "at which collective, iteration and line of the model a rank is late", {
      "spread":
          "Its lateness is spread over the step: of {whole}, {part} is at {name}{origin}, the "
          "most at any collective.",
      "one":
          "It is late by {late} at {place}: it reaches that collective after the others, and "
          "what it does between the one before and this one takes long.",
      "iterations":
          "It is late by {late} at {name}{origin}, over all its {iterations} iterations: "
          "{least} to {most} in each."})
  MOST_WAITED = ("most_waited", "at which collective most of the waiting is",
      "{part} of the waiting is at {name}{origin}{iteration}.")
  MOST_CONTENDED = ("most_contended", "along which axis of the mesh, and where, transfers are slow",
      "{part} of what transfers take beyond their floors is along {axis}, most at "
      "{name}{origin}.")
  WHERE = "where", "which part of the step is longer than the typical rank's"
  LATE_AND_LESS = ("late_and_less", "more ranks of the finding, late by less",
      "Late as well, and less: {late}.")
  WHOLE_HOST = ("whole_host", "all ranks of a host are late",
      "All ranks of {hosts} are late: the {host}, not a single device.")
  ELSEWHERE = "elsewhere", "hosts with other ranks in time", "On {hosts} other ranks are in time."
  SAVES_MORE = ("saves_more", "why mending it saves more than its share",
      "The ranks wait for that {part} of the step, mean over all; {late} hardly at all, so a step "
      "would be shorter by {saving} without it: {speedup:.2f} times as fast.")
  ROWS_MISSING = ("rows_missing",
      "some ranks left no rows, and waiting for them looks like slow transfers",
      "Rows of {ranks} are missing: what the others wait for {them} looks the same.")
  SLOW_AS_WELL = ("slow_as_well", "transfers are slow by the same fault",
      "Transfers are slower then, too, because this host's processors serve them: {evidence}")
  LATE_AS_WELL = ("late_as_well", "a host is late by the same fault",
      "{who} is late by a little since then: {evidence}")
  IN_PLACE = ("in_place", "the slow ranks are those in a bad place", {
      "late":
          "{those} ({ranks}) lose{s} {lateness} per step against the others, and they are the "
          "only ones there: by chance that is so once in {times:,}.",
      "slow": "{those} ({ranks}) are those whose host's link is slow; each step loses {lost}."})
  PLACE = "place", "what is bad about the place"
  LAST_RANK = ("last_rank", "how the last rank changes", {
      "several_beside":
          "{beside} the last rank changes: {others} others were last, in {often} of the "
          "steps, rank {worst} most often, in {worst_often}.",
      "changes":
          "The last rank changes: {ranks} of {of_ranks} were last; the most frequent, "
          "{worst}, in {often} of the steps ({chance} by chance).",
      "none_beside": "{beside} no rank is ever last: lateness varies from step to step.",
      "one_beside": "{beside} it is rank {worst} that is last, in {worst_often} of the steps.",
      "one": "{part} of the waiting is for rank {rank}."})
  WORST_TENTH = ("worst_tenth", "whether rare pauses or everyday jitter hold the waiting",
      "The worst tenth of the steps holds {part} of the waiting: {which}.")
  SPELL = "spell", "from which step to which it is so", "It is so {spell}."
  WAITING_FOR = ("waiting_for", "what the last ranks are longer busy with",
      "Of all waiting, {compute} is for longer compute and {runtime} for longer gaps between "
      "steps{delays}.")
  MOSTLY_HOST = ("mostly_host", "a host holds more of the waiting than its part of the ranks",
      "{part} of the waiting is for {host}, which has {expected} of the ranks.")
  PAUSES = ("pauses", "how long gaps are as a rule, and on average",
      "{who} pause{s} between steps now and then: a gap takes {usual} as a rule, and {mean} "
      "on average.")
  PAUSES_COST = ("pauses_cost", "what a step loses in pauses, and in waiting for them",
      "A step loses {own} in the pauses themselves, mean over ranks, and {waiting} in which "
      "ranks wait for one that pauses.")
  PAUSES_HELD = ("pauses_held", "the part of the pauses that the named ranks hold",
      "{part} of all pauses are on {those}.")
  PAUSES_FEW = ("pauses_few", "pauses of one rank or a few, and no more than chance may make",
      "{part} of all pauses are on {ranks}; of so few pauses that may be chance.")
  PAUSE_ALIKE = ("pause_alike", "all ranks pause equally",
      "All ranks pause equally; no single process is to blame.")
  NO_CAUSE = ("no_cause", "no cause that the loop measures takes that long",
      "Neither garbage collection nor data nor checkpoints, as far as the loop measures them, "
      "take that long: logging, evaluation, or other load on the host's processors?")
  GC = "gc", "a process collects garbage", _PAUSE
  DATA = "data", "a process waits for data", _PAUSE
  CHECKPOINT = "checkpoint", "a process writes checkpoints", _PAUSE
  OTHERS = "others", "a process runs other programs than the step's", _PAUSE
  BETWEEN = "between", "a process is between two steps, and no column shows for what", _PAUSE
  PREEMPTED = ("preempted", "something else runs on a process's processors",
      "{who} is preempted: {switches:.1f} involuntary switches a step, {more:.1f} more than the "
      "others{work}: something else runs on its processors.")
  WORK = ("work", "a process has more work",
      "{who} has more work: its CPU time is {work} a step longer than the others'.")
  ASLEEP = ("asleep", "a process sleeps or waits, and it doesn't show for what",
      "{who} uses no more CPU time than the others, and is not preempted so often that it "
      "would explain this: it sleeps, stands still or waits for a device, and the host's "
      "columns don't say for what.")
  THROTTLED = ("throttled", "a process is throttled by a CPU limit",
      "{who} is throttled by a CPU limit of its control group: {more} per step more than the "
      "others.")
  STEAL = ("steal", "a hypervisor gives the processors to others",
      "{who} runs on a host whose hypervisor gives its processors to others: {more} per step "
      "more than the others.")
  GPU_CLOCK = ("gpu_clock", "a GPU runs at a lower clock",
      "{who}'s GPU runs at {mhz:.0f} MHz, the others' at {usual:.0f}: heat, power, or a limit "
      "set on it.")
  TWO_KINDS = ("two_kinds", "slow and quick transfers take turns",
      "The collectives come in two kinds: {part} of the steps take {level} in them, the "
      "others {quiet}.")
  THROUGHOUT = ("throughout", "transfers are slow in every step",
      "The collectives themselves take {level} per step throughout; {quiet}.")
  STRETCH = ("stretch", "transfers are slow in a stretch of the run",
      "The collectives themselves take {level} per step {spell}, {quiet} in the rest of the "
      "run.")
  NEEDS_FLOOR = ("needs_floor", "what is slow throughout shows against a known floor only",
      "What is equally slow in every step of the run can't be seen without a known floor: "
      "`--floor` takes what `jaxpace bench` measured.")
  NO_COUNTERS = ("no_counters", "no counters tell a slow link from a crowded fabric",
      "Whether one host's link is slow or a trunk that all share is crowded is unknown: no "
      "TCP counters of the hosts were sampled (`Recorder(hosts=...)`), or the collectives "
      "don't use TCP.")
  ONE_HOST = ("one_host", "all ranks are on one host",
      "All ranks are on one host: its processors and memory carry the collectives, no network.")
  SLOW_LINK = ("slow_link", "one host's connections are busy much longer",
      "The link of {process} is the slow one: its connections had data on the way for {busy} "
      "per step, the others' for {others}.")
  ALL_BUSY = ("all_busy", "all hosts' connections are equally busy",
      "All hosts' connections are equally busy, {least} to {most} per step: the fabric "
      "between them is crowded, not one host's link.")
  BOTH_BUSY = ("both_busy", "of two hosts, both are busy",
      "Both hosts' connections are busy, {least} and {most} per step: of two hosts, one's "
      "slow link and a crowded one between them look the same.")
  NO_SINGLE_LINK = ("no_single_link", "the counters name no single link",
      "The hosts' TCP counters name no single link: {least} to {most} per step with data on "
      "the way, most on {process}.")
  QUEUE = ("queue", "round trips are longer in the contended stretch",
      "Data queue on the way: a round trip of the hosts' connections takes {then} then, "
      "{otherwise} in the rest of the run.")
  RESENT = ("resent", "segments are sent again",
      "Segments are lost and sent again: up to {segments:.2f} per step on {process}.")
  PROBE = "probe", "what the link probe names", "The link probe: {says}"
  PROBE_NOTHING = ("probe_nothing", "the link probe names nothing",
      "The link probe names nothing: {why}")


# What to do about a finding, in one table: by its mode, and by its cause as far as that shows.

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
