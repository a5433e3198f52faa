"""The sessions of the README and the docs print what they say."""

from pathlib import Path

import pytest

from sessions import ROOT, has_session, played

PAGES = [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if has_session(p)]


def test_pages_have_sessions() -> None:
    assert {page.name for page in PAGES} >= {"README.md", "cli.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sessions_of_page(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert played(text, tmp_path) == text


def test_a_wrong_output_is_seen(tmp_path: Path) -> None:
    page = "```console\n$ echo {}; false\n1\n$ echo $?\n1\n```\n"
    assert played(page.format(1), tmp_path) == page.format(1)
    assert played(page.format(2), tmp_path) == page.format(2).replace("\n1\n", "\n2\n", 1)
