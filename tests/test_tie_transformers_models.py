"""Models of transformers that tie themselves, are resized, copied and asked for tokens."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import (
    BartForConditionalGeneration,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import tied
from architectures import build, logits
from undeclared import (
    HEAD,
    IN,
    OUT,
    TOKENS,
    UNDECLARED,
    WTE,
    Undeclared,
    assert_alike,
    gpt2,
    read,
    said,
    tensor,
    train,
)


@pytest.fixture(params=UNDECLARED)
def kind(request: pytest.FixtureRequest) -> Undeclared:
    return UNDECLARED[request.param]


@pytest.fixture
def model(kind: Undeclared) -> Any:
    return kind.tie(gpt2())


# ---------------------------------------------------------------------- models that tie themselves


class Transposed(GPT2LMHeadModel):
    """Ties in its __init__, after transformers has done all of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        tied.tie(self, OUT, IN, tied.transpose)


class Early(GPT2LMHeadModel):
    """Ties before `post_init`, which draws all weights."""

    def post_init(self) -> None:
        if isinstance(getattr(self, "lm_head", None), torch.nn.Module):
            tied.tie(self, OUT, IN, tied.transpose)
            tied.tie(self, HEAD, WTE)
        super().post_init()


class OldStyle(Transposed):
    """Draws its weights without a look at what has been loaded already, as before version 5."""

    def _init_weights(self, module: Any) -> None:
        weight = getattr(module, "weight", None)
        if weight is not None:
            weight.data.normal_(0.0, 0.3)
        if getattr(module, "bias", None) is not None:
            module.bias.data.zero_()


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("cls", [Transposed, Early, OldStyle])
def test_a_class_that_ties_in_its_init(cls: Any, declared: bool, tmp_path: Path) -> None:
    model = gpt2(cls, declared=declared)
    train(model)
    model.save_pretrained(tmp_path)
    again = cls.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert isinstance(again, cls)
    assert_alike(again, model)
    assert torch.equal(tensor(again, OUT), again.get_parameter(IN).T)
    assert OUT not in dict(again.named_parameters())
    train(again)
    assert torch.equal(tensor(again, OUT), again.get_parameter(IN).T)
    assert_alike(read(GPT2LMHeadModel, tmp_path), model)


def test_a_class_that_ties_in_its_init_knows_its_own_file(tmp_path: Path) -> None:
    model = gpt2(Transposed)
    model.save_pretrained(tmp_path)
    _, info = Transposed.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    # transformers compares the file with the names of the model, and there the target has none.
    assert set(info["unexpected_keys"]) == {OUT}
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Transposed"]


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": torch.bfloat16},
        {"dtype": "auto"},
        {"device_map": "cpu"},
        {"device_map": {"": "cpu"}},
    ],
    ids=str,
)
def test_a_class_that_ties_in_its_init_is_read_in_every_way(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    model = gpt2(Transposed)
    model.save_pretrained(tmp_path)
    again = Transposed.from_pretrained(tmp_path, attn_implementation="eager", **settings).eval()
    model.to(again.dtype)
    assert_alike(again, model)
    assert tied.shares(again.get_parameter(IN), tensor(again, OUT))


def test_a_missing_neighbour_is_drawn_and_the_source_is_not(tmp_path: Path) -> None:
    """transformers draws all tensors of such a module, but for those that it knows to be loaded."""
    model = gpt2(Transposed)
    model.save_pretrained(tmp_path)
    file, bias = tmp_path / "model.safetensors", OUT.replace("weight", "bias")
    kept = {name: x for name, x in load_file(file).items() if name != bias}
    save_file(kept, file, metadata={"format": "pt"})
    again, info = Transposed.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {bias}
    for name, parameter in again.named_parameters():
        expected = torch.zeros(8) if name == bias else model.get_parameter(name)
        assert torch.equal(parameter, expected), name


def test_a_class_that_ties_in_its_init_comes_back_from_meta() -> None:
    model = gpt2(Transposed)
    with torch.device("meta"):
        again = Transposed(model.config)
    assert all(parameter.is_meta for parameter in again.parameters())
    again.load_state_dict(model.state_dict(), assign=True)
    assert_alike(again.eval(), model)
    assert tied.shares(again.get_parameter(IN), tensor(again, OUT))


class Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, use_cache=False).logits


