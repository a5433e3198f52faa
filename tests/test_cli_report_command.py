"""`tied report`: where the page is written to, and what is printed of it."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from commands import autoencoder, run, text
from tied._checkpoint import open_checkpoint
from tied._cli import report
from tied._cli.page import render
from tied._discover import discover
from tied._ties import said_bytes


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_page_is_that_of_the_checkpoint() -> None:
    path = autoencoder(Path())
    ran = run("report", path)
    page = Path("ties.html").read_text(encoding="utf-8")
    assert ran == (0, f"written  ties.html ({said_bytes(len(page.encode()))})\n", "")
    assert page == render(open_checkpoint(path))
    told = run("report", path, "-o", "other.html", "--json").json
    assert told == {
        "command": "report", "path": "model.safetensors", "written": "other.html",
        "nbytes": len(page.encode()),
    }  # fmt: skip


def test_lost_ties_are_drawn_if_asked_for() -> None:
    w = np.arange(12, dtype="float32").reshape(4, 3)
    save_file({"a": w, "b": w.copy()}, "model.safetensors")
    assert run("report", "model.safetensors", "-o", "plain.html").code == 0
    assert run("report", "model.safetensors", "-o", "found.html", "--discover").code == 0
    contents = open_checkpoint("model.safetensors")
    assert Path("plain.html").read_text(encoding="utf-8") == render(contents)
    found = Path("found.html").read_text(encoding="utf-8")
    assert found == render(contents, discover(contents))
    assert found != render(contents)


def test_nothing_is_overwritten_unasked() -> None:
    path = autoencoder(Path())
    Path("ties.html").write_text("mine", encoding="utf-8")
    assert run("report", path) == (2, "", text("""
        tied: there is a file already
          file  ties.html
          --force replaces it
        """))  # fmt: skip
    assert Path("ties.html").read_text(encoding="utf-8") == "mine"
    assert run("report", path, "--force").code == 0
    before = path.read_bytes()
    assert run("report", path, "--force", "-o", path).code == 2
    assert path.read_bytes() == before
    assert run("report", path, "-o", "no/ties.html").err == (
        "tied: there is no such folder\n  folder  no\n"
    )


def test_the_browser_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert run("report", autoencoder(Path()), "--open").code == 0
    assert opened == [Path("ties.html").resolve().as_uri()]


def test_a_page_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, page: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(report, "write_text", full)
    ran = run("report", autoencoder(Path()))
    assert (ran.code, ran.err) == (2, "tied: no space left on device: ties.html\n")
    assert [p.name for p in Path().iterdir()] == ["model.safetensors"]
