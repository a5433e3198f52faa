"""Checkpoints of tied models: computed targets, modules at two places, buffers and files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tied
import tied.torch
from test_tie_checkpoints import CASES, FORMS, alias_only, both, holds
from tying import KINDS, Pair, bent, get, unbent

# --------------------------------------------------------------------------------------- computed


def test_what_is_computed_and_has_no_inverse_can_not_be_the_only_name() -> None:
    kind = KINDS["triu"]
    with pytest.raises(RuntimeError, match="source"):
        kind.model().load_state_dict(alias_only("triu"))
    state = both("triu")
    state["target"] = torch.ones(4, 4)
    with pytest.raises(tied.TieError) as caught:
        kind.model().load_state_dict(state)
    assert set(caught.value.paths) == {"source", "target"}
    model = kind.model()
    tied.torch.load_state_dict(model, state, on_conflict="source")
    assert torch.equal(model.source, state["source"])


def test_what_is_computed_and_has_an_inverse_is_mapped_back() -> None:
    model = Pair(3, 3)
    tied.tie(model, "target", "source", bent, inverse=unbent)
    model.load_state_dict({"target": torch.full((3,), 0.25)})
    torch.testing.assert_close(model.source.detach(), torch.full((3,), 0.25).atanh())


def joined() -> Any:
    model = Pair(3, 5, other=2)
    tied.tie(
        model, "target", ["source", "other"], lambda a, b: torch.cat([a, b]),
        inverse=lambda x: (x[:3], x[3:]),
    )  # fmt: skip
    return model


def test_a_source_that_is_there_has_to_agree_with_what_the_inverse_gives() -> None:
    target = torch.arange(5.0)
    for state in ({"target": target}, {"target": target, "source": target[:3].clone()}):
        model = joined()
        model.load_state_dict(state)
        assert (model.source.tolist(), model.other.tolist()) == ([0, 1, 2], [3, 4])
    with pytest.raises(tied.TieError) as caught:
        joined().load_state_dict({"target": target, "source": torch.ones(3)})
    assert set(caught.value.paths) >= {"source", "target"}


# -------------------------------------------------------------------------- modules twice, buffers


def twice() -> Any:
    inner = nn.Linear(3, 3)
    return nn.ModuleDict({"a": inner, "b": nn.Sequential(inner)})


def test_a_module_that_is_registered_twice_is_saved_and_loaded_under_either_name() -> None:
    old = {n: t.clone() for n, t in twice().state_dict().items()}
    assert list(old) == ["a.weight", "a.bias", "b.0.weight", "b.0.bias"]
    model = twice()
    tied.tie(model)
    assert list(model.state_dict()) == ["a.weight", "a.bias"]
    for names in (list(old)[:2], list(old)[2:], list(old), ["b.0.weight", "a.bias"]):
        model = twice()
        tied.tie(model)
        model.load_state_dict({n: old[n] for n in names})
        assert torch.equal(model["a"].weight, old["a.weight"])
        assert torch.equal(model["b"][0].bias, old["a.bias"])
    old["b.0.weight"] = old["b.0.weight"] + 1
    with pytest.raises(tied.TieError) as caught:
        model.load_state_dict(old)
    assert caught.value.paths == ("a.weight", "b.0.weight")


def test_buffers_are_saved_once_and_loaded() -> None:
    model = nn.BatchNorm1d(3)
    tied.tie(model, "running_var", "running_mean")
    assert list(model.state_dict()) == ["weight", "bias", "running_mean", "num_batches_tracked"]
    old = nn.BatchNorm1d(3).state_dict()
    with pytest.raises(tied.TieError):
        model.load_state_dict(old)
    model.load_state_dict({**old, "running_mean": torch.full((3,), 4.0),
                           "running_var": torch.full((3,), 4.0)})  # fmt: skip
    assert model.running_var.tolist() == [4, 4, 4]


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("how", ["plain", "mmap", "meta", "cpu"])
@pytest.mark.parametrize(("form", "name"), CASES)
def test_T31_files(form: str, name: str, how: str, tmp_path: Path) -> None:
    """pytorch#82412: map_location="meta" dropped the sharing."""
    torch.save(FORMS[form](name), tmp_path / "m.pt")
    options: dict[str, dict[str, Any]] = {
        "plain": {}, "mmap": {"mmap": True}, "meta": {"map_location": "meta"},
        "cpu": {"map_location": torch.device("cpu")},
    }  # fmt: skip
    state = torch.load(tmp_path / "m.pt", **options[how])
    model = KINDS[name].model()
    model.load_state_dict(state, assign=how != "plain")
    if how == "meta":
        assert all(p.is_meta for p in model.parameters())
        assert list(model.state_dict()) == KINDS[name].names()
        return
    assert holds(name, model)
    model(KINDS[name].inputs).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert KINDS[name].holds(model)


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_of_model_and_optimizer_resumes(name: str) -> None:
    def step(model: Any, optimizer: Any) -> None:
        model(KINDS[name].inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    one = KINDS[name].model()
    optimizer = torch.optim.Adam(one.parameters(), lr=0.01)
    step(one, optimizer)
    file = io.BytesIO()
    torch.save((one.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    states = torch.load(file)
    other = KINDS[name].model(5)
    resumed = torch.optim.Adam(other.parameters(), lr=0.01)
    other.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    step(one, optimizer)
    step(other, resumed)
    for n, p in one.named_parameters():
        assert torch.equal(p, get(other, n))
