"""Every link between pages leads to a page, and to a heading, that is there: without building the
website."""

import re

import pytest

from tests.docs import links
from tests.docs.blocks import ROOT

PAGE = """
# A page, of `code` and *more*

(a-target)=
## What it's worth: 5 % & more

See [above](#a-page-of-code-and-more), [that](other.md), [there](other.md#a-heading) and
[elsewhere](https://example.org/x#y).

## Twice

## Twice

| a | b |
|---|---|
| [c](folder/third.md#deep-er_one) | ![d](d.svg) |

```sh
# No heading: [e](nowhere.md)
```

```{toctree}
:maxdepth: 1
Other <other>
folder/third
```
"""


@pytest.fixture
def page(tmp_path):
  (tmp_path / "folder").mkdir()
  (tmp_path / "other.md").write_text("# Other\n\n### A heading\n\n#### Too deep\n")
  (tmp_path / "folder" / "third.md").write_text("# Deep-er_one\n")
  (tmp_path / "d.svg").touch()
  return tmp_path / "page.md"


def test_every_link_leads_somewhere():
  assert not [f"{page.parent.relative_to(ROOT)}/{told}" for page in links.sources()
              for told in links.broken(page.read_text(), page)]


def test_pages_have_links_to_headings_and_files():
  targets = [link.target for page in links.sources() for link in links.of(page.read_text())]
  assert sum(".md" in target for target in targets) > 200
  assert sum("#" in target and "://" not in target for target in targets) > 20


def test_links_and_headings_are_found(page):
  assert links.anchors(PAGE) == {"a-page-of-code-and-more", "a-target", "twice", "twice-1",
                                 "what-its-worth-5---more"}
  assert [link.target for link in links.of(PAGE)] == [
      "#a-page-of-code-and-more", "other.md", "other.md#a-heading", "https://example.org/x#y",
      "folder/third.md#deep-er_one", "d.svg", "other.md", "folder/third.md"]
  assert not list(links.broken(PAGE, page))


@pytest.mark.parametrize(("right", "wrong", "why"), [
    ("(other.md)", "(others.md)", "no such file"),
    ("#a-heading", "#the-heading", "no such heading in other.md"),
    ("#a-heading", "#too-deep", "no such heading in other.md"),
    ("#a-heading", "#A-heading", "no such heading in other.md"),
    ("#a-heading", "#", "names no heading"),
    ("(#a-page-of-code-and-more)", "(#a-page-of-code)", "no such heading in page.md"),
    ("third.md#deep-er_one", "third.md#deeper_one", "no such heading in third.md"),
    ("d.svg", "e.svg", "no such file"),
    ("<other>", "<another>", "no such file"),
    ("\nfolder/third", "\nfolder/fourth", "no such file")])
def test_a_link_that_leads_nowhere_is_told_with_its_place(page, right, wrong, why):
  changed = PAGE.replace(right, wrong, 1)
  found, = links.broken(changed, page)
  assert found.endswith(f": {why}")
  place, target = re.fullmatch(rf"page.md:(\d+): (.*): {why}", found).groups()
  # The place is where the paragraph, row or fence begins.
  lines = changed.splitlines()[int(place) - 1:]
  assert any(target.removesuffix(".md") in line for line in lines)
