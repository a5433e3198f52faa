"""What is known of a tie: names, shapes and how it reads. It holds no array and no module."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flax.typing import HashableMapping

from tied._errors import TieError
from tied._layout import Layout
from tied._steps import Ints

Keys = tuple[str, ...]


class Function:
    """A function that equals another one made of the same code with the same values.

    A lambda in a constructor is a new object each time; models that are made alike have to be
    equal, or `nnx.jit` compiles for each of them.
    """

    __slots__ = ("_key", "call")

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self._key = _identity(call)

    def __call__(self, *values: Any) -> Any:
        """Returns what the function computes."""
        return self.call(*values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> Any:
        try:
            pickle.dumps(self.call)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TieError(
                "a model with a tie that computes can't be pickled, as its function can't",
                facts=[("function", getattr(self.call, "__qualname__", repr(self.call)))],
                hint="Define it in a module, by name, in place of a lambda or a local function",
            ) from error
        return Function, (self.call,)


def _identity(call: Any) -> Any:
    """Returns what two functions that do the same have in common."""
    code = getattr(call, "__code__", None)
    if code is None:
        return call
    try:
        cells = tuple(cell.cell_contents for cell in call.__closure__ or ())
        key = (code, id(call.__globals__), cells, call.__defaults__, call.__kwdefaults__)
        hash(key)
    except (ValueError, TypeError):  # an empty cell, or what can't be hashed
        return call
    return key


@dataclass(frozen=True, slots=True)
class Tie:
    """A tie, as the module knows it that is the lowest one above all that it speaks of.

    Two models that are tied alike have equal ones, so that NNX finds them equal.

    Attributes:
        target: The names that lead from that module to what is computed.
        sources: The names that lead to each of what it reads.
        how: The layout over the one source, or the function of all; None for the source itself.
        shapes: The shapes of the sources when they were tied; None where a source is no array.
        kind: The type of variable that the target was; None if it is a module.
        metadata: What NNX keeps along with that variable.
        inverse: The function that makes the sources of a value.
        words: How it reads to a person, from that module on.
        within: The name of that module's class, if it is not the whole model.
    """

    target: Keys
    sources: tuple[Keys, ...]
    how: Layout | Function | None
    shapes: tuple[Ints | None, ...]
    kind: type[Any] | None
    metadata: HashableMapping[str, Any]
    inverse: Function | None
    words: str
    within: str

    @property
    def name(self) -> str:
        """The name of the target."""
        return ".".join(self.target)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sources."""
        return tuple(".".join(source) for source in self.sources)

    @property
    def text(self) -> str:
        """How it reads to a person, and where."""
        return f"{self.words}, in {self.within}" if self.within else self.words

    def error(self, message: str, *, facts: Any = (), hint: str = "") -> TieError:
        """Returns the error that something can't be done to what is tied."""
        return TieError(
            message,
            facts=[("tie", self.text), *facts],
            hint=hint or f"Untie it first: {untying(self.text)}",
            paths=[*self.names, self.name],
        )


def target_of(text: str) -> str:
    """Returns the name of the target in the text of a tie."""
    return text.partition(" ")[0]


def untying(text: str) -> str:
    """Returns what to type to take a tie back, given its text."""
    dots = "..." if ", in " in text else ""
    return f'tied.untie(model, "{dots}{target_of(text)}")'
