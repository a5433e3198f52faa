"""`save_model` and `load_model` as safetensors has them, for models with ties of any kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tied import arrays
from tied._checkpoint import array_over, open_checkpoint
from tied._errors import FileError
from tied._files.contents import Checkpoint, Stored
from tied._files.elements import read_bytes
from tied._files.gather import gather
from tied._files.write import write
from tied._load_into import Fit

Place = str | os.PathLike[str]


class _KeysError(FileError, RuntimeError):
    """Names are missing or unexpected: a RuntimeError too, as PyTorch and safetensors raise."""


def save_model(
    model: nn.Module,
    filename: Place,
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Writes the state dict of a module to a safetensors file, as `safetensors.torch.save_model`.

    The same names are kept as there, so that each reads what the other wrote. What is tied is
    written once, whatever reads it: transposes, slices, parts of a buffer.

    Args:
        model: The module. It is not changed.
        filename: The file.
        metadata: Texts for the file's metadata.
        force_contiguous: Write tensors that are not contiguous as if they were; else raise.

    Raises:
        DtypeError: safetensors has no such dtype, or a tensor has no elements (on `meta`).
        FileError: The state dict holds what is no tensor; or, without `force_contiguous`, a tensor
            that is not contiguous and has to be written.
    """
    gathered = gather(_in_order(model), hidden="raise")
    for name, (_, tensor) in gathered.arrays.items():
        if not force_contiguous and not tensor.is_contiguous():
            raise FileError(
                f"{name} is not contiguous",
                facts=[("strides", str(tensor.stride())), ("shape", str(tuple(tensor.shape)))],
                hint="Type: save_model(..., force_contiguous=True)",
                paths=[name],
            )
    write(gathered.contents, Path(filename), metadata=metadata)


def _in_order(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state dict by name: of whole tensors that are tied, the first name is kept."""
    state = model.state_dict()
    for name, x in state.items():
        if not isinstance(x, torch.Tensor):
            raise FileError(
                f"{name} is no tensor but {type(x).__name__}, which a file can't hold",
                paths=[name],
            )
    return dict(sorted(state.items()))


def load_model(
    model: nn.Module,
    filename: Place,
    strict: bool = True,
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[set[str], list[str]]:
    """Reads a checkpoint into a module, as `safetensors.torch.load_model`.

    Args:
        model: The module; what is tied in it stays tied.
        filename: A file that either `save_model` wrote, or any other checkpoint.
        strict: Raise if names are missing or unexpected.
        device: Where tensors are read to before they are copied into the module.
        backend: As there; the file is mapped whatever it says.

    Returns:
        The names of the module that the file has nothing for, and those of the file that the
        module has not. A name that is tied to one that was read is not missing.

    Raises:
        FileError: The file is not sound, or has different values for names that are tied in the
            module; under `strict`, names are missing or unexpected (a RuntimeError too).
        RuntimeError: Shapes differ.
    """
    theirs = open_checkpoint(filename)
    mine = gather(_in_order(model), hidden="raise").contents
    _forget_parts(theirs, mine)
    fit = Fit(mine, theirs, cast=True)
    fit.conflicts = [x for x in fit.conflicts if x.kind != "shape"]  # PyTorch says those
    fit.refuse(strict=False)
    state = {name: _read(theirs, name, stored)
             for name, stored in theirs.storages.items() if stored.named}  # fmt: skip
    for name in mine.names():
        value = fit.values.get(mine.source(name))
        if name not in state and value is not None:
            state[name] = _read(mine, name, value)
        elif name in theirs.aliases:
            state[name] = _read(theirs, name, theirs.storages[theirs.source(name)])
    told = model.load_state_dict({name: x.to(device) for name, x in state.items()}, strict=False)
    missing, unexpected = set(told.missing_keys), list(told.unexpected_keys)
    if strict and (missing or unexpected):
        raise _misfit(model, missing, unexpected)
    return missing, unexpected


def _forget_parts(theirs: Checkpoint, mine: Checkpoint) -> None:
    """Removes what a file says of names that are only parts of what it says they are.

    safetensors writes `{alias: kept}` of all tensors that overlap, also of those that are not
    equal; the module knows which part they are.
    """
    for name in theirs.aliases.keys() & set(mine.names()):
        alias = theirs.aliases[name]
        whole = alias.layout.is_whole(theirs.storages[alias.of].shape)
        if whole and theirs.shape(name) != mine.shape(name):
            del theirs.aliases[name]


def _read(contents: Checkpoint, name: str, value: Stored) -> Any:
    """Returns what a name of a checkpoint reads of the value of a storage."""
    alias = contents.aliases.get(name)
    if alias is None:
        return array_over(arrays.load("torch"), value.memory(), value)
    dtype, shape = alias.layout.dtype or value.dtype, alias.layout.shape
    memory = read_bytes(value, alias)
    seen = Stored(name, dtype, shape, memory.nbytes, lambda: memory)
    return array_over(arrays.load("torch"), memory, seen)


def _misfit(model: nn.Module, missing: set[str], unexpected: list[str]) -> FileError:
    lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
    for what, names in (("Missing", sorted(missing)), ("Unexpected", sorted(unexpected))):
        if names:
            told = ", ".join(f'"{name}"' for name in names)
            lines.append(f"    {what} key(s) in state_dict: {told}")
    return _KeysError("\n".join(lines), paths=[*sorted(missing), *sorted(unexpected)])