def test_what_was_read_is_compiled_and_exported(tmp_path: Path) -> None:
    """Reading leaves marks on the tensors, which the tie passes on."""
    gpt2(Transposed).save_pretrained(tmp_path)
    model = Transposed.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        compiled = torch.compile(Logits(model), backend="eager", fullgraph=True)(TOKENS)
    program = torch.export.export(Logits(model), (TOKENS,))
    for seen in (compiled, program.module()(TOKENS)):
        torch.testing.assert_close(seen, said(model), rtol=1e-5, atol=1e-6)
    assert f"model.{OUT}" not in program.state_dict


@pytest.mark.parametrize("how", ["declared", "the head, tied late", "the embedding, tied late"])
def test_tie_weights_changes_nothing(how: str, tmp_path: Path) -> None:
    """transformers' own way to tie assigns the source to the target, or the other way round."""
    model = gpt2(declared=how == "declared")
    if how == "declared":
        tied.tie(model)
    else:
        UNDECLARED[how].tie(model)
    before, names = said(model), [name for name, _ in model.named_parameters()]
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(said(model), before)
    model.save_pretrained(tmp_path)
    assert_alike(read(GPT2LMHeadModel, tmp_path), model)


def test_a_tensor_of_the_model_itself(tmp_path: Path) -> None:
    """The class of the whole model is another one then; no file and no test of it may notice."""
    model = build("BartForConditionalGeneration")
    tied.tie(model, "final_logits_bias", "model.shared.weight", lambda w: w.sum(1)[None])
    expected = logits(model).detach()
    model.save_pretrained(tmp_path)
    assert model.config.architectures == ["BartForConditionalGeneration"]
    assert not model.is_custom_code()
    again, info = BartForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values())
    assert torch.equal(logits(again.eval()).detach(), expected)


# ---------------------------------------------------------------------------------------- resizing


@pytest.mark.parametrize("tokens", [17, 10])
@pytest.mark.parametrize("how", ["declared", "the head, tied late", "the embedding, tied late"])
def test_a_resize_keeps_the_tie(how: str, tokens: int, tmp_path: Path) -> None:
    model, twin = gpt2(declared=True), gpt2(declared=True)
    if how == "declared":
        tied.tie(model)
    else:
        model = gpt2()
        with torch.no_grad():
            for name, parameter in twin.named_parameters(remove_duplicate=False):
                model.get_parameter(name).copy_(parameter)
        UNDECLARED[how].tie(model)
    for one in (model, twin):
        torch.manual_seed(1)
        one.resize_token_embeddings(tokens)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is embedding.weight
    assert embedding.weight.shape == (tokens, 8)
    assert (head.out_features, embedding.num_embeddings) == (tokens, tokens)
    assert model.config.vocab_size == tokens
    assert torch.equal(said(model), said(twin))
    assert len(list(model.parameters())) == len(list(twin.parameters()))
    train(model)
    assert head.weight is embedding.weight
    model.save_pretrained(tmp_path)
    assert_alike(read(GPT2LMHeadModel, tmp_path), model)


def test_a_resize_leaves_other_ties_alone(kind: Undeclared, model: Any, tmp_path: Path) -> None:
    model.resize_token_embeddings(17)
    assert torch.equal(tensor(model, kind.target), kind.value(model))
    assert said(model).shape == (1, 4, 17)
    model.save_pretrained(tmp_path)
    assert_alike(read(GPT2LMHeadModel, tmp_path), model)


def head_of_a_slice(model: Any) -> None:
    tied.tie(model, HEAD, WTE, lambda w: w[:13])


