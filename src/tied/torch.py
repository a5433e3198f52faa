"""Ties that last in PyTorch modules: what `tied.tie` and `tied.untie` do to them, and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tied._compare import TieChange
from tied._errors import TiedError, TieError
from tied._hidden import captures
from tied._ties import ties
from tied._torch.adopt import adopt, disagree, replace
from tied._torch.dressed import ordinary, release
from tied._torch.files import load_model, save_model
from tied._torch.hugging import keep_ways
from tied._torch.places import Place, below, common, locate, must_be_registered, must_not_turn_back
from tied._torch.reads import Reads, parametrized, shares_storage, ties_below
from tied._torch.state import conflict, repeats, watch_loading, watch_repeats
from tied._torch.views import TORCH, View, native
from tied._where import shares

__all__ = ["load_model", "load_state_dict", "save_model", "tie_all", "tie_one", "untie"]


def tie_all(module: nn.Module, on_conflict: str) -> tuple[list[TieChange], list[str]]:
    """Makes all ties last that a module has: see `tied.tie`."""
    made, left = adopt(module, on_conflict)
    if next(ties_below(module), None) is not None:
        keep_ways(module)
    return made, left


def tie_one(
    module: nn.Module,
    target: str,
    sources: tuple[str, ...],
    view: View | None,
    inverse: Callable[[Any], Any] | None,
    on_conflict: str,
) -> TieChange:
    """Ties a tensor to others: see `tied.tie`."""
    to = locate(module, target)
    places = [locate(module, name) for name in sources]
    for place in places:
        must_be_registered(place)
    _refuse_misuse(to, places, view)
    _refuse_older(module, to, places)
    must_not_turn_back(to, places)
    view = None if view is None else native(view)
    seen, is_view = _seen(to, places, view)
    _compare(to, places, seen)
    if inverse is not None:
        _check_inverse(to, places, inverse)
    _settle_training(to, places, on_conflict)
    root = common([target, *sources])
    reads = Reads(
        module.get_submodule(root),
        below(target, root),
        tuple(below(name, root) for name in sources),
        view,
        inverse=inverse,
        detached=not to.is_parameter,
        is_view=is_view,
        persistent=to.persistent,
        on_conflict=on_conflict,
    )
    replace(to, reads, places)
    watch_loading(module, module.get_submodule(root), to.owner)
    if repeats(module):
        watch_repeats(module)
    keep_ways(module)
    return TieChange(sources[0], target, _how(to, places, is_view))


def _refuse_older(module: nn.Module, target: Place, sources: list[Place]) -> None:
    """Raises if a target is tied by memory to what is no source: that tie would be lost."""
    own = target.tensor
    inputs = [place.tensor for place in sources]
    for name, x in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        if not shares_storage(x, own) or not shares(x, own):
            continue
        place = locate(module, name)
        if (place.owner, place.leaf) == (target.owner, target.leaf):
            continue
        if not any(shares_storage(x, y) and shares(x, y) for y in inputs):
            raise TieError(
                f"{target.name} is tied already",
                facts=[("tie", f"{target.name} shares elements with {name}")],
                hint=f'Untie it first: tied.untie(model, "{target.name}")',
                paths=[name, *(source.name for source in sources), target.name],
            )


def _refuse_misuse(target: Place, sources: list[Place], view: View | None) -> None:
    """Raises for what can't be a tie, whatever the tensors are."""
    names = [place.name for place in sources]
    if target.reads is not None:
        raise TieError(
            f"{target.name} is tied already",
            facts=[("tie", f"{target.name} reads {', '.join(target.reads.names)}")],
            hint=f'Untie it first: tied.untie(model, "{target.name}")',
            paths=[*names, target.name],
        )
    if target.leaf in parametrized(target.owner):
        raise TieError(
            f"{target.name} is computed already, by a parametrization",
            facts=[("tie", f"{target.name} would read {', '.join(names)}")],
            hint="Remove it first: torch.nn.utils.parametrize.remove_parametrizations(...)",
            paths=[*names, target.name],
        )
    for place in (target, *sources):
        if is_lazy(place.tensor):
            raise TieError(
                f"{place.name} has no shape yet",
                facts=[("module", f"{type(place.owner).__name__}, not initialised")],
                hint="Call the module once, then tie",
                paths=[*names, target.name],
            )
    if view is None and len(sources) != 1:
        raise TieError(
            f"{target.name} needs a view to read {len(sources)} sources",
            hint="Give a function of so many tensors: view=lambda a, b: a @ b",
            paths=[*names, target.name],
        )
    if view is not None and getattr(view, "__closure__", None) and captures(view):  # type: ignore[arg-type]
        raise TieError(
            f"the view of {target.name} holds a tensor of its own",
            facts=[("tensor", "in its closure or defaults, where nothing moves or saves it")],
            hint="Make it a buffer of the module, and a further source",
            paths=[*names, target.name],
        )


