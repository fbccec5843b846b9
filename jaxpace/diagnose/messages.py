"""What the diagnosis says, in one table: the sentences that stand beside the codes.

Rules say a code and its values, `say(Note.SPREAD, spread="0.21 ms")`; the words are here.
A code may have several wordings, each with a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpace.diagnose.codes import Code, Evidence, Note, Sentence, Silence, Verdict

Wordings = Mapping[Any, str | Mapping[str, str]]

_PAUSE = {
    "late": "{who} {pauses} for {mean} per step, {more} more than the others.",
    "pauses":
        "In its long gaps a process {pauses}: {held} per step, {part} of the pauses, in {often} "
        "of the steps, up to {longest} at a time."}

VERDICTS: Wordings = {
    Verdict.COSTS_LITTLE: "No fault that costs much. {largest} {said}",
    Verdict.HEALTHY: {
        "waiting": "Healthy: {waiting}. {largest}",
        "alone": "Healthy: one rank has nobody to wait for."},
    Verdict.DATA_WAITS:
        "Every step waits {data} ({part} of it) for data, mean over ranks: prefetch further "
        "ahead, and look at the storage and the decoding it comes from.",
    Verdict.SLOW_TRANSFERS:
        "Transfers take longer than their best for {saving} of the step, which would be "
        "{speedup:.2f} times as fast without that: {why}.",
    Verdict.UNNAMED_WAITING:
        "No lasting fault: no rank is persistently late, and the waiting ({part} of the time) "
        "{where}: see the notes.{lasting}",
    Verdict.NO_STEPS:
        "Nothing to judge: {steps} recorded, and none of them has a recorded step before it to "
        "measure from. Let the job run on.",
    Verdict.TOO_FEW_STEPS: {
        "lost":
            "Too many steps are missing to judge: process {process} recorded {recorded:,} and "
            "lost {lost:,} of {steps}, and those need not be like these. What kept them from "
            "the record is in the notes and in the job's log.",
        "counted":
            "Too few steps to judge: {counted} count, {needed} are needed. So far waiting for "
            "late ranks takes {waiting:.1f} % of the step."},
    Verdict.NO_COLLECTIVES:
        "No collective was recorded: the run does not show whether ranks wait for each other; "
        "see the notes.",
    Verdict.UNTIMED:
        "The run does not show whether ranks wait for each other: {collectives} of the step "
        "{are} not timed ({what}), ranks meet there, and their waiting counts as compute; the "
        "notes say why. {largest}",
    Verdict.DOUBT:
        "The run does not show whether a rank is late: {doubt}, and waiting takes {waiting} of "
        "the step; see the notes.",
    Verdict.UNSEEN_RANKS: "{unseen} {others}: {said}",
}
"""The one sentence a person can act on; of a finding `verdict` makes it of the finding's advice."""

