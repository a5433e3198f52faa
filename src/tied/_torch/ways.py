"""Ways from a module to a tensor below it, and from a part back to the module that it is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tied._node import Node, Opened, declare
from tied._path import Step

_WRAPPED = ("base_layer", "original_module")
"""What PEFT calls the module that it wraps; a way through it holds when it is unwrapped too."""

Way = tuple[tuple[str, ...], str]
"""The submodules on the way to a tensor, and its name in the last of them."""


def way(name: str) -> Way:
    """Returns the way to a tensor, by its dotted name."""
    *modules, leaf = name.split(".")
    return tuple(modules), leaf


def step(module: nn.Module, name: str) -> Any:
    """Returns a submodule; the module itself for a wrapper of PEFT's that has been taken away.

    Raises:
        AttributeError: There is none.
    """
    if name in _WRAPPED and not hasattr(module, name):
        return module
    return getattr(module, name)


class Back:
    """A reference from a part to the module that it is in.

    A deep copy of that module refers to the copy, of the part alone to the module itself. Which of
    the two it is may be known only at the end of the deep copy, so it is looked up when needed.
    """

    __slots__ = ("_pending", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module: nn.Module | None = module
        self._pending: tuple[nn.Module, dict[int, Any]] | None = None

    def __call__(self) -> nn.Module:
        """Returns the module."""
        if self.module is None:
            assert self._pending is not None
            original, memo = self._pending
            self.module = memo.get(id(original), original)
            self._pending = None
        return self.module

    def __deepcopy__(self, memo: dict[int, Any]) -> Back:
        original = self()
        made = Back(original)
        if id(original) in memo:
            made.module = memo[id(original)]
        else:
            made.module, made._pending = None, (original, memo)
        return made

    def __reduce__(self) -> Any:
        return Back, (self(),)


class BackNode(Node):
    """See `Back`; the walk does not go that way."""

    back = True

    def open(self, x: Any) -> Opened:
        return (Step("inside", "()"),), [], x

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return Back(values[0]) if values else static


declare(Back, BackNode())


def remade(module: nn.Module, leaf: str, found: Any) -> Any:
    """Returns a tensor that a hook makes before each forward pass, as it will be in the next one.

    So work pruning and the older weight and spectral normalisation.
    """
    for hook in module._forward_pre_hooks.values():
        own: Any = hook
        if getattr(own, "_tensor_name", None) == leaf:
            return own.apply_mask(module)
        if getattr(own, "name", None) == leaf and hasattr(own, "compute_weight"):
            if hasattr(own, "n_power_iterations"):
                return own.compute_weight(module, do_power_iteration=False)
            return own.compute_weight(module)
    return found


def offloaded(module: Any, leaf: str, found: torch.Tensor) -> torch.Tensor:
    """Returns a source whose value accelerate keeps elsewhere between two uses of its module."""
    hook = module._hf_hook
    for part in getattr(hook, "hooks", [hook]):
        weights = getattr(part, "weights_map", None)
        if weights is not None and getattr(part, "offload", False):
            kept: torch.Tensor = weights[leaf]
            return kept.to(part.execution_device)
    return found
