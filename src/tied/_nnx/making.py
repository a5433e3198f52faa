"""One tie made, or taken back, in a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.typing import HashableMapping

from tied import arrays
from tied._compare import TieChange
from tied._layout import Layout
from tied._nnx import checks
from tied._nnx.facts import Function, Keys, Tie
from tied._nnx.marks import give, lost_of, take, ties_of, undressed
from tied._nnx.places import Place, all_ties, common, end_of, locate, must_stand_once
from tied._nnx.reading import redress
from tied._nnx.reads import is_traced, value_of
from tied._reading import reading
from tied.arrays.computed import plain


def make(
    model: Any,
    target: str,
    sources: tuple[str, ...],
    view: Callable[..., Any] | Layout | None,
    inverse: Callable[[Any], Any] | None,
    on_conflict: str,
) -> TieChange:
    """Ties a variable to others: see `tied.tie`."""
    to = locate(model, target)
    places = [locate(model, name) for name in sources]
    checks.refuse_misuse(to, places, view)
    checks.refuse_circle(model, to, places)
    checks.refuse_older(model, to, places)
    how, seen = checks.understood(to, places, view)
    checks.compare(to, places, seen)
    checks.check_inverse(to, places, inverse)
    checks.check_types(to, places, on_conflict)
    checks.check_sharding(to, places, how)
    depth = common(to, places)
    must_stand_once(model, to, depth)
    if on_conflict == "target":
        for place in places:
            if not place.tied:
                object.__setattr__(place.part, "__class__", type(to.part))
    shapes = tuple(_shape(place) for place in places)
    tie = Tie(
        to.keys[depth:],
        tuple(place.keys[depth:] for place in places),
        how,
        shapes,
        type(to.part),
        HashableMapping(to.part.get_metadata()),
        None if inverse is None else Function(inverse),
        reading(_name(to.keys, depth), _words(how, [_name(p.keys, depth) for p in places], shapes)),
        _within(to, depth),
    )
    install(to, depth, tie)
    return TieChange(sources[0], target, _words(how, list(sources), shapes))


def make_module(model: Any, target: Place, source: Place) -> TieChange:
    """Ties the two places of one module: the second one is computed from the first."""
    depth = common(target, [source])
    must_stand_once(model, target, depth)
    name = _name(source.keys, depth)
    tie = Tie(
        target.keys[depth:],
        (source.keys[depth:],),
        None,
        (None,),
        None,
        HashableMapping({}),
        None,
        reading(_name(target.keys, depth), name),
        _within(target, depth),
    )
    install(target, depth, tie)
    return TieChange(source.name, target.name, source.name)


def install(target: Place, depth: int, tie: Tie) -> None:
    """Makes a variable (or module) one that is computed from now on."""
    owner, holder = target.holders[depth], target.holders[-1]
    name = target.keys[-1]
    take(holder, name)
    if holder is not owner:
        redress(holder, ties_of(holder), {**lost_of(holder), name: tie.text})
    redress(owner, (*ties_of(owner), tie), lost_of(owner))


def remove(model: Any, target: Place) -> None:
    """Makes what is computed by a tie an ordinary variable, with the value of now."""
    holder, name = target.holders[-1], target.keys[-1]
    end = end_of(holder, (name,))
    owner, tie = next((o, t) for o, _, t in all_ties(model) if end_of(o, t.target) == end)
    if tie.kind is None:
        part = tied_copy(target.part)
    else:
        part = variable(tie.kind, copied(target.part.get_value()), dict(tie.metadata))
    if holder is not owner:
        lost = {key: words for key, words in lost_of(holder).items() if key != name}
        redress(holder, ties_of(holder), lost)
    redress(owner, tuple(one for one in ties_of(owner) if one is not tie), lost_of(owner))
    give(holder, name, part)


def tied_copy(module: Any) -> Any:
    """Returns a copy of a module that has values of its own."""
    return nnx.clone(module, graph=True)


def variable(kind: type[Any], value: Any, metadata: dict[str, Any]) -> Any:
    """Returns an ordinary variable."""
    value = jax.new_ref(value) if metadata.get("ref") else value
    return kind._new(value, metadata)


def copied(value: Any) -> Any:
    """Returns a value of its own: no two variables are to hold one array."""
    value = plain(value)
    library = arrays.library_for(type(value))
    return value if library is None or is_traced(value) else library.copy(value)


def _within(target: Place, depth: int) -> str:
    return undressed(type(target.holders[depth])).__name__ if depth else ""


def _name(keys: Keys, depth: int) -> str:
    return ".".join(keys[depth:])


def _shape(place: Place) -> tuple[int, ...] | None:
    value = value_of(place.part)
    return tuple(value.shape) if hasattr(value, "shape") else None


def _words(how: Any, names: list[str], shapes: tuple[tuple[int, ...] | None, ...]) -> str:
    """Returns how a tie reads to a person, without the target."""
    if how is None:
        return names[0]
    if isinstance(how, Layout):
        assert shapes[0] is not None
        return how.describe(shapes[0], names[0])
    return f"computed from {', '.join(names)}"
