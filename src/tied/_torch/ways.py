"""How a tied tensor finds what it reads, and a part of a model the module that it is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tied._errors import TieError
from tied._node import Node, Opened, declare
from tied._path import Step

_WRAPPED = ("base_layer", "original_module")
"""What PEFT calls the module that it wraps; a way through it holds when it is unwrapped too."""


def step(module: nn.Module, name: str) -> Any:
    """Returns a submodule; the module itself for a wrapper of PEFT's that has been taken away.

    Raises:
        AttributeError: There is none.
    """
    if name in _WRAPPED and not hasattr(module, name):
        return module
    return getattr(module, name)


class Source:
    """Where a tied tensor finds one that it reads.

    It knows the module that has the tensor, and a way to it from one that holds both sides. If the
    two come apart, then the module has been moved in the meantime, and the way is found anew; or
    it has been replaced or wrapped, and what is there now is read.

    A deep copy reads the copy of that module, if that was copied too, else the module itself. Which
    it is may be known only at the end of the deep copy, so it is looked up when needed.

    Attributes:
        name: The dotted name of the tensor, seen from `root`.
        root: A module that holds both sides.
        modules: The way from there.
        leaf: The name of the tensor in the module at its end.
        owner: That module.
        target: The name of the tied tensor, for errors.
    """

    __slots__ = ("_pending", "leaf", "modules", "name", "owner", "root", "target")

    def __init__(self, root: nn.Module, name: str, target: str) -> None:
        self.name = name
        *modules, self.leaf = name.split(".")
        self.modules = tuple(modules)
        self.target = target
        self.root: nn.Module | None = root
        self.owner: nn.Module | None = None
        self._pending: tuple[Any, Any, dict[int, Any]] | None = None
        self.owner = self.along()

    def fetch(self) -> torch.Tensor:
        """Returns the tensor."""
        module = self.root
        for name in self.modules:
            if module is None:
                break
            module = module._modules.get(name)
        if module is None or module is not self.owner:
            module = self.settle()
        found = module._parameters.get(self.leaf)
        if found is None:
            return self.search(module)
        if found.is_meta and "_hf_hook" in module.__dict__:
            return offloaded(module, self.leaf, found)
        return found

    def search(self, module: nn.Module) -> torch.Tensor:
        """Returns a tensor that is a buffer, is computed, or lies behind a wrapper's attributes."""
        found = getattr(module, self.leaf, None)
        if self.leaf in module.__dict__:
            found = remade(module, self.leaf, found)
        if not isinstance(found, torch.Tensor):
            raise self.lost(found)
        if found.is_meta and "_hf_hook" in module.__dict__:
            return offloaded(module, self.leaf, found)
        return found

    def lost(self, found: Any) -> TieError:
        """Returns the error that there is no tensor at the end of the way."""
        return TieError(
            f"{self.target} is tied to {self.name}, which is no tensor any more",
            facts=[("found", "nothing" if found is None else type(found).__name__)],
            hint=f'Untie it before {self.name} is replaced: tied.untie(model, "{self.target}")',
            paths=[self.name, self.target],
        )

    def along(self) -> nn.Module | None:
        """Returns the module at the end of the way; None if the way leads nowhere."""
        module: Any = self.root
        try:
            for name in self.modules:
                module = step(module, name)
        except AttributeError:
            return None
        return module if isinstance(module, nn.Module) else None

    def passed(self) -> list[nn.Module]:
        """Returns the modules on the way."""
        self.settle()
        found = [self.root]
        for name in self.modules:
            found.append(step(found[-1], name))  # type: ignore[arg-type]
        return found  # type: ignore[return-value]

    def settle(self) -> nn.Module:
        """Returns the module that has the tensor, and finds the way to it anew if it has moved.

        Raises:
            TieError: It is gone, or what is in its place is no tensor, or reads the tied one.
        """
        self.arrive()
        found = self.along()
        if found is not None and found is self.owner:
            return found
        wraps = found is not None and any(part is self.owner for part in found.modules())
        if not (wraps and self.fits(found)):
            moved = self.moved()
            if moved is not None:
                return moved
        if found is None or not self.fits(found):
            raise self.lost(getattr(found, self.leaf, found))
        self.owner = found
        return found

    def moved(self) -> nn.Module | None:
        """Returns the module that had the tensor, if it is elsewhere below the root now."""
        assert self.root is not None
        for name, part in self.root.named_modules():
            if part is self.owner:
                self.modules = tuple(name.split(".")) if name else ()
                self.name = ".".join((*self.modules, self.leaf))
                return part
        return None

    def fits(self, module: Any) -> bool:
        """Returns whether a module has such a tensor, and not one that reads the tied one."""
        parts = module._modules.get("parametrizations", {})
        if self.leaf in parts:
            first: Any = next(iter(parts[self.leaf].children()), None)
            return all(source is not self for source in getattr(first, "sources", ()))
        return isinstance(getattr(module, self.leaf, None), torch.Tensor)

    def arrive(self) -> None:
        """Looks up what a deep copy has made of the modules that it refers to."""
        if self._pending is None:
            return
        root, owner, memo = self._pending
        self._pending = None
        if id(root) in memo:
            self.root, self.owner = memo[id(root)], memo.get(id(owner))
        elif id(owner) in memo:
            self.anchor(memo[id(owner)])
        else:
            self.root, self.owner = root, owner

    def anchor(self, owner: nn.Module) -> None:
        """Reads a module from now on that no other module leads to."""
        self.root = self.owner = owner
        self.modules = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        self.arrive()
        made = _source(self.leaf, self.modules, self.name, None, None, self.target)
        made._pending = (self.root, self.owner, memo)
        return made

    def __reduce__(self) -> Any:
        self.arrive()
        return _source, (self.leaf, self.modules, self.name, self.owner, self.root, self.target)


def _source(
    leaf: str, modules: tuple[str, ...], name: str, owner: Any, root: Any, target: str
) -> Source:
    made = Source.__new__(Source)
    made.leaf, made.modules, made.name, made.target = leaf, modules, name, target
    made.owner, made.root, made._pending = owner, root, None
    return made


class SourceNode(Node):
    """See `Source`; the walk does not go that way."""

    back = True

    def open(self, x: Any) -> Opened:
        x.arrive()
        return (Step("inside", "root"), Step("inside", "owner")), [], x

    def referents(self, static: Source) -> tuple[Any, ...]:
        return static.root, static.owner

    def unbound(self, static: Source) -> Any:
        return static.leaf, static.modules, static.name, static.target

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        if not values:
            return static
        root, owner = values
        leaf, modules, name, target = static
        made = _source(leaf, modules, name, owner, root, target)
        if root is None:
            made.anchor(owner)
        return made


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

    def referents(self, static: Back) -> tuple[Any, ...]:
        return (static(),)


declare(Source, SourceNode())
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
