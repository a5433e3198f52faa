"""Modules and optimizers of PyTorch, and tensors that wrap other tensors."""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

from tied._node import Closed, Kind, Node, Opened, declare, kinds
from tied._path import Step
from tied.nodes.whole import WHOLE, WholeNode

_TABLES = ("_parameters", "_buffers", "_modules")
_BARE = torch.nn.Module().__dict__
_STANDARD = frozenset(_BARE)
_FRESH = {
    name: type(value)
    for name, value in _BARE.items()
    if isinstance(value, (dict, set)) and name not in _TABLES
}
"""The tables of hooks that every module has, and their types."""
_FRESH_KINDS = tuple(_FRESH.values())
_tables_of_hooks = itemgetter(*_FRESH)
_FLAT, _FLAT_REFS = "_flat_weights", "_flat_weight_refs"
"""What a recurrent module keeps of its own weights: no tie."""


class ModuleNode(Node):
    """`torch.nn.Module`: parameters, buffers, submodules, then all other attributes.

    The module's own tables (hooks and the like) are new in a rebuilt module, so that a hook that
    is registered on one does not run on the other.
    """

    early = True
    lazy = True

    def open(self, x: Any) -> Opened:
        own = x.__dict__
        if "_parameters" not in own:
            raise Closed("a module whose __init__ has not called super().__init__()")
        parameters, buffers, modules = own["_parameters"], own["_buffers"], own["_modules"]
        keys = [*parameters, *buffers, *modules]
        values = [*parameters.values(), *buffers.values(), *modules.values()]
        for name in _others(own):
            keys.append(name)
            values.append(own[name])
        return keys, values, x

    def settle(self, keys: Sequence[Any], static: Any) -> Any:
        own = static.__dict__
        state = own.copy()
        tables = []
        at = 0
        for table in _TABLES:
            entries = own[table]
            tables.append((table, type(entries), at, at + len(entries)))
            at += len(entries)
            state[table] = None
        for name in keys[at:]:
            state[name] = None
        if _FLAT in state:
            state[_FLAT] = state[_FLAT_REFS] = None
        return state, tables, at

    def shell(self, cls: type, static: Any) -> Any:
        return object.__new__(cls)

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        state, tables, at = static
        own = state.copy()
        own.update(zip(_FRESH, [kind() for kind in _FRESH_KINDS], strict=True))
        for table, kind, start, stop in tables:
            pairs = zip(keys[start:stop], values[start:stop], strict=True)
            own[table] = kind(pairs) if stop > start else kind()
        if at < len(keys):
            own.update(zip(keys[at:], values[at:], strict=True))
        if _FLAT in own:
            flatten(own)
        object.__setattr__(x, "__dict__", own)


def _others(own: dict[str, Any]) -> list[str]:
    """Returns the attributes of a module's own making, and the tables of hooks that have some."""
    names = [n for n in own if n not in _STANDARD and kinds[type(own[n])] is not None]
    if _FLAT in own:
        names = [name for name in names if name not in (_FLAT, _FLAT_REFS)]
    if any(_tables_of_hooks(own)):
        names += [name for name in _FRESH if own[name]]
    return names


def flatten(own: dict[str, Any]) -> None:
    """Makes the list that a recurrent module keeps of its own weights anew.

    Args:
        own: The module's attributes. A weight that is not among its parameters is computed; the
            module finds that its list is out of date and asks for that weight.
    """
    weights = [own["_parameters"].get(name) for name in own["_flat_weights_names"]]
    own[_FLAT] = weights
    own[_FLAT_REFS] = [_absent if w is None else weakref.ref(w) for w in weights]


def _absent() -> None:
    """Stands for a weak reference to a weight that is not in the list of a recurrent module."""


class ScriptNode(Node):
    """Compiled modules live in C++; nothing opens them."""

    def open(self, x: Any) -> Opened | None:
        raise Closed("a compiled module can't be taken apart")


