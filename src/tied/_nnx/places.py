"""Where the variables of a model stand: names, and the modules that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from flax import nnx

from tied._errors import PathError, TieError
from tied._nnx.facts import Keys, Tie
from tied._nnx.marks import lost_of, ties_of, ways_to
from tied._nnx.reads import follow

_LISTED = 12


class Place(NamedTuple):
    """A variable or a module of a model, by its name.

    Attributes:
        name: Its dotted name.
        keys: The names of the steps.
        holders: The modules (and containers) gone through; the last one holds it.
        part: What stands there; for what is tied, what it reads.
        tied: Whether it is tied already.
    """

    name: str
    keys: Keys
    holders: tuple[Any, ...]
    part: Any
    tied: bool


def children(part: Any) -> dict[str, Any]:
    """Returns what a module or a container in it holds, by name; ties are not followed."""
    if isinstance(part, nnx.Pytree):
        return {k: v for k, v in vars(part).items() if not k.startswith("_pytree__")}
    if isinstance(part, dict):
        return {k: v for k, v in part.items() if isinstance(k, str)}
    if isinstance(part, (list, tuple)):
        return {str(n): v for n, v in enumerate(part)}
    return {}


def locate(model: Any, name: str) -> Place:
    """Returns the place of a name.

    Raises:
        PathError: There is nothing of that name.
    """
    must_be_whole(model)
    part, rest = model, name
    keys: Keys = ()
    holders: tuple[Any, ...] = ()
    tied = False
    while rest:
        own = children(part)
        names = [*own, *(key for key in _computed(part) if key not in own)]
        fits = [key for key in names if rest == key or rest.startswith(f"{key}.")]
        if tied or not fits:
            raise _nothing(name, keys, [] if tied else names)
        key = max(fits, key=len)
        keys, holders, rest = (*keys, key), (*holders, part), rest[len(key) + 1 :]
        tied = key not in own
        part = own.get(key)
        if tied and rest:
            part, tied = _module_behind(model, holders[-1], key), False
            if part is None:
                raise _nothing(name, keys, [])
    if tied or isinstance(part, nnx.Variable):
        part = follow(model, keys)
    return Place(name, keys, holders, part, tied)


def _module_behind(model: Any, holder: Any, key: str) -> Any:
    """Returns the module that stands, by a tie, at a name of another one; None for a variable."""
    for owner, _, tie in all_ties(model):
        if tie.kind is None and end_of(owner, tie.target) == (id(vars(holder)), key):
            return stored(owner, tie.sources[0])
    return None


def _computed(part: Any) -> list[str]:
    ends = [tie.target[0] for tie in ties_of(part) if len(tie.target) == 1]
    return [*ends, *lost_of(part)]


def _nothing(name: str, keys: Keys, names: list[str]) -> PathError:
    return PathError(
        f"no such variable: {name}",
        facts=[
            ("reached", ".".join(keys) or "the model"),
            ("it has", ", ".join(names[:_LISTED]) or "nothing"),
        ],
        paths=[name],
    )


def must_be_whole(model: Any) -> None:
    """Raises unless a model is one of its own, and no reading of a part."""
    for _, tie, _ in ways_to(model):
        raise tie.error("a part that is reached through a tie can't be tied or untied itself",
                        hint="Give the whole model")  # fmt: skip


class Edge(NamedTuple):
    """A module or variable, as one part holds it."""

    holder: Any
    key: str
    part: Any
    keys: Keys


def edges(model: Any) -> Iterator[Edge]:
    """Gives each way from a part to a module or variable below it, each part gone through once."""
    stack: list[tuple[Any, Keys, Iterator[tuple[str, Any]]]]
    stack = [(model, (), iter(children(model).items()))]
    seen = {id(model)}
    while stack:
        holder, above, below = stack[-1]
        for key, part in below:
            keys = (*above, key)
            yield Edge(holder, key, part, keys)
            if id(part) not in seen and children(part):
                seen.add(id(part))
                stack.append((part, keys, iter(children(part).items())))
                break
        else:
            stack.pop()


def common(target: Place, sources: list[Place]) -> int:
    """Returns how many steps lead to the lowest module above a target and all of its sources."""
    depth = min(len(place.keys) - 1 for place in (target, *sources))
    while any(place.keys[:depth] != target.keys[:depth] for place in sources):
        depth -= 1
    while not isinstance(target.holders[depth], nnx.Pytree):
        depth -= 1
    return depth


def must_stand_once(model: Any, target: Place, depth: int) -> None:
    """Raises if NNX meets the module of a target at several places below the owner of the tie."""
    below = {id(part) for part in target.holders[depth + 1 :]}
    found: dict[int, list[str]] = {}
    for edge in edges(model):
        if id(edge.part) in below:
            found.setdefault(id(edge.part), []).append(".".join(edge.keys))
    for names in found.values():
        if len(names) > 1:
            raise TieError(
                f"{target.name} belongs to a module that stands at several places",
                facts=[("places", ", ".join(names))],
                hint="Tie them to one another first: tied.tie(model)",
                paths=[target.name, *names],
            )


def all_ties(model: Any) -> Iterator[tuple[Any, Keys, Tie]]:
    """Gives each tie of a model: the module that knows it, its name, and the tie."""
    seen: set[int] = set()
    for edge in [Edge(None, "", model, ()), *edges(model)]:
        if id(edge.part) not in seen:
            seen.add(id(edge.part))
            for tie in ties_of(edge.part):
                yield edge.part, edge.keys, tie


def stored(owner: Any, keys: Keys) -> Any:
    """Returns the part itself that some names lead to, and no reading of it."""
    for key in keys:
        own = children(owner)
        if key not in own:  # a module that is tied itself
            tie = next(tie for tie in ties_of(owner) if tie.target == (key,))
            owner = stored(owner, tie.sources[0])
        else:
            owner = own[key]
    return owner


def end_of(owner: Any, keys: Keys) -> tuple[int, str]:
    """Returns, by identity, what holds the end of some names, and its name there."""
    holder = stored(owner, keys[:-1])
    return id(vars(holder) if isinstance(holder, nnx.Pytree) else holder), keys[-1]
