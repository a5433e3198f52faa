"""The variable that stands for a tied one: it has no value of its own."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from flax import nnx
from flax.nnx import graphlib, tracers

from tied._errors import TieError
from tied._nnx.facts import Tie
from tied._nnx.reads import named, read, sources, write

_trace_state: Any = tracers.TraceState


class Tied(nnx.Variable[Any]):
    """What a tie reads, as a variable: each look at it reads the source, each write writes there.

    It is no `nnx.Param`: where a part of a model is handed over alone (`nnx.jit`, `nnx.remat` or
    `nnx.grad` of `self.head`), the value that it reads goes along, and no optimizer or gradient by
    `nnx.Param` takes that copy for a parameter.

    NNX keeps values in `_raw_value`, which is a property here. A variable that a transform has made
    anew of such a part has a value, which can't be changed: the change would be lost.
    """

    __slots__ = ("_tied_link", "_tied_sent", "_tied_value")

    def _get_raw(self) -> Any:
        link = _link(self)
        return read(*link) if link is not None else self._tied_value

    def _set_raw(self, value: Any) -> None:
        link = _link(self)
        if link is not None:
            write(*link, value)
        elif _unset(self):
            object.__setattr__(self, "_tied_value", value)
        elif value is not self._tied_value:
            raise TieError(
                "a tied variable can't be changed in a part of a model that was handed over alone",
                hint="Hand over the whole model, or change the variable that it is computed from",
            )

    _raw_value = property(_get_raw, _set_raw)

    def update_from_state(self, variable_state: Any) -> None:
        """Takes a value over, as NNX does when it updates a module, and after each transform.

        One that was handed over to a transform can't have been changed there. What comes back is
        what went in, and may be older than what the source has become.
        """
        if not _is_sent(self):
            super().update_from_state(variable_state)

    def set_raw_value(self, value: Any, *, _unsafe_bypass_check: bool = False) -> None:
        """Takes a value over: as `update_from_state`, if it is NNX that calls."""
        by_nnx = sys._getframe(1).f_globals.get("__name__") == graphlib.__name__
        if not (by_nnx and _is_sent(self)):
            super().set_raw_value(value, _unsafe_bypass_check=_unsafe_bypass_check)

    def linked(self) -> tuple[Any, Tie] | None:
        """Returns the module that knows the tie, and the tie; None for one with its own value."""
        return _link(self)


def _link(variable: Tied) -> tuple[Any, Tie] | None:
    try:
        link: tuple[Any, Tie] = object.__getattribute__(variable, "_tied_link")
    except AttributeError:
        return None
    return link


def _unset(variable: Tied) -> bool:
    try:
        object.__getattribute__(variable, "_tied_value")
    except AttributeError:
        return True
    return False


def _is_sent(variable: Tied) -> bool:
    """Returns whether a variable was handed over to a transform, or made anew by one."""
    try:
        sent: bool = object.__getattribute__(variable, "_tied_sent")
    except AttributeError:
        return True
    return sent


def derive(owner: Any, tie: Tie, *, sent: bool = False) -> Any:
    """Returns what stands in the place of a target: a variable that reads, or the one module.

    Args:
        owner: The module that knows the tie.
        tie: The tie.
        sent: Whether it is for NNX to take into a transform: see `Tied.update_from_state`.
    """
    if tie.kind is None:
        return sources(owner, tie)[0]
    made = object.__new__(Tied)
    object.__setattr__(made, "_tied_link", (owner, tie))
    object.__setattr__(made, "_tied_sent", sent)
    object.__setattr__(made, "_var_metadata", _metadata(owner, tie))
    object.__setattr__(made, "_trace_state", _trace_state())
    return made


def _metadata(owner: Any, tie: Tie) -> dict[str, Any]:
    """Returns what NNX keeps along with a variable; the names of its axes are the source's."""
    metadata = {**tie.metadata, "ref": False}
    names = sources(owner, tie)[0].get_metadata().get("out_sharding")
    if isinstance(names, (tuple, list)):  # a PartitionSpec is a tuple
        with suppress(TieError):  # what can't be read says so when it is read
            metadata["out_sharding"] = named(owner, tie, tuple(names))
    return metadata


def guarded(part: Any) -> Any:
    """Returns a variable like one that was handed over, which says so if it would be changed."""
    if not isinstance(part, Tied):
        return part
    made = Tied._new(part.get_raw_value(), part.get_metadata())
    object.__setattr__(made, "_tied_sent", False)
    return made
