"""README.md and docs/ say what the records say, and name no measured value without a
record."""

import re

import pytest

from tests.docs.blocks import ROOT
from tests.docs.test_site import extension

claims = extension("measured_claims")

SECTIONS = {"README.md": ("## What you get", "## What it costs"),
            "docs/when_not.md": ("## What it costs",),
            "docs/what_it_costs.md": ("## Recording", "## Compiling", "## Instrumented steps",
                                      "## What comes back"),
            "docs/how_sure.md": ("## How sure a report is", "## Observed steps")}
"""Sections that name measured values: each of these must be in a claim."""
NOT_MEASURED = {
    "README.md": {"0.5 %", "1 %", "5 %", "13 %", "30 %"},
    "docs/when_not.md": set(),
    "docs/what_it_costs.md": {"0.5 %", "1 %", "2 %", "5 ms", "15 ms", "20 ms", "13 %", "30 %"},
    "docs/how_sure.md": {"1 to 50 ms", "5 %", "20 %"}}
"""Aims, sizes that were chosen, and bounds that hold by construction."""


def plain(text):
  """A page in one line."""
  return " ".join(text.split())


def section(text, heading):
  return text.partition(heading)[2].partition("\n## ")[0]


@pytest.mark.parametrize("claim", claims.CLAIMS,
                         ids=lambda claim: f"{claim.page}: {claim.words[:40]}")
def test_a_claim_is_what_its_record_says(claim):
  assert plain(claim.filled()) in plain((ROOT / claim.page).read_text())


@pytest.mark.parametrize("page", SECTIONS)
def test_no_measured_value_is_without_its_record(page):
  text = plain("\n".join(re.sub(r"```.*?```", "", section((ROOT / page).read_text(), heading),
                                flags=re.DOTALL)
                         for heading in SECTIONS[page]))
  for claim in claims.CLAIMS:
    if claim.page == page:
      text = text.replace(plain(claim.filled()), " ")
  left = (set(re.findall(r"\d[\d.,]*(?: to \d[\d.,]*)? (?:%|ms|µs)", text))
          | set(re.findall(r"\d+ of \d+", text)))
  assert left <= NOT_MEASURED[page], left - NOT_MEASURED[page]
