"""Ties that transformers knows nothing of: trained, saved, and read by plain readers.

`UNDECLARED` has a GPT-2 for each kind of tie. The plain reader is a process without tied.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GPT2LMHeadModel, GPT2Model

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
    written,
)


@pytest.fixture(params=UNDECLARED)
def kind(request: pytest.FixtureRequest) -> Undeclared:
    return UNDECLARED[request.param]


@pytest.fixture
def model(kind: Undeclared) -> Any:
    return kind.tie(gpt2())


# ----------------------------------------------------------------- ties the config doesn't declare


def test_it_trains_as_one_tensor(kind: Undeclared, model: Any) -> None:
    before = {source: model.get_parameter(source).clone() for source in kind.sources}
    train(model)
    target = tensor(model, kind.target)
    torch.testing.assert_close(target, kind.value(model), rtol=0, atol=0)
    for source, old in before.items():
        assert not torch.equal(model.get_parameter(source), old)
    assert kind.target not in dict(model.named_parameters())


def test_the_head_tied_late_trains_as_the_one_that_is_declared() -> None:
    late = UNDECLARED["the head, tied late"].tie(gpt2())
    declared = gpt2(declared=True)
    with torch.no_grad():
        for name, parameter in declared.named_parameters():
            parameter.copy_(late.get_parameter(name))
    for one in (late, declared):
        train(one, steps=3)
    assert torch.equal(said(late), said(declared))


def test_a_reader_of_the_file_gets_the_same_logits(
    kind: Undeclared, model: Any, tmp_path: Path
) -> None:
    """By itself, from_pretrained draws the missing name anew at random."""
    train(model)
    model.save_pretrained(tmp_path)
    assert written(tmp_path).keys() == dict(gpt2().named_parameters()).keys()
    plain = read(GPT2LMHeadModel, tmp_path)
    assert type(plain) is GPT2LMHeadModel
    assert_alike(plain, model)
    kind.tie(plain)
    assert_alike(plain, model)


def test_a_plain_process_gets_the_same_logits(tmp_path: Path) -> None:
    """The whole way of a reader who has never heard of tied."""
    expected = {}
    for number, kind in enumerate(UNDECLARED.values()):
        model = kind.tie(gpt2())
        train(model)
        model.save_pretrained(tmp_path / str(number), max_shard_size="2KB" if number % 2 else "1GB")
        expected[str(number)] = said(model)
    program = f"""
import sys
import torch
from transformers import AutoModelForCausalLM

said = {{}}
for name in {list(expected)}:
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager").eval()
    with torch.no_grad():
        said[name] = model(torch.tensor({TOKENS.tolist()})).logits
assert not any(name.split(".")[0] == "tied" for name in sys.modules)
torch.save(said, "said.pt")
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True)
    seen = torch.load(tmp_path / "said.pt")
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(seen[name], value, rtol=1e-5, atol=1e-6)


def test_sharded_files_hold_every_name_once(kind: Undeclared, model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = written(tmp_path)
    assert index["weight_map"].keys() == found.keys() == dict(gpt2().named_parameters()).keys()
    assert len(set(index["weight_map"].values())) > 2
    assert_alike(read(GPT2LMHeadModel, tmp_path), model)


def test_declared_ties_are_in_sharded_files_once(tmp_path: Path) -> None:
    model = gpt2(declared=True)
    logits = said(model)
    tied.tie(model)
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    assert written(tmp_path).keys() == dict(gpt2(declared=True).named_parameters()).keys()
    assert HEAD not in written(tmp_path)
    assert torch.equal(said(read(GPT2LMHeadModel, tmp_path)), logits)


@pytest.mark.parametrize("cloned", [False, True])
def test_T54_a_state_dict_that_is_given_is_completed(
    cloned: bool, kind: Undeclared, model: Any, tmp_path: Path
) -> None:
    """transformers#48972: values equal, storage not shared. It is the Trainer's way to save."""
    state = model.state_dict()
    if cloned:
        state = {name: tensor.clone() for name, tensor in state.items()}
    given = list(state)
    model.save_pretrained(tmp_path, state_dict=state)
    assert list(state) == given
    assert_alike(read(GPT2LMHeadModel, tmp_path), model)


def test_T54_a_state_dict_that_is_given_counts(
    kind: Undeclared, model: Any, tmp_path: Path
) -> None:
    """Such as an average of the weights: what is tied is computed from it, not from the model."""
    state = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=state)
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    assert_alike(read(GPT2LMHeadModel, tmp_path), other)


