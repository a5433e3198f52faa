"""What came untied between two looks at a model, and where."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tied._errors import UntiedError, UntiedWarning
from tied._reading import reading
from tied._ties import Ties, ties


@dataclass(frozen=True, slots=True)
class TieChange:
    """A tie that was lost or made.

    Attributes:
        first: One leaf.
        second: The other.
        how: How the second read the first (or their storage) where the tie stands.
    """

    first: str
    second: str
    how: str

    def __str__(self) -> str:
        text = reading(self.second, self.how)
        return text if self.first in text else f"{text}, as {self.first}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed between two models (or reports); true if any tie was lost or made.

    Attributes:
        lost: The ties that only the first has.
        made: The ties that only the second has.
        gone: The leaves that only the first has.
        new: The leaves that only the second has.
    """

    lost: tuple[TieChange, ...]
    made: tuple[TieChange, ...]
    gone: tuple[str, ...] = ()
    new: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lost or self.made)

    def __str__(self) -> str:
        lines = [f"lost   {change}" for change in self.lost]
        lines += [f"made   {change}" for change in self.made]
        lines += [f"gone   {path}" for path in self.gone]
        lines += [f"new    {path}" for path in self.new]
        return "\n".join(lines) or "the same ties"

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all ties that were lost or made."""
        changes = (*self.lost, *self.made)
        return tuple(path for change in changes for path in (change.first, change.second))


def compare(before: Any, after: Any) -> Comparison:
    """Compares what is tied in two models.

    Args:
        before: A model, a `Ties`, or its `to_dict()`.
        after: The same.

    Returns:
        The ties that were lost and made, each with both paths.

    >>> import copy, numpy as np, tied
    >>> W = np.ones((3, 2))
    >>> model = {"encoder": W, "decoder": W.T}
    >>> print(tied.compare(model, copy.deepcopy(model)))
    lost   decoder = encoder.T
    """
    old, new = _readings(before), _readings(after)
    lost = tuple(_changes(old, new))
    made = tuple(_changes(new, old))
    gone = tuple(path for path in old if path not in new)
    return Comparison(lost, made, gone, tuple(path for path in new if path not in old))


def check(model: Any, expected: Any) -> None:
    """Makes sure that a model is tied as another one.

    Args:
        model: The model, or a `Ties`.
        expected: A model, a `Ties`, or its `to_dict()` (which a test can keep as JSON).

    Raises:
        UntiedError: A tie is lost or made; the error names both paths.
    """
    _refuse(compare(expected, model))


def _refuse(found: Comparison) -> None:
    if found:
        facts = [("lost", str(change)) for change in found.lost]
        facts += [("made", str(change)) for change in found.made]
        raise UntiedError(
            "the ties of the model have changed",
            facts=facts,
            hint="Do the step with tied (tied.f64, tied.to, tied.copy, ...), which keeps them",
            paths=found.paths,
        )


def _readings(x: Any) -> dict[str, tuple[int, str, str]]:
    """Returns for each leaf (number of its storage, the storage's name, how it reads it)."""
    if isinstance(x, dict) and x.get("version") == 1 and "storages" in x:
        data = x
    else:
        data = (x if isinstance(x, Ties) else ties(x)).to_dict()
    return {
        leaf["path"]: (number, storage["name"], leaf["how"])
        for number, storage in enumerate(data["storages"])
        for leaf in storage["leaves"]
    }


def _changes(
    old: dict[str, tuple[int, str, str]], new: dict[str, tuple[int, str, str]]
) -> list[TieChange]:
    """Returns the ties of `old` (each leaf with its storage's first one) that `new` has not."""
    heads: dict[int, str] = {}
    for path, (number, name, _) in old.items():
        if path in new and (path == name or number not in heads):
            heads[number] = path
    changes = []
    for path, (number, name, how) in old.items():
        if path not in new or path == heads[number]:
            continue
        head = heads[number]
        here, there = new[path], new[head]
        same_reading = here[1] != name or here[2] == how
        if here[0] != there[0] or not same_reading:
            changes.append(TieChange(head, path, how))
    return changes


class watch:
    """Watches a model while a block runs, and names each tie that was lost or made.

    Args:
        model: The model; looked at when the block begins and when it ends.
        strict: Raise `UntiedError` at the end, instead of the warning `UntiedWarning`.

    Attributes:
        comparison: What changed; None until the block has ended.

    >>> import numpy as np, tied
    >>> W = np.ones((3, 2))
    >>> model = {"encoder": W, "decoder": W.T}
    >>> with tied.watch(model) as seen:
    ...     model["encoder"] *= 2
    >>> print(seen.comparison)
    the same ties
    """

    def __init__(self, model: Any, *, strict: bool = False) -> None:
        self.model = model
        self.strict = strict
        self.comparison: Comparison | None = None

    def __enter__(self) -> watch:
        self._before = ties(self.model)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.comparison = compare(self._before, self.model)
        if kind is not None or not self.comparison:
            return
        if self.strict:
            _refuse(self.comparison)
        warnings.warn(f"ties have changed:\n{self.comparison}", UntiedWarning, stacklevel=2)
