"""The ties that a model has now, by identity or as a `View`, made to last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from tied._compare import TieChange
from tied._errors import TiedError
from tied._nnx.making import make, make_module
from tied._nnx.places import Edge, Place, common, edges, locate, must_be_whole
from tied._structured import Derived
from tied._where import shares
from tied.arrays.computed import Computed
from tied.arrays.view import View


def adopt(model: Any, on_conflict: str) -> tuple[list[TieChange], list[str]]:
    """Makes all ties last that a model has.

    Returns:
        What was tied, and a line for each tie that can't be.
    """
    must_be_whole(model)
    made: list[TieChange] = []
    left: dict[str, str] = {}
    _hold_spans(model)
    for find in (_modules, _variables, _arrays, _views):
        while (found := next((x for x in find(model) if x[0] not in left), None)) is not None:
            target, sources, view = found
            try:
                made.append(_tied(model, target, sources, view, on_conflict))
            except TiedError as error:
                left[target] = f"{target}: {error.message}"
    return made, list(left.values())


def _tied(
    model: Any, target: str, sources: tuple[str, ...], view: Any, on_conflict: str
) -> TieChange:
    if not sources:
        raise TiedError("no variable holds what it is a reading of")
    to = locate(model, target)
    if isinstance(to.part, nnx.Variable):
        return make(model, target, sources, view, None, on_conflict)
    source = locate(model, sources[0])
    if to.keys[: len(source.keys)] == source.keys:
        raise TiedError("it is a part of itself")
    if not all(isinstance(holder, nnx.Pytree) for holder in to.holders):
        raise TiedError(f"it stands in a {type(to.holders[-1]).__name__}; use nnx.List or nnx.Dict")
    return make_module(model, to, source)


Found = Iterator[tuple[str, tuple[str, ...], Any]]


def _name(edge: Edge) -> str:
    return ".".join(edge.keys)


def _modules(model: Any) -> Found:
    """Gives each module that stands at a further place."""
    first: dict[int, str] = {id(model): ""}
    for edge in edges(model):
        if isinstance(edge.part, nnx.Pytree) and not isinstance(edge.part, nnx.Variable):
            known = first.setdefault(id(edge.part), _name(edge))
            if known != _name(edge):
                yield _name(edge), (known,), None


def _variables(model: Any) -> Found:
    """Gives each variable that stands at a further place."""
    first: dict[int, str] = {}
    for edge in edges(model):
        if isinstance(edge.part, nnx.Variable):
            known = first.setdefault(id(edge.part), _name(edge))
            if known != _name(edge):
                yield _name(edge), (known,), None


def _arrays(model: Any) -> Found:
    """Gives each variable that holds the array of another one; random streams are never tied."""
    first: dict[int, str] = {}
    for edge in edges(model):
        if isinstance(edge.part, nnx.Variable) and not isinstance(edge.part, nnx.RngState):
            value = edge.part.get_raw_value()
            if isinstance(value, jax.Array):
                known = first.setdefault(id(value), _name(edge))
                if known != _name(edge):
                    yield _name(edge), (known,), None


def _holders(model: Any) -> dict[int, str]:
    """Returns the name of the first variable that holds each value."""
    holds: dict[int, str] = {}
    for edge in edges(model):
        if isinstance(edge.part, nnx.Variable):
            holds.setdefault(id(edge.part.get_raw_value()), _name(edge))
    return holds


def _hold_spans(model: Any) -> None:
    """Makes variables of arrays that several variables read a part of and none holds."""
    holds = _holders(model)
    readers: dict[int, list[str]] = {}
    for edge in edges(model):
        value = edge.part.get_raw_value() if isinstance(edge.part, nnx.Variable) else None
        if isinstance(value, View) and id(value.base) not in holds:
            readers.setdefault(id(value.base), []).append(_name(edge))
    for names in readers.values():
        places = _overlapping([locate(model, name) for name in dict.fromkeys(names)])
        kinds = {type(place.part) for place in places}
        if len(places) < 2 or len(kinds) > 1:
            continue
        owner = places[0].holders[common(places[0], places[1:])]
        name, n = "tied_span", 0
        while hasattr(owner, name):
            name, n = f"tied_span_{n}", n + 1
        setattr(owner, name, kinds.pop()(places[0].part.get_raw_value().base))


def _overlapping(places: list[Place]) -> list[Place]:
    """Returns the places that read an element that another one reads too."""
    values = [place.part.get_raw_value() for place in places]
    return [
        place
        for n, place in enumerate(places)
        if any(shares(values[n], other) for k, other in enumerate(values) if k != n)
    ]


def _views(model: Any) -> Found:
    """Gives each variable that holds a reading of the arrays of others."""
    holds = _holders(model)
    for edge in edges(model):
        if not isinstance(edge.part, nnx.Variable):
            continue
        value = edge.part.get_raw_value()
        bases: tuple[Any, ...]
        view: Any
        if isinstance(value, View):
            bases, view = (value.base,), value.layout
        elif isinstance(value, Derived):
            bases = value.base if isinstance(value.base, tuple) else (value.base,)
            view = value.fn
        elif isinstance(value, Computed):
            bases, view = (), None
        else:
            continue
        names = [holds.get(id(base)) for base in bases]
        sources = tuple(name for name in names if name is not None)
        yield _name(edge), sources if len(sources) == len(bases) else (), view