EVIDENCE: Wordings = {
    Evidence.LATE:
        "{rank} reaches the collectives {lateness} after the typical rank, {times}{chronic}: so "
        "in {persistence} of the stretches of {steps} steps; the job waited for it in {often} "
        "of all steps.",
    Evidence.AT: {
        "spread":
            "Its lateness is spread over the step: of {whole}, {part} is at {name}{origin}, the "
            "most at any collective.",
        "one":
            "It is late by {late} at {place}: that is where it reaches a collective after the "
            "others, and what it does since the one before is what takes long.",
        "iterations":
            "It is late by {late} at {name}{origin}, over all its {iterations} iterations: "
            "{least} to {most} in each."},
    Evidence.MOST_WAITED: "{part} of the waiting is at {name}{origin}{iteration}.",
    Evidence.MOST_CONTENDED:
        "{part} of what transfers take beyond their floors is along {axis}, most at "
        "{name}{origin}.",
    Evidence.LATE_AND_LESS: "Late as well, and less: {late}.",
    Evidence.WHOLE_HOST: "All ranks of {hosts} are late: the {host}, not a single device.",
    Evidence.ELSEWHERE: "On {hosts} other ranks are in time.",
    Evidence.SAVES_MORE:
        "{part} of the step is what the ranks wait for that, mean over all, of which {late} "
        "little; the job as a whole would save {saving}: {speedup:.2f} times as fast.",
    Evidence.ROWS_MISSING:
        "Rows of {ranks} are missing: what the others wait for {them} looks the same.",
    Evidence.SLOW_AS_WELL:
        "Transfers are slower as well then, as this host's processors serve them: {evidence}",
    Evidence.LATE_AS_WELL: "{who} is late by a little since then: {evidence}",
    Evidence.IN_PLACE: {
        "late":
            "{those} ({ranks}) lose{s} {lateness} per step against the others, and they are the "
            "only ones there: by chance that is so once in {times:,}.",
        "slow": "{those} ({ranks}) are those whose host's link is slow; each step loses {lost}."},
    Evidence.LAST_RANK: {
        "several_beside":
            "{beside} the last rank changes: {others} others were last, in {often} of the "
            "steps, rank {worst} most often, in {worst_often}.",
        "changes":
            "The last rank changes: {ranks} of {of_ranks} were last; the most frequent, "
            "{worst}, in {often} of the steps ({chance} by chance).",
        "none_beside": "{beside} no rank is ever last: lateness varies from step to step.",
        "one_beside": "{beside} it is rank {worst} that is last, in {worst_often} of the steps.",
        "one": "{part} of the waiting is for rank {rank}."},
    Evidence.WORST_TENTH: {
        "pauses":
            "The worst tenth of the steps holds {part} of the waiting: rare long pauses, not "
            "everyday jitter.",
        "everyday":
            "The worst tenth of the steps holds {part} of the waiting: everyday jitter, not "
            "rare pauses."},
    Evidence.SPELL: "It is so {spell}.",
    Evidence.WAITING_FOR: {
        "no_delays":
            "Of all waiting, {compute} is for longer compute and {runtime} for longer gaps "
            "between steps.",
        "delays":
            "Of all waiting, {compute} is for longer compute and {runtime} for longer gaps "
            "between steps, {pacing} for delays."},
    Evidence.MOSTLY_HOST: "{part} of the waiting is for {host}, which has {expected} of the ranks.",
    Evidence.PAUSES:
        "{who} pause{s} between steps now and then: a gap takes {usual} as a rule, and {mean} "
        "on average.",
    Evidence.PAUSES_COST:
        "A step loses {own} in the pauses themselves, mean over ranks, and {waiting} in which "
        "ranks wait for one that pauses.",
    Evidence.PAUSES_HELD: {
        "rank": "{part} of all pauses are on this rank.",
        "ranks": "{part} of all pauses are on these ranks."},
    Evidence.PAUSE_ALIKE: "All ranks pause equally; no single process is to blame.",
    Evidence.NO_CAUSE:
        "Neither garbage collection nor data nor checkpoints, as far as the loop measures them, "
        "take that long: logging, evaluation, or other load on the host's processors?",
    Evidence.GC: _PAUSE,
    Evidence.DATA: _PAUSE,
    Evidence.CHECKPOINT: _PAUSE,
    Evidence.BETWEEN: _PAUSE,
    Evidence.PREEMPTED: {
        "switches":
            "{who} is preempted: {switches:.1f} involuntary switches a step, {more:.1f} more "
            "than the others: something else runs on its processors.",
        "cpu_time":
            "{who} is preempted: {switches:.1f} involuntary switches a step, {more:.1f} more "
            "than the others, while its CPU time is not longer: something else runs on its "
            "processors."},
    Evidence.WORK: "{who} has more work: its CPU time is {work} a step longer than the others'.",
    Evidence.ASLEEP:
        "{who} uses no more CPU time than the others, and is not preempted so often that it "
        "would explain this: it sleeps, stands still or waits for a device, and the host's "
        "columns don't say for what.",
    Evidence.THROTTLED:
        "{who} is throttled by a CPU limit of its control group: {more} per step more than the "
        "others.",
    Evidence.STEAL:
        "{who} runs on a host whose hypervisor gives its processors to others: {more} per step "
        "more than the others.",
    Evidence.GPU_CLOCK:
        "{who}'s GPU runs at {mhz:.0f} MHz, the others' at {usual:.0f}: heat, power, or a limit "
        "set on it.",
    Evidence.TWO_KINDS:
        "The collectives come in two kinds: {part} of the steps take {level} in them, the "
        "others {quiet}.",
    Evidence.THROUGHOUT: {
        "floor":
            "The collectives themselves take {level} per step throughout; on a quiet fabric "
            "{quiet} ({source}).",
        "link":
            "The collectives themselves take {level} per step throughout; without that host's "
            "link about {quiet}.",
        "quickest":
            "The collectives themselves take {level} per step throughout; the quickest about "
            "{quiet}."},
    Evidence.STRETCH:
        "The collectives themselves take {level} per step {spell}, {quiet} in the rest of the "
        "run.",
    Evidence.NEEDS_FLOOR:
        "What is equally slow in every step of the run can't be seen without a known floor: "
        "`--floor` takes what `jaxpace bench` measured.",
    Evidence.NO_COUNTERS:
        "Whether one host's link is slow or a trunk that all share is crowded is unknown: no "
        "TCP counters of the hosts were sampled (`Recorder(hosts=...)`), or the collectives "
        "don't use TCP.",
    Evidence.SLOW_LINK:
        "The link of {process} is the slow one: its connections had data on the way for {busy} "
        "per step, the others' for {others}.",
    Evidence.ALL_BUSY:
        "All hosts' connections are equally busy, {least} to {most} per step: the fabric "
        "between them is crowded, not one host's link.",
    Evidence.BOTH_BUSY:
        "Both hosts' connections are busy, {least} and {most} per step: of two hosts, one's "
        "slow link and a crowded one between them look the same.",
    Evidence.NO_SINGLE_LINK:
        "The hosts' TCP counters name no single link: {least} to {most} per step with data on "
        "the way, most on {process}.",
    Evidence.QUEUE:
        "Data queue on the way: a round trip of the hosts' connections takes {then} then, "
        "{otherwise} in the rest of the run.",
    Evidence.RESENT:
        "Segments are lost and sent again: up to {segments:.2f} per step on {process}.",
    Evidence.PROBE: "The link probe: {says}",
    Evidence.PROBE_NOTHING: {
        "why": "The link probe names nothing: {why}",
        "none_slower":
            "The link probe names nothing: no host or link was slower than the others when it "
            "was made."},
}
"""What shows that a finding is one."""