@torch.no_grad()
def _seen(target: Place, sources: list[Place], view: View | None) -> tuple[torch.Tensor, bool]:
    """Returns what the target will be (without values, if that can be), and whether it is a view.

    Raises:
        TieError: The view fails, or returns no tensor.
    """
    tensors = [place.tensor for place in sources]
    if view is None:
        return tensors[0], True
    ghosts = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors
    ]
    try:
        seen, read = view(*ghosts), ghosts
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        try:  # not every operation works without values
            seen, read = view(*[x.detach() for x in tensors]), tensors
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise TieError(
                f"the view of {target.name} fails on {', '.join(p.name for p in sources)}",
                facts=[("error", str(error).partition("\n")[0])],
                paths=[*(place.name for place in sources), target.name],
            ) from error
    if not isinstance(seen, torch.Tensor):
        raise TieError(
            f"the view of {target.name} returns {type(seen).__name__}, not a tensor",
            paths=[*(place.name for place in sources), target.name],
        )
    return seen, len(read) == 1 and shares_storage(seen, read[0])


def _compare(target: Place, sources: list[Place], seen: torch.Tensor) -> None:
    """Raises unless what is read can stand in the place of the target."""
    own, first = target.tensor, sources[0].tensor
    devices = {str(place.tensor.device) for place in sources}
    facts = [
        (label, f"{target.name} has {mine}, {sources[0].name} gives {its}")
        for label, mine, its in (
            ("shape", tuple(own.shape), tuple(seen.shape)),
            ("dtype", TORCH.dtype(own), TORCH.dtype(seen)),
            ("device", str(own.device), ", ".join(sorted(devices))),
        )
        if mine != its
    ]
    if facts:
        names = ", ".join(place.name for place in sources)
        raise TieError(
            f"{target.name} can't be tied to {names}",
            facts=facts,
            hint=_remedy(own, first, seen, [label for label, _ in facts]),
            paths=[*(place.name for place in sources), target.name],
        )


def _check_inverse(target: Place, sources: list[Place], inverse: Callable[[Any], Any]) -> None:
    """Raises unless an inverse gives what the sources are.

    Raises:
        TieError: It gives too few tensors, or other shapes.
    """
    with torch.no_grad():
        made = inverse(target.tensor.detach())
    made = made if isinstance(made, (tuple, list)) else (made,)
    shapes = [tuple(getattr(x, "shape", ())) for x in made]
    wanted = [tuple(place.tensor.shape) for place in sources]
    if shapes != wanted:
        names = ", ".join(place.name for place in sources)
        raise TieError(
            f"the inverse does not make {names} of {target.name}",
            facts=[("wanted", ", ".join(map(str, wanted))), ("made", ", ".join(map(str, shapes)))],
            paths=[*(place.name for place in sources), target.name],
        )


def _remedy(own: torch.Tensor, first: torch.Tensor, seen: torch.Tensor, wrong: list[str]) -> str:
    if "shape" not in wrong:
        if "dtype" in wrong:
            return "Cast the module first, so that both have one dtype"
        return "Move the module first, so that both are on one device"
    if own.shape == first.shape:
        return "Is it the same array? tied.tie(model, target, source)"
    if own.dim() == 2 and own.shape == first.shape[::-1]:
        return "Is it the transpose? tied.tie(model, target, source, tied.transpose)"
    return "Give a view that makes the one of the other: view=lambda W: ..."


