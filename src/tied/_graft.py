"""Another part at a place of a model, which is made anew around it."""

from __future__ import annotations

from typing import Any, NamedTuple

from tied._errors import PathError
from tied._map import library_of, rebuild
from tied._walk import Walk


class Spot(NamedTuple):
    """A place of a model: the node it is in, the position there, and the item that is there."""

    node: int
    position: int
    item: int


def find(found: Walk, name: str) -> Spot:
    """Returns the place of an array by its dotted name, through parts met before too.

    Raises:
        PathError: There is no array of that name, and nothing that computes one.
    """
    reached, item, rest = "", found.root, name
    while item >= 0 and _opens(found, item):
        spot, rest_below = _down(found, item, rest)
        if spot is None:
            break
        if not rest_below and not _opens(found, spot.item):
            return spot
        taken = rest[: len(rest) - len(rest_below)].strip(".")
        reached = f"{reached}.{taken}".strip(".")
        item, rest = spot.item, rest_below
    names = [found.step(item, p).name() for p, _ in _holes(found, item)] if item >= 0 else []
    raise PathError(
        f"no such array: {name}",
        facts=[("reached", reached or "the model"), ("it has", ", ".join(names[:12]) or "nothing")],
        paths=[name],
    )


def _opens(found: Walk, item: int) -> bool:
    """Returns whether a name leads on from an item: not from arrays, nor from what computes one."""
    record = found.records[item]
    return record is not None and not record.node.derived


def _down(found: Walk, item: int, rest: str) -> tuple[Spot | None, str]:
    """Returns the child that the next steps of a name lead to, and what is left of the name."""
    best: tuple[Spot | None, str] = (None, rest)
    for position, child in _holes(found, item):
        step = found.step(item, position)
        if step.kind == "inside":
            return Spot(item, position, child), rest
        name = step.name()
        if rest == name:
            return Spot(item, position, child), ""
        if rest.startswith(name + ".") and len(rest) - len(name) - 1 < len(best[1]):
            best = Spot(item, position, child), rest[len(name) + 1 :]
    return best


def _holes(found: Walk, item: int) -> list[tuple[int, int]]:
    record = found.records[item]
    return [] if record is None or record.node.back else record.holes


def grafted(found: Walk, model: Any, values: dict[Spot, Any]) -> Any:
    """Returns the model with other parts at some places; all other leaves are the very same.

    Args:
        found: The walk of the model; it is used up.
        model: The model; it is not changed.
        values: For each place what is to be there: an array, or what computes one.
    """
    for spot, value in values.items():
        leaf = len(found.objects)
        found.objects.append(value)
        found.parents.append(spot.node)
        found.positions.append(spot.position)
        found.records.append(None)
        found.leaves.append(leaf)
        found.libraries.append(library_of(value))
        record = found.records[spot.node]
        assert record is not None
        record.holes = [(p, leaf if p == spot.position else child) for p, child in record.holes]
    return rebuild(found, model, lambda _found, _one, array, _library: array)
