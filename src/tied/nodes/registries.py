"""Types that a pytree registry knows: JAX's, optree's, PyTorch's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tied._node import Kind, Node, Opened
from tied._path import Step

_ATTRIBUTES = ("name", "key", "idx")


class JaxNode(Node):
    """A type registered with JAX."""

    def open(self, x: Any) -> Opened | None:
        import jax

        pairs, static = jax.tree_util.default_registry.flatten_one_level_with_keys(x)
        keys, values = [], []
        for key, value in pairs:
            keys.append(_step(key))
            values.append(value)
        return keys, values, static

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        import jax

        leaf = jax.tree_util.tree_structure(0)
        node = jax.tree_util.PyTreeDef.from_node_data_and_children(
            jax.tree_util.default_registry, (cls, static), [leaf] * len(values)
        )
        return node.unflatten(values)


def _step(key: Any) -> Step:
    kind = type(key).__name__
    name = next(getattr(key, name) for name in _ATTRIBUTES if hasattr(key, name))
    return Step({"GetAttrKey": "attr", "DictKey": "key"}.get(kind, "index"), name)


class OptreeNode(Node):
    """A type registered with optree."""

    step = "index"

    def open(self, x: Any) -> Opened | None:
        import optree

        children, static, entries, rebuild = optree.tree_flatten_one_level(x, none_is_leaf=True)
        steps = [Step("attr" if isinstance(entry, str) else "index", entry) for entry in entries]
        return steps, list(children), (static, rebuild)

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        metadata, rebuild = static
        return rebuild(metadata, values)


class TorchNode(Node):
    """A type registered with `torch.utils._pytree`."""

    step = "index"

    def __init__(self, entry: Any) -> None:
        self.entry = entry

    def open(self, x: Any) -> Opened | None:
        if self.entry.flatten_with_keys_fn is None:
            values, static = self.entry.flatten_fn(x)
            return range(len(values)), list(values), static
        pairs, static = self.entry.flatten_with_keys_fn(x)
        return [_step(key) for key, _ in pairs], [value for _, value in pairs], static

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return self.entry.unflatten_fn(values, static)


JAX = JaxNode()
OPTREE = OptreeNode()


def find(cls: type, root: str) -> tuple[bool, Kind]:
    """Returns whether the registry of the package `root` knows `cls`, and its kind."""
    module: Any = sys.modules[root]
    if root == "jax":
        return module.tree_util.default_registry.is_node(cls), JAX
    if root == "optree":
        entry = module.register_pytree_node.get(cls)
        return entry is not None, OPTREE
    entry = module.utils._pytree.SUPPORTED_NODES.get(cls)
    return entry is not None, None if entry is None else TorchNode(entry)