def _settle_training(target: Place, sources: list[Place], on_conflict: str) -> None:
    """Makes the source trainable or not, as `on_conflict` says.

    Raises:
        TieError: One side is trainable, the other is not, and nobody has said which counts.
    """
    if not target.is_parameter:
        return
    own = target.tensor.requires_grad
    stored = [place for place in sources if place.reads is None]
    trained = any(place.tensor.requires_grad for place in sources)
    if own == trained or on_conflict == "source":
        return
    if on_conflict == "raise":
        raise disagree(sources[0], target)
    for place in stored:
        if place.is_parameter:
            place.tensor.requires_grad_(own)
        elif own:
            raise disagree(place, target)


@torch.no_grad()
def _how(target: Place, sources: list[Place], is_view: bool) -> str:
    """Returns how a tie reads to a person."""
    names = ", ".join(place.name for place in sources)
    if not is_view:
        return f"computed from {names}"
    report = ties({sources[0].name: sources[0].tensor, target.name: target.tensor})
    leaves = [leaf for storage in report.storages for leaf in storage.leaves]
    found = [leaf.how for leaf in leaves if leaf.path == target.name]
    return found[0] or names


def untie(module: nn.Module, name: str) -> None:
    """Makes a tied tensor an ordinary one: see `tied.untie`."""
    place = locate(module, name)
    reads = place.reads
    readers = [
        tie.name for tie in ties_below(module)
        if _reads_from(tie.reads, place) and tie.name != name
    ]  # fmt: skip
    if reads is None and readers:
        raise TieError(
            f"{name} is the source of other tensors and can't be untied from them",
            facts=[("computed", reader) for reader in readers],
            hint=f'Untie those: tied.untie(model, "{readers[0]}")',
            paths=[name, *readers],
        )
    again = [other for first, other in repeats(module) for part in (first, other)
             if name.startswith(part + ".")]  # fmt: skip
    if again:
        raise TieError(
            f"{name} belongs to a module that stands at several places",
            hint=f"Put a copy in one of them: tied.copy of {again[0]}",
            paths=[name, again[0]],
        )
    if reads is None:
        _untie_now(module, place)
        return
    value = ordinary(place.tensor)
    if not reads.detached:
        value = nn.Parameter(value, any(x.requires_grad for x in reads.roots()))
    release(place.owner, place.leaf, value)


def _reads_from(reads: Reads, place: Place) -> bool:
    return any(
        (source.settle(), source.leaf) == (place.owner, place.leaf) for source in reads.sources
    )


def _untie_now(module: nn.Module, place: Place) -> None:
    """Gives a tensor that is tied by identity or by memory a copy of its own."""
    if not any(place.name in group for group in ties(module).groups):
        raise TieError(f"{place.name} is not tied", paths=[place.name])
    tensor = place.tensor
    value = ordinary(tensor)
    if place.is_plain:
        place.owner.__dict__[place.leaf] = value
    elif place.is_parameter:
        setattr(place.owner, place.leaf, nn.Parameter(value, tensor.requires_grad))
    else:
        place.owner._buffers[place.leaf] = value


def load_state_dict(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    assign: bool = False,
    on_conflict: str = "raise",
) -> Any:
    """Loads a checkpoint into a module with lasting ties, and says what counts if it disagrees.

    `module.load_state_dict` does the same, with what `tie` was told about conflicts. Both accept a
    checkpoint with the names of tied tensors: both sides, if they are bit for bit the same (up to
    rounding, where a function computes one of the other); or only tied names, if together they
    hold all of the source.

    Args:
        module: The module.
        state_dict: Tensors by name. It is not changed.
        strict: Raise unless the names are those of the module.
        assign: Put the tensors of the checkpoint into the module instead of copying them.
        on_conflict: Whose value counts where both sides are there and differ: "source", "target",
            or "raise".

    Returns:
        What `torch.nn.Module.load_state_dict` returns: missing and unexpected names.

    Raises:
        TieError: Both sides are there and differ; the error names them. Nothing has been loaded.
    """
    if on_conflict not in ("raise", "source", "target"):
        raise TiedError(
            f"on_conflict={on_conflict!r} is unknown", hint='Type "raise", "source" or "target"'
        )
    with conflict(on_conflict):
        return module.load_state_dict(state_dict, strict=strict, assign=assign)
