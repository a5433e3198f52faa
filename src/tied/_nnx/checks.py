"""Whether two variables can be tied: everything is asked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tied._errors import TieError
from tied._hidden import captures
from tied._layout import Layout
from tied._nnx.facts import Function
from tied._nnx.mapped import padded, struct, through
from tied._nnx.places import Place, all_ties, edges, end_of
from tied._nnx.reads import is_traced, value_of
from tied._nnx.variable import Tied
from tied.arrays.computed import Computed, plain
from tied.arrays.view import View

Struct = Any
_FAILS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError)


def refuse_misuse(target: Place, sources: list[Place], view: Any) -> None:
    """Raises for what can't be a tie, whatever the arrays are."""
    names = [place.name for place in sources]
    paths = [*names, target.name]
    if target.tied:
        raise TieError(f"{target.name} is tied already", paths=paths,
                       hint=f'Untie it first: tied.untie(model, "{target.name}")')  # fmt: skip
    for place in (target, *sources):
        if not isinstance(place.part, nnx.Variable):
            kind = type(place.part).__name__
            raise TieError(f"{place.name} is no variable but a {kind}", paths=paths)
        if place.part.hijax:
            raise TieError(
                f"{place.name} is a hijax variable, which can't be tied",
                hint="Make it with hijax=False",
                paths=paths,
            )
    if any(place.keys == target.keys for place in sources):
        raise TieError(f"{target.name} can't be tied to itself", paths=paths)
    if view is None and len(sources) != 1:
        raise TieError(
            f"{target.name} needs a view to read {len(sources)} sources",
            hint="Give a function of so many arrays: view=lambda a, b: a @ b",
            paths=paths,
        )
    if view is not None and getattr(view, "__closure__", None) and captures(view):
        raise TieError(
            f"the view of {target.name} holds an array of its own",
            facts=[("array", "in its closure or defaults, where nothing moves or saves it")],
            hint="Make it a variable of the model, and a further source",
            paths=paths,
        )
    for part in target.holders:
        if isinstance(part, (list, dict, tuple)):
            raise TieError(
                f"{target.name} stands in a {type(part).__name__}, where nothing can be tied",
                hint="Use nnx.List or nnx.Dict in its place",
                paths=paths,
            )


def refuse_circle(model: Any, target: Place, sources: list[Place]) -> None:
    """Raises if a source is computed, over any ties, of the target."""
    reads: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for owner, _, tie in all_ties(model):
        end = end_of(owner, tie.target)
        reads[end] = [end_of(owner, keys) for keys in tie.sources]
    goal = end_of(target.holders[-1], target.keys[-1:])
    for place in sources:
        queue = [end_of(place.holders[-1], place.keys[-1:])]
        while queue:
            found = queue.pop()
            if found == goal:
                raise TieError(
                    f"{target.name} can't be tied to {place.name}, which is computed from it",
                    hint=f'Untie it first: tied.untie(model, "{place.name}")',
                    paths=[place.name, target.name],
                )
            queue += reads.get(found, [])


def refuse_older(model: Any, target: Place, sources: list[Place]) -> None:
    """Raises if a target is tied now, by identity, to what is no source: that tie would be lost."""
    own = target.part
    value = own.get_raw_value()
    inputs = [place.part for place in sources]
    values = [place.part.get_raw_value() for place in sources]
    for edge in edges(model):
        if not isinstance(edge.part, nnx.Variable):
            continue
        if edge.holder is target.holders[-1] and edge.key == target.keys[-1]:
            continue
        same = edge.part is own and not any(own is x for x in inputs)
        other = edge.part.get_raw_value()
        shared = isinstance(value, jax.Array) and other is value and edge.part is not own
        if same or (shared and not any(value is x for x in values)):
            name = ".".join(edge.keys)
            raise TieError(
                f"{target.name} is tied already",
                facts=[("tie", f"{target.name} is {name}" if same else
                        f"{target.name} has the array of {name}")],
                hint=f'Untie it first: tied.untie(model, "{target.name}")',
                paths=[name, *(place.name for place in sources), target.name],
            )  # fmt: skip


def understood(
    target: Place, sources: list[Place], view: Callable[..., Any] | Layout | None
) -> tuple[Layout | Function | None, Struct]:
    """Returns how a target reads its sources, and what it will be, without values.

    Raises:
        TieError: The view fails, or returns no array.
    """
    paths = [*(place.name for place in sources), target.name]
    values = [value_of(place.part) for place in sources]
    for place, value in zip(sources, values, strict=True):
        if isinstance(value, Computed):
            raise TieError(
                f"{place.name} holds no array of its own but a {type(value).__name__}",
                hint="Make what is tied last first: tied.tie(model)",
                paths=paths,
            )
    if view is None:
        return None, values[0]
    if isinstance(view, Layout):
        return view, struct(view.shape, values[0].dtype)
    structs = [struct(x.shape, x.dtype) for x in values]
    try:
        layout = _layout(view, structs) if len(structs) == 1 else None
        if layout is not None:
            return layout, struct(layout.shape, structs[0].dtype)
        seen = jax.eval_shape(lambda *parts: plain(view(*parts)), *structs)
    except _FAILS as error:
        raise TieError(
            f"the view of {target.name} fails on {', '.join(p.name for p in sources)}",
            facts=[("error", str(error).partition("\n")[0])],
            paths=paths,
        ) from error
    if not isinstance(seen, jax.ShapeDtypeStruct):
        kind = type(seen).__name__
        raise TieError(f"the view of {target.name} returns {kind}, not an array", paths=paths)
    return Function(view), seen


