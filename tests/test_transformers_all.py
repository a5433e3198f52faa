"""Every text architecture of transformers: its ties are found, and last once they are adopted.

What the model does is compared with a twin that tied has never seen.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import oracle
import tied
from architectures import BUILT, build, logits

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

pytestmark = [
    pytest.mark.parametrize("name", BUILT),
    # A layer of width 0, in models with parts that the small configuration leaves out.
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op"),
]

Groups = set[frozenset[str]]

# Their own code makes float32 tensors, or numbers that are out of range, whatever the dtype.
NOT_IN_DOUBLE = {
    "BltForCausalLM",
    "Inkling2ForCausalLM",
    "Inkling2LoopForCausalLM",
    "MraForMaskedLM",
    "XGLMForCausalLM",
}


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under every name, whether or not it is computed."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        names = {*module._parameters, *module._buffers, *getattr(module, "parametrizations", ())}
        for name in names:
            tensor = getattr(module, name)
            if tensor is not None and ".parametrizations." not in f".{prefix}.":
                found[f"{prefix}.{name}".removeprefix(".")] = tensor
    return found


def shared(named: dict[str, torch.Tensor]) -> Groups:
    """The names that have a byte in common, joined: by the addresses of all bytes."""
    names = list(named)
    leader = list(range(len(names)))

    def lead(i: int) -> int:
        while leader[i] != i:
            i = leader[i]
        return i

    addresses, owners = [], []
    for i, name in enumerate(names):
        starts, each = oracle.positions(named[name])
        addresses.append((starts.reshape(-1, 1) + np.arange(each)).reshape(-1))
        owners.append(np.full(addresses[-1].size, i))
    address, owner = np.concatenate(addresses), np.concatenate(owners)
    order = np.argsort(address, kind="stable")
    address, owner = address[order], owner[order]
    for i in np.flatnonzero(address[1:] == address[:-1]):
        a, b = lead(owner[i]), lead(owner[i + 1])
        leader[max(a, b)] = min(a, b)
    groups: dict[int, set[str]] = {}
    for i, name in enumerate(names):
        groups.setdefault(lead(i), set()).add(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def attribute(model: Any, path: str) -> torch.Tensor:
    for step in path.split("."):
        model = getattr(model, step)
    return model


def unique(model: Any) -> dict[str, torch.Tensor]:
    """The named values of a model that a training or a file has to have, each once."""
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


@pytest.fixture
def twin(name: str) -> Any:
    return build(name)


@pytest.fixture
def model(twin: Any) -> Any:
    """The model with its ties adopted."""
    made = copy.deepcopy(twin)
    adoption = tied.tie(made)
    assert adoption.left == ()
    return made


def said(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return logits(model)


def assert_tied(model: Any, twin: Any) -> None:
    """The ties of the twin are ties of the model, by memory, and it has one parameter for each."""
    assert shared(tensors(model)) == shared(tensors(twin))
    named = list(model.named_parameters(remove_duplicate=False))
    assert len(named) == len({id(p) for _, p in named}) == len(list(twin.parameters()))


def test_ties_finds_every_tie_and_nothing_else(name: str, twin: Any) -> None:
    named = tensors(twin)
    assert named.keys() >= {n for n, _ in twin.named_parameters(remove_duplicate=False)}
    assert named.keys() >= {n for n, _ in twin.named_buffers(remove_duplicate=False)}
    groups = tied.ties(twin).groups
    found = {frozenset(set(group) & named.keys()) for group in groups}
    assert {group for group in found if len(group) > 1} == shared(named)
    # What else is tied is held in plain attributes of the modules: it is memory in common, too.
    for group in groups:
        assert shared({path: attribute(twin, path) for path in group}) == {frozenset(group)}
    for target, source in twin.all_tied_weights_keys.items():
        assert any({target, source} <= group for group in found)


def test_adopted(name: str, model: Any, twin: Any) -> None:
    assert_tied(model, twin)
    assert type(model).__name__ == name
    assert isinstance(model, type(twin))
    assert torch.equal(said(model), said(twin))
    assert model.num_parameters() == twin.num_parameters()
    assert not tied.compare(twin, model)


def test_double(name: str, model: Any, twin: Any) -> None:
    assert model.double() is model
    assert_tied(model, twin)
    twin.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    named = tensors(twin)
    assert all(torch.equal(x, named[key]) for key, x in tensors(model).items())
    if name not in NOT_IN_DOUBLE:
        assert torch.equal(said(model), said(twin))


def test_deepcopy(name: str, model: Any, twin: Any) -> None:
    copied = copy.deepcopy(model)
    assert_tied(copied, twin)
    mine, theirs = ({x.data_ptr() for x in m.parameters() if x.numel()} for m in (copied, model))
    assert mine.isdisjoint(theirs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(said(copied), said(twin))


def test_meta_and_back(name: str, model: Any, twin: Any) -> None:
    state = unique(model)
    model.to("meta")
    assert all(x.is_meta for x in tensors(model).values())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    # No state dict has them, and to_empty forgets them.
    for key, buffer in twin.named_non_persistent_buffers():
        attribute(model, key).copy_(buffer)
    assert_tied(model, twin)
    assert torch.equal(said(model), said(twin))


def test_save_and_load(name: str, model: Any, twin: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    twin.save_pretrained(tmp_path / "twin")
    mine, theirs = (load_file(tmp_path / m / "model.safetensors") for m in ("model", "twin"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[key]) for key, x in mine.items())
    for file in ("config.json", "generation_config.json"):
        there = [(tmp_path / m / file) for m in ("model", "twin")]
        assert there[0].exists() == there[1].exists()
        if there[0].exists():
            assert there[0].read_text() == there[1].read_text()
    cls = getattr(transformers, name)
    plain = cls.from_pretrained(
        tmp_path / "model", attn_implementation="eager", experts_implementation="eager"
    )
    assert type(plain) is cls
    # Some were saved contiguous and are not in the model, which changes the last bit.
    torch.testing.assert_close(said(plain.eval()), said(twin), rtol=1e-5, atol=1e-6)


def test_a_training_step(name: str, model: Any, twin: Any) -> None:
    before = said(model)
    said(twin)  # BigBird makes new modules, at random, the first time
    after = []
    for one in (model, twin):
        torch.manual_seed(1)
        one.train()
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        logits(one).square().mean().backward()
        optimizer.step()
        after.append(said(one.eval()))
    assert_tied(model, twin)
    assert not torch.equal(after[0], before)
    torch.testing.assert_close(after[0], after[1], rtol=1e-5, atol=1e-6)
    named = dict(twin.named_parameters(remove_duplicate=False))
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (named[key].grad is None)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, named[key].grad, rtol=1e-5, atol=1e-6)
