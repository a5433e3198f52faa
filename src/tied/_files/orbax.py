"""Folders of orbax-checkpoint: a pytree of arrays, each read when it is asked for."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tied._files.contents import Checkpoint, Stored
from tied._files.dtypes import BITS, CODES
from tied._files.header import bad, ints, parse
from tied._files.outside import BROKEN, add_once, needed, tell_types, too_much

_TREE = "_METADATA"
_STEP = "_CHECKPOINT_METADATA"
_ARRAYS = {"jax.Array", "np.ndarray", "scalar"}
_EMPTY = {"None", "Dict", "List", "Tuple", "NamedTuple"}


def orbax_folder(path: Path) -> Path | None:
    """Returns the folder of a pytree: this one, or the one part of a step of a CheckpointManager.

    None if it is no folder of orbax.
    """
    if (path / _TREE).is_file():
        return path
    if (path / _STEP).is_file():
        parts = [part for part in sorted(path.iterdir()) if (part / _TREE).is_file()]
        if len(parts) == 1:
            return parts[0]
    return None


def open_orbax(path: Path) -> Checkpoint:
    """Returns the arrays of a folder, named by the keys that lead to them.

    orbax writes each array of a tree, however they are tied: a folder has no ties.

    Raises:
        FileError: The folder is not sound.
        LibraryError: tensorstore is not installed, with which orbax stores arrays.
    """
    folder = orbax_folder(path)
    if folder is None:
        raise bad(path, "no folder of orbax")
    tensorstore = needed("tensorstore", "orbax", f"reading {path.name}")
    told = parse(folder / _TREE, (folder / _TREE).read_bytes())
    tree = told.get("tree_metadata")
    if not isinstance(tree, dict):
        raise bad(folder / _TREE, "a list of arrays that is none")
    files = tuple(sorted(file for file in folder.rglob("*") if file.is_file()))
    contents = Checkpoint(path, "orbax", {}, files=files)
    types: dict[str, str] = {}
    for row in tree.values():
        name, kind = _row(folder, row)
        if kind in _EMPTY:
            continue
        add_once(contents, path, name)
        if kind not in _ARRAYS:
            types[name] = kind
            continue
        contents.storages[name] = _stored(folder, name, told, tensorstore)
    if too_much(contents.nbytes, sum(file.stat().st_size for file in files)):
        raise bad(path, f"files that would become {contents.nbytes:,} bytes")
    tell_types(contents, types)
    return contents


def _row(folder: Path, row: Any) -> tuple[str, str]:
    """Returns the name of an entry of the tree, and the kind of its value."""
    keys = row.get("key_metadata") if isinstance(row, dict) else None
    value = row.get("value_metadata") if isinstance(row, dict) else None
    if not isinstance(keys, list) or not isinstance(value, dict):
        raise bad(folder / _TREE, "an entry that describes nothing")
    names = [key.get("key") if isinstance(key, dict) else None for key in keys]
    if not all(isinstance(name, (str, int)) for name in names):
        raise bad(folder / _TREE, f"the keys {json.dumps(names)}")
    return ".".join(str(name) for name in names), str(value.get("value_type"))


def _stored(folder: Path, name: str, told: dict[str, Any], tensorstore: Any) -> Stored:
    spec = _spec(folder, name, told)
    try:
        store = tensorstore.open(spec, read=True, open=True).result()
        told_shape, dtype = list(store.shape), store.dtype.name
    except BROKEN as error:
        raise _broken(folder, name, error) from error
    code = CODES.get(dtype)
    if code is None:
        raise bad(folder, f"the dtype {dtype}", name)
    shape = ints(folder, name, told_shape, "a shape", 64)
    nbytes = math.prod(shape) * BITS[code] // 8
    return Stored(name, code, shape, nbytes, partial(_memory, tensorstore, spec, folder, name))


def _spec(folder: Path, name: str, told: dict[str, Any]) -> dict[str, Any]:
    """Returns where tensorstore finds an array."""
    base = folder.absolute()
    if told.get("use_ocdbt", True):
        kvstore: dict[str, Any] = {
            "driver": "ocdbt", "base": {"driver": "file", "path": f"{base}/"}, "path": f"{name}/"
        }  # fmt: skip
    elif "/" in name or "\\" in name or name in ("", ".", ".."):
        raise bad(folder, f"an array outside of the folder: {name!r}", name)
    else:
        kvstore = {"driver": "file", "path": f"{base / name}/"}
    return {"driver": "zarr3" if told.get("use_zarr3") else "zarr", "kvstore": kvstore}


def _memory(tensorstore: Any, spec: dict[str, Any], folder: Path, name: str) -> Any:
    try:
        x = tensorstore.open(spec, read=True, open=True).result().read().result()
    except BROKEN as error:
        raise _broken(folder, name, error) from error
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _broken(folder: Path, name: str, error: BaseException) -> Exception:
    return bad(folder, f"an array that can't be read ({str(error).partition(chr(10))[0]})", name)