NOTES: Wordings = {
    Note.IMPOSSIBLE_STEPS:
        "{steps} left out: by their timestamps they took no time, less than none, or more than "
        "eleven days. Are the columns nanoseconds of one clock for each rank?",
    Note.WARMUP:
        "Warm-up left out: step{s} {steps} (of the first {first} steps, all up to the last that "
        "took over {factor:g} times the median).",
    Note.UNFINISHED:
        "The last {steps} left out, from step {first:,} on: rows of some ranks are missing "
        "there. They come later while the job runs, and never if a process was killed.",
    Note.UNMEASURED:
        "{steps} can't be measured: a step counts from the exit before it, which is not "
        "recorded.",
    Note.IN_FULL:
        "{detailed:,} of {steps} that count are detailed, with a row for each collective: "
        "shares, waits and what-if are of these. Step times, how late each rank is and since "
        "when are of all.",
    Note.LOWER_BOUND:
        "Contention is a lower bound: the floor of a transfer is the lowest running median of "
        "{width} steps of this run ({source}), not that of a quiet fabric.",
    Note.ONE_OFF:
        "One-off: in step {step} alone the others waited {lost} for {rank}; as the mean over "
        "all ranks that is {part:.1f} % of all the time recorded.",
    Note.WAITING_FOR:
        "Of the waiting for late ranks, {causes}. Half of it is in {few} of {steps}{which}.",
    Note.FEW_PAUSES:
        "Long pauses: {cause} took {seconds}, {part} of all the time counted, in {steps}: "
        "{numbers}. They are no finding, but that is what they cost.",
    Note.SLOW_FOR_GOOD:
        "What would help {ranks}: a host as quick as the others' ({mended}); or, without a "
        "spare, fewer micro-batches ({shared}, the more of them there are the nearer). For that "
        "`loss, grads = jaxpace.accumulate(loss_fn, params, micro_batches, counts, mesh=mesh, "
        "fetch=True, weighted=False)` takes the place of the loop over them, `feed = "
        "jaxpace.shares(mesh, total_micro_batches={total})`, of all ranks together, goes before "
        "the training loop, and `feed.next(step).counts` into each step. A step without such a "
        "loop gets one by the same lines, its batch reshaped to [{total}, rows, ...], unless "
        "its loss looks across the batch. Fewer rows of one batch, padded and masked, would "
        "save nothing: all ranks run one program, which computes the padding.",
    Note.SPREAD:
        "Ranks leave the collectives {spread} apart from each other on average; that is part of "
        "transfer.",
    Note.PACED: {
        "forecast":
            "Pacing was active: the forecast is by arrivals with each rank's own delay taken "
            "out.",
        "report":
            "Pacing was active: lateness, blame and what-if are by arrivals with each rank's "
            "own delay taken out."},
    Note.UNTOLD: "{mode} is a finding of {one} alone, and {other} can't tell who waits for whom.",
    Note.GROUPS_APART: {
        "forecast":
            "The job has {groups} groups of ranks that never meet: the first one is the sample.",
        "report":
            "The ranks are {groups} groups that never meet in a collective with timestamps: "
            "each rank is compared with those of its own group, and the job's figures are means "
            "over all ranks."},
    Note.MEETING_UNKNOWN: {
        "forecast":
            "run.json does not tell which ranks synchronise with each other: all of them are "
            "taken to.",
        "report":
            "run.json does not tell which ranks meet in a collective (no `settings` with `mesh` "
            "and `axis` of as many devices): all of them are taken to."},
    Note.POINT_TO_POINT:
        "{number} of {collectives} {are}, as between the stages of a pipeline: a rank waits "
        "there for its source alone. They hold {transfer} of the transfer.",
    Note.STAGES:
        "Ranks {ranks}{more} never meet in a collective with timestamps, and yet take the same "
        "step, though they are busy for different times: something else joins them, as the "
        "stages of a pipeline are.",
    Note.BUBBLES:
        "What stages wait for each other without being late (a pipeline that fills and drains: "
        "bubbles) counts as transfer; 'no skew' leaves it as it is.",
    Note.FABRIC_UNUSED:
        "The quiet fabric that was given ({source}) says nothing of this run's collectives over "
        "{ranks}, so it was not used: measure it as the job runs, on as many hosts and "
        "processes.",
    Note.CLOCK_JUMPED:
        "The clock of {ranks} jumped, or timestamps are damaged: {steps} of theirs left out, as "
        "long as on no other rank.",
    Note.CROWDED_PROCESSORS:
        "Processes share the hosts' processors: up to {switches:.0f} involuntary switches of "
        "one a step. Ragged gaps and transfers are put down to that, not to the job or the "
        "fabric.",
    Note.NO_SLOT:
        "{collectives} had no slot left and count as compute: give `instrument` more slots.",
    Note.NOT_STAMPED: "Without timestamps: {many} ({reason}); {their} waiting counts as compute.",
    Note.NEVER_MEET:
        "Ranks leave {collectives} before others have reached it: not all of them wait for each "
        "other there (an axis of a mesh with several, or from one rank to the next). Which wait "
        "for which, a trace doesn't say, so all are compared: who is late, and what waiting "
        "costs, can't be separated from that.",
    Note.TURNS:
        "{devices} devices of a host take turns on {cores} cores, as simulated ones do: waiting "
        "of up to {least} may be for that, so it is no finding unless one rank, or all ranks "
        "of a host, stand out from the others.",
    Note.HUNG: {
        "step": "Watchdog: step {step} {ended}; {who}.{within}",
        "more": "Watchdog: more steps were overdue: {rest}."},
    Note.SAME_RUN: "Both are the same run.",
    Note.RANKS_DIFFER:
        "A has {a}, B {b}: ranks are not set beside each other. More ranks wait longer for "
        "their last one and exchange more, without anything being wrong; `jaxpace report "
        "--forecast` says how much.",
    Note.HOSTS_DIFFER: {
        "devices": "A ran on {a}, B on {b}: a rank's number stands for another device.",
        "hosts": "A ran on {a}, B on {b}."},
    Note.STEPS_DIFFER:
        "A counts {a:,} steps and B {b:,}: the interval is as wide as the shorter one makes it.",
    Note.COLLECTIVES_DIFFER: "The steps are not the same: A has {a}, B {b}.",
    Note.OWN_FLOOR:
        "Each run has a floor of its own under its transfers: a fabric that is slower "
        "throughout shows as transfer, not as contention.",
    Note.CLOCKS_DIFFER:
        "A was timed by the {a} clock and B by the {b} clock, which cost differently.",
    Note.SETTINGS_DIFFER: "Set differently: {settings}.",
    Note.BETWEEN_STARTS:
        "The interval is about the steps of these two runs. What changes from one start of a "
        "job to the next (placement, neighbours) is not in it: compare two runs of one program "
        "to see how much that is.",
    Note.RANKS_AWAY:
        "{ranks} left no rows in most of {steps} ({numbers}): what the others wait for {them} "
        "there can't be separated from slow transfers, and counts as transfer, never as "
        "contention.",
    Note.RANKS_UNSEEN:
        "{mode} is a finding of {one} alone, and {other} can't tell: rows of {rank} {numbers} "
        "are missing there.",
    Note.RANKS_LEFT_OUT:
        "Left out: {rank} {numbers}, known in less than half of the steps. The forecast takes "
        "the others for all.",
    Note.LATE_TOGETHER:
        "The {unit} ranks of a process are late together: each process counts as one, with its "
        "last rank's arrival.",
    Note.RANKS_DIFFER_FOR_GOOD:
        "Ranks differ for good (standard deviation {spread:.2f} ms, the latest {latest:.2f} ms "
        "after the mean). The recorded ones are taken to stay and new ones to be as they; "
        "{known} tell little of many, hence wide intervals. Mend a late rank first.",
    Note.NOT_INDEPENDENT:
        "At {collective} ranks are late together more than by chance, and not all of them: they "
        "are no independent ranks, and the forecast is too high.",
    Note.ONE_SIZE:
        "How transfers grow is not known from collectives of one size: the interval holds all "
        "from bandwidth alone to latency alone. `jaxpace bench` and --fabric would tell.",
    Note.SAME_TIER: "New hosts are taken to hang on the same tier of the fabric as those recorded.",
    Note.TAIL:
        "At {ranks} ranks the slowest is beyond what was observed often: by a generalised "
        "Pareto tail.",
    Note.SILENT_RANKS: "{ranks} recorded nothing in the steps shown: {silent}.",
    Note.NOT_CLEARED:
        "What the others wait for ranks without rows counts as transfer: nothing here clears "
        "them.",
    Note.STOPPED_EARLY: "{ranks} stopped recording before the others: {late}.",
    Note.RANKS_NOT_SHOWN:
        "Rank numbers from {first:,} on are left out here; `jaxpace report` reads them.",
    Note.STOPPED_RECORDING: "Process {name} stopped recording: {stopped}.",
    Note.LACKS_STEPS: "Process {name} lacks steps: {not_copied}.",
}
"""What a reader must know to read the numbers rightly."""

