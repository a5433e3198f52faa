"""The field's reports on transformers, F and G, after tie: what is tied, loaded, resized, frozen.

The numbers are those of the project's list of field reports. test_transformers_all.py goes through
every architecture; here are the questions that the reports are about.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

import tied
import tied.torch
from test_field_transformers import CASES, TOKENS, Case, gpt2, llama, logits

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

WTE, HEAD = "transformer.wte.weight", "lm_head.weight"


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def model(case: Case) -> Any:
    torch.manual_seed(0)
    model = case.build().eval()
    tied.tie(model)
    return model


def parameter_ties(model: Any) -> set[frozenset[str]]:
    """The ties of parameters; rotary buffers are held twice by transformers itself."""
    names = {name for name, _ in model.named_parameters()}
    return {frozenset(group) for group in tied.ties(model).groups if group[0] in names}


# --------------------------------------------------------------------------- F. which ties are made


def test_T58_no_tie_is_invented_where_the_config_has_none(tmp_path: Path) -> None:
    """transformers#48154: an embedding was taken from lm_head without a word."""
    torch.manual_seed(0)
    model = llama()
    config = model.config
    config.tie_word_embeddings = False
    model = type(model)(config).eval()
    assert tied.tie(model).made == ()
    before = logits(model, CASES["llama"])
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(again, CASES["llama"]), before)
    assert not tied.shares(again.lm_head.weight, again.model.embed_tokens.weight)


def test_T59_the_embedding_of_an_encoder_alone_is_kept(tmp_path: Path) -> None:
    """transformers#43880: UMT5EncoderModel's embedding was all zeros after loading."""
    torch.manual_seed(0)
    config = transformers.UMT5Config(
        vocab_size=13, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2
    )
    model = transformers.UMT5EncoderModel(config).eval()
    tied.tie(model)
    model.save_pretrained(tmp_path)
    again = transformers.UMT5EncoderModel.from_pretrained(tmp_path).eval()
    for m in (model, again):
        assert m.encoder.embed_tokens.weight.abs().sum() > 0
        assert torch.equal(m.encoder.embed_tokens.weight, m.shared.weight)
    with torch.no_grad():
        one, other = (m(input_ids=TOKENS).last_hidden_state for m in (model, again))
    assert torch.equal(one, other)


class OwnConfig(PretrainedConfig):
    model_type = "own_of_the_tests"


class Own(PreTrainedModel):
    """A model of a user's own, that declares no tie."""

    config_class = OwnConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed, self.head = nn.Embedding(13, 4), nn.Linear(4, 13)
        self.down = nn.Linear(13, 4, bias=False)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        for p in module.parameters(recurse=False):
            torch.nn.init.normal_(p)

    def forward(self, input_ids: Any) -> Any:
        return self.down(self.head(self.embed(input_ids)).relu())


def test_T60_a_model_of_ones_own_needs_no_list_of_tied_keys(tmp_path: Path) -> None:
    """prime-rl#1998, EXAONE-3.5#7, Model-Optimizer#2071: _tied_weights_keys changed its type."""
    torch.manual_seed(0)
    model = Own(OwnConfig()).eval()
    ties = (("head.weight", "embed.weight", None), ("down.weight", "embed.weight", tied.transpose))
    for tie in ties:
        tied.tie(model, *tie)
    before = model(TOKENS)
    model.save_pretrained(tmp_path)
    again = Own.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(TOKENS), before)
    for tie in ties:
        tied.tie(again, *tie)
    assert torch.equal(again(TOKENS), before)
    assert [n for n, _ in again.named_parameters()] == ["embed.weight", "head.bias"]


LOADS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "auto": {"dtype": "auto"},
    "device_map": {"device_map": {"": "cpu"}},
}


@pytest.mark.parametrize("how", LOADS)
def test_T61_T62_ties_do_not_depend_on_how_the_model_is_loaded(
    how: str, case: Case, model: Any, tmp_path: Path
) -> None:
    """transformers#33913, #33689, #33688; #26989, #27204, #27972, #29128: missing tied keys."""
    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager", **LOADS[how]
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    tied.tie(again)
    assert parameter_ties(again) == set(map(frozenset, case.groups))
    assert len(list(again.parameters())) == len(list(model.parameters()))
    close = {"float16": 1e-2, "bfloat16": 1e-1}.get(how, 1e-6)
    found = logits(again.eval(), case).float()
    torch.testing.assert_close(found, logits(model, case), atol=close, rtol=0)


def both_keys(folder: Path, *, equal: bool) -> dict[str, torch.Tensor]:
    """A file with the embedding and the head, beside a config that says they are tied."""
    torch.manual_seed(1)
    other = gpt2()
    other.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    state[HEAD] = state[WTE] + (0 if equal else 1)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return state


