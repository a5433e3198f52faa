"""Checkpoints of tied models: each storage is saved once, and every older form can be loaded."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tied
import tied.torch
from tying import KINDS, PURE, Autoencoder, LanguageModel, get

State = dict[str, torch.Tensor]
LOADERS: dict[str, Callable[..., Any]] = {
    "module": lambda model, state, **how: model.load_state_dict(state, **how),
    "tied": tied.torch.load_state_dict,
}
COVERED = [name for name in PURE if name != "diagonal"]


@pytest.fixture(params=LOADERS)
def load(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return LOADERS[request.param]


def kept(name: str, seed: int = 1) -> State:
    """What a tied model saves."""
    return {n: t.clone() for n, t in KINDS[name].model(seed).state_dict().items()}


def both(name: str, seed: int = 1) -> State:
    """What the same model saved before ties lasted: every name, the values agree."""
    kind = KINDS[name]
    model = kind.model(seed)
    wanted = {**model.state_dict(), **kind.expected(model)}
    return {n: wanted[n].clone() for n in kind.plain().state_dict()}


def alias_only(name: str, seed: int = 1) -> State:
    """The sources that some target reads are missing."""
    sources = set()
    for _, source, _ in KINDS[name].ties:
        sources |= {source} if isinstance(source, str) else set(source)
    targets = set(KINDS[name].targets)
    return {n: t for n, t in both(name, seed).items() if n not in sources or n in targets}


FORMS: dict[str, Callable[[str], State]] = {"kept": kept, "both": both, "alias_only": alias_only}
CASES = [(form, name) for form in ("kept", "both") for name in KINDS]
CASES += [("alias_only", name) for name in COVERED]


def holds(name: str, model: Any, seed: int = 1) -> bool:
    """Whether the model is tied and has the values of the checkpoint."""
    kind = KINDS[name]
    wanted = kind.model(seed).state_dict()
    found = model.state_dict()
    same = all(torch.equal(found[n], t) for n, t in wanted.items())
    return list(found) == list(wanted) and same and kind.holds(model)


# ------------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("name", KINDS)
def test_a_state_dict_has_each_storage_once(name: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    state = model.state_dict()
    assert list(state) == kind.names()
    assert len({t.untyped_storage().data_ptr() for t in state.values()}) == len(state)
    for n, p in model.state_dict(keep_vars=True).items():
        assert p is get(model, n)
    assert list(model.state_dict(prefix="m.")) == [f"m.{n}" for n in state]


def test_the_file_has_each_storage_once(tmp_path: Path) -> None:
    model = LanguageModel()
    model.wte, model.lm_head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
    tied.tie(model, "lm_head.weight", "wte.weight")
    torch.save(model.state_dict(), tmp_path / "m.pt")
    assert 256_000 < (tmp_path / "m.pt").stat().st_size < 260_000


# ----------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize(("form", "name"), CASES)
def test_every_form_of_the_checkpoint_loads(
    form: str, name: str, assign: bool, load: Callable[..., Any]
) -> None:
    model, state = KINDS[name].model(), FORMS[form](name)
    given = list(state.items())
    weights = dict(model.named_parameters())
    result = load(model, state, assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert holds(name, model)
    assert list(state.items()) == given
    for n, p in model.named_parameters():
        assert isinstance(p, nn.Parameter)
        assert p.requires_grad
        assert (p is weights[n]) is not assign
    if assign and form != "alias_only":
        assert all(tied.shares(p, state[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(("form", "name"), CASES)
def test_every_form_loads_into_a_model_on_meta(form: str, name: str) -> None:
    with torch.device("meta"):
        model = KINDS[name].model()
    model.load_state_dict(FORMS[form](name), assign=True)
    assert not any(p.is_meta for p in model.parameters())
    assert holds(name, model)
    with torch.device("meta"):
        model = KINDS[name].model()
    model.to_empty(device="cpu").load_state_dict(FORMS[form](name))
    assert holds(name, model)


@pytest.mark.parametrize(("form", "name"), CASES)
def test_every_form_loads_where_the_tied_module_is_a_part(form: str, name: str) -> None:
    model = nn.ModuleDict({"linear": nn.Linear(2, 2), "inner": KINDS[name].model()})
    state = {f"inner.{n}": t for n, t in FORMS[form](name).items()}
    state |= {f"linear.{n}": t for n, t in nn.Linear(2, 2).state_dict().items()}
    model.load_state_dict(state)
    assert holds(name, model["inner"])
    assert torch.equal(model["linear"].weight, state["linear.weight"])


@pytest.mark.parametrize("name", ["same", "transpose"])
def test_a_checkpoint_with_another_choice_of_the_kept_name_loads(
    name: str, load: Callable[..., Any]
) -> None:
    ((target, source, view),) = KINDS[name].ties
    other = KINDS[name].plain(1)
    tied.tie(other, source, target, view)
    state = {n: t.clone() for n, t in other.state_dict().items()}
    assert target in state
    assert source not in state
    model = KINDS[name].model()
    load(model, state)
    assert torch.equal(get(model, target), state[target])
    back = {n: t.clone() for n, t in model.state_dict().items()}
    load(other, back)
    assert torch.equal(get(other, source), back[source])


def test_a_checkpoint_goes_to_an_untied_model_and_back() -> None:
    """Into plain PyTorch: only the target's name is missing, and it may be filled in by hand."""
    state = kept("transpose")
    plain = Autoencoder()
    missing = plain.load_state_dict(state, strict=False).missing_keys
    assert missing == ["decoder.weight"]
    plain.load_state_dict({**state, "decoder.weight": state["encoder.weight"].T})
    model = KINDS["transpose"].model()
    model.load_state_dict(plain.state_dict())
    assert holds("transpose", model)


