"""Every how-to page is played from its first block to its last; what is not run is listed with the reason."""

import re
from pathlib import Path

import pytest
from pages import ROOT, blocks, pattern, play, typed

PAGES = [*sorted((ROOT / "docs" / "howto").glob("*.md")), ROOT / "docs" / "migrate.md"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_does_what_it_says(page, tmp_path):
    assert play(page, tmp_path) > 0


def test_what_is_not_run_is_listed_with_the_reason():
    found = [f"{page.stem}: {one.reason}" for page in PAGES for one in blocks(page) if one.reason is not None]
    listed = (Path(__file__).parent / "not_run.txt").read_text().splitlines()
    assert found == [line for line in listed if " | " not in line]


def test_every_page_says_what_it_needs_and_is_in_the_table_of_contents():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in PAGES:
        assert "**You need:**" in page.read_text(), page.name
        assert re.search(rf"^(howto/)?{page.stem}$", index, re.MULTILINE), page.name


def test_every_page_of_the_start_and_the_how_tos_says_what_it_needs():
    index = (ROOT / "docs" / "index.md").read_text()
    listed = "".join(re.findall(r":caption: (?:Start|How to)\n.*?\n\n(.*?)```", index, re.DOTALL)).split()
    assert len(listed) > 20
    pages = [ROOT / "docs" / f"{name}.md" for name in listed]
    assert [page.stem for page in pages if "You need" not in page.read_text()] == []


def test_commands_and_what_they_show_are_told_apart():
    assert typed("$ a \\\n  b\nsaid\n$ c\n") == [("a \\\n  b", "said\n"), ("c", "")]
    assert re.search(pattern("a ... b\n...\nend\n"), "a   1 b\nx\nend\n")
    assert not re.search(pattern("a ... b\n...\nend\n"), "end\na 1 b\n")
