"""`tied unpack`: a file with an array for every name, for readers that know no ties."""

from __future__ import annotations

import argparse

from tied._checkpoint import open_checkpoint
from tied._cli.outputs import Request, target, untied, write_to
from tied._cli.pack import add_places, forget_checksums
from tied._cli.printing import Console, counted, listed
from tied._cli.writers import nbytes_of
from tied._ties import said_bytes


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_places(parser, "what to write, as for `tied convert`")


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs the command."""
    out = target(options.out, options.max_shard_bytes)
    contents = open_checkpoint(options.file)
    forget_checksums(contents)
    request = Request("unpacking", expand=True, max_shard_bytes=options.max_shard_bytes,
                      force=options.force)  # fmt: skip
    made = write_to(contents, out, request)
    apart = untied(contents, out.form, expand=True)
    names = list(contents.names())
    nbytes = sum(nbytes_of(contents, name) for name in names)
    console.document({
        "path": str(contents.path), "written": str(made), "format": out.form, "names": len(names),
        "nbytes": nbytes, "unique_nbytes": contents.nbytes, "untied": apart,
    })  # fmt: skip
    told = f"{counted(len(names), 'array')}, {said_bytes(nbytes)}"
    facts = [("written", str(made)), ("names", told)]
    if apart:
        facts.append(("untied", listed(apart)))
    console.facts(facts)
    return 0
