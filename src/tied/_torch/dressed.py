"""The class of a module that has a tied tensor: PyTorch's own, and what that one can't do.

`torch.nn.utils.parametrize` gives such a module a class of its own, whose property computes the
tensor. That class can't be pickled, copies of the module share it (so that removing a
parametrization from one breaks the other, and `parametrize.cached` mixes them up), and nothing in
it keeps a tool from registering the tensor anew. The class made here can, don't, and does.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from tied._errors import TieError
from tied._node import Lasting, declare
from tied._torch.reads import Reads, parametrized, reads_of
from tied.nodes.torch import ModuleNode, flatten


class Tied:
    """Marks the classes of modules that have a tied tensor."""

    __slots__ = ()


class Parameters(dict[str, Any]):
    """The parameters of a module that has a tied tensor, which is none of them.

    Tools that take a parameter out of this table (the older weight and spectral normalisation) are
    told so.
    """

    __slots__ = ("owner",)

    def __init__(self, items: Any, owner: nn.Module) -> None:
        super().__init__(items)
        self.owner = weakref.ref(owner)

    def __missing__(self, name: str) -> Any:
        self.refuse(name)

    def __delitem__(self, name: str) -> None:
        if name not in self:
            self.refuse(name)
        super().__delitem__(name)

    def refuse(self, name: str) -> None:
        """Raises for a name that is not in the table."""
        owner = self.owner()
        reads = None if owner is None else reads_of(owner).get(name)
        if reads is None:
            raise KeyError(name)
        raise reads.refused(f"{reads.target} is tied and no parameter of its own")

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _guarded(module: nn.Module) -> None:
    """Puts the table that refuses in the place of a module's parameters."""
    module.__dict__["_parameters"] = Parameters(module._parameters, module)


def dressed(base: type, names: Sequence[str]) -> type:
    """Returns a new subclass of a module class, with a property for each parametrized tensor.

    PyTorch takes properties away from it before it registers what a tensor is from then on, so the
    names are kept apart too.
    """
    told = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {name: _computed(name) for name in names}
    return type(base.__name__, (base, Tied), {**told, **_METHODS, **own, "_tied": frozenset(names)})


def undressed(cls: type) -> Any:
    """Returns the class that a module had before."""
    return cls.__bases__[0] if issubclass(cls, Tied) else cls


def parameters_of(cls: type) -> tuple[str, ...]:
    """Returns the names of the tensors that a class computes."""
    return tuple(name for name, value in vars(cls).items() if isinstance(value, property))


def register(module: nn.Module, name: str, reads: Reads) -> None:
    """Makes a tensor of a module one that `reads` computes."""
    weights = module.__dict__.get("_flat_weights_names")
    table = module._parameters if name in module._parameters else module._buffers
    reads.position = list(table).index(name)
    parametrize.register_parametrization(module, name, reads, unsafe=True)
    reads.armed = True
    parts = parametrized(module)
    parts[name].__class__ = TiedList
    base = undressed(type(module)) if issubclass(type(module), Tied) else type(module).__bases__[0]
    module.__class__ = dressed(base, tuple(parts))
    _guarded(module)
    if weights is not None:
        flatten(module.__dict__)


