"""Links between the pages of the documentation lead to a file, and their anchors to a heading of it."""

import re
from pathlib import Path

import pytest

from tests import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings of a page, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Returns the links of a page, within the repository, that lead nowhere."""
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    assert not broken_links(page)


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# One `two`: three\n[a](#one-two-three) [b](page.md#four) [c](none.md) [d](https://x.y/z)\n")
    assert broken_links(page) == ["page.md#four", "none.md"]


def test_every_page_is_linked_from_the_readme():
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {str(page.relative_to(ROOT)) for page in PAGES if page.name != "README.md"} <= linked
