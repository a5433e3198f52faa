"""The laws of ties that last: random modules with planned sharing, tied, then left to PyTorch.

What each tensor has to read is known by brute force, as the bytes of one memory, before the tie.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import oracle
import tied
from recipes import look
from strategies import LAW, buffers, chains

DTYPES = ("float32", "float64", "complex64", "int32")


def member(model: nn.Module, name: str) -> torch.Tensor:
    for step in name.split("."):
        model = getattr(model, step)
    return model  # type: ignore[return-value]


def members(model: nn.Module, names: list[str]) -> list[torch.Tensor]:
    return [member(model, name).detach() for name in names]


def pattern(model: nn.Module, names: list[str]) -> list[list[int]]:
    """Which bytes are which, whatever their addresses."""
    return oracle.pattern([oracle.positions(x) for x in members(model, names)])


def values(model: nn.Module, names: list[str]) -> list[Any]:
    return [oracle.bits(x) for x in members(model, names)]


@st.composite
def modules(draw: Any, *, reinterpret: bool = True) -> tuple[nn.Module, list[str]]:
    """A module with parts, each of which holds readings of one or two pieces of memory."""
    made = draw(st.lists(buffers(DTYPES), min_size=1, max_size=2))
    memory = [buffer.build("torch") for buffer in made]
    apart = draw(st.booleans())
    model = nn.ModuleDict({name: nn.Module() for name in "abc"[: draw(st.integers(1, 3))]})
    names = []
    for number in range(draw(st.integers(1, 5))):
        index = draw(st.sampled_from([0, 0, len(made) - 1]))
        ops = draw(chains(made[index], "torch", reinterpret, apart))
        tensor = look(memory[index], ops, "torch")
        part = draw(st.sampled_from(sorted(model)))
        name = f"x{number}"
        if draw(st.booleans()) and (tensor.is_floating_point() or tensor.is_complex()):
            setattr(model[part], name, nn.Parameter(tensor))
        else:
            model[part].register_buffer(name, tensor)
        names.append(f"{part}.{name}")
    return model, names


def tie(model: nn.Module) -> None:
    """Ties; leaves out what can't be tied, and what PyTorch itself neither copies nor loads."""
    try:
        tied.tie(model, on_conflict="target")
    except tied.TieError as error:
        assume("trainable" not in str(error))  # no gradient passes through a reading of bits
        raise
    for x in (*model.parameters(), *model.buffers()):
        starts = oracle.positions(x)[0].reshape(-1)
        assume(len(set(starts.tolist())) == starts.size)  # a tensor that repeats elements


def law(test: Callable[..., None]) -> Any:
    return LAW(given(drawn=modules())(test))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    try:
        torch.save(model, file)
    except RuntimeError as error:  # parts of one buffer, apart, in several dtypes
        assume("view the same data as different types" not in str(error))
        raise
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved,
    "copy": tied.copy,
    "split": lambda model: tied.merge(*tied.split(tied.copy(model))),
}


@law
def test_what_is_tied_and_its_values_stay_what_they_were(drawn: Any) -> None:
    model, names = drawn
    before, was = pattern(model, names), values(model, names)
    tie(model)
    assert pattern(model, names) == before
    assert values(model, names) == was


@law
def test_each_element_is_held_once(drawn: Any) -> None:
    model, _ = drawn
    tie(model)
    stored = [*model.parameters(), *model.buffers()]
    places = [oracle.positions(x) for x in stored]
    for i, place in enumerate(places):
        assert not any(oracle.overlap(place, other) for other in places[i + 1 :])


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_tied_alike_and_apart_from_the_model(way: str) -> None:
    @law
    def check(drawn: Any) -> None:
        model, names = drawn
        tie(model)
        other = COPIES[way](model)
        assert pattern(other, names) == pattern(model, names)
        assert values(other, names) == values(model, names)
        assert not tied.shares(model, other)

    check()


@law
def test_a_state_dict_holds_each_element_once_and_loads(drawn: Any) -> None:
    model, names = drawn
    before, was = pattern(model, names), values(model, names)
    tie(model)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.zero_()
    model.load_state_dict(state)
    assert values(model, names) == was
    model.load_state_dict({name: x.clone() for name, x in state.items()}, assign=True)
    assert values(model, names) == was
    assert pattern(model, names) == before


@law
def test_a_checkpoint_with_every_name_loads(drawn: Any) -> None:
    """The file of before the tie."""
    model, names = drawn
    was = values(model, names)
    old = {name: x.clone() for name, x in model.state_dict().items()}
    tie(model)
    spans = {name: x.clone() for name, x in model.state_dict().items() if "tied_span" in name}
    model.load_state_dict({**old, **spans})
    assert values(model, names) == was


@LAW
@given(drawn=modules(reinterpret=False))
def test_the_gradient_is_the_sum_over_all_readings(drawn: Any) -> None:
    """Law 7: doubling what is read by a parameter shows in what is stored, once for each use."""
    model, names = drawn
    tie(model)
    leaves = [member(model, name) for name in names]
    wanting = [x for x in leaves if x.requires_grad]
    if not wanting:
        return
    sum((2 * x).sum().real for x in wanting).backward()
    uses = sum(x.numel() for x in wanting)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert sum(float(g.sum().real) for g in grads) == pytest.approx(2 * uses)


@law
def test_untying_all_gives_each_memory_of_its_own(drawn: Any) -> None:
    model, names = drawn
    was = values(model, names)
    tie(model)
    for name in names:
        if name not in dict(model.state_dict()):
            tied.untie(model, name)
    assert values(model, names) == was
    places = [oracle.positions(x) for x in members(model, names) if x.numel()]
    for i, place in enumerate(places):
        assert not any(oracle.overlap(place, other) for other in places[i + 1 :])
