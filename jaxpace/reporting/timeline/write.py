"""From a run that was read to timeline files."""

from __future__ import annotations

from jaxpace.diagnosis.findings import Finding
from jaxpace.reporting.json_file import UnwritableError, check_target, write_file
from jaxpace.reporting.timeline import chrome, perfetto
from jaxpace.reporting.timeline.build import build, latest
from jaxpace.trace.run import Run
from jaxpace.trace.step_times import read_bounds


def check(perfetto_file: str | None, chrome_file: str | None) -> None:
  """Finds out, before the work is done, whether the timelines can be written.

  Raises:
    UnwritableError: they can't.
    perfetto.MissingPackageError: Perfetto's format is asked for and its package is not installed.
  """
  for target, option in ((perfetto_file, "--perfetto"), (chrome_file, "--chrome")):
    if target == "-":
      raise UnwritableError(
          f"{option} takes the name of a file, such as timeline.pftrace, not '-'.")
    if target is not None:
      check_target(target)
  if perfetto_file is not None:
    perfetto.messages()


def write(run: Run, findings: tuple[Finding, ...], perfetto_file: str | None,
          chrome_file: str | None) -> str:
  """Writes the timelines asked for, each as a whole or not at all.

  Args:
    run: the recorded run, or a window of it; of a very large one, its last steps are shown.
    findings: what was found in it.
    perfetto_file: file for Perfetto's protobuf; None for none.
    chrome_file: file for Chrome's JSON; None for none.

  Returns:
    A sentence on what is in them.

  Raises:
    UnwritableError: a file can't be written.
    perfetto.MissingPackageError: Perfetto's package is not installed.
  """
  shown = latest(run)
  timeline = build(shown, read_bounds(shown), findings)
  for target, encode in ((perfetto_file, perfetto.encode), (chrome_file, chrome.encode)):
    if target is not None:
      write_file(encode(timeline), target)
  steps = shown.steps[shown.inside]
  left_out = "" if shown is run else (", the last ones that a browser can show: choose others with "
                                      "--steps A:B")
  names = " and ".join(name for name in (perfetto_file, chrome_file) if name is not None)
  return (f"Timeline of {shown.ranks} ranks, steps {steps[0]} to {steps[-1]}{left_out}, in "
          f"{names}. Once aligned, exits of a collective lie {timeline.spread * 1e3:.3f} ms from "
          "their common one (median)."
          + (" Groups of ranks that never meet have no time in common: each is shown from the "
             "others' beginning on."
             if timeline.apart else ""))

