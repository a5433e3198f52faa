"""A place in a model, and the one way to print it."""

from __future__ import annotations

from typing import Any, NamedTuple

from tied._errors import PathError


class Step(NamedTuple):
    """One step down.

    `kind` is "attr", "key", "index", or, in containers whose keys are objects, "nth key" and "nth
    value". Steps without a name are "inside" (what leads to the part itself) and "of" (what a
    `Derived` is computed of).
    """

    kind: str
    key: Any

    @property
    def named(self) -> bool:
        """Whether the step stands in a dotted name."""
        return self.kind not in ("inside", "of")

    def name(self) -> str:
        """Returns the step as it stands in a dotted name; empty for a step without a name."""
        if not self.named:
            return ""
        if self.kind == "nth key":
            return f"<key {self.key}>"
        return self.key if isinstance(self.key, str) else repr(self.key)

    def code(self) -> str:
        """Returns the step as Python code: `.weight`, `['a']`, `[0]`."""
        if self.kind == "attr":
            return f".{self.key}"
        if self.kind.startswith("nth"):
            return f"[<{self.kind} {self.key}>]"
        if self.kind == "of":
            return ".base" if self.key is None else f".base[{self.key}]"
        return "" if self.kind == "inside" else f"[{self.key!r}]"


class Path:
    """A place in a model: the steps that lead from its root to a part.

    `str(path)` is the dotted name that the field uses (`encoder.weight`, `layers.0.W`, the names of
    PyTorch's `named_parameters`); `path.code()` is Python (`.layers[0].W`) and never ambiguous.

    >>> path = Path((Step("attr", "layers"), Step("index", 0), Step("key", "W")))
    >>> str(path), path.code()
    ('layers.0.W', ".layers[0]['W']")
    """

    __slots__ = ("steps",)

    def __init__(self, steps: tuple[Step, ...] = ()) -> None:
        self.steps = steps

    def __str__(self) -> str:
        return ".".join(step.name() for step in self.steps if step.named)

    def code(self) -> str:
        """Returns the path as Python code, to put behind the model's name."""
        return "".join(step.code() for step in self.steps)

    def __repr__(self) -> str:
        return f"Path({self.code() or '.'!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Path) and self.steps == other.steps

    def __hash__(self) -> int:
        return hash(str(self))

    def __len__(self) -> int:
        return len(self.steps)

    def get(self, model: Any) -> Any:
        """Returns the part of `model` at this path.

        Raises:
            PathError: A step leads nowhere; the error says which.
        """
        part = model
        for depth, step in enumerate(self.steps):
            try:
                part = take(part, step)
            except (AttributeError, LookupError, TypeError) as error:
                raise self._lost(depth, part) from error
        return part

    def has(self, model: Any) -> bool:
        """Returns whether `model` has a part at this path."""
        try:
            self.get(model)
        except PathError:
            return False
        return True

    def set(self, model: Any, value: Any) -> None:
        """Puts `value` at this path, in place.

        Raises:
            PathError: A step leads nowhere, or the last part can't be changed (a tuple).
        """
        if not self.steps:
            raise PathError("the root of a model can't be replaced in place", paths=[self])
        parent = Path(self.steps[:-1]).get(model)
        step = self.steps[-1]
        try:
            if step.kind == "attr":
                setattr(parent, step.key, value)
            else:
                parent[step.key] = value
        except (AttributeError, LookupError, TypeError) as error:
            raise self._lost(len(self.steps) - 1, parent) from error

    def _lost(self, depth: int, part: Any) -> PathError:
        return PathError(
            f"no such part: {self}",
            facts=[
                ("reached", str(Path(self.steps[:depth])) or "the model"),
                ("step", f"{self.steps[depth].code()} of a {type(part).__name__}"),
            ],
            paths=[self],
        )


def take(part: Any, step: Step) -> Any:
    """Returns the child of `part` that `step` names; raises what Python raises."""
    if step.kind == "attr":
        return getattr(part, step.key)
    if step.kind == "inside":
        return part
    if step.kind == "of":
        return part.base if step.key is None else part.base[step.key]
    if step.kind == "nth key":
        return list(part)[step.key]
    if step.kind == "nth value":
        return list(part.values())[step.key]
    return part[step.key]
