"""`tie` and `untie`: ties that last, in the model itself."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tied._compare import TieChange
from tied._errors import TiedError, TiedWarning, callers_level


@dataclass(frozen=True, slots=True)
class Adoption:
    """What `tie` did.

    Attributes:
        made: The ties that last from now on: `first` is the source, `second` is computed of it.
        left: Ties that can't be made to last, with the reason, one line each.
    """

    made: tuple[TieChange, ...]
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"tied   {change}" for change in self.made]
        lines += [f"left   {line}" for line in self.left]
        return "\n".join(lines) or "nothing is tied"


def tie(
    model: Any,
    target: str | None = None,
    source: str | Sequence[str] | None = None,
    view: Callable[..., Any] | None = None,
    *,
    inverse: Callable[[Any], Any] | None = None,
    on_conflict: str = "raise",
) -> Adoption:
    """Ties two arrays of a model for good, or makes all ties last that the model has now.

    Of a `torch.nn.Module`, in place: the source stays a `Parameter`, the target is computed from it
    on each access (by `torch.nn.utils.parametrize`), and no cast, move, copy, optimizer or
    checkpoint can take them apart. Tie before an optimizer is made of the parameters.

    Args:
        model: A `torch.nn.Module`.
        target: The dotted name of the parameter or buffer that is computed from now on; its own
            values are given up. Without it, every tie that the module has now is made to last.
        source: The name of the parameter or buffer that it reads; several names for a `view` of
            several arrays.
        view: What it reads: nothing for the same array, `tied.transpose`, any indexing or reshape
            (`lambda W: W[1:3]`), or any function of the sources (`lambda v: torch.diag(v)`).
        inverse: For a `view` that computes: the source (or a tuple of them) of a given value, so
            that the target can be assigned to. What only reads needs none.
        on_conflict: Whose word counts where the two sides do not agree: "source", "target", or
            "raise". It is about which of them is trainable, now, and about values in a checkpoint
            that holds both, later.

    Returns:
        What was done; it prints. A target that was a `Parameter` passes its gradients on to the
        source; one that was a buffer does not.

    Raises:
        PathError: There is no array of that name.
        TieError: Shapes, dtypes or devices do not agree, one side is trainable and the other
            frozen, the target is tied already, or the tie would be a circle. The model is left as
            it was.

    >>> import torch, tied
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    >>> print(tied.tie(model, "1.weight", "0.weight", tied.transpose))
    tied   1.weight = 0.weight.T
    >>> model = model.double()
    >>> tied.shares(model[1].weight, model[0].weight)
    True
    """
    if on_conflict not in ("raise", "source", "target"):
        raise TiedError(
            f"on_conflict={on_conflict!r} is unknown", hint='Type "raise", "source" or "target"'
        )
    framework = _framework(model)
    if target is None:
        if source is not None or view is not None:
            raise TiedError("a source needs a target", hint="tied.tie(model, target, source, view)")
        made, left = framework.tie_all(model, on_conflict)
        if left:
            text = TiedError("some ties can't be made to last", facts=[("left", x) for x in left])
            warnings.warn(str(text), TiedWarning, stacklevel=callers_level())
        return Adoption(tuple(made), tuple(left))
    if source is None or len(source) == 0:
        raise TiedError(
            f"{target} needs a source", hint='tied.tie(model, "decoder.weight", "encoder.weight")'
        )
    sources = (source,) if isinstance(source, str) else tuple(source)
    change = framework.tie_one(model, target, sources, view, inverse, on_conflict)
    return Adoption((change,))


def untie(model: Any, name: str) -> None:
    """Takes an array out of its tie, in place: it becomes an ordinary one, with values of its own.

    Args:
        model: A `torch.nn.Module`.
        name: The dotted name of one side of a tie: of one that lasts, the side that is computed; of
            any other (one `Parameter` at two places, a view), either. Its values stay what they
            are now; it is a `Parameter` if it was one, and trainable if it was. An optimizer that
            exists already does not know it.

    Raises:
        PathError: There is no array of that name.
        TieError: It is not tied, others are computed from it, or its module stands at two places.

    >>> import torch, tied
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> _ = tied.tie(model, "1.weight", "0.weight")
    >>> tied.untie(model, "1.weight")
    >>> tied.shares(model[1].weight, model[0].weight)
    False
    """
    _framework(model).untie(model, name)


def _framework(model: Any) -> Any:
    """Returns the module of this package that ties such models."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        import tied.torch

        return tied.torch
    raise TiedError(
        f"tie changes a torch.nn.Module in place, not {type(model).__name__}",
        hint="In other models, tie arrays with tied.transpose or tied.view where they are made",
    )
