"""Instances of classes declared with `@tied.leaf`: leaves that only their identity places."""

from __future__ import annotations

import copy
from typing import Any

from tied.arrays.library import Library, Place, Span


class Opaque(Library):
    """See `Library`."""

    name = "opaque"

    def place(self, x: Any) -> Place:
        return ("object", id(x)), 0, 1, True

    def geometry(self, x: Any) -> None:
        return None

    def span(self, x: Any) -> Span:
        return Span("python", id(x), 0, 1)

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(getattr(x, "shape", ()))

    def dtype(self, x: Any) -> str:
        return str(getattr(x, "dtype", type(x).__name__))

    def nbytes(self, x: Any) -> int:
        return int(getattr(x, "nbytes", 0))

    def device(self, x: Any) -> str:
        return "python"

    def agrees(self, a: Any, b: Any) -> bool:
        return a is b or bool(a == b)

    def cast(self, x: Any, dtype: str) -> Any:
        return x

    def copy(self, x: Any) -> Any:
        return copy.deepcopy(x)

    def empty(self, x: Any, device: Any) -> Any:
        return x

    def target(self, device: Any) -> None:
        return None

    def move(self, x: Any, target: Any) -> Any:
        return x


LIBRARY = Opaque()