# ------------------------------------------------------------------------------------ disagreement


def conflicting(name: str) -> tuple[State, str, str]:
    state = both(name)
    target, source, _ = KINDS[name].ties[0]
    state[target] = state[target].clone()
    state[target][(0,) * state[target].dim()] += 1
    return state, target, source


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", PURE)
def test_T35_names_that_disagree_are_refused_and_nothing_is_loaded(
    name: str, assign: bool, load: Callable[..., Any]
) -> None:
    """pytorch#120569: the last of two values won, without a word."""
    model = KINDS[name].model()
    state, target, source = conflicting(name)
    with pytest.raises(tied.TieError) as caught:
        load(model, state, assign=assign)
    assert set(caught.value.paths) >= {source, target}
    assert holds(name, model, seed=0)


def test_the_text_of_a_disagreement() -> None:
    model = KINDS["transpose"].model()
    with pytest.raises(tied.TieError) as caught:
        model.load_state_dict(conflicting("transpose")[0])
    wanted = """
        a checkpoint holds two values for one tied tensor
          source     encoder.weight, (4, 3) float32
          target     decoder.weight, (4, 3) float32
          differ in  1 of 12 elements
          Say which counts: tied.torch.load_state_dict(..., on_conflict="source") or "target"
        """
    assert str(caught.value) == textwrap.dedent(wanted).strip("\n")
    assert caught.value.paths == ("encoder.weight", "decoder.weight")


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["same", "transpose", "slices", "diagonal"])
def test_on_conflict_says_which_name_wins(name: str, assign: bool) -> None:
    for wins in ("source", "target"):
        model = KINDS[name].model()
        state, target, source = conflicting(name)
        tied.torch.load_state_dict(model, state, assign=assign, on_conflict=wins)
        loaded = {"source": source, "target": target}[wins]
        assert torch.equal(get(model, loaded), state[loaded])
        assert KINDS[name].holds(model)


def test_on_conflict_target_keeps_the_rest_of_the_source() -> None:
    model, (state, _, _) = KINDS["diagonal"].model(), conflicting("diagonal")
    tied.torch.load_state_dict(model, state, on_conflict="target")
    wanted = state["source"].clone()
    wanted[0, 0] = state["target"][0]
    assert torch.equal(model.source, wanted)


def test_an_unknown_on_conflict() -> None:
    with pytest.raises(tied.TiedError) as caught:
        tied.torch.load_state_dict(KINDS["same"].model(), kept("same"), on_conflict="last")
    assert "'last'" in str(caught.value)


def test_NaN_weights_agree_bit_for_bit() -> None:
    """H11: NaN is not equal to itself, but its bits are."""
    for name in ("same", "transpose"):
        state = both(name)
        for n in state:
            state[n][(0,) * state[n].dim()] = float("nan")
        model = KINDS[name].model()
        model.load_state_dict(state)
        assert get(model, KINDS[name].targets[0]).isnan().any()


