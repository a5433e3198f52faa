"""What a module says of the ties it has a part in: its class says it."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from typing import Any

from flax.typing import HashableMapping

from tied._errors import TieError
from tied._nnx.facts import Keys, Tie, target_of, untying

Lost = tuple[tuple[str, str], ...]
"""Names that a module has no more, each with what is to be said of it."""

Ways = tuple[tuple[Any, Tie, Keys], ...]
"""Modules that were gone through, with a tie of each and the names that are left of its target."""


class Dressed:
    """Marks the classes of modules that know ties, or have lost variables to them.

    Attributes:
        _tied_base: The class that the module had before.
        _tied_ties: The ties that it knows: it is the lowest module above all of their sides.
        _tied_lost: What is computed in its place.
    """

    __slots__ = ()
    _tied_base: type[Any]
    _tied_ties: tuple[Tie, ...] = ()
    _tied_lost: Lost = ()


class Reading:
    """Marks the classes of readings.

    Attributes:
        _tied_ways: The ties that lead through or to it; not there in a detached one.
    """

    __slots__ = ("_tied_ways",)
    _tied_ways: Ways


def undressed(cls: type[Any]) -> type[Any]:
    """Returns the class that a module had before it was tied."""
    return getattr(cls, "_tied_base", cls)


def ties_of(module: Any) -> tuple[Tie, ...]:
    """Returns the ties that a module knows."""
    found: tuple[Tie, ...] = getattr(type(module), "_tied_ties", ())
    return found


def lost_of(module: Any) -> dict[str, str]:
    """Returns what is computed in the place of variables that a module had, in words."""
    return dict(getattr(type(module), "_tied_lost", ()))


def ways_to(part: Any) -> Ways:
    """Returns the ties of modules above that lead through or to a reading."""
    found: Ways = getattr(part, "_tied_ways", ()) if isinstance(part, Reading) else ()
    return found


def all_ways(part: Any) -> Iterator[tuple[Any, Tie, Keys]]:
    """Gives the ties that a part knows, and those that lead to it from above."""
    for tie in ties_of(part):
        yield part, tie, tie.target
    yield from ways_to(part)


def subclass(base: type[Any], bases: tuple[type[Any], ...], body: dict[str, Any]) -> type[Any]:
    """Returns a class that looks like `base`, made as NNX makes it."""
    told = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    settings = {"pytree": base._pytree__is_pytree}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what NNX has to say of the base, it has said
        return types.new_class(base.__name__, bases, settings, lambda n: n.update(told, **body))


def take(module: Any, name: str) -> None:
    """Takes a variable out of a module."""
    own = vars(module)
    del own[name]
    if "_pytree__nodes" in own:
        nodes = dict(own["_pytree__nodes"])
        nodes.pop(name, None)
        own["_pytree__nodes"] = HashableMapping(nodes)


def give(module: Any, name: str, part: Any) -> None:
    """Puts a variable (or a module) into a module."""
    own = vars(module)
    own[name] = part
    if "_pytree__nodes" in own:
        nodes = {**own["_pytree__nodes"], name: True}
        own["_pytree__nodes"] = HashableMapping(nodes)


def lost_error(part: Any, name: str) -> TieError:
    """Returns the error that a part of a tied model can't say alone what is tied."""
    text = lost_of(part)[name]
    return TieError(
        f"{name} of this {undressed(type(part)).__name__} is tied, and can't be read from it alone",
        facts=[("tie", text)],
        hint=f"Reach it through the model, or hand over the whole model. Untie it first: "
        f"{untying(text)}",
        paths=[target_of(text)],
    )


def state_error(part: Any, name: str) -> TieError:
    """Returns the error that a state holds a value of its own for what is tied."""
    text = lost_of(part).get(name)
    if text is None:
        text = next(tie.text for _, tie, keys in all_ways(part) if keys == (name,))
    return TieError(
        f"a state holds {target_of(text)}, which is tied",
        facts=[("tie", text)],
        hint="Leave it out of the state: the model computes it",
        paths=[target_of(text)],
    )
