"""What a page needs to know of a checkpoint, as plain data that stays small for many names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tied._cli.show import Kept
from tied._cli.tree import dtype_said, reads
from tied._discover import Discovered
from tied._files.contents import Checkpoint
from tied._files.dtypes import BITS

_NUMBERS = re.compile(r"[0-9]+")
_MOST = 400  # characters of how a name reads a storage; a gather can have millions


class _Table:
    """Values that are written once, and their numbers."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def values(self) -> list[Any]:
        return list(self.numbers)


class _Branch:
    """A part of names, up to a dot, and what follows it."""

    __slots__ = ("name", "parts")

    def __init__(self) -> None:
        self.name: str | None = None
        self.parts: dict[str, _Branch] = {}


def page_data(contents: Checkpoint, kept: Kept, found: Discovered | None) -> dict[str, Any]:
    """Returns what the page draws.

    The names are a tree in columns, each branch before what is in it: `depth`, `word` (its part of
    the name, a number in `words`), `kind` (what is there: 0 for nothing, else 1 + its number in
    `kinds`, which are shape, dtype, bytes, elements) and `file`. Other lists name the nodes by
    their numbers.
    """
    names = _names(contents)
    words, kinds, files = _Table(), _Table(), _Table()
    columns: dict[str, list[int]] = {"depth": [], "word": [], "kind": [], "file": []}
    nodes: dict[str, int] = {}
    for depth, label, name in _preorder(names):
        if name is not None:
            nodes[name] = len(columns["depth"])
        columns["depth"].append(depth)
        columns["word"].append(words.number(label))
        kind = None if name is None else _kind(contents, name)
        columns["kind"].append(0 if kind is None else 1 + kinds.number(kind))
        stored = None if name is None else contents.storages.get(contents.source(name))
        file = stored.file.name if stored is not None and stored.file is not None else ""
        columns["file"].append(files.number(file) if name is not None else 0)
    if len(files.numbers) < 2:
        columns["file"] = []
    missed = [nodes[name] for name in kept.missed]
    return {
        **columns,
        "words": words.values(),
        "kinds": [list(kind) for kind in kinds.values()],
        "files": files.values(),
        "aliases": [
            [nodes[name], nodes[alias.of], _how(reads(contents, name), alias.of)]
            for name, alias in contents.aliases.items()
        ],
        "computed": [
            [nodes[name], [nodes[source] for source in sources if source in nodes]]
            for name, sources in contents.computed.items()
        ],
        "spans": [nodes[s.name] for s in contents.storages.values() if not s.named],
        "lost": None if found is None else [
            [nodes[x.name], nodes[x.of], _how(x.how, x.of), x.kind] for x in found.findings
        ],
        "missed": True if len(missed) == len(contents.aliases) else missed,
    }  # fmt: skip


def _names(contents: Checkpoint) -> Iterable[str]:
    """Returns the names of the tree, in its order: that of the file, if the file has one."""
    names = dict.fromkeys([*contents.storages, *contents.aliases, *contents.computed])
    if contents.format != "safetensors":
        return names
    return sorted(names, key=_by_number)


def _by_number(name: str) -> list[str]:
    """Returns what sorts `h.2.w` before `h.10.w`, and `h.2` before what is in it."""
    return _NUMBERS.sub(lambda found: found[0].zfill(12), name).split(".")


def _preorder(names: Iterable[str]) -> Iterator[tuple[int, str, str | None]]:
    """Gives the tree of names: depth, part of the name, and the name if it is whole there.

    A branch with nothing but one branch in it is one with it: `embed.weight`.
    """
    root = _Branch()
    for name in names:
        branch = root
        for part in name.split("."):
            inner = branch.parts.get(part)
            if inner is None:
                inner = branch.parts[part] = _Branch()
            branch = inner
        branch.name = name
    waiting = [(0, part, branch) for part, branch in reversed(root.parts.items())]
    while waiting:
        depth, label, branch = waiting.pop()
        chain = [label]
        while branch.name is None and len(branch.parts) == 1:
            ((label, branch),) = branch.parts.items()
            chain.append(label)
        yield depth, ".".join(chain), branch.name
        waiting += ((depth + 1, part, inner) for part, inner in reversed(branch.parts.items()))


def _kind(contents: Checkpoint, name: str) -> tuple[str, str, int, int] | None:
    """Returns what there is under a name: shape, dtype, bytes and elements."""
    if name in contents.storages:
        stored = contents.storages[name]
        size = math.prod(stored.shape)
        return str(stored.shape), dtype_said(stored.dtype), stored.nbytes, size
    if name not in contents.aliases:
        return None
    layout, dtype = contents.aliases[name].layout, contents.dtype(name)
    nbytes = layout.size * BITS[dtype] // 8 if dtype in BITS else 0
    return str(layout.shape), dtype_said(dtype), nbytes, layout.size


def _how(text: str, base: str) -> str | list[str]:
    """Returns how a name reads a storage: what follows the storage's name, or a list of all."""
    cut = text if len(text) <= _MOST + len(base) else f"{text[: _MOST + len(base)]}..."
    return cut[len(base) :] if cut.startswith(base) else [cut]
