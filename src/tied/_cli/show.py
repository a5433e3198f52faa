"""`tied show`: what a checkpoint holds, what of it is tied, and what a loader will miss."""

from __future__ import annotations

import argparse
from typing import Any

from tied._checkpoint import open_checkpoint
from tied._cli.found import find, found_dict, found_facts
from tied._cli.printing import Console, counted, listed
from tied._cli.tree import Branch, branches, lines, reads, total
from tied._discover import Discovered
from tied._files.contents import Alias, Checkpoint
from tied._files.header import read_header
from tied._ties import said_bytes


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("file", metavar="FILE", help="a checkpoint: a file, an index or a folder")
    parser.add_argument("patterns", metavar="PATTERN", nargs="*",
                        help="show only storages of which a name matches: 'h.0.*'")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="do not cut a long listing")
    parser.add_argument("--discover", action="store_true",
                        help="look for ties that only the values remember")  # fmt: skip


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs the command."""
    contents = open_checkpoint(options.file)
    shown = branches(contents, options.patterns)
    kept = Kept.of(contents)
    found = find(contents) if options.discover else None
    if console.json:
        console.document(_document(contents, shown, kept, found))
        return 0
    console.say(*lines(contents, shown, console, options.all))
    console.say(str(total(shown)), "")
    if options.patterns:
        many = counted(len(contents.storages), "storage")
        console.say(f"{len(shown):,} of {many} shown", "")
    console.facts(_facts(contents, kept, found))
    return 0


class Kept:
    """How the files of a checkpoint keep its names.

    Attributes:
        nbytes: The bytes of the files.
        stored: The bytes of tensors in them.
        missed: The names that have no tensor, so that a reader that knows no ties misses them.
    """

    def __init__(self, nbytes: int, stored: int, missed: list[str]) -> None:
        self.nbytes = nbytes
        self.stored = stored
        self.missed = missed

    @staticmethod
    def of(contents: Checkpoint) -> Kept:
        """Returns that of a checkpoint."""
        nbytes = sum(file.stat().st_size for file in contents.files if file.is_file())
        if contents.format != "safetensors":
            return Kept(nbytes, contents.nbytes, [])
        stored = sum(file.stat().st_size - _before(file) for file in contents.files)
        if stored == contents.nbytes:
            return Kept(nbytes, stored, list(contents.aliases))
        there = {name for file in contents.files for name in read_header(file).entries}
        return Kept(nbytes, stored, [name for name in contents.aliases if name not in there])


def _before(file: Any) -> int:
    """Returns how many bytes of a safetensors file stand before its tensors."""
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


def _facts(
    contents: Checkpoint, kept: Kept, found: Discovered | None
) -> list[tuple[str, str]]:  # fmt: skip
    files = f", {counted(len(contents.files), 'file')}" if len(contents.files) > 1 else ""
    size = f", {said_bytes(kept.nbytes)}" if kept.nbytes else ""
    facts = [("file", f"{contents.path} ({contents.format}{files}{size})")]
    twice = kept.stored - contents.nbytes
    unique = f"{said_bytes(contents.nbytes)} unique"
    facts.append(("tensors", f"{said_bytes(kept.stored)} stored, {unique}" if twice else unique))
    if kept.missed:
        facts.append(
            ("missed", f"by a loader that knows no ties: {listed(kept.missed)} "
                       "(`tied unpack` writes every name)")
        )  # fmt: skip
    for name, sources in contents.computed.items():
        facts.append(("computed", f"{name} of {', '.join(sources)}"))
    if found is None and not contents.aliases and not contents.computed:
        facts.append(("ties", "none recorded; --discover looks for those that were lost"))
    if found is not None:
        facts += found_facts(found)
    return facts


def alias_dict(contents: Checkpoint, alias: Alias) -> dict[str, Any]:
    """Returns an alias as plain data."""
    layout = alias.layout
    return {
        "name": alias.name,
        "reads": reads(contents, alias.name),
        "shape": list(layout.shape),
        "strides": list(layout.strides),
        "offset": layout.offset,
        "conj": layout.conj,
        "neg": layout.neg,
        "dtype": layout.dtype,
    }


def _document(
    contents: Checkpoint, shown: list[Branch], kept: Kept, found: Discovered | None
) -> dict[str, Any]:
    sums = total(shown)
    storages = [
        {
            "name": branch.stored.name,
            "dtype": branch.stored.dtype,
            "shape": list(branch.stored.shape),
            "nbytes": branch.stored.nbytes,
            "named": branch.stored.named,
            "file": None if branch.stored.file is None else str(branch.stored.file),
            "aliases": [alias_dict(contents, alias) for alias in branch.aliases],
        }
        for branch in shown
    ]
    return {
        "path": str(contents.path),
        "format": contents.format,
        "files": [str(file) for file in contents.files],
        "file_nbytes": kept.nbytes,
        "stored_nbytes": kept.stored,
        "unique_nbytes": contents.nbytes,
        "parameters": sums.parameters,
        "nbytes": sums.nbytes,
        "naive_parameters": sums.naive_parameters,
        "naive_nbytes": sums.naive_nbytes,
        "missed": kept.missed,
        "metadata": contents.metadata,
        "computed": {name: list(sources) for name, sources in contents.computed.items()},
        "storages": storages,
        "discovered": found_dict(found),
    }
