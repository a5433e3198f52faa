"""Ties that can't be made: exact texts, the paths, and that nothing is changed."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import tied
from test_field_torch import LanguageModel as SharedLanguageModel
from tying import KINDS, bent


class Holder(nn.Module):
    """Parameters and buffers of several shapes, dtypes and devices."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 2))
        self.across = nn.Parameter(torch.randn(2, 3))
        self.same = nn.Parameter(torch.randn(3, 2))
        self.wide = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(3, 2, device="meta"))
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.register_buffer("buffer", torch.randn(3, 2))
        self.register_parameter("nothing", None)
        self.plain = torch.randn(3, 2)
        self.layer = nn.Linear(2, 3)


def holder() -> Any:
    torch.manual_seed(0)
    model = Holder()
    for p in (model.w, model.same):
        p.grad = torch.ones_like(p)
    return model


def parametrized() -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.utils.parametrizations.orthogonal(model[0])
    return model


def with_another() -> Any:
    model = SharedLanguageModel()
    model.other = nn.Parameter(torch.ones(7, 4))
    return model


def scaled(by: torch.Tensor) -> Any:
    return lambda w: w * by


def state(model: nn.Module) -> list[Any]:
    """Every module's type and dictionaries, objects by identity, gradients and values."""
    found: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        held = {**module._parameters, **module._buffers}
        found.append((name, type(module), sorted(vars(module)), list(module._modules)))
        found += [(n, id(t), t is not None and (id(t.grad), t.requires_grad, t._version))
                  for n, t in held.items()]  # fmt: skip
    return [*found, list(model.state_dict()), hooks(model)]


def hooks(model: nn.Module) -> list[int]:
    kinds = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
             "_load_state_dict_post_hooks", "_forward_pre_hooks")  # fmt: skip
    return [len(getattr(m, kind)) for m in model.modules() for kind in kinds]


@dataclass(frozen=True)
class Bad:
    call: Callable[[Any], Any]
    paths: tuple[str, ...]
    text: str
    error: type[tied.TiedError] = tied.TieError
    build: Callable[[], Any] = holder


