"""Models of transformers, tiny and with random weights: what is tied in them stays tied.

The numbers are those of the project's list of field reports.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import tied

TOKENS = torch.tensor([[1, 5, 2, 9]])
SMALL: dict[str, Any] = {"vocab_size": 13, "attn_implementation": "eager"}


@dataclass(frozen=True)
class Case:
    build: Callable[[], Any]
    groups: tuple[tuple[str, ...], ...]
    inputs: dict[str, Any]


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=8, **SMALL))


def t5() -> Any:
    return T5ForConditionalGeneration(
        T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, **SMALL)
    )


def bert() -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForMaskedLM(
        BertConfig(intermediate_size=8, max_position_embeddings=8, **sizes, **SMALL)
    )


def llama() -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(intermediate_size=8, tie_word_embeddings=True, **sizes, **SMALL)
    )


CASES: dict[str, Case] = {
    "gpt2": Case(gpt2, (("transformer.wte.weight", "lm_head.weight"),), {}),
    "t5": Case(
        t5,
        (
            ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
             "lm_head.weight"),
        ),
        {"decoder_input_ids": TOKENS},
    ),
    "bert": Case(
        bert,
        (
            ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
            ("cls.predictions.bias", "cls.predictions.decoder.bias"),
        ),
        {},
    ),
    "llama": Case(llama, (("model.embed_tokens.weight", "lm_head.weight"),), {}),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def model(case: Case) -> Any:
    torch.manual_seed(0)
    return case.build().eval()


def parameter_ties(model: Any) -> tuple[tuple[str, ...], ...]:
    """The ties of parameters; rotary buffers are held twice by transformers itself."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    groups = tied.ties(model).groups
    return tuple(group for group in groups if set(group) <= names)


def logits(model: Any, case: Case) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, **case.inputs).logits


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "copy": tied.copy,
    "split_and_merge": lambda m: tied.merge(*tied.split(m)),
    "f64_and_back": lambda m: tied.f32(tied.f64(m)),
    "map": lambda m: tied.map(lambda x: x.clone(), m),
    "cpu": tied.cpu,
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_T40_T50_the_model_stays_tied_and_computes_the_same(
    operation: str, case: Case, model: Any
) -> None:
    """safetensors#98 and many: ordinary tied models; transformers#22437: a suite of them."""
    assert parameter_ties(model) == case.groups
    after = OPERATIONS[operation](model)
    assert parameter_ties(after) == case.groups
    assert tied.ties(after).groups == tied.ties(model).groups
    assert torch.equal(logits(after, case), logits(model, case))
    assert type(after) is type(model)
    assert after.config.to_dict() == model.config.to_dict()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_T61_ties_do_not_depend_on_the_dtype(dtype: str, case: Case, model: Any) -> None:
    """transformers#33913, #33689, #33688: tied on the CPU in float32, not elsewhere."""
    after = tied.cast(model, dtype)
    assert parameter_ties(after) == case.groups
    assert {p.dtype for p in after.parameters()} == {getattr(torch, dtype)}
    close = 1e-5 if dtype == "float64" else 0.1
    torch.testing.assert_close(logits(after, case).float(), logits(model, case), atol=close, rtol=0)


def test_T13_T15_T62_meta_and_back_keeps_every_tied_key(case: Case, model: Any) -> None:
    """Modalities#357, accelerate#3154, transformers#26989, #27204, #27972."""
    meta = tied.to(model, "meta")
    assert all(p.is_meta for p in meta.parameters())
    assert tied.ties(meta).groups == tied.ties(model).groups
    after = tied.empty(meta, "cpu")
    assert tied.ties(after).groups == tied.ties(model).groups
    after.load_state_dict(model.state_dict())
    skeleton, storages = tied.split(after)
    _, values = tied.split(model)
    assert list(storages) == list(values)
    assert torch.equal(logits(skeleton.merge(values), case), logits(model, case))


def test_T54_T64_the_tensors_decide_and_not_the_config(case: Case, model: Any) -> None:
    """NeMo Automodel#2571, transformers#48972: the config says tied, the tensors are not."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    untied = parameter_ties(model)
    assert not any("lm_head.weight" in g or "cls.predictions.decoder.weight" in g for g in untied)
    assert parameter_ties(tied.f64(model)) == untied
    assert tied.split(model)[1].keys() - tied.split(case.build())[1].keys()


def test_T28_the_pickle_of_split_is_no_larger_than_the_module(case: Case, model: Any) -> None:
    split = pickle.dumps(tied.split(model))
    assert len(split) < 1.5 * len(pickle.dumps(model)) + 20_000
    after = tied.merge(*pickle.loads(split))
    assert parameter_ties(after) == case.groups
    assert torch.equal(logits(after, case), logits(model, case))


def test_T74_parameters_are_counted_as_transformers_counts_them(case: Case, model: Any) -> None:
    """torchtitan#3225, nanoGPT#209: shared weights counted twice."""
    _, parameters, _ = tied.split(model, torch.nn.Parameter)
    assert sum(p.numel() for p in parameters.values()) == model.num_parameters()


def test_T3_a_cast_by_the_framework_is_seen(case: Case, model: Any) -> None:
    """One Parameter under two names survives Module.double, which `compare` confirms."""
    assert not tied.compare(model, copy.deepcopy(model).double())


def test_T16_the_embedding_gets_both_sides_of_its_gradient(case: Case, model: Any) -> None:
    """verl#7834: the embedding missed the output side of its gradient."""
    skeleton, storages = tied.split(model)
    copied = {name: x.detach().clone().requires_grad_(x.requires_grad)
              for name, x in storages.items()}  # fmt: skip
    loss = skeleton.merge(copied)(input_ids=TOKENS, **case.inputs).logits.square().mean()
    loss.backward()
    model(input_ids=TOKENS, **case.inputs).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(copied[name].grad, parameter.grad)
