"""Objects of JAX and modules of Equinox."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax

from tied import arrays
from tied._node import Kind, Opened
from tied.nodes.objects import CLOSED, ObjectNode
from tied.nodes.registries import JAX

_own: Any = object.__getattribute__


class ModuleNode(ObjectNode):
    """Modules of Equinox, past their own `__getattribute__`, which binds methods and is slow."""

    def open(self, x: Any) -> Opened:
        state = _own(x, "__dict__")
        return tuple(state), list(state.values()), None

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        _own(x, "__dict__").update(zip(keys, values, strict=True))


_MODULE = ModuleNode()


def find(cls: type) -> tuple[bool, Kind]:
    """Returns whether `cls` is Equinox's or JAX's own, and its kind."""
    equinox: Any = sys.modules.get("equinox")
    if equinox is not None and issubclass(cls, equinox.Module):
        return True, _MODULE
    if cls.__module__.partition(".")[0] not in ("jax", "jaxlib"):
        return False, None
    if issubclass(cls, jax.Ref):
        return True, arrays.load("opaque")  # an array that is written to: one leaf, by identity
    if jax.tree_util.default_registry.is_node(cls):
        return True, JAX
    return True, CLOSED if hasattr(cls, "__call__") else None  # noqa: B004 (asks the class)
