"""Archives of `torch.export` (`.pt2`): the weights, without the program and without PyTorch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tied._files.contents import Checkpoint
from tied._files.dtypes import BITS
from tied._files.gather import gather
from tied._files.header import bad, ints, parse
from tied._files.zipped import Archive

# ScalarType of torch/_export/serde/schema.py.
_CODES = {
    1: "U8", 2: "I8", 3: "I16", 4: "I32", 5: "I64", 6: "F16", 7: "F32", 8: "F64", 10: "C64",
    12: "BOOL", 13: "BF16", 28: "U16", 29: "F8_E4M3", 30: "F8_E5M2", 31: "F8_E4M3FNUZ",
    32: "F8_E5M2FNUZ", 33: "F8_E8M0", 34: "U32", 35: "U64",
}  # fmt: skip
_STRIDED = 7
_CONFIGS = ("data/weights/", "_weights_config.json"), ("data/constants/", "_constants_config.json")
_MOST = 100_000_000  # bytes of a config


def open_pt2(path: Path) -> Checkpoint:
    """Returns the weights, buffers and constant tensors of the exported programs in an archive.

    Two of them that read one storage are tied. What several programs hold has the program's name
    in front of its own.

    Raises:
        FileError: The archive is not sound, or of a PyTorch older than 2.8.
    """
    archive = Archive(path)
    for name in archive.packed():
        raise bad(path, "a member that is compressed", name)
    configs = [(member, folder, end) for member in archive.members for folder, end in _CONFIGS
               if _is_config(member, folder, end)]  # fmt: skip
    if not configs:
        raise bad(path, "no archive of torch.export, or one of a PyTorch older than 2.8")
    models = {_model(member, end) for member, _, end in configs}
    arrays: dict[str, Any] = {}
    codes: dict[str, str] = {}
    for member, folder, end in configs:
        prefix = f"{_model(member, end)}." if len(models) > 1 else ""
        place = member[: member.rindex(folder)] + folder
        for name, told in _entries(archive, member).items():
            full = prefix + name
            if full in arrays:
                raise bad(path, "two arrays have one name", full)
            codes[full] = _code(path, full, told)
            arrays[full] = _array(archive, full, place, told, codes[full])
    archive.close()
    return _contents(path, arrays, codes)


def _contents(path: Path, arrays: dict[str, Any], codes: dict[str, str]) -> Checkpoint:
    contents = gather(arrays).contents
    contents.path, contents.format, contents.files = path, "pt2", (path,)
    for name, stored in contents.storages.items():
        readers = [x.name for x in contents.aliases.values() if x.of == name]
        readers += [name] if stored.named else []
        if len({codes[reader] for reader in readers}) > 1:
            raise bad(path, "two dtypes over one storage", readers[0])
        contents.storages[name] = dataclasses.replace(stored, dtype=codes[readers[0]])
    return contents


def _is_config(member: str, folder: str, end: str) -> bool:
    # The root of the archive stands before all names.
    return member.partition("/")[2].startswith(folder) and member.endswith(end)


def _model(member: str, end: str) -> str:
    return member.rpartition("/")[2].removesuffix(end).removesuffix("_model")


def _entries(archive: Archive, member: str) -> dict[str, Any]:
    told = parse(archive.path, archive.read(member, _MOST)).get("config")
    if not isinstance(told, dict):
        raise bad(archive.path, "a list of weights that is none", member)
    return {k: v for k, v in told.items() if not (isinstance(v, dict) and _is_object(v))}


def _is_object(told: dict[str, Any]) -> bool:
    """Returns whether an entry is an object of a program (a `ScriptObject`), and no tensor."""
    return told.get("tensor_meta") is None and str(told.get("path_name")).startswith(
        ("custom_obj_", "opaque_obj_")
    )


def _code(path: Path, name: str, told: Any) -> str:
    meta = told.get("tensor_meta") if isinstance(told, dict) else None
    if not isinstance(meta, dict) or not isinstance(told.get("path_name"), str):
        raise bad(path, "an entry that describes no tensor", name)
    if told.get("use_pickle") is not False:
        raise bad(path, "a tensor that is stored as a pickle", name)
    code = _CODES.get(meta["dtype"]) if type(meta.get("dtype")) is int else None
    if code is None or meta.get("layout") != _STRIDED:
        raise bad(path, f"dtype {meta.get('dtype')!r}, layout {meta.get('layout')!r}", name)
    return code


def _array(archive: Archive, name: str, place: str, told: Any, code: str) -> Any:
    """Returns a tensor as integers as wide as its elements, over the file."""
    meta, path, member = told["tensor_meta"], archive.path, place + told["path_name"]
    shape = ints(path, name, _numbers(meta.get("sizes")), "a shape", 64)
    strides = ints(path, name, _numbers(meta.get("strides")), "strides", 64)
    (offset,) = ints(path, name, _numbers([meta.get("storage_offset")]), "an offset", 1)
    nbytes = BITS[code] // 8
    if member not in archive.members:
        raise bad(path, f"{told['path_name']!r} is not in the archive", name)
    if len(shape) != len(strides):
        raise bad(path, "a layout whose parts do not fit", name)
    if 0 in shape:
        return np.empty(shape, f"u{nbytes}")
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if (last + 1) * nbytes > archive.members[member]:
        raise bad(path, f"it reads outside of {told['path_name']}", name)
    memory = archive.part(member, 0, archive.members[member])
    return np.ndarray(
        shape, f"u{nbytes}", memory, offset * nbytes, tuple(s * nbytes for s in strides)
    )


def _numbers(told: Any) -> Any:
    """Returns the numbers that the archive wraps as `{"as_int": 6}`."""
    if not isinstance(told, list):
        return None
    return [x.get("as_int") if isinstance(x, dict) else None for x in told]
