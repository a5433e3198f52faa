"""Checkpoints written as safetensors files: each storage once, and the tie table beside."""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tied._errors import FileError, UntiedWarning, callers_level
from tied._files.atomic import replacing, settle, sweep, write_text
from tied._files.container import Progress, write_container
from tied._files.contents import INDEX, ONE, Alias, Checkpoint, Stored
from tied._files.dtypes import BITS
from tied._files.elements import overlapping, read_bytes
from tied._files.header import is_text
from tied._files.table import write_table


def write(
    contents: Checkpoint,
    path: Path,
    *,
    expand: bool = False,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes a checkpoint.

    Args:
        contents: What to write.
        path: A file; with `max_shard_bytes` a folder.
        expand: Write a tensor for every name, for readers that need it.
        max_shard_bytes: The most bytes of tensors in one file.
        metadata: What else the file is to say of itself.
        progress: Called with the number of bytes that were just written.

    Returns:
        The file, or the index of the files.
    """
    _refuse_names(contents)
    pieces = dict(contents.storages)
    if expand:
        _warn_of_spans(contents)
        pieces |= {x.name: _expanded(contents, x) for x in contents.aliases.values()}
        pieces = {name: x for name, x in pieces.items() if x.named}
    notes = {**contents.metadata, **(metadata or {})}
    try:
        return _placed(contents, pieces, path, expand, max_shard_bytes, notes, progress)
    except OSError as error:
        facts = [("file", str(path)), ("why", error.strerror or str(error))]
        raise FileError("the file can't be written", facts=facts) from error


def _placed(
    contents: Checkpoint, pieces: dict[str, Stored], path: Path, expand: bool,
    max_shard_bytes: int | None, notes: Mapping[str, str], progress: Progress | None,
) -> Path:  # fmt: skip
    """Writes the pieces to a file, or into a folder."""
    if max_shard_bytes is None and not path.is_dir():
        if path.suffix != ".safetensors":
            raise FileError(
                "a file of this name would be taken for another format",
                facts=[("file", str(path))],
                hint=f"Name it {path.stem}.safetensors",
            )
        _write_file(contents, pieces, path, expand, notes, progress)
        return path
    path.mkdir(parents=True, exist_ok=True)
    shards = _shards(pieces, max_shard_bytes)
    if len(shards) == 1:
        try:
            _write_file(contents, shards[0], path / ONE, expand, notes, progress)
            _forget(path, {ONE})
        except BaseException:
            if (path / INDEX).exists():  # which leads to the files of before
                (path / ONE).unlink(missing_ok=True)
            raise
        return path / ONE
    return _write_shards(contents, shards, path, expand, notes, progress)


def _write_shards(
    contents: Checkpoint, shards: list[dict[str, Stored]], path: Path, expand: bool,
    notes: Mapping[str, str], progress: Progress | None,
) -> Path:  # fmt: skip
    """Writes several files, whose index comes last and makes them the checkpoint."""
    tag = f"-{secrets.token_hex(4)}" if (path / INDEX).exists() else ""
    files = [
        path / f"model-{n:05}-of-{len(shards):05}{tag}.safetensors"
        for n in range(1, len(shards) + 1)
    ]
    done: list[Path] = []
    try:
        for file, shard in zip(files, shards, strict=True):
            done.append(file)
            _write_file(contents, shard, file, expand, notes, progress)
        total = sum(x.nbytes for shard in shards for x in shard.values())
        places = {name: file.name for file, shard in zip(files, shards, strict=True)
                  for name in shard}  # fmt: skip
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_text(path / INDEX, json.dumps(index, indent=2))
    except BaseException:
        if not _leads_to(path / INDEX, files[0]):  # else it is the checkpoint now
            for file in done:
                file.unlink(missing_ok=True)
        raise
    _forget(path, {INDEX, *(file.name for file in files)})
    return path / INDEX


def _leads_to(index: Path, file: Path) -> bool:
    return index.is_file() and f'"{file.name}"' in index.read_text(encoding="utf-8")


def _forget(path: Path, kept: set[str]) -> None:
    """Removes the files of the checkpoint that was in a folder before: what leads to it first."""
    if INDEX not in kept and (path / INDEX).exists():
        (path / INDEX).unlink()
        settle(path)
    for file in path.glob("model*.safetensors"):
        if file.name not in kept and (file.name == ONE or "-of-" in file.name):
            file.unlink()
    sweep(path, "model")
    settle(path)


def _refuse_names(contents: Checkpoint) -> None:
    """Raises for names that no file can have."""
    for name in (*contents.storages, *contents.aliases):
        if name == "__metadata__" or not is_text(name):
            paths = [name if is_text(name) else ascii(name)]
            raise FileError(f"no array can be named {name!a}", paths=paths)
        if name in contents.storages and name in contents.aliases:
            raise FileError(
                f"two arrays have the name {name}",
                hint="A key with a dot in it reads like two keys: rename it",
                paths=[name],
            )


def _warn_of_spans(contents: Checkpoint) -> None:
    """Warns of ties that an expanded file does not hold, as no tensor in it has all elements."""
    for stored in contents.storages.values():
        readers = [alias for alias in contents.aliases.values() if alias.of == stored.name]
        if not stored.named and overlapping(stored, readers):
            names = [alias.name for alias in readers]
            warnings.warn(
                f"expand=True writes {', '.join(names)} apart: no tensor holds them all",
                UntiedWarning,
                stacklevel=callers_level(),
            )


def _shards(pieces: dict[str, Stored], most: int | None) -> list[dict[str, Stored]]:
    shards: list[dict[str, Stored]] = [{}]
    room = most
    for name, stored in pieces.items():
        if most is not None and room is not None and stored.nbytes > room and shards[-1]:
            shards.append({})
            room = most
        shards[-1][name] = stored
        room = None if room is None else room - stored.nbytes
    return shards


def _write_file(
    contents: Checkpoint, pieces: dict[str, Stored], path: Path, expand: bool,
    notes: Mapping[str, str], progress: Progress | None,
) -> None:  # fmt: skip
    metadata = {"format": "pt"}
    metadata |= {k: v for k, v in notes.items() if k not in pieces}
    metadata |= write_table(contents, pieces.keys() & contents.storages.keys(), expanded=expand)
    with replacing(path) as beside:
        write_container(beside, pieces.values(), metadata, progress)


def _expanded(contents: Checkpoint, alias: Alias) -> Stored:
    """Returns an alias as a storage of its own."""
    base, layout = contents.storages[alias.of], alias.layout
    dtype = layout.dtype or base.dtype
    nbytes = int(np.prod(layout.shape)) * BITS[dtype] // 8
    return Stored(alias.name, dtype, layout.shape, nbytes, lambda: read_bytes(base, alias))