def release(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Makes a tied tensor an ordinary one again, a Parameter or a buffer with this value."""
    base = undressed(type(module))
    reads = reads_of(module)[name]
    del parametrized(module)[name]
    names = tuple(parametrized(module))
    if names:
        module.__class__ = dressed(base, names)
    else:
        del module._modules["parametrizations"]
        module.__class__ = base
        module.__dict__["_parameters"] = dict(module._parameters)
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value, persistent=reads.persistent)
    table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    for later in [n for n in table if n != name][reads.position :]:
        table[later] = table.pop(later)
    if "_flat_weights_names" in module.__dict__:
        flatten(module.__dict__)


class TiedList(parametrize.ParametrizationList):
    """The parametrizations of a tied tensor; more may be put on top, if they take one tensor."""

    def append(self, module: nn.Module) -> Any:
        """Adds a parametrization.

        Raises:
            TieError: It needs tensors of its own, which a tied tensor has not.
        """
        (first, *_) = self._modules.values()
        assert isinstance(first, Reads)
        if type(module).__module__.startswith("peft."):
            raise _own_tensors(first, module)
        now = self()
        try:
            with torch.no_grad():
                made = module(now)
        except (TypeError, RuntimeError, ValueError) as error:
            raise _own_tensors(first, module) from error
        if not isinstance(made, torch.Tensor) or made.shape != now.shape:
            raise _own_tensors(first, module)
        return super().append(module)


def _own_tensors(reads: Reads, module: nn.Module) -> TieError:
    return reads.refused(f"{type(module).__name__} can't be put on {reads.target}, which is tied")


def _computed(name: str) -> property:
    """Returns the property that computes a tensor."""

    def compute(self: Any) -> torch.Tensor:
        if parametrize._cache_enabled:
            return _cached(self, name)
        parts = self._modules["parametrizations"]._modules[name]
        inner = parts._modules
        first = inner.get("0")
        if len(inner) == 1 and type(first) is Reads:
            return first.read()
        made: torch.Tensor = parts()
        return made

    def assign(self: Any, value: Any) -> None:
        self._modules["parametrizations"]._modules[name].right_inverse(value)

    return property(compute, assign)


def _cached(module: Any, name: str) -> torch.Tensor:
    """Returns what `parametrize.cached` keeps of a tensor, as the property of PyTorch does."""
    key = (id(module), name)
    found = parametrize._cache.get(key)
    if found is None:
        found = parametrize._cache[key] = module._modules["parametrizations"]._modules[name]()
    return found


def _set(self: Any, name: str, value: Any) -> None:
    reads = reads_of(self).get(name)
    if reads is not None:
        if not isinstance(value, torch.Tensor):
            reads.admit(value, reads.read())
        parametrized(self)[name].right_inverse(value)
        return
    if name == "qconfig" and value is not None:
        raise _first(self).refused("quantization would give a tied tensor an array of its own")
    undressed(type(self)).__setattr__(self, name, value)


def _delete(self: Any, name: str) -> None:
    if name in reads_of(self):
        raise reads_of(self)[name].refused(f"{name} is tied and can't be deleted")
    undressed(type(self)).__delattr__(self, name)


_FORMS = ("_orig", "_g", "_v", "_u", "_bar")
"""How pruning and the older normalisations name what they put in the place of a tensor."""


def _register_parameter(self: Any, name: str, param: Any) -> None:
    base = undressed(type(self))
    reads = reads_of(self)
    for tied, own in reads.items():
        if name in [tied + form for form in _FORMS]:
            raise own.refused(f"{name} can't be put in the place of {tied}, which is tied")
    if name in reads:
        _set(self, name, param)
        return
    if param is not None and name in self._tied:
        param = nn.Parameter(param.detach().clone(), param.requires_grad)  # no longer tied
    base.register_parameter(self, name, param)


def _register_buffer(self: Any, name: str, tensor: Any, persistent: bool = True) -> None:
    base = undressed(type(self))
    if name in reads_of(self):
        _set(self, name, tensor)
        return
    if tensor is not None and name in self._tied:
        tensor = tensor.detach().clone()
    base.register_buffer(self, name, tensor, persistent)


def _first(module: nn.Module) -> Reads:
    return next(iter(reads_of(module).values()))


def _state(module: Any) -> dict[str, Any]:
    """Returns what a copy of a module is filled with."""
    state: dict[str, Any] = dict(undressed(type(module)).__getstate__(module))
    if "_flat_weights" in state:
        flatten(state)
        del state["_flat_weight_refs"]
    return state


def _revive(base: Any, names: Sequence[str]) -> Any:
    """Returns a module without anything in it."""
    made = base.__new__(base)
    made.__class__ = dressed(base, names)
    return made


def _blank(module: Any) -> Any:
    return _revive(undressed(type(module)), tuple(parametrized(module)))


def _fill(self: Any, state: dict[str, Any]) -> None:
    base = undressed(type(self))
    if hasattr(base, "__setstate__"):
        base.__setstate__(self, state)
    else:
        self.__dict__.update(state)
    _guarded(self)
    if "_flat_weights" in state:
        flatten(self.__dict__)


def _reduce(self: Any, protocol: Any) -> Any:
    return _revive, (undressed(type(self)), tuple(parametrized(self))), _state(self)


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    base = undressed(type(self))
    if hasattr(base, "__deepcopy__"):
        made = base.__deepcopy__(self, memo)
        made.__class__ = dressed(base, tuple(parametrized(self)))
        return made
    made = memo[id(self)] = _blank(self)
    made.__setstate__(copy.deepcopy(_state(self), memo))
    return made


_METHODS: dict[str, Callable[..., Any]] = {
    "__setattr__": _set,
    "__delattr__": _delete,
    "__setstate__": _fill,
    "__reduce_ex__": _reduce,
    "__deepcopy__": _deepcopy,
    "register_parameter": _register_parameter,
    "register_buffer": _register_buffer,
}


class TiedNode(ModuleNode):
    """A module that has a tied tensor: what is tied is computed in the new module too."""

    def shell(self, cls: type, static: Any) -> Any:
        return object.__new__(dressed(undressed(cls), parameters_of(cls)))

    def settle(self, keys: Sequence[Any], static: Any) -> Any:
        state, ((table, _, *span), *tables), at = super().settle(keys, static)
        return state, [(table, dict, *span), *tables], at

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        super().fill(x, keys, values, static)
        _guarded(x)

    def readings(self, x: Any) -> Iterable[Lasting]:
        for name, reads in reads_of(x).items():
            with torch.no_grad():
                array = reads.read()
            computed = reads.view is not None and not reads.is_view
            source = reads.roots()[0]
            yield Lasting(name, array, source, "computed from {}" if computed else "")

    def portable(self, cls: type) -> Any:
        return dressed, undressed(cls), parameters_of(cls)


declare(Tied, TiedNode())
