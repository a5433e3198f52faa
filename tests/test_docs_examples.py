"""The examples of the README, the docs and the docstrings run, and print what they say.

The ```python blocks of a page are one program, run from top to bottom. A ```text block right behind
one is what that block prints.
"""

import contextlib
import doctest
import importlib
import io
import re
import sys
import types
from pathlib import Path

import pytest

from test_imports import MODULES

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n?^```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


def stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def run_page(text: str, name: str, namespace: dict[str, object]) -> int:
    """Runs the examples of a page; returns how many there were."""
    matches = list(BLOCK.finditer(text))
    for match in matches:
        # Line numbers of a traceback are those of the page.
        code = "\n" * text[: match.start("code")].count("\n") + match["code"]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), namespace)
        if match["output"] is not None:
            assert stripped(printed.getvalue()) == stripped(match["output"]), match["code"]
    return len(matches)


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    """The globals of a module of its own, in a folder of its own."""
    module = types.ModuleType("example_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    return vars(module)


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_page(page: str, namespace: dict[str, object]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert run_page(text, page, namespace) == text.count("```python")


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_docstrings(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_a_wrong_output_fails(namespace: dict[str, object]) -> None:
    page = "```python\nprint(1)\n```\n\n```text\n{}\n```\n"
    assert run_page(page.format(1), "page", namespace) == 1
    with pytest.raises(AssertionError, match="print"):
        run_page(page.format(2), "page", namespace)