def test_T63_a_file_whose_head_differs_is_refused_and_one_whose_head_agrees_is_tied(
    tmp_path: Path,
) -> None:
    """vllm#6758, #12689, #51665, mlx-lm#1298: config flag and file disagree."""
    model = gpt2()
    tied.tie(model)
    before = model.transformer.wte.weight.detach().clone()
    state = both_keys(tmp_path, equal=False)
    with pytest.raises(tied.TieError) as caught:
        model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert caught.value.paths == (WTE, HEAD)
    assert torch.equal(model.lm_head.weight, before)
    for wins, name in (("source", WTE), ("target", HEAD)):
        tied.torch.load_state_dict(model, state, on_conflict=wins)
        assert torch.equal(model.lm_head.weight, state[name])
        assert model.lm_head.weight is model.transformer.wte.weight
    state = both_keys(tmp_path, equal=True)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(model.lm_head.weight, state[WTE])


def test_T63_two_heads_that_the_config_calls_tied_can_be_kept_apart(tmp_path: Path) -> None:
    """The tensors of the model decide: untie, load, and both values are there."""
    state = both_keys(tmp_path, equal=False)
    model = gpt2()
    tied.tie(model)
    tied.untie(model, HEAD)
    model.load_state_dict(state)
    assert torch.equal(model.lm_head.weight, state[HEAD])
    assert torch.equal(model.transformer.wte.weight, state[WTE])


def test_T64_the_tensors_decide_and_not_the_config() -> None:
    """NeMo Automodel#2571, #2511: config says tied, tensors are not; the head was dropped."""
    model = gpt2()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone() + 1)
    assert model.config.tie_word_embeddings
    assert tied.tie(model).made == ()
    assert {WTE, HEAD} <= set(model.state_dict())
    tied.tie(model, HEAD, WTE)
    assert HEAD not in model.state_dict()
    assert model.lm_head.weight is model.transformer.wte.weight


# ------------------------------------------------------------------- G. resize, freeze, vocabulary


@pytest.mark.parametrize("tokens", [17, 11])
def test_T65_a_resize_changes_both_sides(
    tokens: int, case: Case, model: Any, tmp_path: Path
) -> None:
    """transformers#1730, #851, #17580, #8880: one side only, weight or bias; #35141."""
    before = model.get_input_embeddings().weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.resize_token_embeddings(tokens, mean_resizing=False)
    assert parameter_ties(model) == set(map(frozenset, case.groups))
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert layer.weight.shape == (tokens, 8)
        assert torch.equal(layer.weight[:11], before[:11])
    after = logits(model, case)
    assert after.shape[-1] == tokens
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(again, case), after)
    model.double()
    assert parameter_ties(model) == set(map(frozenset, case.groups))


def test_T65_a_resize_under_a_transposed_tie_is_followed() -> None:
    model = gpt2()
    model.lm_head.weight = nn.Parameter(torch.randn(13, 8))
    model.project = nn.Linear(13, 8, bias=False)
    tied.tie(model, "project.weight", WTE, tied.transpose)
    model.resize_token_embeddings(17, mean_resizing=False)
    assert torch.equal(model.project.weight, model.transformer.wte.weight.T)


def test_T67_freezing_either_name_freezes_the_one_parameter(case: Case, model: Any) -> None:
    """transformers#11903, #31467, #14035, LlamaFactory#5032, fromage#18."""
    names = [n for n, _ in model.named_parameters()]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is embedding.weight
    head.weight.requires_grad_(False)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert frozen == [case.groups[0][0]]
    assert [n for n, _ in model.named_parameters()] == names
    model.train()
    model(input_ids=TOKENS, **case.inputs).logits.sum().backward()
    assert embedding.weight.grad is None
    embedding.weight.requires_grad_(True)
    assert head.weight.requires_grad


def test_T67_a_transposed_target_can_not_be_frozen_alone() -> None:
    """It is computed, so PyTorch says that there is no flag to set."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    tied.tie(model, "1.weight", "0.weight", tied.transpose)
    with pytest.raises(RuntimeError, match="can only change requires_grad flags of leaf variables"):
        model[1].weight.requires_grad_(False)
    assert model[0].weight.requires_grad


def test_what_transformers_saves_of_the_tied_model_is_what_it_always_saved(
    case: Case, model: Any, tmp_path: Path
) -> None:
    """A declared tie is in the file once, under the name that transformers keeps."""
    torch.manual_seed(0)
    case.build().save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "tied")
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("plain", "tied"))
    assert sorted(one) == sorted(other)
    assert all(torch.equal(one[n], other[n]) for n in one)
