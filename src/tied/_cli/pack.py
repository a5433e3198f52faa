"""`tied pack`: a safetensors file with each storage once, and its ties."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tied._checkpoint import open_checkpoint
from tied._cli.checksums import KEY, write_checksums
from tied._cli.found import find, found_dict, found_facts
from tied._cli.outputs import Request, Target, check, parse_bytes, target, write_to
from tied._cli.printing import Console, counted
from tied._cli.progress import Progress
from tied._discover import retied
from tied._files.contents import Checkpoint
from tied._ties import said_bytes


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_places(parser, "a .safetensors file, or a folder")
    parser.add_argument("--discover", action="store_true",
                        help="tie names that hold the same values, too")  # fmt: skip
    parser.add_argument("--checksum", action="store_true",
                        help="store a checksum of each storage, for `tied verify`")  # fmt: skip


def add_places(parser: argparse.ArgumentParser, out: str) -> None:
    """Adds the arguments of a command that writes a checkpoint."""
    parser.add_argument("file", metavar="IN", help="a checkpoint: a file, an index or a folder")
    parser.add_argument("out", metavar="OUT", help=out)
    parser.add_argument("--max-shard-bytes", metavar="BYTES", type=_bytes,
                        help="write several files of at most so many: 5GB, 512MiB")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there")


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        told = f"{text!r} is no number of bytes; type 5GB or 512MiB"
        raise argparse.ArgumentTypeError(told) from None


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs the command."""
    out = target(options.out, options.max_shard_bytes, "safetensors")
    contents = open_checkpoint(options.file)
    request = Request("packing", max_shard_bytes=options.max_shard_bytes, force=options.force)
    check(contents, out, options.force)
    found = find(contents) if options.discover else None
    packed = contents if found is None else retied(contents, found)
    forget_checksums(packed)
    if options.checksum:
        with Progress("summing", packed.nbytes) as progress:
            packed.metadata |= write_checksums(packed, progress)
    made = write_to(packed, out, request)
    console.document({
        **written_dict(contents, packed, out, made),
        "checksums": options.checksum,
        "discovered": found_dict(found),
    })  # fmt: skip
    told = [] if found is None else found_facts(found)
    if options.checksum:
        told.append(("checksums", f"one for each of {counted(len(packed.storages), 'storage')}"))
    console.facts([*written(packed, made), *told])
    return 0


def forget_checksums(contents: Checkpoint) -> None:
    """Removes checksums that the input had: what is written now may have other storages."""
    contents.metadata = {k: v for k, v in contents.metadata.items() if k != KEY}


def written(contents: Checkpoint, made: Path, apart: int = 0) -> list[tuple[str, str]]:
    """Returns what to print of a checkpoint that was written, and some of whose names apart."""
    tied = len(contents.aliases) - apart
    text = f"{counted(len(contents.storages), 'storage')}, {said_bytes(contents.nbytes)}"
    text += f", {counted(tied, 'name')} tied to them" if tied else ""
    return [("written", str(made)), ("storages", text)]


def written_dict(
    source: Checkpoint, contents: Checkpoint, out: Target, made: Path
) -> dict[str, Any]:
    """Returns the same as plain data."""
    return {
        "path": str(source.path),
        "written": str(made),
        "format": out.form,
        "storages": len(contents.storages),
        "unique_nbytes": contents.nbytes,
        "aliases": len(contents.aliases),
    }
