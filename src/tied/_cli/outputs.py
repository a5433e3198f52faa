"""Where a command writes to: not over its input, not over other things unasked."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tied._cli.progress import Progress
from tied._cli.writers import nbytes_of, write_npz, write_orbax, write_pytorch
from tied._errors import FileError, TiedError, UntiedWarning
from tied._files.contents import Checkpoint
from tied._files.write import write

FORMATS = {
    ".safetensors": "safetensors", ".npz": "npz", ".pt": "pytorch", ".pth": "pytorch",
    ".bin": "pytorch", ".orbax": "orbax",
}  # fmt: skip
"""What is written to a file or folder, by how its name ends."""
_WITHOUT_TIES = ("npz", "orbax")
_WRITERS = {"npz": write_npz, "pytorch": write_pytorch, "orbax": write_orbax}


@dataclass(frozen=True, slots=True)
class Request:
    """What to write, and how.

    Attributes:
        doing: What the command does, for its progress bar: "packing".
        expand: Write an array for every name.
        max_shard_bytes: The most bytes of tensors in one file.
        force: Replace what is there.
    """

    doing: str
    expand: bool = False
    max_shard_bytes: int | None = None
    force: bool = False


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Returns the bytes that a person writes as "5GB" or "512 MiB".

    Raises:
        ValueError: It is none.

    >>> parse_bytes("5GB"), parse_bytes("1.5 MiB")
    (5000000000, 1572864)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = _UNITS.get(match[2].upper().removesuffix("B")) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ValueError(text)
    return int(float(match[1]) * unit)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint is written to.

    Attributes:
        path: The file, or the folder.
        form: The format: one of the values of `FORMATS`.
        folder: Whether it is a folder of safetensors files.
    """

    path: Path
    form: str
    folder: bool = False


def target(out: str, max_shard_bytes: int | None, only: str | None = None) -> Target:
    """Returns where to write to, as a person named it.

    Args:
        out: A file, whose ending says the format; or a folder: it has no ending, ends in a slash,
            is there already, or is to have several files.
        max_shard_bytes: The most bytes of tensors in one file, if that is limited.
        only: The one format that the command writes.

    Raises:
        TiedError: No format is known by that ending.
    """
    path = Path(out)
    form = FORMATS.get(path.suffix)
    several = max_shard_bytes is not None and form is None
    if form != "orbax" and (several or not path.suffix or out.endswith("/") or path.is_dir()):
        return Target(path, "safetensors", folder=True)
    if form is None or only not in (None, form):
        known = [suffix for suffix, name in FORMATS.items() if only in (None, name)]
        raise TiedError(
            f"no checkpoint is written to a file that ends in {path.suffix!r}",
            facts=[("file", str(path)), ("known", ", ".join(known))],
            hint="Give it one of these endings; for a folder of safetensors files, type a / behind",
        )
    if max_shard_bytes is not None:
        raise TiedError(
            "several files need a folder", facts=[("given", str(path))],
            hint="With --max-shard-bytes, OUT is the name of a folder",
        )  # fmt: skip
    return Target(path, form)


def write_to(contents: Checkpoint, out: Target, request: Request) -> Path:
    """Writes a checkpoint.

    Returns:
        The file that leads to it.

    Raises:
        TiedError: It would overwrite something, or can't be written in this format.
    """
    check(contents, out, request.force)
    total = contents.nbytes
    if request.expand or out.form in _WITHOUT_TIES:
        total = sum(nbytes_of(contents, name) for name in contents.names())
    with Progress(request.doing, total) as progress:
        if out.form == "safetensors":
            return _write_safetensors(contents, out, request, progress)
        try:
            _WRITERS[out.form](contents, out.path, request.expand, progress)
        except OSError as error:
            facts = [("file", str(out.path)), ("why", error.strerror or str(error))]
            raise FileError("the file can't be written", facts=facts) from error
    return out.path


def check(contents: Checkpoint, out: Target, force: bool) -> None:
    """Checks that a checkpoint may be written to a place.

    Raises:
        TiedError: It may not: that is the input, or something else that is there.
    """
    path, inputs = out.path, [contents.path, *contents.files]
    same = any(path.exists() and x.exists() and path.samefile(x) for x in inputs)
    if same or (out.folder and any(x.resolve().parent == path.resolve() for x in inputs)):
        raise TiedError(
            "this would overwrite the input", facts=[("file", str(path))],
            hint="Write to another place, and move it when you have looked at it",
        )  # fmt: skip
    if not path.absolute().parent.is_dir():
        raise FileError("there is no such folder", facts=[("folder", str(path.parent))])
    there = sorted(path.glob("model*.safetensors*")) if path.is_dir() else [path]
    if not force and any(x.exists() for x in there):
        raise TiedError(
            "there is a checkpoint already" if path.is_dir() else "there is a file already",
            facts=[("file", str(there[0]))], hint="--force replaces it",
        )  # fmt: skip


def _write_safetensors(
    contents: Checkpoint, out: Target, request: Request, progress: Callable[[int], None]
) -> Path:
    made = out.folder and not out.path.exists()
    if made:
        out.path.mkdir()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntiedWarning)  # `untied` says it
            return write(
                contents, out.path, expand=request.expand, max_shard_bytes=request.max_shard_bytes,
                progress=progress,
            )  # fmt: skip
    except BaseException:
        if made and not any(out.path.iterdir()):
            out.path.rmdir()
        raise


def untied(contents: Checkpoint, form: str, expand: bool) -> list[str]:
    """Returns the names that come untied when a checkpoint is written.

    Args:
        contents: The checkpoint.
        form: The format: one of the values of `FORMATS`.
        expand: Whether every name is written.
    """
    if form == "safetensors" and not expand:
        return []
    if form == "safetensors":  # where a tensor holds all of them, the tie table has them
        return [x.name for x in contents.aliases.values() if not contents.storages[x.of].named]
    return list(contents.aliases) if form in _WITHOUT_TIES or expand else []
