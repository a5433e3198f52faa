"""What a tie reads of its sources now, and what is written into them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from flax import nnx

from tied import arrays
from tied._errors import TieError
from tied._layout import Layout
from tied._nnx.facts import Keys, Tie, untying
from tied._nnx.mapped import computed, moved, through
from tied._nnx.through import put, writable

_PLAIN_GET = nnx.Variable.get_value


def follow(owner: Any, keys: Keys) -> Any:
    """Returns what stands at the end of some names, through ties on the way.

    Raises:
        AttributeError, LookupError: A name leads nowhere.
    """
    for key in keys:
        owner = below(owner, key)
    return owner


def below(part: Any, key: str) -> Any:
    """Returns the part of this name, of a module or of a container in one."""
    if isinstance(part, nnx.Pytree):
        return getattr(part, key)
    if isinstance(part, (list, tuple)):
        return part[int(key)]
    if isinstance(part, dict):
        return part[key]
    raise AttributeError(key)


def sources(owner: Any, tie: Tie) -> list[Any]:
    """Returns the variables (or the module) that a tie reads, as they are found now."""
    found = []
    for keys, name in zip(tie.sources, tie.names, strict=True):
        try:
            part = follow(owner, keys)
        except (AttributeError, LookupError, TypeError) as error:
            raise tie.error(f"{tie.name} is tied to {name}, which is no longer there") from error
        if tie.kind is not None and not isinstance(part, nnx.Variable):
            kind = type(part).__name__
            raise tie.error(f"{tie.name} is tied to {name}, which is no variable but a {kind}")
        found.append(part)
    return found


def value_of(variable: Any) -> Any:
    """Returns the value of a variable as its users see it."""
    raw = variable.get_raw_value()
    plain = type(variable).get_value is _PLAIN_GET and not variable.ref
    return raw if plain and not variable.has_metadata("on_get_value") else variable.get_value()


def read(owner: Any, tie: Tie) -> Any:
    """Returns the value of what is tied.

    Raises:
        TieError: A source is gone, or has become something that can't be read.
    """
    values = [value_of(variable) for variable in sources(owner, tie)]
    if tie.how is None:
        return values[0]
    if isinstance(tie.how, Layout):
        (value,) = values
        library = arrays.library_for(type(value))
        if library is None:
            raise _unreadable(tie, values)
        shape = tuple(value.shape)
        return library.apply(value, _layout(tie, shape).steps(shape))
    made = computed(tie.how, tie.shapes, values)  # type: ignore[arg-type]
    if made is None:
        raise _wrong_axis(tie, [tuple(value.shape) for value in values])
    return made


def _layout(tie: Tie, shape: tuple[int, ...]) -> Layout:
    """Returns how a source of this shape is read.

    Raises:
        TieError: It is not certain.
    """
    assert isinstance(tie.how, Layout)
    assert tie.shapes[0] is not None
    if shape == tie.shapes[0]:
        return tie.how
    layout = moved(tie.how, tie.shapes[0], shape)
    if layout is None:
        raise _wrong_axis(tie, [shape])
    return layout


class Origin(NamedTuple):
    """Where the value of what is tied comes from, through all ties on the way.

    Attributes:
        value: The value of the variable that is stored, the first of them.
        layout: How it is read; None if a function computes, on the way, or if it is no array.
        same: Whether it is read as it is.
    """

    value: Any
    layout: Layout | None
    same: bool


def origin(owner: Any, tie: Tie) -> Origin:
    """Returns where the value of what is tied comes from."""
    variable = sources(owner, tie)[0]
    link = getattr(type(variable), "linked", lambda _: None)(variable)
    value = value_of(variable)
    own = Origin(value, None, same=tie.how is None)
    if isinstance(tie.how, Layout):
        own = Origin(value, _layout(tie, tuple(value.shape)), same=False)
    if link is None:
        return own
    first = origin(*link)
    if first.same or own.same:
        known = own.layout if first.same else first.layout
        return Origin(first.value, known, first.same and own.same)
    both = None
    if first.layout is not None and own.layout is not None:
        both = first.layout.then(own.layout)
    return Origin(first.value, both, same=False)


def named(owner: Any, tie: Tie, names: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Returns the names of the axes of what is tied, given those of its source."""
    source = value_of(sources(owner, tie)[0])
    layout = isinstance(tie.how, Layout)
    return through(_layout(tie, tuple(source.shape)) if layout else tie.how, source, names)


def _wrong_axis(tie: Tie, found: list[tuple[int, ...]]) -> TieError:
    names = ", ".join(tie.names)
    return tie.error(
        f"it is not certain what {tie.name} reads of {names} here",
        facts=[
            ("tied as", ", ".join(map(str, tie.shapes))),
            ("found", ", ".join(map(str, found))),
        ],
        hint="Under nnx.vmap and nnx.scan, tie inside of the mapped constructor, or with a view of"
        " the last axes: lambda W: W.mT",
    )


def _unreadable(tie: Tie, values: list[Any]) -> TieError:
    kinds = ", ".join(type(value).__name__ for value in values)
    return tie.error(f"{tie.name} can't be read: its source holds no array but a {kinds}")


def write(owner: Any, tie: Tie, value: Any) -> None:
    """Writes a value into what a tie reads.

    Raises:
        TieError: It does not fit, or what is read can't be written.
    """
    now = read(owner, tie)
    if value is now:
        return
    _must_fit(tie, value, now)
    found = sources(owner, tie)
    if tie.how is None:
        found[0].set_value(value)
        return
    if tie.inverse is not None:
        made = tie.inverse(value)
        made = tuple(made) if isinstance(made, (tuple, list)) else (made,)
        for variable, new in zip(found, made, strict=True):
            variable.set_value(new)
        return
    names = ", ".join(tie.names)
    if not isinstance(tie.how, Layout) or not writable(tie.how):
        if _agree(value, now):
            return
        how = "reads elements more than once" if isinstance(tie.how, Layout) else "is computed"
        raise tie.error(
            f"{tie.name} can't be assigned: it {how} from {names}",
            hint=f"Assign to {tie.names[0]}, tie with inverse=..., or untie first: "
            f"{untying(tie.text)}",
        )
    source = value_of(found[0])
    shape = tuple(source.shape)
    layout = _layout(tie, shape)
    if layout.size < source.size and value.dtype != source.dtype:
        raise tie.error(
            f"a value does not fit {tie.name}, which is tied",
            facts=[("dtype", f"{value.dtype} where {source.dtype} is")],
        )
    found[0].set_value(put(source, layout.steps(shape), value))


def _agree(value: Any, now: Any) -> bool:
    """Returns whether a value that is written is the one that is there, as far as can be known."""
    library = arrays.library_for(type(now))
    same_type = library is not None and library is arrays.library_for(type(value))
    if not same_type or is_traced(value) or is_traced(now):
        return False
    return library.agrees(value, now)  # type: ignore[union-attr]


def _must_fit(tie: Tie, value: Any, now: Any) -> None:
    if not hasattr(now, "shape") or not hasattr(now, "dtype"):
        return
    given = getattr(value, "shape", None)
    if given is None or tuple(given) != tuple(now.shape):
        what = type(value).__name__ if given is None else tuple(given)
        raise tie.error(
            f"a value does not fit {tie.name}, which is tied",
            facts=[("shape", f"{what} where {tuple(now.shape)} is")],
        )


def is_traced(value: Any) -> bool:
    """Returns whether a value stands for one that is not known yet."""
    return isinstance(value, (jax.core.Tracer, jax.ShapeDtypeStruct))
