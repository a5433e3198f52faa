"""`tied convert`: a checkpoint in another format, with its ties where that can hold them."""

from __future__ import annotations

import argparse

from tied._checkpoint import open_checkpoint
from tied._cli.outputs import Request, target, untied, write_to
from tied._cli.pack import add_places, forget_checksums, written, written_dict
from tied._cli.printing import Console, listed


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_places(parser, "what to write, by its ending: .safetensors, .npz, .pt, .orbax; a folder")


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs the command."""
    out = target(options.out, options.max_shard_bytes)
    contents = open_checkpoint(options.file)
    forget_checksums(contents)
    request = Request("converting", max_shard_bytes=options.max_shard_bytes, force=options.force)
    made = write_to(contents, out, request)
    apart = untied(contents, out.form, expand=False)
    console.document({**written_dict(contents, contents, out, made), "untied": apart})
    facts = written(contents, made, len(apart))
    if apart:
        facts.append(("untied", f"{listed(apart)}: {out.form} holds no ties"))
    console.facts(facts)
    return 0
