"""Every link between pages leads to a page, and to a heading, that is there: without building the
website."""

from tests.docs import links
from tests.docs.blocks import ROOT


def test_every_link_leads_somewhere():
  assert not [f"{page.parent.relative_to(ROOT)}/{told}" for page in links.sources()
              for told in links.broken(page.read_text(), page)]


def test_pages_have_links_to_headings_and_files():
  targets = [link.target for page in links.sources() for link in links.of(page.read_text())]
  assert sum(".md" in target for target in targets) > 200
  assert sum("#" in target and "://" not in target for target in targets) > 20
