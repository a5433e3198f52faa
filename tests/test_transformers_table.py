"""The list of architectures is whole, and the page that says what they tie is up to date."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import transformers

from architectures import BUILT, NOT_BUILT, candidates

TOOL = Path(__file__).parent.parent / "tools" / "transformers_ties.py"


def test_every_text_architecture_is_built_or_has_a_reason() -> None:
    """A new version of transformers brings new ones: enter them."""
    assert transformers.__version__ == "5.24.0"
    assert len(BUILT) == len(set(BUILT)) == 279
    assert set(BUILT) | NOT_BUILT.keys() == candidates()
    assert not set(BUILT) & NOT_BUILT.keys()
    assert sorted(BUILT) == BUILT


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
def test_the_page_is_what_the_tool_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is not: `python tools/transformers_ties.py`."""
    monkeypatch.setattr("sys.path", sys.path.copy())
    spec = importlib.util.spec_from_file_location("transformers_ties", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.PAGE.read_text()
    assert tool.page(text) == text