SILENCES: Wordings = {
    Silence.TOO_SHORT:
        "The run is too short: the slowest of {ranks:,} ranks is one in {units:,}, and "
        "{recorded} x {by:,} recorded steps reach up to {reach:,} ranks. {needed:,} steps would "
        "do.",
    Silence.NEW_TIER:
        "With {per_host} a host, {ranks:,} ranks need {hosts:,} hosts, and this run never left "
        "one: what lies between hosts was not measured. Give --fabric (from `jaxpace bench`), "
        "or --ranks-per-host if so many share a host.",
    Silence.BEYOND_FABRIC:
        "{source} describes a fabric of {ranks} at most (level '{level}'): what lies beyond was "
        "not measured.",
    Silence.NO_COST: "{source} has no cost of {kinds} at level '{level}'.",
}
"""Why there is no forecast."""

_TABLES: Mapping[type[Code], Wordings] = {Verdict: VERDICTS, Evidence: EVIDENCE, Note: NOTES,
                                          Silence: SILENCES}


def say(code: Code, wording: str = "", /, **values: Any) -> Sentence:
  """A sentence of the table.

  Args:
    code: what it says.
    wording: which of the code's wordings; empty where it has one.
    values: what stands in it.
  """
  words = _TABLES[type(code)][code]
  return Sentence(code, (words if isinstance(words, str) else words[wording]).format(**values))
