"""Draws docs/report.png. Type: PYTHONPATH=src:tests python tools/report_picture.py."""

from __future__ import annotations

import tempfile
from pathlib import Path

from browser import browser
from report_models import gpt2, saved
from tied._checkpoint import open_checkpoint
from tied._cli.page import render
from tied._discover import discover

OUT = Path(__file__).parent.parent / "docs" / "report.png"


def main() -> None:
    """Draws a small GPT-2 with a tie, and with a copy of its embedding that was tied once."""
    model = gpt2(6)
    model["value_head.weight"] = model["transformer.wte.weight"].T.copy()
    with tempfile.TemporaryDirectory() as folder, browser() as page:
        contents = open_checkpoint(saved(model, Path(folder)))
        path = Path(folder) / "ties.html"
        path.write_text(render(contents, discover(contents)), encoding="utf-8")
        page.show(path, width=1240, height=860)
        page.run("document.querySelector('[id=n0]').click()")
        page.picture(OUT)


if __name__ == "__main__":
    main()
