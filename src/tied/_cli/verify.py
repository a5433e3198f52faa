"""`tied verify`: whether a checkpoint is sound, and what that was seen by."""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tied._checkpoint import open_checkpoint
from tied._cli.checksums import ALGORITHM, checksum, read_checksums
from tied._cli.printing import Console, clean, counted, listed, paint
from tied._cli.progress import Progress
from tied._cli.writers import bytes_of
from tied._files.contents import Checkpoint
from tied._files.header import Entry, read_header
from tied._ties import said_bytes

_PIECE = 16 << 20


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("file", metavar="FILE", help="a checkpoint: a file, an index or a folder")


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked.

    Attributes:
        what: "header", "ties", ...
        sound: Whether it is as it should be; None if the file has nothing to check.
        text: What was seen.
        names: The tensors at which it is not sound.
    """

    what: str
    sound: bool | None
    text: str
    names: tuple[str, ...] = ()


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs the command."""
    contents = open_checkpoint(options.file)
    checks = list(_checks(contents))
    sound = all(check.sound is not False for check in checks)
    rows = [{"what": c.what, "sound": c.sound, "text": c.text, "names": list(c.names)}
            for c in checks]  # fmt: skip
    console.document({
        "path": str(contents.path), "format": contents.format, "sound": sound, "checks": rows,
    })  # fmt: skip
    for check in checks:
        style = {True: "good", False: "bad", None: "dim"}[check.sound]
        mark = {True: "ok", False: "BAD", None: "-"}[check.sound]
        told = f"{check.what:<10} {paint(style, f'{mark:<4}', console.colour)} {check.text}"
        console.say(told + (f": {clean(listed(check.names))}" if check.names else ""))
    console.say(paint(*(("good", "sound") if sound else ("bad", "not sound")), console.colour))
    return 0 if sound else 1


def _checks(contents: Checkpoint) -> Iterator[Check]:
    """Gives the checks one by one; the first ones are those of `open_checkpoint`, which passed."""
    if contents.format == "safetensors":
        yield from _checks_of_safetensors(contents)
        return
    many = counted(len(contents.storages), "storage")
    yield Check("structure", True, f"{contents.format}, {many}, {said_bytes(contents.nbytes)}")
    for file in contents.files:
        if file.is_file() and zipfile.is_zipfile(file):
            yield _zipped(file)
    yield _ties(contents)


def _checks_of_safetensors(contents: Checkpoint) -> Iterator[Check]:
    headers = {file: read_header(file) for file in contents.files}
    entries = {name: (file, entry) for file, header in headers.items()
               for name, entry in header.entries.items()}  # fmt: skip
    files = counted(len(headers), "file")
    yield Check("header", True, f"{files}, {counted(len(entries), 'tensor')}; dtypes, shapes and "
                "lengths agree")  # fmt: skip
    nbytes = sum(entry.nbytes for _, entry in entries.values())
    yield Check("offsets", True, f"{said_bytes(nbytes)}, each byte in one tensor")
    if contents.path.name.endswith(".index.json"):
        yield _index(contents.path, set(entries))
    yield _ties(contents)
    yield _records(contents, [header.metadata for header in headers.values()])
    yield _expanded(contents, entries)
    yield _checksums(contents)


def _index(path: Path, there: set[str]) -> Check:
    told = json.loads(path.read_bytes())["weight_map"]
    missed = tuple(sorted(there - set(told)))
    if missed:
        return Check("index", False, "tensors of the files that it does not name", missed)
    return Check("index", True, f"names {counted(len(told), 'tensor')}, each in its file")


def _ties(contents: Checkpoint) -> Check:
    if not contents.aliases:
        return Check("ties", None, "none recorded")
    many = counted(len(contents.aliases), "name")
    return Check("ties", True, f"{many} tied; each reads inside of its storage")


def _records(contents: Checkpoint, metadata: list[dict[str, str]]) -> Check:
    """Compares the table with what the files say in Hugging Face's form."""
    told = {name: kept for texts in metadata for name, kept in texts.items()
            if name in contents.aliases}  # fmt: skip
    if not told:
        return Check("records", None, "no tie in Hugging Face's form {alias: kept}")
    wrong = tuple(name for name, kept in told.items() if contents.aliases[name].of != kept)
    if wrong:
        return Check("records", False, "the tie table and Hugging Face's form disagree", wrong)
    return Check("records", True, f"{counted(len(told), 'tie')} in Hugging Face's form agree")


def _expanded(contents: Checkpoint, entries: dict[str, tuple[Path, Entry]]) -> Check:
    """Compares the names that are tied, and have a tensor of their own too, with their storages."""
    written = [name for name in contents.aliases if name in entries]
    if not written:
        return Check("expanded", None, "no tied name has a tensor of its own")
    wrong = []
    total = 2 * sum(entries[name][1].nbytes for name in written)
    with Progress("comparing", total) as progress:
        for name in written:
            file, entry = entries[name]
            own = np.memmap(file, np.uint8, "r", entry.start, (entry.nbytes,)) if (
                entry.nbytes) else np.empty(0, np.uint8)  # fmt: skip
            alike = entry.shape == contents.shape(name) and entry.dtype == contents.dtype(name)
            if not alike or not _equal(own, bytes_of(contents, name), progress):
                wrong.append(name)
    if wrong:
        return Check("expanded", False, "tensors that are not what they are tied to", tuple(wrong))
    many = counted(len(written), "tied name")
    return Check("expanded", True, f"{many} with a tensor of its own agree bit by bit")


def _equal(a: Any, b: Any, progress: Callable[[int], object]) -> bool:
    if a.size != b.size:
        return False
    for start in range(0, a.size, _PIECE):
        piece = slice(start, start + _PIECE)
        if not np.array_equal(a[piece], b[piece]):
            return False
        progress(2 * a[piece].size)
    return True


def _checksums(contents: Checkpoint) -> Check:
    sums = read_checksums(contents)
    if sums is None:
        return Check("checksums", None, "none recorded; `tied pack --checksum` does")
    unlike = sorted(sums.keys() ^ contents.storages.keys())
    if unlike:
        return Check("checksums", False, "not of the storages that are there", tuple(unlike))
    with Progress("summing", contents.nbytes) as progress:
        wrong = tuple(
            name for name, stored in contents.storages.items()
            if checksum(stored, progress) != sums[name]
        )  # fmt: skip
    if wrong:
        return Check("checksums", False, "bytes that are not what was written", wrong)
    return Check("checksums", True, f"{counted(len(sums), 'storage')}, {ALGORITHM}")


def _zipped(file: Path) -> Check:
    """Reads all of a zip archive, which has a CRC-32 of each member."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        with Progress("reading", sum(member.file_size for member in members)) as progress:
            for member in members:
                try:
                    with archive.open(member) as opened:
                        while piece := opened.read(_PIECE):
                            progress(len(piece))
                except zipfile.BadZipFile:
                    return Check("crc-32", False, f"of a member of {file.name}", (member.filename,))
    return Check("crc-32", True, f"{counted(len(members), 'member')} of {file.name}")
