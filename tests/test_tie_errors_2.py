"""What can't be done to a tied tensor, and how two sides that disagree are brought together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tied
from test_tie_errors import Bad, holder, refuse, state
from tying import KINDS, Autoencoder, Pair

BAD: dict[str, Bad] = {
    "untie_of_what_is_not_tied": Bad(
        lambda m: tied.untie(m, "w"),
        ("w",),
        """
        w is not tied
        """,
    ),
    "untie_of_a_source": Bad(
        lambda m: tied.untie(m, "encoder.weight"),
        ("encoder.weight", "decoder.weight"),
        """
        encoder.weight is the source of other tensors and can't be untied from them
          computed  decoder.weight
          Untie those: tied.untie(model, "decoder.weight")
        """,
        build=KINDS["transpose"].model,
    ),
    "untie_of_an_unknown_name": Bad(
        lambda m: tied.untie(m, "decoder.wieght"),
        ("decoder.wieght",),
        """
        no such tensor: decoder.wieght
          reached  decoder
          step     .wieght of a Linear
          it has   bias, weight
        """,
        tied.PathError,
        KINDS["transpose"].model,
    ),
    "write_of_another_shape": Bad(
        lambda m: setattr(m.decoder, "weight", torch.ones(3, 4)),
        ("encoder.weight", "decoder.weight"),
        """
        a value does not fit decoder.weight, which is tied
          tie    decoder.weight reads encoder.weight
          shape  (3, 4) where (4, 3) is
          Untie it first: tied.untie(model, "decoder.weight")
        """,
        build=KINDS["transpose"].model,
    ),
    "write_of_no_tensor": Bad(
        lambda m: setattr(m.decoder, "weight", None),
        ("encoder.weight", "decoder.weight"),
        """
        decoder.weight is tied and can't be set to None
          tie  decoder.weight reads encoder.weight
          Untie it first: tied.untie(model, "decoder.weight")
        """,
        build=KINDS["transpose"].model,
    ),
    "write_to_what_is_computed": Bad(
        lambda m: setattr(m, "target", torch.ones(4, 4)),
        ("source", "target"),
        """
        target can't be assigned: it is computed from source
          tie  target reads source
          Assign to source, tie with inverse=..., or untie first: tied.untie(model, "target")
        """,
        build=KINDS["triu"].model,
    ),
    "delete": Bad(
        lambda m: delattr(m.decoder, "weight"),
        ("encoder.weight", "decoder.weight"),
        """
        decoder.weight is tied and can't be deleted
          tie  decoder.weight reads encoder.weight
          Untie it first: tied.untie(model, "decoder.weight")
        """,
        build=KINDS["transpose"].model,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_is_named_and_leaves_the_model_as_it_was(name: str) -> None:
    refuse(BAD[name])


def test_one_trainable_source_of_several_is_enough() -> None:
    model = holder()
    tied.tie(model, "same", ["w", "frozen"], torch.add)
    model.same.sum().backward()
    assert model.w.requires_grad
    assert model.frozen.grad is None


def test_a_plain_attribute_may_be_a_target_and_is_saved_as_little_as_before() -> None:
    model = holder()
    tied.tie(model, "plain", "w")
    assert tied.shares(model.plain, model.w)
    assert not model.plain.requires_grad
    assert "plain" not in model.state_dict()
    model.plain = torch.zeros(3, 2)
    assert not model.w.any()


def test_registering_a_parameter_over_a_target_writes_through() -> None:
    model = KINDS["transpose"].model()
    model.decoder.register_parameter("weight", nn.Parameter(torch.ones(4, 3)))
    assert (model.encoder.weight == 1).all()
    assert list(model.state_dict()) == KINDS["transpose"].names()


def test_an_error_in_the_users_own_view_comes_through() -> None:
    def view(w: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("of the user's own")

    model = holder()
    before = state(model)
    with pytest.raises(ZeroDivisionError, match="of the user's own"):
        tied.tie(model, "same", "w", view)
    assert state(model) == before


@pytest.mark.parametrize(("wins", "trainable"), [("source", True), ("target", False)])
def test_on_conflict_says_whose_requires_grad_wins(wins: str, trainable: bool) -> None:
    model = holder()
    tied.tie(model, "frozen", "w", on_conflict=wins)
    assert (model.w.requires_grad, model.frozen.requires_grad) == (trainable, trainable)
    model = Autoencoder()
    model.encoder.weight.requires_grad_(False)
    tied.tie(model, "decoder.weight", "encoder.weight", tied.transpose, on_conflict=wins)
    assert model.encoder.weight.requires_grad is not trainable
    assert model.decoder.weight.requires_grad is not trainable


def test_a_buffer_may_read_what_is_trainable_or_frozen() -> None:
    for source in ("w", "frozen"):
        model = holder()
        tied.tie(model, "buffer", source)
        assert not model.buffer.requires_grad
        assert torch.equal(model.buffer, getattr(model, source))


def test_of_ties_that_share_a_source_one_failure_leaves_the_others() -> None:
    model = Pair((3, 2), (2, 3), other=(2, 2))
    tied.tie(model, "target", "source", tied.transpose)
    before = state(model)
    with pytest.raises(tied.TieError):
        tied.tie(model, "other", "target")
    assert state(model) == before
    tied.tie(model, "other", "target", lambda w: w[:, 1:])
    assert torch.equal(model.other, model.source.T[:, 1:])


def test_adopting_all_or_nothing() -> None:
    """The second of two ties is refused: the first is not left made."""
    model = nn.ModuleDict({"a": Autoencoder(), "b": Autoencoder()})
    for name in "ab":
        model[name].decoder.weight = nn.Parameter(model[name].encoder.weight.detach().T)
    model["b"].decoder.weight.requires_grad_(False)
    before = state(model)
    with pytest.raises(tied.TieError) as caught:
        tied.tie(model)
    assert caught.value.paths == ("b.encoder.weight", "b.decoder.weight")
    assert state(model) == before
