"""Ties that last in pytrees of JAX: what `tied.tie` and `tied.untie` make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tied import arrays
from tied._bundle import Bundle
from tied._errors import TiedError, TieError
from tied._graft import Spot, find, grafted
from tied._lazy import view as read_as
from tied._map import library_of, taken_apart
from tied._overlap import Cluster, clusters
from tied._path import Path
from tied._places import places
from tied._structured import Derived
from tied._walk import Walk
from tied.arrays.computed import Computed
from tied.arrays.view import View

__all__ = ["tie_all", "tie_one", "untie"]

Reading = Callable[..., Any]


def tie_all(model: Any) -> Bundle:
    """Returns the bundle of a model, with all ties that it has: see `tied.tie`."""
    return model if isinstance(model, Bundle) else Bundle(_checked(model))


def tie_one(
    model: Any, targets: Sequence[str], sources: Sequence[str], view: Reading | None
) -> Bundle:
    """Returns the bundle of a model in which some arrays read another: see `tied.tie`."""
    if view is None and len(sources) > 1:
        raise TieError(
            f"{', '.join(targets)} needs a view to read {len(sources)} sources",
            hint="Give a function of so many arrays: view=lambda a, b: a @ b",
            paths=[*sources, *targets],
        )
    found = taken_apart(_checked(model), "warn")
    spots = [find(found, name) for name in sources]
    values = {}
    for target in targets:
        spot = find(found, target)
        value = _value(found, spots, view)
        if not _reads(found, spot, spots, value):
            _refuse(found, spot, spots, target, sources)
            _compare(found.objects[spot.item], value, target, sources)
            values[spot] = value
    made = grafted(found, model, values) if values else model
    return made if isinstance(made, Bundle) else Bundle(made)


def untie(model: Any, name: str) -> Bundle:
    """Returns the bundle of a model in which an array is an ordinary one: see `tied.untie`."""
    found = taken_apart(_checked(model), "warn")
    spot = find(found, name)
    own = found.objects[spot.item]
    others = _others(found, spot, name)
    computing = _computing(found, spot)
    if not others and not computing and not isinstance(own, Computed):
        raise TieError(f"{name} is not tied", paths=[name])
    if isinstance(own, Computed):
        own = own.read()
    else:
        _refuse_source(found, spot, name, others, computing)
    made = grafted(found, model, {spot: library_of(own).copy(own)})
    return made if isinstance(made, Bundle) else Bundle(made)


def _checked(model: Any) -> Any:
    """Returns a model whose arrays JAX takes; raises for others."""
    arrays.load("jax")
    for path, library in _foreign(model):
        raise TiedError(
            f"tie makes a Bundle of JAX arrays, and {path or 'the model'} is one of {library}",
            hint=f'Move the model first: tied.to(model, "jax"), or tie its {library} modules',
            paths=[path],
        )
    return model


def _foreign(model: Any) -> list[tuple[str, str]]:
    found = taken_apart(model, "keep")
    return [
        (found.name(item), library.name)
        for item, library in zip(found.leaves, found.libraries, strict=True)
        if library.name not in ("jax", "numpy", "lazy", "opaque")
    ]


def _value(found: Walk, spots: list[Spot], view: Reading | None) -> Any:
    """Returns what a target is to be: the source itself, a `View` of it, or what is computed."""
    parts = [found.objects[spot.item] for spot in spots]
    if view is None:
        return parts[0]
    return Derived(tuple(parts), view) if len(parts) > 1 else read_as(parts[0], view)


def _reads(found: Walk, spot: Spot, spots: list[Spot], value: Any) -> bool:
    """Returns whether what is at a place reads the source in that way already."""
    own = found.objects[spot.item]
    if own is value:
        return spot not in spots
    alike = type(own) is type(value) and getattr(own, "base", own) is getattr(value, "base", value)
    if isinstance(own, Derived):
        return alike and own.fn == value.fn
    return alike and isinstance(own, Computed) and own.layout == value.layout


def _others(found: Walk, spot: Spot, name: str) -> dict[str, int]:
    """Returns the other places that share an element with what is at one, and their items."""
    items = {spot.item}
    for one in clusters(found):
        members = [found.leaves[i] for i in one.members] if isinstance(one, Cluster) else ()
        if spot.item in members:
            items.update(members)
    record = found.records[spot.item]
    if record is not None:  # what is computed: of these
        items.update(child for _, child in record.holes)
    seen = {str(Path(steps)): item for steps, item in places(found) if item in items}
    return {path: item for path, item in seen.items() if path not in (name, f"{name}.base")}


def _refuse(
    found: Walk, spot: Spot, spots: list[Spot], target: str, sources: Sequence[str]
) -> None:
    """Raises for what can't be tied, whatever the arrays are."""
    if spot in spots:
        raise TieError(
            f"{target} can't be tied to itself",
            hint="Name another array as the source",
            paths=dict.fromkeys([*sources, target]),
        )
    others = dict(_others(found, spot, target)) | dict.fromkeys(_computing(found, spot), -1)
    if others or isinstance(found.objects[spot.item], Computed):
        raise TieError(
            f"{target} is tied already",
            facts=[("tied to", ", ".join([*others][:8]) or "what it computes")],
            hint=f'Untie it first: tied.untie(model, "{target}")',
            paths=dict.fromkeys([*sources, target, *others]),
        )


def _compare(own: Any, value: Any, target: str, sources: Sequence[str]) -> None:
    """Raises unless a value can stand in the place of an array."""
    told = [
        ("shape", tuple(own.shape), tuple(value.shape)),
        ("dtype", str(own.dtype), str(value.dtype)),
    ]
    told += _whereabouts(own, value)
    facts = [
        (label, f"{target} has {mine}, {sources[0]} gives {its}")
        for label, mine, its in told
        if mine != its
    ]
    if facts:
        raise TieError(
            f"{target} can't be tied to {', '.join(sources)}",
            facts=facts,
            hint="Give a view that makes the one of the other: view=lambda W: ...",
            paths=[*sources, target],
        )


def _whereabouts(own: Any, value: Any) -> list[tuple[str, str, str]]:
    """Returns where a target is and where it would be, if both were put somewhere on purpose."""
    base = value.base if isinstance(value, View) else value
    if not (getattr(own, "committed", False) and getattr(base, "committed", False)):
        return []
    library, shape = library_of(base), tuple(base.shape)
    devices = library.device(own), library.device(base)
    if devices[0] != devices[1]:
        return [("device", *devices)]
    asked = library.through(own.sharding, value.layout if value is not base else None, shape)
    there = library.through(base.sharding, None, shape)
    mine, its = (str(getattr(x, "spec", "")) for x in (asked, there))
    return [("sharding", mine, its)]


def _computing(found: Walk, spot: Spot) -> list[str]:
    """Returns the places at which something is computed of an array."""
    return [
        found.name(node)
        for item, node, _ in found.repeats
        if item == spot.item and node >= 0 and isinstance(found.objects[node], Derived)
    ]


def _refuse_source(
    found: Walk, spot: Spot, name: str, others: dict[str, int], computing: list[str]
) -> None:
    """Raises for an array that others are computed from, and that stands nowhere else."""
    if spot.item in others.values():
        return
    readers = [path for path, item in others.items() if isinstance(found.objects[item], View)]
    readers += computing
    if readers:
        raise TieError(
            f"{name} is the source of other arrays and can't be untied from them",
            facts=[("computed", reader) for reader in readers],
            hint=f'Untie those: tied.untie(model, "{readers[0]}")',
            paths=[name, *readers],
        )