BAD: dict[str, Bad] = {
    "shape": Bad(
        lambda m: tied.tie(m, "across", "w"),
        ("w", "across"),
        """
        across can't be tied to w
          shape  across has (2, 3), w gives (3, 2)
          Is it the transpose? tied.tie(model, target, source, tied.transpose)
        """,
    ),
    "shape_of_a_view": Bad(
        lambda m: tied.tie(m, "same", "w", tied.transpose),
        ("w", "same"),
        """
        same can't be tied to w
          shape  same has (3, 2), w gives (2, 3)
          Is it the same array? tied.tie(model, target, source)
        """,
    ),
    "dtype": Bad(
        lambda m: tied.tie(m, "wide", "w"),
        ("w", "wide"),
        """
        wide can't be tied to w
          dtype  wide has float64, w gives float32
          Cast the module first, so that both have one dtype
        """,
    ),
    "device": Bad(
        lambda m: tied.tie(m, "empty", "w"),
        ("w", "empty"),
        """
        empty can't be tied to w
          device  empty has meta, w gives cpu
          Move the module first, so that both are on one device
        """,
    ),
    "frozen_target": Bad(
        lambda m: tied.tie(m, "frozen", "w"),
        ("w", "frozen"),
        """
        one side of a tie is trainable and the other is frozen
          trainable  w
          frozen     frozen
          Say which counts: tied.tie(..., on_conflict="source") or "target"
        """,
    ),
    "frozen_source": Bad(
        lambda m: tied.tie(m, "w", "frozen"),
        ("frozen", "w"),
        """
        one side of a tie is trainable and the other is frozen
          frozen     frozen
          trainable  w
          Say which counts: tied.tie(..., on_conflict="source") or "target"
        """,
    ),
    "unknown_on_conflict": Bad(
        lambda m: tied.tie(m, "frozen", "w", on_conflict="first"),
        (),
        """
        on_conflict='first' is unknown
          Type "raise", "source" or "target"
        """,
        tied.TiedError,
    ),
    "unknown_target": Bad(
        lambda m: tied.tie(m, "layer.wieght", "w"),
        ("layer.wieght",),
        """
        no such tensor: layer.wieght
          reached  layer
          step     .wieght of a Linear
          it has   weight, bias
        """,
        tied.PathError,
    ),
    "unknown_source": Bad(
        lambda m: tied.tie(m, "same", "leyar.weight"),
        ("leyar.weight",),
        """
        no such tensor: leyar.weight
          reached  the module
          step     .leyar of a Holder
          it has   w, across, same, wide, empty, frozen, buffer, layer
        """,
        tied.PathError,
    ),
    "unknown_among_several": Bad(
        lambda m: tied.tie(m, "same", ("w", "v"), torch.add),
        ("v",),
        """
        no such tensor: v
          reached  the module
          step     .v of a Holder
          it has   w, across, same, wide, empty, frozen, buffer, layer
        """,
        tied.PathError,
    ),
    "a_module": Bad(
        lambda m: tied.tie(m, "layer", "w"),
        ("layer",),
        """
        no such tensor: layer
          reached  the module
          step     .layer of a Holder
          it has   w, across, same, wide, empty, frozen, buffer, layer
        """,
        tied.PathError,
    ),
    "a_parameter_that_is_None": Bad(
        lambda m: tied.tie(m, "nothing", "w"),
        ("nothing",),
        """
        no such tensor: nothing
          reached  the module
          step     .nothing of a Holder
          it has   w, across, same, wide, empty, frozen, buffer, layer
        """,
        tied.PathError,
    ),
    "itself": Bad(
        lambda m: tied.tie(m, "w", "w"),
        ("w",),
        """
        w can't be tied to itself
          Name another tensor as the source
        """,
    ),
    "itself_among_several": Bad(
        lambda m: tied.tie(m, "w", ("w", "same"), torch.add),
        ("w",),
        """
        w can't be tied to itself
          Name another tensor as the source
        """,
    ),
    "already_tied": Bad(
        lambda m: tied.tie(m, "decoder.weight", "encoder.weight", tied.transpose),
        ("encoder.weight", "decoder.weight"),
        """
        decoder.weight is tied already
          tie  decoder.weight reads encoder.weight
          Untie it first: tied.untie(model, "decoder.weight")
        """,
        build=KINDS["transpose"].model,
    ),
    "cycle": Bad(
        lambda m: tied.tie(m, "encoder.weight", "decoder.weight", tied.transpose),
        ("decoder.weight", "encoder.weight"),
        """
        encoder.weight can't be tied to decoder.weight, which is computed from it
          Untie that one first: tied.untie(model, "decoder.weight")
        """,
        build=KINDS["transpose"].model,
    ),
    "long_cycle": Bad(
        lambda m: tied.tie(m, "source", "last", lambda w: torch.cat([w, w])[:, :3]),
        ("last", "source"),
        """
        source can't be tied to last, which is computed from it
          Untie that one first: tied.untie(model, "last")
        """,
        build=KINDS["chain"].model,
    ),
    "several_without_a_view": Bad(
        lambda m: tied.tie(m, "same", ("w", "frozen")),
        ("w", "frozen", "same"),
        """
        same needs a view to read 2 sources
          Give a function of so many tensors: view=lambda a, b: a @ b
        """,
    ),
    "no_source": Bad(
        lambda m: tied.tie(m, "same", ()),
        (),
        """
        same needs a source
          tied.tie(model, "decoder.weight", "encoder.weight")
        """,
        tied.TiedError,
    ),
    "no_source_of_a_view": Bad(
        lambda m: tied.tie(m, "same", (), lambda: torch.ones(3, 2)),
        (),
        """
        same needs a source
          tied.tie(model, "decoder.weight", "encoder.weight")
        """,
        tied.TiedError,
    ),
    "a_view_that_gives_no_tensor": Bad(
        lambda m: tied.tie(m, "same", "w", lambda w: [w]),
        ("w", "same"),
        """
        the view of same returns list, not a tensor
        """,
    ),
    "an_inverse_that_does_not_invert": Bad(
        lambda m: tied.tie(m, "same", "w", bent, inverse=lambda x: x[:1]),
        ("w", "same"),
        """
        the inverse does not make w of same
          wanted  (3, 2)
          made    (1, 2)
        """,
    ),
    "target_that_is_computed": Bad(
        lambda m: tied.tie(m, "0.weight", "1.weight"),
        ("1.weight", "0.weight"),
        """
        0.weight is computed already, by a parametrization
          tie  0.weight would read 1.weight
          Remove it first: torch.nn.utils.parametrize.remove_parametrizations(...)
        """,
        build=parametrized,
    ),
    "target_that_is_tied_already_and_not_for_good": Bad(
        lambda m: tied.tie(m, "lm_head.weight", "other"),
        ("wte.weight", "other", "lm_head.weight"),
        """
        lm_head.weight is tied already
          tie  lm_head.weight shares elements with wte.weight
          Untie it first: tied.untie(model, "lm_head.weight")
        """,
        build=with_another,
    ),
    "target_without_a_shape": Bad(
        lambda m: tied.tie(m, "1.weight", "0.weight", tied.transpose),
        ("0.weight", "1.weight"),
        """
        1.weight has no shape yet
          module  LazyLinear, not initialised
          Call the module once, then tie
        """,
        build=lambda: nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(3)),
    ),
    "view_that_holds_a_tensor": Bad(
        lambda m: tied.tie(m, "same", "w", scaled(torch.ones(2))),
        ("w", "same"),
        """
        the view of same holds a tensor of its own
          tensor  in its closure or defaults, where nothing moves or saves it
          Make it a buffer of the module, and a further source
        """,
    ),
    "view_that_fails": Bad(
        lambda m: tied.tie(m, "same", "w", lambda w: w @ w),
        ("w", "same"),
        """
        the view of same fails on w
          error  mat1 and mat2 shapes cannot be multiplied (3x2 and 3x2)
        """,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_tie_that_is_refused_is_named_and_leaves_the_model_as_it_was(name: str) -> None:
    refuse(BAD[name])


def refuse(bad: Bad) -> None:
    """Makes the call: the error's class, paths and text, and that nothing was changed."""
    model = bad.build()
    before, values = state(model), copy.deepcopy(model.state_dict())
    with pytest.raises(tied.TiedError) as caught:
        bad.call(model)
    assert str(caught.value) == textwrap.dedent(bad.text).strip("\n")
    assert type(caught.value) is bad.error
    assert caught.value.paths == bad.paths
    assert state(model) == before
    assert all(
        torch.equal(t, values[n])
        for n, t in model.state_dict().items()
        if not (t.is_meta or nn.parameter.is_lazy(t))
    )