class Fixed:
    """Marks the step counter of an optimizer: not a weight, so neither cast nor moved."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class FixedNode(Node):
    """See `Fixed`."""

    is_counter = True
    stands_in = True

    def open(self, x: Fixed) -> Opened:
        return (Step("inside", "value"),), [x.value], None

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return values[0]


class Slots:
    """The state of an optimizer, as (parameter, its state) pairs."""

    __slots__ = ("pairs",)

    def __init__(self, state: dict[Any, Any]) -> None:
        self.pairs = [(key, Slot(value) if type(value) is dict else value)
                      for key, value in state.items()]  # fmt: skip


class SlotsNode(Node):
    """See `Slots`."""

    stands_in = True

    def open(self, x: Slots) -> Opened:
        keys: list[Step] = []
        values: list[Any] = []
        for position, pair in enumerate(x.pairs):
            keys += [Step("nth key", position), Step("nth value", position)]
            values += pair
        return tuple(keys), values, None

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return defaultdict(dict, zip(values[::2], values[1::2], strict=True))


class Slot:
    """What an optimizer keeps for one parameter."""

    __slots__ = ("state",)

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


class SlotNode(Node):
    """See `Slot`."""

    step = "key"
    stands_in = True

    def open(self, x: Slot) -> Opened:
        values = [
            Fixed(value) if name == "step" and isinstance(value, torch.Tensor) else value
            for name, value in x.state.items()
        ]
        return tuple(x.state), values, None

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return dict(zip(keys, values, strict=True))


class OptimizerNode(Node):
    """`torch.optim.Optimizer`: parameter groups, state, and the other attributes.

    As with modules, a rebuilt optimizer has tables of hooks of its own.
    """

    early = True

    def open(self, x: Any) -> Opened:
        own = dict(x.__dict__)
        step = own.pop("step", None)
        state = own.pop("state")
        groups = own.pop("param_groups")
        return (
            ("param_groups", "state", *own),
            [groups, Slots(state), *own.values()],
            None if step is None else (step, weakref.ref(x)),
        )

    def shell(self, cls: type, static: Any) -> Any:
        return object.__new__(cls)

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        own = zip(keys, values, strict=True)
        x.__dict__.update((k, v.copy() if type(v) is OrderedDict else v) for k, v in own)
        if static is not None:
            step, old = static
            x.__dict__["step"] = _rebound(step, old, x)


def _rebound(step: Any, old: weakref.ref[Any], new: Any) -> Any:
    """Returns the `step` that a learning rate scheduler has wrapped, for another optimizer.

    The wrapper finds its optimizer through a weak reference in its closure.
    """
    if not isinstance(step, types.FunctionType):
        return step
    cells = tuple(
        types.CellType(weakref.ref(new)) if cell == types.CellType(old) else cell
        for cell in step.__closure__ or ()
    )
    made = types.FunctionType(step.__code__, step.__globals__, step.__name__, None, cells)
    made.__dict__.update(step.__dict__)
    return made


class WrapperNode(Node):
    """Tensor subclasses made of other tensors, through `__tensor_flatten__`."""

    def open(self, x: Any) -> Opened:
        names, context = x.__tensor_flatten__()
        static = (context, x.size(), x.stride(), x.requires_grad, x.__dict__.get("_is_param"))
        return tuple(names), [getattr(x, name) for name in names], static

    def build(self, cls: Any, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        context, size, stride, requires_grad, is_param = static
        inner = dict(zip(keys, values, strict=True))
        x = cls.__tensor_unflatten__(inner, context, size, stride).requires_grad_(requires_grad)
        if is_param:
            x._is_param = True
        return x


class GeneratorNode(WholeNode):
    """Random generators; `copy` gives the copy one in the same state."""

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return static.clone_state()


declare(Fixed, FixedNode())
declare(Slots, SlotsNode())
declare(Slot, SlotNode())

_KINDS: dict[type, Kind] = {
    torch.Size: None,
    torch.dtype: None,
    torch.device: None,
    torch.layout: None,
    torch.memory_format: None,
    torch.Generator: GeneratorNode(),
    torch.nn.parameter.UninitializedParameter: WHOLE,
    torch.nn.parameter.UninitializedBuffer: WHOLE,
}
_MODULE = ModuleNode()
_OPTIMIZER = OptimizerNode()


def find(cls: type) -> tuple[bool, Kind]:
    """Returns whether `cls` is PyTorch's and no ordinary object, and its kind."""
    if cls in _KINDS:
        return True, _KINDS[cls]
    if issubclass(cls, torch.jit.ScriptModule):
        return True, ScriptNode()
    if issubclass(cls, torch.nn.Module):
        return True, _MODULE
    if issubclass(cls, torch.optim.Optimizer):
        return True, _OPTIMIZER
    if issubclass(cls, torch.Tensor):
        return True, WrapperNode()
    return False, None
