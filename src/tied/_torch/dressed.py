"""The class of a module that has a tied tensor: PyTorch's own, and what that one can't do.

`torch.nn.utils.parametrize` gives such a module a class of its own, whose property computes the
tensor. That class can't be pickled, copies of the module share it (so that removing a
parametrization from one breaks the other, and `parametrize.cached` mixes them up), and nothing in
it keeps a tool from registering the tensor anew. The class made here can, don't, and does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.utils import parametrize

from tied._errors import TieError
from tied._node import Lasting, declare
from tied._torch.reads import Reads, parametrized, reads_of
from tied.nodes.torch import ModuleNode, flatten


class Tied:
    """Marks the classes of modules that have a tied tensor."""

    __slots__ = ()


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
    quick = module.__dict__.setdefault("_reads", {})
    quick[name] = reads
    parts[name].__class__ = TiedList
    parts[name].__dict__["quick"] = quick, name
    base = undressed(type(module)) if issubclass(type(module), Tied) else type(module).__bases__[0]
    module.__class__ = dressed(base, tuple(parts))
    if weights is not None:
        flatten(module.__dict__)


def release(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Makes a tied tensor an ordinary one again, a Parameter or a buffer with this value."""
    base = undressed(type(module))
    reads = reads_of(module)[name]
    del parametrized(module)[name]
    module.__dict__["_reads"].pop(name, None)
    names = tuple(parametrized(module))
    if names:
        module.__class__ = dressed(base, names)
    else:
        del module._modules["parametrizations"]
        module.__class__ = base
        del module.__dict__["_reads"]
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value, persistent=reads.persistent)
    table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    for later in [n for n in table if n != name][reads.position :]:
        table[later] = table.pop(later)
    if "_flat_weights_names" in module.__dict__:
        flatten(module.__dict__)


def ordinary(tied: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tied tensor that is like any other: dense, in C order, a leaf."""
    return tied.detach().clone(memory_format=torch.contiguous_format)


class TiedList(parametrize.ParametrizationList):
    """The parametrizations of a tied tensor; more may be put on top, if they take one tensor.

    Attributes:
        quick: The table of the module's ties that nothing is put on top of, and the name in it.
    """

    quick: tuple[dict[str, Reads], str]

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
        quick, name = self.quick
        quick.pop(name, None)
        return super().append(module)


def _own_tensors(reads: Reads, module: nn.Module) -> TieError:
    return reads.refused(f"{type(module).__name__} can't be put on {reads.target}, which is tied")


def _computed(name: str) -> property:
    """Returns the property that computes a tensor."""

    def compute(self: Any) -> torch.Tensor:
        if not is_compiling() and parametrize._cache_enabled:  # a program computes it once anyway
            return _cached(self, name)
        reads = self._reads.get(name)
        if reads is not None:
            found: torch.Tensor = reads.read()
            return found
        made: torch.Tensor = self._modules["parametrizations"]._modules[name]()
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


def _new(cls: type, *args: Any, **settings: Any) -> Any:
    """Makes an ordinary module where a module makes another of its own class (`plist[1:]`)."""
    return undressed(cls)(*args, **settings)


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
        reads = reads_of(self)[name]
        raise reads.refused(f"{reads.target} is tied and can't be deleted")
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
        self._reads.pop(name, None)
        param = nn.Parameter(ordinary(param), param.requires_grad)  # no longer tied
    base.register_parameter(self, name, param)


def _register_buffer(self: Any, name: str, tensor: Any, persistent: bool = True) -> None:
    base = undressed(type(self))
    if name in reads_of(self):
        _set(self, name, tensor)
        return
    if tensor is not None and name in self._tied:
        self._reads.pop(name, None)
        tensor = ordinary(tensor)
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
    "__new__": _new,
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

    lasting = True

    def shell(self, cls: type, static: Any) -> Any:
        return object.__new__(dressed(undressed(cls), parameters_of(cls)))

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
