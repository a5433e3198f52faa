"""Models of Hugging Face transformers: what they name, save and resize themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tied._torch.dressed import register
from tied._torch.places import Place, locate, must_not_turn_back
from tied._torch.reads import Tie, ties_below
from tied._torch.state import watch_repeats
from tied._torch.ways import Back


def declared(module: nn.Module) -> set[str]:
    """Returns the names that models of transformers keep of what they tie themselves."""
    found = set()
    for prefix, part in module.named_modules():
        ties = getattr(part, "all_tied_weights_keys", None)
        if isinstance(ties, dict):
            found |= {f"{prefix}.{source}".removeprefix(".") for source in ties.values()}
    return found


def _declared_targets(model: nn.Module) -> set[str]:
    ties = getattr(model, "all_tied_weights_keys", None)
    return set(ties) if isinstance(ties, dict) else set()


def keep_ways(module: nn.Module) -> None:
    """Makes the models of transformers in a module save and resize with their lasting ties."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    for part in module.modules():
        if isinstance(part, transformers.PreTrainedModel):
            for method in (SavePretrained, ResizeTokenEmbeddings, ExpandedTies):
                part.__dict__.setdefault(method.name, method(Back(part)))
            for tie in ties_below(part):
                tie.reads.keep_marks()


class Method:
    """A method of one model, in the place of the one of its class."""

    name = ""

    __slots__ = ("back",)

    def __init__(self, back: Back) -> None:
        self.back = back

    def __getstate__(self) -> Any:
        return self.back

    def __setstate__(self, back: Back) -> None:
        self.back = back


class SavePretrained(Method):
    """Saves a model, with the value of each tie that its config does not declare.

    A reader that knows nothing of the tie would draw a missing tensor anew at random.
    """

    name = "save_pretrained"

    __slots__ = ()

    def __call__(self, save_directory: Any, *args: Any, **settings: Any) -> Any:
        """Does what the model's own method does."""
        model: Any = self.back()
        state = settings.pop("state_dict", None)
        whole = model.state_dict() if state is None else dict(state)
        expand(model, whole)
        return type(model).save_pretrained(
            model, save_directory, *args, state_dict=whole, **settings
        )


class ExpandedTies(Method):
    """Expands what the config of a model ties, which looks for the names among its parameters."""

    name = "get_expanded_tied_weights_keys"

    __slots__ = ()

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Does what the model's own method does."""
        model: Any = self.back()

        def named(*args: Any, **settings: Any) -> Iterator[tuple[str, torch.Tensor]]:
            yield from type(model).named_parameters(model, *args, **settings)
            yield from ((tie.name, tie.reads.read()) for tie in ties_below(model))

        model.__dict__["named_parameters"] = named
        try:
            return type(model).get_expanded_tied_weights_keys(model, *args, **settings)
        finally:
            model.__dict__.pop("named_parameters", None)  # the method calls itself


class ResizeTokenEmbeddings(Method):
    """Resizes the vocabulary of a model, and ties anew what has got another module meanwhile."""

    name = "resize_token_embeddings"

    __slots__ = ()

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Does what the model's own method does.

        Raises:
            TieError: A tied tensor has another shape now than what it is to read.
        """
        model: Any = self.back()
        before = list(ties_below(model))
        made = type(model).resize_token_embeddings(model, *args, **settings)
        for tie in before:
            place = locate(model, tie.name)
            if place.owner is not tie.owner and place.reads is None:
                _tie_again(model, place, tie)
        return made


def _tie_again(model: nn.Module, place: Place, tie: Tie) -> None:
    reads = tie.reads
    sources = [locate(model, source) for source in tie.sources or ()]
    if any((s.owner, s.leaf) == (place.owner, place.leaf) for s in sources):
        watch_repeats(model)  # one module stands at both places now
        return
    must_not_turn_back(place, sources)
    now = reads.read()
    if now.shape != place.tensor.shape:
        raise reads.refused(
            f"{place.name} has been resized and does not fit what it is tied to",
            facts=[("shape", f"{tuple(place.tensor.shape)}, it reads {tuple(now.shape)}")],
        )
    reads.armed = False
    register(place.owner, place.leaf, reads)


@torch.no_grad()
def expand(model: nn.Module, state: dict[str, Any]) -> None:
    """Adds to a state dict the tied tensors that the config of a model does not tie."""
    known = _declared_targets(model)
    for name, _, reads, sources in ties_below(model):
        if name in known or name in state or not reads.persistent:
            continue
        if not all(source in state for source in sources or ()):
            continue  # a part of the model, such as an adapter
        state[name] = reads.read().detach().clone(memory_format=torch.contiguous_format)