@pytest.mark.parametrize(
    ("one", "other"), [(0.0, -0.0), (1.0, 1.0000001), (float("nan"), -float("nan"))]
)
def test_bits_that_differ_disagree(one: float, other: float) -> None:
    state = {"wte.weight": torch.full((7, 4), one), "lm_head.weight": torch.full((7, 4), other)}
    if one != one:
        state["lm_head.weight"] = torch.full((7, 4), 0x7FC00001, dtype=torch.int32).view(
            torch.float32
        )
    with pytest.raises(tied.TieError):
        KINDS["same"].model().load_state_dict(state)


def test_targets_that_overlap_have_to_agree_with_each_other() -> None:
    state = {"target": torch.arange(5.0), "other": torch.arange(3.0, 8.0)}
    model = KINDS["overlap"].model()
    model.load_state_dict(state)
    assert model.source.tolist() == list(range(8))
    state["other"][0] = 9
    with pytest.raises(tied.TieError) as caught:
        model.load_state_dict(state)
    assert set(caught.value.paths) >= {"target", "other"}
    assert model.source.tolist() == list(range(8))


# ------------------------------------------------------------------------- strict, and parts of it


def test_a_missing_or_unexpected_name_is_what_it_is_in_pytorch(load: Callable[..., Any]) -> None:
    for form in ("kept", "both", "alias_only"):
        model, state = KINDS["transpose"].model(), FORMS[form]("transpose")
        del state["encoder.bias"]
        state["other"] = torch.ones(1)
        with pytest.raises(RuntimeError) as caught:
            load(model, state)
        text = str(caught.value)
        assert 'Missing key(s) in state_dict: "encoder.bias"' in text
        assert 'Unexpected key(s) in state_dict: "other"' in text
        assert "weight" not in text
        result = load(model, state, strict=False)
        assert result.missing_keys == ["encoder.bias"]
        assert result.unexpected_keys == ["other"]
        assert torch.equal(model.encoder.weight, both("transpose")["encoder.weight"])


def test_a_storage_of_which_no_name_is_there_is_missing(load: Callable[..., Any]) -> None:
    state = kept("slices")
    del state["c_attn.weight"]
    model = KINDS["slices"].model()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "c_attn.weight"'):
        load(model, state)
    assert load(model, state, strict=False).missing_keys == ["c_attn.weight"]


@pytest.mark.parametrize("name", ["diagonal", "slices"])
def test_targets_that_do_not_cover_the_source_leave_it_missing(
    name: str, load: Callable[..., Any]
) -> None:
    """A part of the source is in no name: that is a missing weight, not a loaded one."""
    kind, state = KINDS[name], alias_only(name)
    state.pop("k.weight", None)
    target, source, _ = kind.ties[0]
    with pytest.raises(RuntimeError, match=source):
        load(kind.model(), state)
    model = kind.model()
    result = load(model, state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([source], [])
    assert torch.equal(get(model, target), state[target])
    assert kind.holds(model)


def test_a_shape_that_does_not_fit_is_named(load: Callable[..., Any]) -> None:
    for form in ("kept", "both"):
        model, state = KINDS["same"].model(), FORMS[form]("same")
        state = {n: torch.ones(8, 4) for n in state}
        with pytest.raises(RuntimeError, match=r"size mismatch for wte\.weight"):
            load(model, state)
    with pytest.raises((RuntimeError, tied.TieError), match=r"lm_head\.weight|wte\.weight"):
        load(KINDS["same"].model(), {"lm_head.weight": torch.ones(8, 4)})


def test_a_checkpoint_of_another_dtype_is_cast() -> None:
    for form in FORMS:
        state = {n: t.half() for n, t in FORMS[form]("transpose").items()}
        model = KINDS["transpose"].model()
        model.load_state_dict(state)
        assert model.encoder.weight.dtype == torch.float32
        assert torch.equal(model.encoder.weight, both("transpose")["encoder.weight"].half().float())


def test_a_part_alone_loads_what_it_saved_and_what_it_saved_before() -> None:
    model = KINDS["transpose"].model()
    assert list(model.decoder.state_dict()) == ["bias"]
    model.decoder.load_state_dict({"bias": torch.ones(4)})
    assert model.decoder.bias.tolist() == [1, 1, 1, 1]
    model.decoder.load_state_dict({"bias": torch.zeros(4), "weight": torch.ones(4, 3)})
    assert (model.encoder.weight == 1).all()
