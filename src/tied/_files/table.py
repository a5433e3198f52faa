"""The tie table: the names that read a storage, as JSON in the metadata of a safetensors file.

`docs/format.md` says what is in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tied._files.contents import Alias, Checkpoint, Stored
from tied._files.dtypes import BITS
from tied._files.header import Header, bad, ints, parse, too_large
from tied._layout import Layout

KEY = "tied"
VERSION = 1
_LOW = -(1 << 62)
_NO_NAMES = (KEY, "format", "__metadata__")
_FIELDS = {"of", "shape", "strides", "offset", "conj", "neg", "dtype"}


def write_table(contents: Checkpoint, names: set[str], *, expanded: bool) -> dict[str, str]:
    """Returns the metadata of a file that holds some storages: the table, and Hugging Face's form.

    Args:
        contents: What is written.
        names: The storages that are in this file.
        expanded: Whether aliases are written as tensors too.
    """
    aliases = {x.name: x for x in contents.aliases.values() if x.of in names}
    computed = {k: list(v) for k, v in contents.computed.items() if set(v) <= names}
    unnamed = [name for name in names if not contents.storages[name].named]
    keys = {name: contents.storages[name].key for name in sorted(names)
            if contents.storages[name].key}  # fmt: skip
    if not aliases and not computed and not keys:
        return {}
    table: dict[str, Any] = {
        "version": VERSION, "aliases": {name: _row(alias) for name, alias in aliases.items()}
    }  # fmt: skip
    table |= {"computed": computed} if computed else {}
    table |= {"unnamed": sorted(unnamed)} if unnamed else {}
    table |= {"keys": keys} if keys else {}
    table |= {"expanded": True} if expanded else {}
    whole = {
        name: alias.of
        for name, alias in aliases.items()
        if not expanded
        and name not in _NO_NAMES
        and contents.storages[alias.of].named
        and alias.layout.is_whole(contents.storages[alias.of].shape)
    }
    return {**whole, KEY: json.dumps(table, separators=(",", ":"))}


def _row(alias: Alias) -> dict[str, Any]:
    layout = alias.layout
    row: dict[str, Any] = {
        "of": alias.of,
        "shape": list(layout.shape),
        "strides": list(layout.strides),
        "offset": layout.offset,
    }
    row |= {"conj": True} if layout.conj else {}
    row |= {"neg": True} if layout.neg else {}
    return row | ({"dtype": layout.dtype} if layout.dtype else {})


def read_table(path: Path, header: Header, storages: dict[str, Stored]) -> dict[str, Any]:
    """Reads and checks what a file says about its ties.

    Args:
        path: The file.
        header: Its header.
        storages: All storages of the checkpoint, those of other files too.

    Returns:
        `aliases`, `computed`, `unnamed` and `expanded`, as in `Checkpoint` and the table.

    Raises:
        FileError: The table is not what `docs/format.md` says, or reads outside of a storage.
    """
    aliases = {
        name: Alias(name, kept, Layout.whole(storages[kept].shape))
        for name, kept in header.metadata.items()
        if kept in storages and name not in storages and name not in _NO_NAMES
    }
    found: dict[str, Any] = {
        "aliases": aliases, "computed": {}, "unnamed": [], "expanded": False, "keys": {}
    }  # fmt: skip
    text = header.metadata.get(KEY)
    if text is None:
        return found
    told = parse(path, text.encode())
    version = told.get("version")
    if type(version) is not int or version != VERSION:
        raise bad(path, f"a tie table of version {version!r}; this is read: {VERSION}")
    if type(told.get("expanded", False)) is not bool:
        raise bad(path, "a tie table whose 'expanded' is neither true nor false")
    found["expanded"] = told.get("expanded", False)
    rows, computed, unnamed = (
        told.get("aliases", {}), told.get("computed", {}), told.get("unnamed", [])
    )  # fmt: skip
    if not isinstance(rows, dict) or not isinstance(computed, dict):
        raise bad(path, "a tie table whose aliases are no object")
    sources = {str(row.get("of")) for row in rows.values() if isinstance(row, dict)}
    for name, row in rows.items():
        aliases[name] = _alias(path, name, row, storages)
        if name in sources or name == "__metadata__":
            raise bad(path, "an alias that can't be one", name)
        if name in storages and not found["expanded"]:
            raise bad(path, "an alias that is stored too", name)
        if found["expanded"] and not _is_stored(aliases[name], storages):
            raise bad(path, "an expanded alias that is not stored as it reads", name)
    for name, of in computed.items():
        if not _texts(of) or not set(of) <= storages.keys():
            raise bad(path, "what it is computed from is not in the file", name)
        found["computed"][name] = tuple(of)
    if not _texts(unnamed) or not set(unnamed) <= storages.keys():
        raise bad(path, "storages without a name that are not in the file")
    found["unnamed"] = unnamed
    found["keys"] = _keys(path, told.get("keys", {}), storages)
    for alias in aliases.values():
        if alias.of in found["keys"] and not alias.layout.is_whole(storages[alias.of].shape):
            raise bad(path, "it reads a part of random keys", alias.name)
    return found


def _keys(path: Path, told: Any, storages: dict[str, Stored]) -> dict[str, str]:
    """Returns which storages are the data of random keys of JAX, and of which implementation."""
    if not isinstance(told, dict):
        raise bad(path, "random keys that are no object")
    for name, impl in told.items():
        stored = storages.get(name)
        if stored is None or stored.dtype != "U32" or not stored.shape or not isinstance(impl, str):
            raise bad(path, "it is no random key", name)
        if not impl:
            raise bad(path, "a random key of no implementation", name)
    return told


def _is_stored(alias: Alias, storages: dict[str, Stored]) -> bool:
    """Returns whether a tensor is there with the shape and dtype of what an alias reads."""
    own, of = storages.get(alias.name), storages[alias.of]
    dtype = alias.layout.dtype or of.dtype
    return own is not None and (own.shape, own.dtype) == (alias.layout.shape, dtype)


def _texts(told: Any) -> bool:
    return isinstance(told, list) and all(isinstance(x, str) for x in told)


def _alias(path: Path, name: str, row: Any, storages: dict[str, Stored]) -> Alias:
    if not isinstance(row, dict) or not row.keys() <= _FIELDS:
        raise bad(path, "a row of the tie table that is none", name)
    stored = storages.get(row["of"]) if isinstance(row.get("of"), str) else None
    if stored is None:
        raise bad(path, f"it reads {row.get('of')!r}, which is no storage", name)
    shape = ints(path, name, row.get("shape"), "a shape", 64)
    strides = ints(path, name, row.get("strides"), "strides", 64, _LOW)
    (offset,) = ints(path, name, [row.get("offset")], "an offset", 1)
    dtype = row.get("dtype")
    conj, neg = row.get("conj", False), row.get("neg", False)
    if len(shape) != len(strides) or type(conj) is not bool or type(neg) is not bool:
        raise bad(path, "a layout whose parts do not fit", name)
    if dtype is not None and (not isinstance(dtype, str) or BITS.get(dtype, 1) % 8):
        raise bad(path, f"the dtype {dtype!r}", name)
    seen = dtype or stored.dtype
    if (conj and seen != "C64") or (neg and seen in ("BOOL", "F8_E8M0")):
        raise bad(path, f"a sign of {seen}", name)
    layout = Layout(shape, strides, offset, conj, neg, dtype)
    if too_large(shape, seen) or not _inside(layout, stored):
        raise bad(path, f"it reads outside of {stored.name}", name)
    return Alias(name, stored.name, layout)


def _inside(layout: Layout, stored: Stored) -> bool:
    """Returns whether a layout reads nothing but the storage."""
    bits = BITS[stored.dtype]
    unit = 8 if layout.dtype is not None else bits
    if bits % 8 and layout.dtype is None and not layout.is_whole(stored.shape):
        return False  # elements that are no whole bytes can't be read in part
    if 0 in layout.shape:
        return layout.offset * unit <= stored.nbytes * 8 and not any(
            abs(s) * unit > 1 << 60 for s in layout.strides
        )
    reach = [(n - 1) * s for n, s in zip(layout.shape, layout.strides, strict=True)]
    low = layout.offset + sum(x for x in reach if x < 0)
    high = layout.offset + sum(x for x in reach if x > 0)
    last = BITS[layout.dtype] // 8 if layout.dtype is not None else 1
    far = any(abs(s) * unit > 1 << 60 for s in layout.strides)
    return low >= 0 and not far and (high + last) * unit <= stored.nbytes * 8
