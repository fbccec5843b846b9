"""Code in the pages on metrics runs."""

import doctest

from tests.multiprocess.jobs import ROOT


def test_code_with_a_prompt_runs():
  results = doctest.testfile(str(ROOT / "docs" / "metrics.md"), module_relative=False)
  assert results.failed == 0 and results.attempted > 5
