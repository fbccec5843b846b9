"""What a reader must know to read the numbers rightly."""

from __future__ import annotations

from jaxpace.diagnose.words.codes import Code


class Note(Code):
  """What a note says."""

  IMPOSSIBLE_STEPS = ("impossible_steps", "report: steps with impossible times are left out",
      "{steps} left out: by their timestamps they took no time, less than none, or more than "
      "eleven days. Are the columns nanoseconds of one clock for each rank?")
  WARMUP = ("warmup", "report: the first steps are left out",
      "Warm-up left out: step{s} {steps} (of the first {first} steps, all up to the last that "
      "took over {factor:g} times the median).")
  UNFINISHED = ("unfinished", "report: the last steps are left out, rows are missing there",
      "The last {steps} left out, from step {first:,} on: rows of some ranks are missing "
      "there. They come later while the job runs, and never if a process was killed.")
  OTHER_LOOPS = ("other_loops", "report: other programs ran in loops before or after",
      "The program ran in {loops}, one after the other. This report is about that of {step}, "
      "with {part} of their time; it also ran {others}.")
  LATE_IN_LOOP = ("late_in_loop", "report: somebody is late in another loop than it is on",
      "In the loop of {step}, {said} `--steps {first}:{stop}` says more.")
  UNMEASURED = ("unmeasured", "report: steps without a recorded exit before them",
      "{steps} can't be measured: a step counts from the exit before it, which is not "
      "recorded.")
  IN_FULL = ("in_full", "report: some steps are detailed, of the others only totals are known",
      "{detailed:,} of {steps} that count are detailed, with a row for each collective: "
      "shares, waits and what-if come from these; step times, how late each rank is and since "
      "when come from all.")
  OTHER_SHAPES = ("other_shapes", "report: steps of other shapes are left out",
      "The step was compiled in several shapes: this is about the one that ran most. {steps} of "
      "others, {mean} each on average and {part} of the time, are left out{paused}.")
  LOWER_BOUND = ("lower_bound", "report: contention is a lower bound",
      "Contention is a lower bound: it is what transfers take beyond the quickest stretch of "
      "{width} steps in this run, not beyond a quiet fabric, which `jaxpace bench` measures.")
  ONE_OFF = ("one_off", "report: one step holds much of all the waiting",
      "One-off: in step {step} alone the others waited {lost} for {rank}; averaged over "
      "all ranks, that is {part:.1f} % of all the time recorded.")
  WAITING_FOR = ("waiting_for", "report: what waiting without a finding is for, and where it is",
      "Of the waiting for late ranks, {causes}. Half of it is in {few} of {steps}{which}.")
  OTHER_PROGRAMS = ("other_programs",
      "report: what all processes run between steps, such as an evaluation",
      "Between steps the job runs {programs}: {seconds} per step, {part} of the time, in "
      "{often} of the steps, up to {longest} at a time. That is the job's own work, no pause.")
  FEW_PAUSES = ("few_pauses", "report: few long pauses, and their steps",
      "Long pauses: {cause} took {seconds}, {part} of all the time counted, in {steps}: "
      "{numbers}{most}.{why}")
  STOOD_STILL = ("stood_still", "report: how it is known that a process was stopped",
      "It took no samples of itself for {seconds}, while other processes took theirs every "
      "{usual}: something stopped it, such as a signal, a debugger or swapping.")
  SLOW_FOR_GOOD = ("slow_for_good",
      "report: what helps where ranks are slow for good, and how much",
      "What would help {ranks}: a host as quick as the others' ({mended}); or, without a "
      "spare, fewer micro-batches ({shared}, the more of them there are the nearer). For that "
      "`loss, grads = jaxpace.accumulate(loss_fn, params, micro_batches, counts, mesh=mesh, "
      "fetch=True, weighted=False)` takes the place of the loop over them, `feed = "
      "jaxpace.shares(mesh, total_micro_batches={total})`, of all ranks together, goes before "
      "the training loop, and `feed.next(step).counts` into each step. A step without such a "
      "loop gets one by the same lines, its batch reshaped to [{total}, rows, ...], unless "
      "its loss looks across the batch. Fewer rows of one batch, padded and masked, would "
      "save nothing: all ranks run one program, which computes the padding.")
  SPREAD = ("spread", "report: ranks leave the collectives apart from each other",
      "Ranks leave the collectives {spread} apart from each other on average; that is part of "
      "transfer.")
  PACED = ("paced", "report, forecast: delays are taken out of arrivals", {
      "forecast":
          "Pacing was active: the forecast is by arrivals with each rank's own delay taken "
          "out.",
      "report":
          "Pacing was active: lateness, blame and what-if are by arrivals with each rank's "
          "own delay taken out."})
  UNTOLD = ("untold", "report, compare, watch: timestamps cannot show who waits for whom",
      "{mode} is a finding of {one} alone, and {other} can't tell who waits for whom.")
  GROUPS_APART = ("groups_apart", "report, forecast: groups of ranks never meet", {
      "forecast":
          "The job has {groups} groups of ranks that never meet: the first one is the sample.",
      "report":
          "The ranks are {groups} groups that never meet in a collective with timestamps: "
          "each rank is compared with those of its own group, and the job's figures are means "
          "over all ranks."})
  MEETING_UNKNOWN = ("meeting_unknown", "report, forecast: run.json doesn't tell which ranks meet",
      {
      "forecast":
          "run.json does not tell which ranks synchronise with each other: all of them are "
          "taken to.",
      "report":
          "run.json does not tell which ranks meet in a collective (no `settings` with `mesh` "
          "and `axis` of as many devices): all of them are taken to."})
  POINT_TO_POINT = ("point_to_point", "report: collectives from one rank to another",
      "{number} of {collectives} {are}, as between the stages of a pipeline: a rank waits "
      "there for its source alone. They hold {transfer} of the transfer.")
  STAGES = ("stages", "report: groups that never meet keep step",
      "Ranks {ranks}{more} never meet in a collective with timestamps, and yet take the same "
      "step, though they are busy for different times: something else joins them, as the "
      "stages of a pipeline are.")
  BUBBLES = ("bubbles", "report: what stages wait for each other counts as transfer",
      "What stages wait for each other without being late (a pipeline that fills and drains: "
      "bubbles) counts as transfer; 'no skew' leaves it as it is.")
  FABRIC_UNUSED = ("fabric_unused",
      "report: the quiet fabric that was given says nothing of this run",
      "The quiet fabric that was given ({source}) says nothing of this run's collectives over "
      "{ranks}, so it was not used: measure it as the job runs, on as many hosts and "
      "processes.")
  CLOCK_JUMPED = ("clock_jumped", "report: steps of ranks whose clock jumped are left out",
      "The clock of {ranks} jumped, or timestamps are damaged: left out {steps} of theirs that "
      "took as long on no other rank.")
  CROWDED_PROCESSORS = ("crowded_processors", "report: other programs run on the processors",
      "Processes share the hosts' processors: the one that others interrupt most loses its "
      "processor {switches:.0f} times per step. The report puts uneven gaps and transfers down to "
      "that, not to the job or the fabric.")
  NO_SLOT = ("no_slot", "report: collectives without a slot count as compute",
      "{collectives} had no slot left and count as compute: give `instrument` more slots.")
  NOT_STAMPED = ("not_stamped", "report: a collective without timestamps, and why",
      "Without timestamps: {many} ({reason}); {their} waiting counts as compute.")
  PLAN_NOTICE = "plan_notice", "report: what `instrument` noticed of the step"
  NEVER_MEET = ("never_meet", "report: of a sampled run, ranks don't all wait for each other",
      "Ranks leave {collectives} before others have reached it: not all of them wait for each "
      "other there (an axis of a mesh with several, or from one rank to the next). Which wait "
      "for which, a trace doesn't say, so all are compared: who is late, and what waiting "
      "costs, can't be separated from that.")
  TURNS = ("turns", "report: of a sampled run, devices take turns on few cores",
      "{devices} devices of a host take turns on {cores} cores, as simulated ones do: waiting "
      "of up to {least} may be for that, so it is no finding unless one rank, or all ranks "
      "of a host, stand out from the others{who}.")
  HUNG = ("hung", "report: a watchdog found a step overdue", {
      "step": "Watchdog: step {step} {ended}; {who}.{within}",
      "more": "Watchdog: more steps were overdue: {rest}."})
  SAME_RUN = "same_run", "compare: both are the same run", "Both are the same run."
  RANKS_DIFFER = ("ranks_differ", "compare: numbers of ranks",
      "A has {a}, B {b}: ranks are not set beside each other. More ranks wait longer for "
      "their last one and exchange more, without anything being wrong; `jaxpace report "
      "--forecast` says how much.")
  HOSTS_DIFFER = ("hosts_differ", "compare: hosts", {
      "devices": "A ran on {a}, B on {b}: a rank's number stands for another device.",
      "hosts": "A ran on {a}, B on {b}."})
  STEPS_DIFFER = ("steps_differ", "compare: one run is much shorter",
      "A counts {a:,} steps and B {b:,}: the interval is as wide as the shorter one makes it.")
  ONE_LOOP = ("one_loop", "compare: a run has several loops, and one of them is compared",
      "{run} ran in several loops, one after the other: this compares that of {step}, not "
      "{others}.")
  SHAPES_LEFT_OUT = ("shapes_left_out", "compare: steps of other shapes are left out",
      "Steps of another shape are left out: they took {a} of A's time, and {b} of B's.")
  PROGRAMS_DIFFER = ("programs_differ", "compare: what was found to be the step",
      "The steps are executions of different programs: of A {a}, of B {b}. `--match` when "
      "recording names the step.")
  COLLECTIVES_DIFFER = ("collectives_differ", "compare: collectives of the step",
      "The steps are not the same: A has {a}, B {b}.")
  OWN_FLOOR = ("own_floor", "compare: each run has a floor of its own",
      "Each run has a floor of its own under its transfers: a fabric that is slower "
      "throughout shows as transfer, not as contention.")
  CLOCKS_DIFFER = ("clocks_differ", "compare: clocks",
      "A was timed by the {a} clock and B by the {b} clock, which cost differently.")
  SETTINGS_DIFFER = ("settings_differ", "compare: versions, config, pacer",
      "Set differently: {settings}.")
  BETWEEN_STARTS = ("between_starts",
      "compare: what changes between two starts is not in the interval",
      "The interval is by {a} blocks of A's steps and {b} of B's. What changes from one start "
      "of a job to the next (placement, neighbours) is not in it: compare two runs of one "
      "program to see how much that is.")
  RANKS_AWAY = ("ranks_away",
      "report: some ranks left no rows in a stretch: nothing there counts as "
      "contention",
      "{ranks} left no rows in most of {steps} ({numbers}): what the others wait for {them} "
      "there can't be separated from slow transfers, and counts as transfer, never as "
      "contention.")
  RANKS_UNSEEN = ("ranks_unseen", "compare: a finding's ranks left no rows in the other run",
      "{mode} is a finding of {one} alone, and {other} can't tell: rows of {rank} {numbers} "
      "are missing there.")
  RANKS_LEFT_OUT = ("ranks_left_out", "forecast: ranks known in too few of the steps",
      "Left out: {rank} {numbers}, known in less than half of the steps. The forecast is by "
      "the others.")
  LATE_TOGETHER = ("late_together", "forecast: ranks of a process count as one",
      "The {unit} ranks of a process are late together: each process counts as one, with its "
      "last rank's arrival.")
  RANKS_DIFFER_FOR_GOOD = ("ranks_differ_for_good", "forecast: ranks with lasting differences",
      "Ranks differ for good (standard deviation {spread:.2f} ms, the latest {latest:.2f} ms "
      "after the mean). The forecast keeps the recorded ones, and takes new ones to be like "
      "them; {known} say little about many, hence the wide intervals. Mend a late rank first.")
  NOT_INDEPENDENT = ("not_independent", "forecast: ranks late together, the forecast is too high",
      "At {collective} ranks are late together more than by chance, and not all of them: they "
      "are not independent, and the forecast is too high.")
  ONE_SIZE = ("one_size", "forecast: transfers of one size give bounds only",
      "How transfers grow is not known from collectives of one size: the interval holds all "
      "from bandwidth alone to latency alone. `jaxpace bench` and --floor would tell.")
  SAME_TIER = ("same_tier", "forecast: new hosts are taken to be where the recorded ones are",
      "The forecast takes new hosts to be on the same tier of the fabric as those recorded.")
  TAIL = ("tail", "forecast: by a fitted tail, beyond what was observed",
      "At {ranks} ranks the slowest is rarer than what was observed often: it comes from a "
      "generalised Pareto tail.")
  SILENT_RANKS = ("silent_ranks", "watch: ranks without rows in the steps shown",
      "{ranks} recorded nothing in the steps shown: {silent}.")
  NOT_CLEARED = ("not_cleared", "watch: waiting for ranks without rows counts as transfer",
      "What the others wait for ranks without rows counts as transfer: nothing here clears "
      "them.")
  PARTS_AWAY = "parts_away", "watch: processes of which nothing is here, and what to do"
  STOPPED_EARLY = ("stopped_early", "watch: ranks that stopped recording before the others",
      "{ranks} stopped recording before the others: {late}.")
  RANKS_NOT_SHOWN = ("ranks_not_shown", "watch: ranks beyond what the screen reads",
      "Rank numbers from {first:,} on are left out here; `jaxpace report` reads them.")
  STOPPED_RECORDING = ("stopped_recording", "watch: a process stopped recording, and why",
      "Process {name} stopped recording: {stopped}.")