def _layout(view: Callable[..., Any], structs: list[Struct]) -> Layout | None:
    """Returns the layout that a view reads; None if it computes, or works on JAX's arrays only."""
    (one,) = structs
    name = str(one.dtype)
    known = name.startswith(("float", "complex", "int", "uint", "bool"))
    try:
        found = Layout.of(view, tuple(one.shape), dtype=name if known else None)
    except (AttributeError, TypeError):  # it may need an array of JAX
        found = None
    if found is None:
        seen: list[Layout] = []

        def look(x: Any) -> Any:
            made = view(x)
            if isinstance(made, View) and made.base is x:
                seen.append(made.layout)
            return plain(made)

        jax.eval_shape(look, one)
        found = seen[0] if seen else None
    return None if found is None or found.dtype is not None else found


def compare(target: Place, sources: list[Place], seen: Struct) -> None:
    """Raises unless what is read can stand in the place of the target."""
    own = value_of(target.part)
    first = value_of(sources[0].part)
    if not hasattr(own, "shape") or not hasattr(seen, "shape"):
        return
    facts = [
        (label, f"{target.name} has {mine}, {sources[0].name} gives {its}")
        for label, mine, its in (
            ("shape", tuple(own.shape), tuple(seen.shape)),
            ("dtype", str(own.dtype), str(seen.dtype)),
            ("device", _devices(own, first), _devices(first, own)),
        )
        if mine != its
    ]
    if facts:
        names = ", ".join(place.name for place in sources)
        raise TieError(
            f"{target.name} can't be tied to {names}",
            facts=facts,
            hint=_remedy(own, first, [label for label, _ in facts]),
            paths=[*(place.name for place in sources), target.name],
        )


def _devices(x: Any, other: Any) -> str:
    if any(is_traced(y) or not isinstance(plain_of(y), jax.Array) for y in (x, other)):
        return ""
    return ", ".join(sorted(f"{d.platform}:{d.id}" for d in plain_of(x).devices()))


def plain_of(x: Any) -> Any:
    """Returns the array that a value is, or that it is a reading of."""
    return x.base if isinstance(x, View) else x


def _remedy(own: Any, first: Any, wrong: list[str]) -> str:
    if "shape" not in wrong:
        if "dtype" in wrong:
            return "Cast the model first, so that both have one dtype"
        return "Move the model first, so that both are on the same devices"
    if own.shape == first.shape:
        return "Is it the same array? tied.tie(model, target, source)"
    if own.ndim == 2 and own.shape == first.shape[::-1]:
        return "Is it the transpose? tied.tie(model, target, source, tied.transpose)"
    return "Give a view that makes the one of the other: view=lambda W: ..."


def check_inverse(
    target: Place, sources: list[Place], inverse: Callable[[Any], Any] | None
) -> None:
    """Raises unless an inverse gives what the sources are."""
    if inverse is None:
        return
    own = value_of(target.part)
    made = jax.eval_shape(inverse, struct(own.shape, own.dtype))
    made = made if isinstance(made, (tuple, list)) else (made,)
    shapes = [tuple(getattr(x, "shape", ())) for x in made]
    wanted = [tuple(value_of(place.part).shape) for place in sources]
    if shapes != wanted:
        names = ", ".join(place.name for place in sources)
        raise TieError(
            f"the inverse does not make {names} of {target.name}",
            facts=[("wanted", ", ".join(map(str, wanted))), ("made", ", ".join(map(str, shapes)))],
            paths=[*(place.name for place in sources), target.name],
        )


def check_types(target: Place, sources: list[Place], on_conflict: str) -> None:
    """Raises if the two sides are of different types, and nobody has said which counts."""
    own = kind_of(target.part)
    for place in sources:
        known = on_conflict == "source" or (on_conflict == "target" and not place.tied)
        if kind_of(place.part) is own or known:
            continue
        raise TieError(
            f"{target.name} and {place.name} are variables of different types",
            facts=[(target.name, own.__name__), (place.name, kind_of(place.part).__name__)],
            hint='Say which counts: tied.tie(..., on_conflict="source") or "target"',
            paths=[place.name, target.name],
        )


def kind_of(variable: Any) -> type[Any]:
    """Returns the type of a variable; of a tied one, the type that it had."""
    link = variable.linked() if isinstance(variable, Tied) else None
    return type(variable) if link is None or link[1].kind is None else link[1].kind


def check_sharding(target: Place, sources: list[Place], how: Any) -> None:
    """Raises if the axes of the two sides are annotated, or placed, on a mesh in different ways."""
    for place in sources:
        for label, mine, its in (
            ("out_sharding", _names(target), _names(place)),
            ("sharding", _spec(target), _spec(place)),
        ):
            if mine is None or its is None:
                continue
            wanted = through(how, value_of(place.part), its)
            mine = padded(mine, value_of(target.part).ndim)
            if wanted is not None and mine != wanted:
                raise TieError(
                    f"{target.name} and {place.name} ask for different shardings",
                    facts=[(target.name, f"{label} {mine}"),
                           (place.name, f"{label} {padded(its, value_of(place.part).ndim)}, "
                            f"which is {wanted} there")],
                    hint="Annotate both alike, or one of them only",
                    paths=[place.name, target.name],
                )  # fmt: skip


def _names(place: Place) -> Any:
    found = place.part.get_metadata().get("out_sharding")
    return tuple(found) if isinstance(found, (tuple, list, PartitionSpec)) else None


def _spec(place: Place) -> Any:
    value = value_of(place.part)
    sharding = None if is_traced(value) else getattr(value, "sharding", None)
    if isinstance(sharding, NamedSharding) and any(sharding.spec):
        return tuple(sharding.spec)
    return None