def computed_embedding(model: Any) -> None:
    """transformers sets its `.data`, which is lost on what is computed on each access."""
    model.table = torch.nn.Linear(13, 8, bias=False)
    tied.tie(model, WTE, "table.weight", tied.transpose)


@pytest.mark.parametrize("size", [{"new_num_tokens": 17}, {"pad_to_multiple_of": 17}], ids=str)
@pytest.mark.parametrize(
    ("tie", "target", "source"),
    [(head_of_a_slice, HEAD, WTE), (computed_embedding, WTE, "table.weight")],
)
def test_a_resize_that_a_tie_can_not_follow_is_refused(
    tie: Any, target: str, source: str, size: dict[str, int]
) -> None:
    model = gpt2()
    tie(model)
    before = said(model)
    with pytest.raises(tied.TieError) as caught:
        model.resize_token_embeddings(**size)
    assert str(caught.value) == (
        f"{target} can't be resized, since it is computed\n"
        f"  tie     {target} reads {source}\n"
        "  tokens  13 to 17\n"
        f'  Untie it first: tied.untie(model, "{target}")'
    )
    assert caught.value.paths == (source, target)
    assert torch.equal(said(model), before)
    assert model.resize_token_embeddings(13) is model.get_input_embeddings()
    tied.untie(model, target)
    model.resize_token_embeddings(**size)
    assert said(model).shape == (1, 4, 17)


# -------------------------------------------------------------------------------- files and copies


def test_T53_an_alias_record_in_the_file_does_no_harm(tmp_path: Path) -> None:
    """transformers#41038: the loaded tensor was overwritten with one of meta."""
    model = gpt2(declared=True)
    tied.tie(model)
    model.save_pretrained(tmp_path)
    save_model(gpt2(declared=True), str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    again = read(GPT2LMHeadModel, tmp_path)
    assert torch.equal(said(again), said(model))
    tied.tie(again)
    assert torch.equal(said(again), said(model))


def test_T53_a_missing_tied_key_is_no_random_weight(kind: Undeclared, model: Any) -> None:
    """transformers#38870: no warning, and the weight was left as it was drawn."""
    state = model.state_dict()
    assert kind.target not in state
    other = kind.tie(gpt2())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(said(other), said(model))


@pytest.mark.parametrize("way", ["torch.save", "pickle", "deepcopy"])
def test_a_whole_model_is_copied_with_its_tie(way: str, kind: Undeclared, tmp_path: Path) -> None:
    if kind.view is not None and "lambda" in kind.view.__qualname__ and way != "deepcopy":
        kind = Undeclared(kind.target, kind.sources, second_to_tenth)
    model = kind.tie(gpt2())
    if way == "torch.save":
        torch.save(model, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        again = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(said(again), said(model))
    expected = said(model)
    train(again)
    assert torch.equal(said(model), expected)
    torch.testing.assert_close(tensor(again, kind.target), kind.value(again), rtol=0, atol=0)
    again.save_pretrained(tmp_path)
    assert_alike(read(GPT2LMHeadModel, tmp_path), again)


def second_to_tenth(w: torch.Tensor) -> torch.Tensor:
    return w[2:10]


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(**sizes, vocab_size=13, decoder_start_token_id=0, attn_implementation="eager")
    ).eval()


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}])
@pytest.mark.parametrize("build", [t5, lambda: gpt2(declared=True)], ids=["t5", "gpt2"])
def test_generate_gives_the_same_tokens(build: Any, settings: dict[str, Any]) -> None:
    model, twin = build(), build()
    tied.tie(model)
    tokens = []
    for one in (model, twin):
        torch.manual_seed(2)
        tokens.append(
            one.generate(
                TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=4,
                min_new_tokens=4, pad_token_id=0, **settings,
            )
        )  # fmt: skip
    assert tokens[0].shape[1] >= 4
    assert torch.equal(*tokens)
