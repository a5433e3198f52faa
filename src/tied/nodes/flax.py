"""Modules and variables of Flax NNX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx
from flax.nnx import pytreelib, tracers

from tied._node import Kind, Node, Opened
from tied._path import Step

_VALUE = (Step("inside", "value"),)
_OWN = ("_pytree__state", "_pytree__nodes")


class ModuleNode(Node):
    """NNX modules and other NNX objects: every attribute is a child.

    A rebuilt module belongs to the trace it is rebuilt in, as after `nnx.merge`.
    """

    early = True

    def open(self, x: Any) -> Opened:
        state = x.__dict__.copy()
        own = state.pop("_pytree__state")
        nodes = state.pop("_pytree__nodes", None)
        return tuple(state), list(state.values()), (own.initializing, own.is_setup, nodes)

    def shell(self, cls: type, static: Any) -> Any:
        return object.__new__(cls)

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        initializing, is_setup, nodes = static
        state = x.__dict__
        state["_pytree__state"] = pytreelib.PytreeState(initializing, is_setup)
        if nodes is not None:
            state["_pytree__nodes"] = nodes
        state.update(zip(keys, values, strict=True))


class VariableNode(Node):
    """NNX variables: the value is the child, the metadata stays."""

    early = True

    def open(self, x: Any) -> Opened:
        return _VALUE, [x._raw_value], x._var_metadata.copy()

    def shell(self, cls: type, static: Any) -> Any:
        return object.__new__(cls)

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        object.__setattr__(x, "_raw_value", values[0])
        object.__setattr__(x, "_var_metadata", static.copy())
        object.__setattr__(x, "_trace_state", _trace_state())


_trace_state: Any = tracers.TraceState

_MODULE = ModuleNode()
_VARIABLE = VariableNode()


def find(cls: type) -> tuple[bool, Kind]:
    """Returns whether `cls` is an NNX object or variable, and its kind."""
    if issubclass(cls, nnx.Variable):
        return True, _VARIABLE
    if issubclass(cls, nnx.Pytree):
        return True, _MODULE
    return False, None