def test_the_trainer_trains_and_saves_it(kind: Undeclared, model: Any, tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), use_cpu=True, report_to=[], max_steps=2,
        per_device_train_batch_size=1, disable_tqdm=True, save_strategy="steps", save_steps=2,
    )  # fmt: skip
    examples: Any = [{"input_ids": TOKENS[0], "labels": TOKENS[0]}] * 2
    before = said(model)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=examples)
    trainer.train()
    trainer.save_model(str(tmp_path / "end"))
    assert not torch.equal(said(model.eval()), before)
    torch.testing.assert_close(tensor(model, kind.target), kind.value(model), rtol=0, atol=0)
    for folder in (tmp_path / "end", tmp_path / "run" / "checkpoint-2"):
        assert_alike(read(GPT2LMHeadModel, folder), model)


# ------------------------------------------------------------------- what users do before and after


def test_what_was_tied_by_hand_is_adopted_and_saved(tmp_path: Path) -> None:
    """By itself, transformers writes such a head nowhere, and draws it at random when it reads."""
    model = gpt2()
    model.lm_head.weight = model.transformer.wte.weight
    mlp = model.transformer.h[0].mlp
    mlp.c_proj.weight = torch.nn.Parameter(mlp.c_fc.weight.detach().T)
    made = {(change.first, change.second) for change in tied.tie(model).made}
    assert made == {(WTE, HEAD), (IN, OUT)}
    train(model)
    model.save_pretrained(tmp_path)
    assert_alike(read(GPT2LMHeadModel, tmp_path), model)


def test_what_is_untied_is_saved_as_two(tmp_path: Path) -> None:
    model = gpt2(declared=True)
    tied.tie(model)
    tied.untie(model, HEAD)
    train(model)
    assert not torch.equal(tensor(model, HEAD), tensor(model, WTE))
    model.save_pretrained(tmp_path)
    assert_alike(read(GPT2LMHeadModel, tmp_path), model)


def test_a_part_that_reads_outside_is_saved_whole(tmp_path: Path) -> None:
    model = UNDECLARED["the embedding, tied late"].tie(gpt2())
    model.transformer.save_pretrained(tmp_path)
    part = read(GPT2Model, tmp_path)
    with torch.no_grad():
        seen, expected = (m(TOKENS).last_hidden_state for m in (part, model.transformer))
    assert torch.equal(seen, expected)


def test_activation_checkpointing_computes_the_target_again(kind: Undeclared) -> None:
    models = [kind.tie(gpt2()) for _ in range(2)]
    models[0].activation_checkpointing_enable()
    for model in models:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        train(model.train())
    assert models[0].is_activation_checkpointing
    assert_alike(*[model.eval() for model in models])


def test_weights_that_are_written_in_another_form(tmp_path: Path) -> None:
    """A file of Mixtral has each expert on its own, the model all of them in one tensor."""
    model = build("MixtralForCausalLM")
    names = [f"model.layers.{i}.mlp.experts.gate_up_proj" for i in (0, 1)]
    tied.tie(model, names[1], names[0])
    model.save_pretrained(tmp_path)
    files = written(tmp_path)
    experts = "model.layers.{}.block_sparse_moe.experts.{}.w1.weight"
    for expert in (0, 1):
        first, second = (files[experts.format(layer, expert)] for layer in (0, 1))
        assert torch.equal(first, second)
    plain, info = type(model).from_pretrained(
        tmp_path, output_loading_info=True,
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    assert not any(info.values())
    with torch.no_grad():
        torch.testing.assert_close(logits(plain.eval()), logits(model), rtol=1e-5, atol=1e-6)
