"""Shows models on the page of `tied report`, and reads what is to be seen there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from browser import Page
from report_models import saved
from tied._checkpoint import open_checkpoint
from tied._cli.page import render
from tied._discover import discover


class Shown:
    """Shows models in the browser; at the end nothing may have gone wrong in the page."""

    def __init__(self, page: Page, folder: Path) -> None:
        self.page, self.folder = page, folder

    def __call__(self, model: dict[str, Any], *, search: bool = False, **window: Any) -> Page:
        contents = open_checkpoint(saved(model, self.folder))
        path = self.folder / "ties.html"
        text = render(contents, discover(contents) if search else None)
        path.write_text(text, encoding="utf-8")
        self.page.show(path, **window)
        return self.page


def rows(page: Page) -> list[str]:
    """The rows that are in the page, from top to bottom, as a screen reader has them."""
    code = """[...document.querySelectorAll("[role=treeitem]")]
        .sort((a, b) => a.getBoundingClientRect().y - b.getBoundingClientRect().y)
        .map(row => " ".repeat(row.ariaLevel - 1) +
            ({true: "v ", false: "> "}[row.ariaExpanded] ?? "") + row.ariaLabel)"""
    return list(page.run(code))


def active(page: Page) -> str:
    """The row that has the keys."""
    code = """(() => { const tree = document.getElementById("tree");
        const row = document.getElementById(tree.getAttribute("aria-activedescendant"));
        return row && document.activeElement === tree ? row.ariaLabel.split(",")[0] : ""; })()"""
    return str(page.run(code))


def to_tree(page: Page) -> None:
    """Goes to the tree by the Tab key alone."""
    for _ in range(20):
        page.press("Tab")
        if page.run("document.activeElement.id") == "tree":
            return
    raise AssertionError("Tab does not reach the tree")


def lines(page: Page) -> list[str]:
    code = """[...document.querySelectorAll(".wires g")].map(g =>
        g.getAttribute("class") + " " + g.querySelectorAll("circle").length)"""
    return sorted(page.run(code))


def background(page: Page) -> str:
    return str(page.run("getComputedStyle(document.body).backgroundColor"))
