"""Filters of NNX that know a variable by each of its names, tied ones too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx
from flax.nnx import filterlib

from tied._errors import TieError
from tied._nnx.marks import ties_of
from tied._nnx.places import children, stored
from tied._nnx.reads import follow
from tied._nnx.variable import Tied

Names = tuple[Any, ...]
"""The names that lead to a variable, as NNX writes them: elements of lists are integers."""


@dataclass(frozen=True)
class Alias:
    """A filter that takes a variable if another filter takes any of its names: see `alias`."""

    filter: Callable[[Any, Any], bool]
    groups: tuple[tuple[Names, ...], ...]

    def __post_init__(self) -> None:
        found = {names: group for group in self.groups for names in group}
        object.__setattr__(self, "_found", found)

    def __call__(self, names: Names, value: Any) -> bool:
        """Returns whether the filter takes the variable by any of its names."""
        found: dict[Names, tuple[Names, ...]] = self._found  # type: ignore[attr-defined]
        return any(self.filter(each, value) for each in found.get(names, (names,)))

    def __repr__(self) -> str:
        return f"Alias({self.filter!r})"


def alias(model: Any, filter: Any) -> Alias:
    """Returns a filter of NNX that takes a variable by any of its names.

    NNX knows a variable that is shared by the first of its names only, and a tied one not at all:
    `nnx.state(model, nnx.PathContains("head"))` leaves out the embedding that the head reads.

    Args:
        model: The module; the filter is for it, and for what is split from it.
        filter: A filter of NNX: a type of variables, a string, `nnx.PathContains(...)`, a function
            of names and value, `nnx.Any(...)`, ...

    Returns:
        The filter, for `nnx.state`, `nnx.split`, `nnx.DiffState`, `nnx.Optimizer(wrt=...)`. Equal
        ones are equal.

    >>> from flax import nnx
    >>> import tied
    >>> model = nnx.Dict(embed=nnx.Embed(5, 2, rngs=nnx.Rngs(0)),
    ...                  head=nnx.Linear(2, 5, use_bias=False, rngs=nnx.Rngs(1)))
    >>> _ = tied.tie(model, "head.kernel", "embed.embedding", tied.transpose)
    >>> list(nnx.state(model, nnx.PathContains("head")))
    []
    >>> list(nnx.state(model, tied.nnx.alias(model, nnx.PathContains("head"))))
    ['embed']
    """
    groups = [tuple(group) for group, _ in _storages(model) if len(group) > 1]
    return Alias(filterlib.to_predicate(filter), tuple(groups))


def state_axes(model: Any, axes: Mapping[Any, Any]) -> Any:
    """Returns `nnx.StateAxes` in which each filter is asked of every name of a variable.

    By itself NNX asks the first name only: an axis that is asked for by another one is ignored, and
    nobody is told.

    Args:
        model: The module whose arrays are to be mapped.
        axes: The axis for each filter (None: the array is not mapped; `nnx.Carry` for `nnx.scan`).
            `...` counts for what no other filter takes by any name.

    Returns:
        What `in_axes` of `nnx.vmap` and `nnx.scan` takes.

    Raises:
        TieError: Two names of one variable ask for different axes; it names both.
    """
    default = axes.get(..., axes.get(True, _UNASKED))
    asked = [
        (filterlib.to_predicate(filter), axis)
        for filter, axis in axes.items()
        if filter not in (..., True)
    ]
    found: dict[Any, list[Names]] = {}
    for group, variable in _storages(model):
        axis = _settled(group, variable, asked)
        axis = default if axis is _UNASKED else axis
        if axis is not _UNASKED:
            found.setdefault(axis, []).extend(group)
    return nnx.StateAxes([(filterlib.PathIn(*names), axis) for axis, names in found.items()])


_UNASKED = object()


def _settled(group: list[Names], variable: Any, asked: list[tuple[Any, Any]]) -> Any:
    """Returns the axis that the names of a variable ask for."""
    wanted: list[tuple[Names, Any]] = []
    for names in group:
        for predicate, axis in asked:
            if predicate(names, variable):
                wanted.append((names, axis))
                break
    if not wanted:
        return _UNASKED
    first, axis = wanted[0]
    for names, other in wanted:
        if _positive(other, variable) != _positive(axis, variable):
            one, two = (".".join(map(str, each)) for each in (first, names))
            raise TieError(
                f"{one} and {two} are one array and ask for different axes",
                facts=[(one, f"axis {axis}"), (two, f"axis {other}")],
                hint="Ask for the same axis by both names, or by one of them only",
                paths=[one, two],
            )
    return axis


def _positive(axis: Any, variable: Any) -> Any:
    ndim = getattr(variable.get_raw_value(), "ndim", 0)
    return axis + ndim if isinstance(axis, int) and axis < 0 else axis


def _storages(model: Any) -> Iterator[tuple[list[Names], Any]]:
    """Gives each variable of a model, with all of its names: its own ones first."""
    found: dict[int, tuple[list[Names], Any]] = {}
    later: list[tuple[Names, Any]] = []
    for names, part in _paths(model, (), set()):
        if isinstance(part, nnx.Variable):
            found.setdefault(id(part), ([], part))[0].append(names)
        else:
            later += [(names, tie) for tie in ties_of(part)]
    for above, tie in later:
        owner = follow_names(model, above)
        target = (*above, *_as_nnx(owner, tie.target))
        for keys in tie.sources:
            for rest, variable in _variables(follow(owner, keys)):
                names = (*target, *rest)
                if names not in found[id(variable)][0]:
                    found[id(variable)][0].append(names)
    yield from found.values()


def _variables(part: Any) -> Iterator[tuple[Names, Any]]:
    """Gives the variables that hold the values of a part: behind a tied one, its sources."""
    link = part.linked() if isinstance(part, Tied) else None
    if link is not None:
        owner, tie = link
        for keys in tie.sources:
            yield from _variables(follow(owner, keys))
    elif isinstance(part, nnx.Variable):
        yield (), part
    else:
        for names, below in _paths(part, (), set()):
            if isinstance(below, nnx.Variable):
                yield names, below


def follow_names(model: Any, names: Names) -> Any:
    """Returns the part at the end of names as NNX writes them, through ties on the way."""
    return follow(model, tuple(map(str, names)))


def _paths(part: Any, above: Names, inside: set[int]) -> Iterator[tuple[Names, Any]]:
    """Gives every way down to a module or variable; a cycle is gone round once."""
    yield above, part
    if id(part) in inside:
        return
    inside.add(id(part))
    for key, child in children(part).items():
        if isinstance(child, nnx.Variable) or children(child):
            yield from _paths(child, (*above, *_as_nnx(part, (key,))), inside)
    inside.discard(id(part))


def _as_nnx(part: Any, keys: tuple[str, ...]) -> Names:
    """Returns names as NNX writes them."""
    names: list[Any] = []
    for key in keys:
        counted = isinstance(part, (list, tuple)) or getattr(part, "_pytree__has_int_keys", False)
        names.append(int(key) if counted and key.lstrip("-").isdigit() else key)
        part = stored(part, (key,)) if key in children(part) else None
    return tuple(names)
