"""Sentences of README.md and docs/ that name measured values, with these left out: each is filled
in from its file.

A test fills them in and looks for the sentence on its page, so a page can't say other than the
record does.
"""

from __future__ import annotations

import measured_claim_values as read
import numpy as np
from measured_values import Claim

README, WHEN_NOT, HOW_SURE = "README.md", "docs/when_not.md", "docs/how_sure.md"
PACING, TRACE = "docs/pacing.md", "docs/trace.md"
PAPER, INTERLEAVING = "docs/paper.md", "docs/interleaving.md"
SLOW_HOST, OBSERVE = "docs/how_to/slow_host.md", "docs/observe.md"
COSTS = "docs/what_it_costs.md"
HOUSEKEEPING = "docs/how_to/housekeeping.md"
_LAB = "fault_lab_seed4.json"
_BUSY = "fault_lab_seed7.json"
_LATEST = "fault_lab_seed5.json"
_UNCHANGED = "fault_lab_seed28.json"
_ALARMS = ("within_30", "faults", "false_alarms_in_controls", "steps_of_controls")

CLAIMS = (
    Claim(README, "steps took {} % or {} % less with one of four processes 1.5 or 3 times slower",
          "shared_quota.json", lambda f: [f"{-f['judged'][slow]['percent']['shared'][0]:.1f}"
                                          for slow in ("1.5", "3")]),
    Claim(TRACE, "A timestamp takes {} ns by itself, and adds {} ns to an iteration of a "
                 "compiled loop. `recorder.record()` takes {} µs by itself",
          "marks_cost.json",
          lambda f: [f"{f['alone'][0]:.0f}", f"{f['in_a_program']['mark'][0]:.0f}",
                     f"{f['record']['median'][0]:.1f}"]),
    Claim(TRACE, "A step of 200 collectives leaves {} bytes in `steps`, and {} in `collectives` "
                 "where it is detailed", "marks_cost.json",
          lambda f: [f"{f['rows'][-1][name]:.0f}"
                     for name in ("steps_bytes", "collectives_bytes")]),
    Claim(README,
          "where work and {} faults are sleeps, it blamed the right rank or host in {} of {} "
          "cases that cost 5 % or more and had "
          "somebody to blame; {} of {} healthy runs had a finding, which blamed {}.", _LATEST,
          lambda f: [read.sleeping(f), *read.latest_sums(f, lambda one: read.blamed(one, "all")),
                     *read.latest_sums(f, read.controls),
                     *("nobody" if found == "0" else found
                       for found in read.latest_sums(f, lambda one: read.headline(one)[-1:]))]),
    Claim(README, "By the timestamps alone it is {} of {}.", _LATEST,
          lambda f: read.latest_sums(f, lambda one: read.blamed(one, "bare"))),
    Claim(HOW_SURE, "came to {} to {}, and {} to {}; the right rank or host was blamed in {} of {} "
                    "cases in which somebody was to blame, and {} of {} healthy runs had a finding",
          _LATEST,
          lambda f: [*read.latest_from_to(
              f, lambda one: [read.f1(one, way) for way in ("counters", "all")]),
                     *read.latest_sums(f, lambda one: read.blamed(one, "all")),
                     *read.latest_sums(f, read.controls)]),
    Claim(HOW_SURE, "in the two later sets by {} and {} %, and by {} and {} %", _LATEST,
          lambda f: [value for values in read.latest(f, read.median_and_worst)
                     for value in values]),
    Claim(HOW_SURE, "fault_lab_seed7.md) by {} and {} %", _BUSY, read.median_and_worst),
    Claim(HOW_SURE, "differ by {} % at the 95th percentile, what-if and twin by {}, what-if and "
                    "the same run without what the injectors' clocks say by {};",
          "fault_lab_seed21.json", read.what_if_and_twins),
    Claim(HOW_SURE, "[22](measurements/fault_lab_seed22.md) by {}, {} and {} %.",
          "fault_lab_seed22.json", read.what_if_and_twins),
    Claim(HOW_SURE, "macro-F1 is {} where `record()` and `measure` give {}, and {} of {} are "
                    "blamed rightly instead of {} of {}.", _UNCHANGED,
          lambda f: [read.f1(f, "unchanged, all"), read.f1(f, "all"),
                     *read.blamed(f, "unchanged, all"), *read.blamed(f, "all")]),
    Claim(HOW_SURE, "(measurements/fault_lab_seed24.md) gave {} and {}.", "fault_lab_seed24.json",
          lambda f: [read.f1(f, "unchanged, all"), read.f1(f, "all")]),
    Claim(HOW_SURE, "{} of {} faults were named rightly within 30 steps, with {} false alarm in "
                    "{:,} healthy steps; of the same jobs recorded unchanged {} of {}, with {}.",
          _UNCHANGED,
          lambda f: [f["judged"][way]["detection"][name]
                     for way, names in (("all", _ALARMS), ("unchanged, all", _ALARMS[:3]))
                     for name in names]),
    *(Claim(page, f"| {name} | {{}} of {{}} | {{}} of {{}} |", "observed_overhead.json",
            lambda f, arm=arm, case=case: [words for pair in read.costs(f, arm, (case,))
                                           for words in pair])
      for page, name, arm, case in (
          *((page, f"`jaxpace run`: {name}", "unchanged", case) for page in (README, COSTS)
            for name, case in (("data parallel", "data parallel"),
                               ("FSDP, scan and remat", "FSDP"))),
          (COSTS, "*observed* with `record()`: data parallel", "recorded", "data parallel"),
          (COSTS, "*observed* with `record()`: FSDP, scan and remat", "recorded", "FSDP"),
          (COSTS, "*instrumented* and recorded, arrivals not shared", "instrumented", "shard_map"),
          (README, "*instrumented*, which pacing needs", "instrumented", "shard_map"))),
    *(Claim(page, words, "observed_overhead.json",
            lambda f: read.ends([row["percent"]["bare again"][0] for row in f["rows"]], 1))
      for page, words in ((README, "The bare step against itself shows {} to {} %."),
                          (COSTS, "| the bare step against itself | {} to {} % |"))),
    *(Claim(page, words + " are met by {} of the four", "observed_overhead.json",
            lambda f: [read.within_aims(f)])
      for page, words in ((README, "(2 % of 5 ms, 1 % of 20 ms, whole interval)"),
                          (COSTS, "2 % of 5 ms and 1 % of 20 ms with the whole interval,"))),
    Claim(COSTS, "`jaxpace run` costs {} of {}, {} of {}, and at most {}, of {}, where the "
                 "bare step itself shows {} %;", "observed_overhead_no_priority.json",
          lambda f: [*(words for found in read.costs(f, "unchanged", targets=(5,))
                       for words in found),
                     *read.dearest(f, "unchanged", (5, 20, 50)),
                     *read.ends([f["rows"][-1]["percent"]["bare again"][0]], 1)[:1]]),
    Claim(WHEN_NOT, "at most {} of a step in one process", "observed_overhead_no_priority.json",
          lambda f: [read.dearest(f, "unchanged", (5, 20, 50))[0]]),
    *(Claim(page, words, "observed_overhead_processes.json",
            lambda f: [read.dearest(f, "unchanged")[0]])
      for page, words in ((WHEN_NOT, "up to {} in two"),
                          (README, "in two processes, where it costs up to {}."))),
    Claim(WHEN_NOT, "an instrumented step {} of {},", "observed_overhead.json",
          lambda f: read.costs(f, "instrumented", ("shard_map",), (5,))[0]),
    *(Claim(page, words, "overhead.json",
            lambda f: sorted(read.shared(f)[at] for at in (0, 4)))
      for page, words in ((README, "a step takes {} to {} % longer"),
                          (WHEN_NOT, "one that shares arrivals {} to {} %"),
                          (PACING, "takes [{} to {} % longer]"))),
    Claim(COSTS, "with priority, [{} of {}]", "observed_overhead_long.json",
          lambda f: list(read.costs(f, "unchanged", ("FSDP",), (50,))[0])),
    Claim(COSTS, "it is {}, {}, {} and {}; the bare step against itself shows {} to {} %.",
          "observed_overhead_processes.json",
          lambda f: [*(f"{cost} of {bare}" for cost, bare in read.costs(f, "unchanged")),
                     *read.ends([row["percent"]["bare again"][0] for row in f["rows"]], 1)]),
    Claim(COSTS, "*Observed* with `record()` costs up to {}, of {}, and",
          "observed_overhead_processes.json", lambda f: read.dearest(f, "recorded")),
    Claim(COSTS, "observed_overhead_instrumented.md) {} of {} and {} of {}",
          "observed_overhead_instrumented.json",
          lambda f: [words for found in read.costs(f, "instrumented", ("shard_map",))
                     for words in found]),
    Claim(PACING, "of the step; aligned -{}, -{}, -{} % |", "pauses.json",
          lambda f: read.frozen(f, "aligned")[:3]),
    *(Claim(COSTS, f"| {name} | {columns} |", "shared_quota.json",
            lambda f, slow=slow, arms=arms: [read.changed(f["judged"][slow]["percent"][arm])
                                             for arm in arms])
      for name, slow, columns, arms in (
          ("healthy", "1", "{} | | {}", ("shared", "again")),
          *((f"{slow} times slower", slow, "{} | {} | {}", ("shared", "by_hand", "again"))
            for slow in ("1.2", "1.5", "2", "3")))),
    Claim(README, "a step takes {}, {} or {} less", "shared_quota.json",
          lambda f: [f"{-mean:.1f} % [{-high:.1f}, {-low:.1f}]" for mean, low, high in (
              f["judged"][slow]["percent"]["shared"] for slow in ("1.5", "2", "3"))]),
    Claim(README, "which is {}, {} and {} of what the best counts set by hand save",
          "shared_quota.json", lambda f: [read.work_recovered(f, slow).partition(" [")[0]
                                          for slow in ("1.5", "2", "3")]),
    Claim(README, "lose {}.", "shared_healthy.json",
          lambda f: [read.changed(f["judged"]["1"]["percent"]["shared"]).removeprefix("+")]),
    Claim(COSTS, "{} of 36 ms beside {},", "shared_healthy.json",
          lambda f: [read.changed(f["judged"]["1"]["percent"][arm])
                     for arm in ("shared", "again")]),
    Claim(COSTS, "{} with `fetch=True`,", "shared_healthy.json",
          lambda f: [read.changed(f["judged"]["1"]["percent"]["fetched"])]),
    Claim(COSTS, "and {} where [a thread loads batches]", "shared_healthy_loaded.json",
          lambda f: [read.changed(f["judged"]["1"]["percent"]["shared"])]),
    Claim(SLOW_HOST, "of what the best counts by hand save {}, {} and {} came back, of ten "
                     "starts",
          "shared_quota.json", lambda f: [read.work_recovered(f, slow)
                                    for slow in ("1.5", "2", "3")]),
    Claim(SLOW_HOST, "The other {} have the same counts, and got {}; their steps took {} of those",
          "shared_quota.json", lambda f: read.with_counts_by_hand(f["starts"], "1.5")),
    Claim(SLOW_HOST, "1.5 and 3 times slower: {} and {};", "shared_quota_other.json",
          lambda f: [read.work_recovered(f, slow) for slow in ("1.5", "3")]),
    Claim(SLOW_HOST, "2 times slower, beside a busy neighbour: {}.", "shared_quota_eight.json",
          lambda f: [read.work_recovered(f, "2")]),
    Claim(SLOW_HOST, "for 4 ms it was {} at 1.2 times, {} at 1.5, of one start",
          "shared_steps.json", lambda f: [read.work_recovered(f, slow) for slow in ("1.2", "1.5")]),
    Claim(SLOW_HOST, "in each step that is uneven, it was {} and {}.", "shared_steps.json",
          lambda f: [read.work_recovered(f, slow, "fetched") for slow in ("1.2", "1.5")]),
    Claim(SLOW_HOST, "of 6,000 steps {} were lost at 1.5 times and {} at 3 times, without the "
                     "guard {} and {}; of healthy ranks whose noise hangs together {} instead of "
                     "{}",
          "guarded_shares.json", lambda f: [
              *(read.regret_of_shares(f, f"one rank {slow} times slower", "5 %", block)
                for block in (32, 0) for slow in ("1.5", "3")),
              *(read.regret_of_shares(f, "healthy", "15 %, hangs together", block)
                for block in (32, 0))]),
    Claim(SLOW_HOST, "After 1,000 steps {} and {} of what the best counts by hand save came back, "
                     "of one start of 24 rounds with priority; healthy ranks took {}, without the "
                     "guard {}.", "guarded_shares_live.json",
          lambda f: [*(read.work_recovered(f, slow, "guarded") for slow in ("1.5", "3")),
                     *(read.changed(f["judged"]["1"]["percent"][arm])
                       for arm in ("guarded", "shared"))]),
    Claim(PACING, "of 6,000 steps {} at 1.5 times, {} at 3 times", "guarded_shares.json",
          lambda f: [read.regret_of_shares(f, f"one rank {slow} times slower", "5 %", 32)
                     for slow in ("1.5", "3")]),
    Claim(COSTS, "**[Sampled profiles](profiler.md)** cost {} ± {} %.", "profiled_cost.json",
          read.profiled),
    Claim(COSTS, "got back {} % of what they cost each other, at {} times the variation",
          "two_jobs.json", lambda f: [read.jobs(f)[0], read.jobs(f)[-1]]),
    Claim(COSTS, "one taking turns got back {} % of a loss of {} %: its own steps took {} % "
                  "less, the other "
                  "job's {} %.", "turns_tcp.json",
          lambda f: [read.turns(f, "1.13", "one")[2], read.turns(f, "1.13", "one")[1],
                     *read.turns_by_job(f, "1.13", "one")]),
    Claim(COSTS, "At 30 % turns of both lost {} % more.", "turns_tcp.json",
          lambda f: [read.lost(f, "1.3", "both")]),
    Claim(README, "What a job would gain was off by {} and {} % in the median, by {} and {} % at "
                  "the 95th percentile", _LATEST,
          lambda f: [value for values in zip(*read.latest(f, read.median_and_worst), strict=True)
                     for value in values]),
    Claim(README, "by {} and {} %.", _BUSY, read.median_and_worst),
    Claim(HOW_SURE, "had a finding in {} of [{}]", "fault_lab.json", read.controls),
    Claim(HOW_SURE, "and in {} of [{}](measurements/fault_lab_seed2.md) healthy runs",
          "fault_lab_seed2.json", read.controls),
    *(Claim(HOW_SURE, f"| [{seed}](measurements/fault_lab_seed{seed}.md) | {made} | "
            + "{} | {} | {} of {} | {} of {} | {} |", f"fault_lab_seed{seed}.json", read.headline)
      for seed, made in ((3, "on a busy machine"), (4, "with real-time priority"),
                         (5, "the same, hogs later"), (6, "the same, hogs later"))),
    Claim(HOW_SURE, "| [7](measurements/fault_lab_seed7.md), a third of it | beside "
          "many other programs, without priority | {} | {} | {} of {} | {} of {} | {} |",
          "fault_lab_seed7.json", read.headline),
    Claim(HOW_SURE, "{} of {} move nothing in these runs", "ablation.json",
          read.idle_rules),
    Claim(HOW_SURE, "{} of {} runs are right, and none of the {} healthy ones has a finding",
          "observed_processes.json",
          lambda f: [read.observed_processes(f)[at] for at in (0, 1, 4)]),
    Claim(HOW_SURE, "named in {} of {} of them", "observed_processes.json",
          lambda f: read.observed_processes(f)[2:4]),
    Claim(INTERLEAVING, "leaves a loss of {} % at 1.13 and {} % at 1.3: {} and {} % of the model's "
                        "loss come back, {} and {} % of the loss that was", "turns_bounds.json",
          read.bounds),
    Claim(INTERLEAVING, "By message that recovers {} % of the loss at 1.13, and −{} % at 1.3.",
          "turns_bounds.json", read.by_message),
    *(Claim(INTERLEAVING, words, "two_jobs.json", lambda f, name=name: read.by_congestion(f, name))
      for words, name in (("| each alone | {} | {} | {} |", "alone_none_mean_ms"),
                          ("| both, no control | {} | {} | {} |", "none_mean_ms"),
                          ("| both, `interleave_jobs` | {} | {} | {} |", "interleave_mean_ms"))),
    *(Claim(INTERLEAVING, words, "two_jobs.json",
            lambda f, name=name: read.by_congestion(f, name, 100))
      for words, name in (("| variation (CV), no control | {} % | {} % | {} % |",
                           "none_settled_cv"),
                          ("| the same, `interleave_jobs` | {} % | {} % | {} % |",
                           "interleave_settled_cv"))),
    Claim(INTERLEAVING, "**{} % [{}, {}]** | {} % | {} % |", "two_jobs.json", read.recovered),
    *(Claim(INTERLEAVING, f"| {about} | {{}} | {{}} | {{}} | {{}} |", "two_jobs_simulated.json",
            lambda f, scene=scene: read.fluid(f, scene))
      for about, scene in (("two, 2 % jitter", "two"), ("four, 2 % jitter", "four"),
                           ("periods 1 and 1.13", "periods_near"),
                           ("periods 1 and 1.3", "periods"))),
    Claim(INTERLEAVING, "| **1.0, {} starts** | {} % | **{} % [{}, {}]**; `interleave_jobs` {} % "
                        "[{}, {}] | {} % [{}, {}] | {} % [{}, {}] |", "turns_tcp.json",
          lambda f: read.turns(f, "1.0", "both", "interleave", "one", "again")),
    *(Claim(INTERLEAVING, "| **1.13" + about + ", {} starts** | {} % | **{} % [{}, {}]** | "
                          "**{} % [{}, {}]** | {} % [{}, {}] |", "turns_tcp.json",
            lambda f, tcp=tcp: read.turns(f, "1.13", "both", "one", "again", tcp=tcp))
      for about, tcp in (("", "cubic"), (" with bbr", "bbr"))),
    Claim(INTERLEAVING, "| 1.3, {} starts | {} % | {} % [{}, {}] | {} % [{}, {}] | {} % [{}, {}] |",
          "turns_tcp.json", lambda f: read.turns(f, "1.3", "both", "one", "again")),
    Claim(INTERLEAVING, "take {} % less, the other job's {} %.", "turns_tcp.json",
          lambda f: read.turns_by_job(f, "1.13", "one")),
    Claim(INTERLEAVING, "cost {} and {} % of a step.", "turns_tcp.json",
          lambda f: [value.removeprefix("-") for value in read.turns_by_job(f, "1.3", "both")]),
    Claim(INTERLEAVING, "A job alone takes {} % longer [{}, {}] with turns at 1.0",
          "turns_tcp.json",
          read.alone_with_turns),
    Claim(INTERLEAVING, "**{}, {}, {} and {} %** of the loss came back",
          "turns_tcp_before.json", lambda f: read.turns_guarded(f, "1.13")),
    Claim(PAPER, "cost two jobs {} % at a ratio of 1.13, where a link that loses nothing makes it "
                 "{} %.", "turns_bounds.json", read.measured_and_modelled),
    Claim(PAPER, "would be {} to {} % higher", "table1.json", read.couplings_gone),
    Claim(PAPER, "By message turns gain {} % at 32 nodes and {} % at 64 in the one scene",
          "table1_scenarios_fitted.json", read.by_message_in_scenes),
    Claim(PAPER, "this job alone loses no more than {} % in any of the {} worlds over 10,000",
          "table1_turns.json", read.guarded_loss),
    Claim(PACING, "frozen -{}, -{}, -{} % of the step", "pauses.json",
          lambda f: read.frozen(f)[:3]),
    Claim(PACING, "as it comes (`cost=0.001`) step -{} % [", "polling_pinned.json",
          lambda f: read.polling(f)[:1]),
    Claim(PACING, "with ten times that, `cost=0.01`, **step -{} % [",
          "polling_pinned.json", lambda f: read.polling(f)[1:2]),
    Claim(PACING, "{} to {} ms per step, alone {}: ", "two_jobs.json", read.job_steps),
    Claim(PACING, "bbr {}, reno {} % ({} starts each", "two_jobs.json",
          lambda f: read.jobs(f)[2:5]),
    Claim(PACING, "**CV {} times that without control", "two_jobs.json",
          lambda f: read.jobs(f)[-1:]),
    Claim(COSTS, "takes {} % [{}, {}] more of {} ms than the bare one on 2 processes, and "
                 "{} % [{}, {}] more of {} ms on 4", "overhead.json", read.shared),
    Claim(COSTS, "instrumented without sharing, {} % [{}, {}] and {} % [{}, {}]",
          "overhead.json", read.unshared),
    Claim(PACING, "Live, means, two devices in a process: {} % [{}, {}] with jitter, "
                            "{} % "
                            "[{}, {}] with a straggler", "null_live_one.json", read.live_null),
    Claim(PACING, "regret at most {} steps in 1,000, {} in 10,000, {} in 50,000",
          "guard_simulated.json",
          lambda f: [read.regret(f, steps) for steps in ("1000", "10000", "50000")]),
    Claim(PACING, "the A/A of all {} means fails", "null_live.json", read.failed_means),
    Claim(PACING, "whose collections strike in {} to {} % of the steps", "pauses.json",
          lambda f: read.ends([100 * run["oracle"]["chance"] for run in f["runs"]], 1)),
    Claim(HOW_SURE,
          "off by {} % in the median and {} % at the 95th percentile ({} % with the counters only, "
          "{} % by timestamps alone)",
          _LAB, lambda f: [read.median_and_worst(f)[0], *read.what_if(f)]),
    Claim(WHEN_NOT, "takes {} s and {} GiB of memory", "html_1024.json", read.page_made),
    Claim("docs/how_to/read_a_report.md", "× 100,000 steps takes {} s and {} GiB of memory",
          "html_speed.json",
          lambda f: [f"{f['wall_s']['median']:.1f}", f"{f['peak_gib']['median']:.1f}"]),
    Claim(HOW_SURE, "is reported in {} s with {} GiB of memory and {} s of processor time",
          "observed_speed.json",
          lambda f: [*read.page_made(f), f"{f['cpu_s']['median']:.0f}"]),
    *(Claim(page, words + "{} ± {} %", "profiled_cost.json", read.profiled)
      for page, words in ((WHEN_NOT, "on CPU made the loop "),
                          (OBSERVE, "which slow the loop down by "))),
    Claim("docs/profiler.md", "was **{} % ± {} % slower**", "profiled_cost.json", read.profiled),
    *(Claim(page, words, "guard_simulated.json", read.to_show)
      for page, words in ((WHEN_NOT, "**{} steps** in the median, {} in one case of ten"),
                          (PACING, "median {}, 90th percentile {} |"))),
    *(Claim(PACING, f"| at most {{}} steps | {most} |", "guard_simulated.json",
            lambda f, steps=steps: [read.regret(f, steps)])
      for steps, most in (("1000", 100), ("10000", 100), ("50000", 500))),
    Claim(OBSERVE, "observed steps with `record()` {} to {} ms.", "observed_overhead.json",
          lambda f: read.ends([row["percent"]["recorded"][0] / 100 * row["bare_ms"][0]
                           for row in f["rows"] if row["target_ms"] <= 20], 2)),
    Claim(OBSERVE, "steps of 4 to 5 ms take {} to {} ms longer", "observed_overhead.json",
          lambda f: read.ends([row["percent"]["unchanged"][0] / 100 * row["bare_ms"][0]
                               for row in f["rows"]
                               if row["target_ms"] == 5 and row["case"] != "shard_map"], 2)),
    Claim(OBSERVE, "The first call takes {} times as long", "compile_time_quiet.json",
          lambda f: [read.times_bare(f, "first start")]),
    *(Claim(COSTS, words, "compile_time_quiet.json",
            lambda f, start=start: [read.times_bare(f, start)])
      for words, start in (
          ("took](measurements/compile_time_quiet.md) {} times the bare", "first start"),
          ("and {} times on a second", "second start"))),
    Claim(COSTS, "([{} and {}](measurements/compile_time.md) on a busy one)", "compile_time.json",
          lambda f: [read.times_bare(f, start) for start in ("first start", "second start")]),
    Claim(COSTS, "[{:,} short steps](measurements/soak.md) with", "soak.json",
          lambda f: [f["recorded"]] if f["recorded"] == f["steps"] else []),
    Claim(COSTS, "were recorded, in {} MB; memory stayed within {} MB, descriptors at {}; "
          "the report took {} s", "soak.json",
          lambda f: [f"{f['looks'][-1]['run_mb']:.1f}",
                     f"{np.ptp([look['memory_mb'] for look in f['looks']]):.0f}",
                     read.only({look["descriptors"] for look in f["looks"]}),
                     f"{f['report_seconds']:.1f}"]),
    Claim(COSTS, "takes {} to {} % of a core", "observed_overhead.json",
          lambda f: read.ends([row["writer_percent"] for row in f["rows"]], 1)),
    *(Claim(page, words, "observed_parts.json", read.record_behind)
      for page, words in ((COSTS, "`record()` takes {} to {} µs"), (TRACE, "[{} to {} µs]"))),
    Claim(HOW_SURE, "that layer is the largest in {} of {} cases", "observed_truth.json",
          read.layers_of_four),
    Claim(HOW_SURE, "{} of {} runs are right, by a rule", "observed_lab.json",
          lambda f: [str(f["right"]), str(f["done"])]),
    Claim(HOW_SURE, "None of the {} healthy ones blames a rank, and {} have a finding",
          "observed_lab.json", read.healthy_observed),
    Claim(HOUSEKEEPING, "strike there in {} to {} % of a process's steps", "pauses.json",
          lambda f: read.ends([100 * run["oracle"]["chance"] for run in f["runs"]], 1)),
    Claim(HOUSEKEEPING, "(../measurements/collections.md) it is {} to {} %",
          "collections.json",
          lambda f: read.short_ends([100 * row["per_step"] for row in f["rows"]])),
    *(Claim(HOUSEKEEPING, f"| {processes} | {{}} | {{}} % [{{}}, {{}}] | ",
            "pauses.json", lambda f, processes=processes: read.control(f, processes))
      for processes in (2, 4, 8)),
)
