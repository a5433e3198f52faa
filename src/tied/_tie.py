"""`tie` and `untie`: ties that last."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tied import arrays
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
    target: str | Sequence[str] | None = None,
    source: str | Sequence[str] | None = None,
    view: Callable[..., Any] | None = None,
    *,
    inverse: Callable[[Any], Any] | None = None,
    on_conflict: str = "raise",
) -> Any:
    """Ties two arrays of a model for good, or makes all ties last that the model has now.

    Of a `torch.nn.Module`, in place: the source stays a `Parameter`, the target is computed from it
    on each access (by `torch.nn.utils.parametrize`), and no cast, move, copy, optimizer or
    checkpoint can take them apart. Tie before an optimizer is made of the parameters.

    Of a module of Flax NNX, in place too: the source stays the one `Param`; see `tied.nnx`.

    Of any other model, whose arrays are those of JAX (dicts, Equinox modules, variables of
    `flax.linen`): the result is a `tied.Bundle`, with the tie in its skeleton; `model` is not
    changed.

    Args:
        model: A `torch.nn.Module`, a `flax.nnx.Module`, a pytree, or a `Bundle`.
        target: The dotted name of the array that is computed from now on (in PyTorch a parameter or
            buffer); its own values are given up. Several names: each is tied to the source.
            Without it, every tie that the model has now is made to last.
        source: The name of the array that it reads; several names for a `view` of several arrays.
        view: What it reads: nothing for the same array, `tied.transpose`, any indexing or reshape
            (`lambda W: W[1:3]`), or any function of the sources (`lambda v: torch.diag(v)`).
        inverse: For a `view` that computes: the source (or a tuple of them) of a given value, so
            that the target can be assigned to. What only reads needs none, nor does a bundle.
        on_conflict: Whose word counts where the two sides do not agree: "source", "target", or
            "raise". It is about which of them is trainable, now, and about values in a checkpoint
            that holds both, later. A bundle has no such differences.

    Returns:
        In place: an `Adoption`, which says what was done and prints. A target that was a
        `Parameter` passes its gradients on to the source; one that was a buffer does not.
        Otherwise the `Bundle`.

    Raises:
        PathError: There is no array of that name.
        TieError: Shapes, dtypes or devices do not agree, one side is trainable and the other
            frozen, the target is tied already, or the tie would be a circle. The model is left as
            it was; of several targets in place, those before the one that the error names are tied.

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
    targets = (target,) if isinstance(target, str) else tuple(target or ())
    sources = (source,) if isinstance(source, str) else tuple(source or ())
    _refuse_misuse(target, targets, sources, view)
    framework = _in_place(model)
    if framework is not None and not targets:
        made, left = framework.tie_all(model, on_conflict)
        if left:
            text = TiedError("some ties can't be made to last", facts=[("left", x) for x in left])
            warnings.warn(str(text), TiedWarning, stacklevel=callers_level())
        return Adoption(tuple(made), tuple(left))
    if framework is not None:
        done = [
            framework.tie_one(model, name, sources, view, inverse, on_conflict) for name in targets
        ]
        return Adoption(tuple(done))
    if inverse is not None or on_conflict != "raise":
        raise TiedError(
            "inverse and on_conflict are for modules that are tied in place",
            hint="A bundle is never assigned to: leave them out",
        )
    pytrees = _of_pytrees()
    return pytrees.tie_one(model, targets, sources, view) if targets else pytrees.tie_all(model)


def _refuse_misuse(target: Any, targets: Any, sources: Any, view: Any) -> None:
    """Raises for arguments that do not go together."""
    if target is None and (sources or view is not None):
        raise TiedError("a source needs a target", hint="tied.tie(model, target, source, view)")
    if target is not None and (not targets or not sources):
        raise TiedError(
            f"{', '.join(targets) or 'no target'} needs a source",
            hint='tied.tie(model, "decoder.weight", "encoder.weight")',
        )


def untie(model: Any, name: str) -> Any:
    """Takes an array out of its tie: it becomes an ordinary one, with values of its own.

    Args:
        model: A `torch.nn.Module` or a `flax.nnx.Module`, which is changed in place; a `Bundle` or
            another pytree, which is not.
        name: The dotted name of one side of a tie: of one that lasts, the side that is computed; of
            any other (one array at two places, a view), either. Its values stay what they are now;
            it is a `Parameter` if it was one, and trainable if it was. An optimizer that exists
            already does not know it.

    Returns:
        None, or the new `Bundle`.

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
    framework = _in_place(model)
    return (_of_pytrees() if framework is None else framework).untie(model, name)


def _in_place(model: Any) -> Any:
    """Returns the module of this package that ties such models in place; None for pytrees."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        import tied.torch

        return tied.torch
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Pytree):
        import tied.nnx

        return tied.nnx
    return None


def _of_pytrees() -> Any:
    arrays.load("jax")
    import tied.jax

    return tied.jax
