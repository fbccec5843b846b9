"""Intermittent waiting: what is said of how rare it is, and of who pauses when few pauses were
  seen."""

import itertools

import numpy as np
import pytest

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.modes.jitter import LongGaps
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.names import percent
from jaxpace.diagnose.words.verdicts import Verdict
from tests.diagnose.synthetic import case_of, run_of
from tests.lib.said import only
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_runs import SyntheticJob

STEPS = 300


@pytest.mark.parametrize("struck",
                         [(2, 5), (2, 2, 5), (2, 2, 2, 5), (2, 2, 2, 2, 5), (2, 2, 2, 6, 7)])
def test_a_process_is_named_if_chance_would_not_give_any_one_so_many_pauses(struck):
  """Chance by counting all ways in which eight processes can have these pauses."""
  pauses = [Fault("pause", 0.1, (2 * process, 2 * process + 1), begin=(60 + 20 * i) / STEPS,
                  end=(61 + 20 * i) / STEPS, mechanism="gc") for i, process in enumerate(struck)]
  run, _ = run_of(SyntheticJob(ranks=16, steps=STEPS, processes=8, hosts=8, noise=0.02,
                            host_columns=True, faults=tuple(pauses)))
  most = struck.count(2)
  ways = itertools.product(range(8), repeat=len(struck))
  chance = np.mean([max(way.count(process) for process in set(way)) >= most for way in ways])
  assert LongGaps(case_of(run)).ranks() == ([4, 5] if chance < 0.01 else [])


@pytest.mark.parametrize("fault", [Fault("rotating", 8e-3), Fault("jitter", 6e-3)])
def test_the_worst_tenth_of_the_steps_holds_what_is_said(fault):
  run, truth = run_of(SyntheticJob(ranks=8, steps=STEPS, processes=4, noise=0.02, faults=(fault,)))
  found = diagnose(run)
  (finding,) = (f for f in found.findings if f.mode == Verdict.AMPLIFICATION)
  waited = np.sort((truth.busy[0].max(axis=0) - truth.busy[0].mean(axis=0))[found.selected.mask])
  worst = waited[-(len(waited) // 10):].sum() / waited.sum()
  assert percent(worst) in only(finding.evidence, Evidence.WORST_TENTH)
