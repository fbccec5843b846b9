"""What the verdict of a report says: the one sentence a person can act on."""

from __future__ import annotations

from jaxpace.diagnose.words.codes import Code


class Verdict(Code):
  """What the verdict of a report says. Of a finding in the headline it is the finding's mode."""

  PERSISTENT = "persistent_straggler", "the same ranks are late"
  AMPLIFICATION = "synchronization_amplification", "ranks are late in turn"
  CONTENTION = "fabric_contention", "transfers take longer than they need"
  LOCALITY = "locality", "ranks in a bad place are slow"
  JITTER = "runtime_jitter", "processes pause between steps"
  COSTS_LITTLE = ("costs_little", "findings, of which none costs much",
      "No fault that costs much. {largest} {said}")
  HEALTHY = ("healthy", "nothing found, and nothing that hides", {
      "waiting": "Healthy: {waiting}. {largest}",
      "alone": "Healthy: one rank has nobody to wait for."})
  DATA_WAITS = ("data_waits", "no finding, but every step waits for data",
      "Every step waits {data} ({part} of it) for data, mean over ranks: prefetch further "
      "ahead, and look at the storage and the decoding it comes from.")
  SLOW_TRANSFERS = ("slow_transfers", "no finding, but transfers take longer than their best",
      "Transfers take longer than their best for {saving} of the step, which would be "
      "{speedup:.2f} times as fast without that: {why}.")
  FEW_PAUSES = "few_pauses", "no finding, but few long pauses take much of the time"
  UNNAMED_WAITING = ("unnamed_waiting", "no finding, but much waiting without a cause that shows",
      "No lasting fault: no rank is persistently late, and the waiting ({part} of the time) "
      "{where}: see the notes.{lasting}")
  NO_STEPS = ("no_steps", "no step can be measured",
      "Nothing to judge: {steps} recorded, and none of them has a recorded step before it to "
      "measure from. Let the job run on.")
  TOO_FEW_STEPS = ("too_few_steps", "fewer steps count than a judgement needs", {
      "lost":
          "Too many steps are missing to judge: process {process} recorded {recorded:,} and "
          "lost {lost:,} of {steps}, and those need not be like these. What kept them from "
          "the record is in the notes and in the job's log.",
      "counted":
          "Too few steps to judge: {counted} count, {needed} are needed. So far waiting for "
          "late ranks takes {waiting:.1f} % of the step."})
  NO_COLLECTIVES = ("no_collectives", "no collective was recorded",
      "No collective was recorded: the run does not show whether ranks wait for each other; "
      "see the notes.")
  UNTOLD = "untold", "timestamps cannot show who waits for whom"
  UNTIMED = ("untimed", "collectives of the step are not timed",
      "The run does not show whether ranks wait for each other: {collectives} of the step "
      "{are} not timed ({what}), ranks meet there, and their waiting counts as compute; the "
      "notes say why. {largest}")
  DOUBT = ("doubt", "a sampled run can't tell what was seen in it",
      "The run does not show whether a rank is late: {doubt}, and waiting takes {waiting} of "
      "the step; see the notes.")
  UNSEEN_RANKS = ("unseen_ranks", "nothing is known of some ranks; `not_judged` has them",
      "{unseen} {others}: {said}")
