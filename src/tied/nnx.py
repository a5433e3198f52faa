"""Ties that last in Flax NNX modules: what `tied.tie` and `tied.untie` do to them, and filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

import tied._nnx.nodes  # noqa: F401  (what the walk and pickle have to know)
from tied._compare import TieChange
from tied._errors import TieError
from tied._nnx.adopt import adopt
from tied._nnx.filters import alias, state_axes
from tied._nnx.making import copied, make, remove, variable
from tied._nnx.marks import give
from tied._nnx.places import Place, all_ties, edges, end_of, locate
from tied._nnx.variable import Tied
from tied.arrays.computed import Computed

__all__ = ["Tied", "alias", "state_axes", "tie_all", "tie_one", "untie"]


def tie_all(model: Any, on_conflict: str) -> tuple[list[TieChange], list[str]]:
    """Makes all ties last that a model has: see `tied.tie`."""
    return adopt(model, on_conflict)


def tie_one(
    model: Any,
    target: str,
    sources: tuple[str, ...],
    view: Callable[..., Any] | None,
    inverse: Callable[[Any], Any] | None,
    on_conflict: str,
) -> TieChange:
    """Ties a variable to others: see `tied.tie`."""
    return make(model, target, sources, view, inverse, on_conflict)


def untie(model: Any, name: str) -> None:
    """Makes a tied variable an ordinary one: see `tied.untie`."""
    place = locate(model, name)
    if not place.tied and not isinstance(place.part, nnx.Variable):
        raise TieError(f"{name} is no variable but a {type(place.part).__name__}", paths=[name])
    _must_stand_once(model, place)
    if place.tied:
        remove(model, place)
    else:
        _untie_now(model, place)


def _must_stand_once(model: Any, place: Place) -> None:
    holder = place.holders[-1]
    names = [".".join(edge.keys) for edge in edges(model) if edge.part is holder]
    names += [".".join((*above, *tie.target)) for owner, above, tie in all_ties(model)
              if tie.kind is None and locate(model, ".".join((*above, *tie.sources[0]))).part
              is holder]  # fmt: skip
    if len(names) > 1:
        raise TieError(
            f"{place.name} belongs to a module that stands at several places",
            facts=[("places", ", ".join(names))],
            hint=f"Put a copy in one of them: nnx.clone of {names[0]}",
            paths=[place.name, *names],
        )


def _untie_now(model: Any, place: Place) -> None:
    """Gives a variable that is tied by identity, or holds a reading, a value of its own."""
    own = place.part
    value = own.get_raw_value()
    others = [
        ".".join(edge.keys)
        for edge in edges(model)
        if isinstance(edge.part, nnx.Variable)
        and (edge.holder is not place.holders[-1] or edge.key != place.keys[-1])
        and (edge.part is own or _shares(edge.part.get_raw_value(), value))
    ]
    if not others and not isinstance(value, Computed):
        raise _not_tied(model, place)
    metadata = dict(own.get_metadata())
    give(place.holders[-1], place.keys[-1], variable(type(own), copied(own.get_value()), metadata))


def _shares(other: Any, value: Any) -> bool:
    return isinstance(value, jax.Array) and other is value


def _not_tied(model: Any, place: Place) -> TieError:
    end = end_of(place.holders[-1], place.keys[-1:])
    readers = [
        ".".join((*above, *tie.target))
        for owner, above, tie in all_ties(model)
        if any(end_of(owner, keys) == end for keys in tie.sources)
    ]
    if not readers:
        return TieError(f"{place.name} is not tied", paths=[place.name])
    return TieError(
        f"{place.name} is the source of other variables and can't be untied from them",
        facts=[("computed", reader) for reader in readers],
        hint=f'Untie those: tied.untie(model, "{readers[0]}")',
        paths=[place.name, *readers],
    )
