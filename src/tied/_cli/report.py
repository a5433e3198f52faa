"""`tied report`: one page of HTML that draws a checkpoint and its ties."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from tied._checkpoint import open_checkpoint
from tied._cli.found import find
from tied._cli.outputs import Target, check
from tied._cli.printing import Console
from tied._files.atomic import write_text
from tied._ties import said_bytes


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("file", metavar="FILE", help="a checkpoint: a file, an index or a folder")
    parser.add_argument("-o", "--out", metavar="PAGE", default="ties.html",
                        help="the page (ties.html)")  # fmt: skip
    parser.add_argument("--discover", action="store_true",
                        help="draw ties that only the values remember, too")  # fmt: skip
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument("--force", action="store_true", help="replace the page if it is there")


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs the command."""
    contents = open_checkpoint(options.file)
    out = Path(options.out)
    check(contents, Target(out, "html"), options.force)
    from tied._cli.page import render

    page = render(contents, find(contents) if options.discover else None)
    write_text(out, page)
    nbytes = out.stat().st_size
    console.document({"path": str(contents.path), "written": str(out), "nbytes": nbytes})
    console.facts([("written", f"{out} ({said_bytes(nbytes)})")])
    if options.open:
        webbrowser.open(out.resolve().as_uri())
    return 0
