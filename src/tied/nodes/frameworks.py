"""Which file knows a framework's own objects; each is loaded once its framework is."""

from __future__ import annotations

import importlib
import sys

from tied._node import Kind, framework

_FILES = {
    "torch": "tied.nodes.torch",
    "flax": "tied.nodes.flax",
    "equinox": "tied.nodes.jax",
    "jax": "tied.nodes.jax",
    "jaxlib": "tied.nodes.jax",
    "numpy": "tied.nodes.numpy",
}
_REGISTRIES = ("jax", "optree", "torch")


def find(cls: type) -> tuple[bool, Kind]:
    """Returns whether a framework knows the type, by itself or in its pytree registry."""
    for root in framework(cls):
        if root in _FILES:
            found, kind = importlib.import_module(_FILES[root]).find(cls)
            if found:
                return True, kind
    for root in _REGISTRIES:
        if root in sys.modules:
            found, kind = importlib.import_module("tied.nodes.registries").find(cls, root)
            if found:
                return True, kind
    return False, None
