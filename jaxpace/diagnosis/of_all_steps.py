"""What is said of all steps of an observed run, of which only some are written in full."""

from __future__ import annotations

import dataclasses

from jaxpace.diagnosis.diagnosis import Facts, step_time_of
from jaxpace.diagnosis.selected_steps import count_steps, step_times
from jaxpace.diagnosis.what_if import Alternative
from jaxpace.trace.run import Run


def of_all_steps(facts: Facts, finished: Run) -> Facts:
  """Puts the times of all steps in: steps that might have been are as many times as quick as those
  written in full.

  Args:
    facts: of the steps that are written in full; they come back as they are where those are all.
    finished: the run without its unfinished steps.
  """
  if finished.whole is None or facts.step_time is None:
    return facts
  mask = count_steps(finished.whole).mask
  times = step_times(finished.whole)[mask]
  if not times.size:
    return facts
  found = step_time_of(times)
  factor = found.mean / facts.step_time.mean

  def scaled(one: Alternative | None) -> Alternative | None:
    return None if one is None else one._replace(step_time=one.step_time * factor)

  def each(some: dict) -> dict:
    return {key: one._replace(step_time=one.step_time * factor) for key, one in some.items()}

  return dataclasses.replace(
      facts, step_time=found, counted_in_all=int(mask.sum()), no_skew=scaled(facts.no_skew),
      no_contention=scaled(facts.no_contention), without_rank=each(facts.without_rank),
      without_late=scaled(facts.without_late), without_host=each(facts.without_host),
      no_runtime_jitter=scaled(facts.no_runtime_jitter), work_shared=scaled(facts.work_shared),
      asked=tuple((text, one._replace(step_time=one.step_time * factor))
                  for text, one in facts.asked))
