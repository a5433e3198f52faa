"""PyTorch's modules and optimizers: all that is no element is kept."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oracle
import tied


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 3), nn.Linear(3, 4)
        self.decoder.weight = nn.Parameter(self.encoder.weight.detach().T)

    def forward(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))


TIED = (("encoder.weight", "decoder.weight"),)
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "copy": tied.copy,
    "f64": tied.f64,
    "map": lambda m: tied.map(torch.clone, m),
    "meta": lambda m: tied.to(m, "meta"),
    "split_and_merge": lambda m: tied.merge(*tied.split(m)),
}


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return OPERATIONS[request.param]


def build() -> Autoencoder:
    torch.manual_seed(0)
    return Autoencoder()


# ------------------------------------------------------------------- a model and its optimizer

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=True),
    "groups": lambda ps: torch.optim.Adam([{"params": ps[:1]}, {"params": ps[1:], "lr": 0.2}]),
}


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    x = torch.ones(2, 4, dtype=model.encoder.weight.dtype)
    model(x).square().mean().backward()
    optimizer.step()


def values(model: Any) -> list[Any]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture(params=OPTIMIZERS)
def training(request: pytest.FixtureRequest) -> Any:
    """A model, an optimizer that has stepped, and a schedule of its learning rate."""
    model = build()
    optimizer = OPTIMIZERS[request.param](list(model.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    step(model, optimizer)
    schedule.step()
    return model, optimizer, schedule


def members(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("name", ["copy", "f64", "map", "meta"])
def test_model_and_optimizer_stay_one_graph(name: str, training: Any) -> None:
    model, optimizer, _ = training
    after, moved, later = OPERATIONS[name](training)
    assert type(moved) is type(optimizer)
    pairs = zip(members(moved), members(optimizer), strict=True)
    names = {id(p): n for n, p in model.named_parameters()}
    assert all(after.get_parameter(names[id(old)]) is new for new, old in pairs)
    assert all(p is q for p, q in zip(moved.state, after.parameters(), strict=False))
    assert len(moved.state) == len(optimizer.state)
    assert later.optimizer is moved
    assert tied.ties(after).groups == TIED
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert [{k: v for k, v in g.items() if k != "params"} for g in moved.param_groups] == options


def test_the_moved_optimizer_and_schedule_step_the_moved_model_only(training: Any) -> None:
    model, optimizer, schedule = training
    before = values(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    after, moved, later = tied.f64(training)
    step(after, moved)
    later.step()
    assert all(map(torch.equal, values(model), before))
    assert not any(map(torch.equal, values(after), [p.double() for p in before]))
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert [group["lr"] for group in moved.param_groups] == [rate / 2 for rate in rates]
    assert (schedule.last_epoch, later.last_epoch) == (1, 2)
    assert tied.ties(after).groups == TIED


def test_the_old_optimizer_steps_the_old_model_only(training: Any) -> None:
    model, optimizer, schedule = training
    after, _, later = tied.copy(training)
    before = values(after)
    step(model, optimizer)
    schedule.step()
    assert all(map(torch.equal, values(after), before))
    assert later.last_epoch == 1


def test_a_copied_training_goes_on_as_the_original(training: Any) -> None:
    again = tied.copy(training)
    for _ in range(3):
        for model, optimizer, schedule in (training, again):
            step(model, optimizer)
            schedule.step()
    assert all(map(torch.equal, values(training[0]), values(again[0])))


def test_the_state_follows_and_the_step_counter_is_not_cast() -> None:
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    _, moved = tied.bf16((model, optimizer))
    for state in moved.state.values():
        assert (state["exp_avg"].dtype, state["step"].dtype) == (torch.bfloat16, torch.float32)
        assert float(state["step"]) == 1
    loaded = OPTIMIZERS["adam"](list(model.parameters()))
    loaded.load_state_dict(moved.state_dict())
    assert len(loaded.state) == 4


@pytest.mark.parametrize("name", ["copy", "f64", "map"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fresh_optimizer_is_ready_to_step(kind: str, name: str) -> None:
    model = build()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    after, moved = OPERATIONS[name]((model, optimizer))
    before = values(after)
    step(after, moved)
    assert type(moved.state) is type(optimizer.state)
    assert not any(map(torch.equal, values(after), before))
    assert len(optimizer.state) == 0


def test_hooks_of_the_optimizer_stay_with_it() -> None:
    model, seen = build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda opt, *_: seen.append(opt))
    after, moved = tied.copy((model, optimizer))
    step(after, moved)
    assert seen == [moved]


# ------------------------------------------------------------------ what hangs on parameters


@pytest.mark.parametrize("name", ["copy", "f64", "map", "meta"])
def test_grads_travel_with_their_parameters(name: str) -> None:
    model, operation = build(), OPERATIONS[name]
    model(torch.ones(2, 4)).sum().backward()
    before = oracle.snapshot(model)
    after = operation(model)
    assert oracle.snapshot(model) == before
    for p, q in zip(model.parameters(), after.parameters(), strict=True):
        assert (q.grad.dtype, q.grad.device) == (q.dtype, q.device)
        assert not tied.shares(p.grad, q.grad)
        assert q.is_meta or torch.equal(q.grad, p.grad.to(q.dtype))


def test_a_grad_that_is_shared_stays_shared() -> None:
    model = build()
    grad = torch.ones(3, 4)
    model.encoder.weight.grad, model.decoder.weight.grad = grad, grad.T
    after = tied.f64(model)
    assert tied.shares(after.encoder.weight.grad, after.decoder.weight.grad)


READINGS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda w: w.T, "row": lambda w: w[1], "reshape": lambda w: w.view(-1),
    "permute": lambda w: tied.permute(w, (1, 0)), "diagonal": tied.diagonal,
    "of_a_reading": lambda w: w.T[1:],
}  # fmt: skip


@pytest.mark.parametrize("name", ["copy", "f64", "map", "split_and_merge"])
@pytest.mark.parametrize("reading", READINGS)
def test_a_reading_that_passes_gradients_on_goes_on_doing_so(reading: str, name: str) -> None:
    """The thread's own layer: one W, used as W and as its transpose."""
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(3, 3))
    model.v = READINGS[reading](model.w)
    after = OPERATIONS[name](model)
    (3 * after.w.sum() + 4 * after.v.sum()).backward()
    seen = torch.zeros(3, 3, dtype=after.w.dtype)
    READINGS[reading](seen).add_(4)
    torch.testing.assert_close(after.w.grad, seen + 3)
    assert model.w.grad is None or name == "split_and_merge"
    assert tied.shares(after.w, after.v)


@pytest.mark.parametrize("name", ["copy", "f64", "map", "meta"])
def test_a_plain_leaf_of_autograd_is_one_afterwards(name: str) -> None:
    w = torch.ones(3, 2, requires_grad=True)
    after = OPERATIONS[name]({"w": w, "t": w.T, "frozen": w.detach()[0]})
    found = {key: (x.requires_grad, x.is_leaf) for key, x in after.items()}
    assert found == {"w": (True, True), "t": (True, False), "frozen": (False, True)}
    (after["w"].sum() + after["t"].sum()).backward()
    assert w.grad is None
    assert after["w"].is_meta or after["w"].grad.unique().tolist() == [2]


class Scaled(nn.Parameter):
    """A user's own class of parameter."""


def test_requires_grad_class_and_attributes_are_kept(operation: Callable[[Any], Any]) -> None:
    model = build()
    model.encoder.bias.requires_grad_(False)
    model.scaled = Scaled(torch.ones(2))
    model.scaled.group, model.scaled.reference = "no_decay", model.encoder.weight
    model.register_buffer("kept", torch.ones(2), persistent=False)
    model.register_buffer("absent", None)
    after = operation(model)
    assert [p.requires_grad for p in after.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    assert type(after.scaled) is Scaled
    assert after.scaled.group == "no_decay"
    assert after.scaled.reference is after.encoder.weight
    assert [n for n, _ in after.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert list(after.state_dict()) == list(model.state_dict())
    assert after.absent is None
    assert all(p.is_leaf for p in after.parameters())


def test_integers_and_booleans_stay_and_views_among_them_too() -> None:
    model = nn.Module()
    ids = torch.arange(6)
    model.register_buffer("ids", ids)
    model.register_buffer("some", ids[1:3])
    model.register_buffer("mask", ids > 2)
    after = tied.bf16(model)
    assert after.ids is ids
    assert after.some is model.some
    assert after.mask.dtype == torch.bool


def test_tensor_hooks_run_on_the_copy_and_on_the_original() -> None:
    model, seen = build(), []

    def scaled(grad: Any) -> Any:
        seen.append("before")
        return grad * 10

    model.encoder.weight.register_hook(scaled)
    model.encoder.bias.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    after = tied.copy(model)
    after(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    assert sorted(seen) == ["after", "after", "before", "before"]
    assert torch.equal(after.encoder.weight.grad, model.encoder.weight.grad)


def test_module_hooks_are_kept_and_those_added_later_are_not_shared() -> None:
    model, seen = build(), []
    model.encoder.register_forward_hook(lambda m, *_: seen.append(m))
    after = tied.copy(model)
    model.encoder.register_forward_pre_hook(lambda m, *_: seen.append("later"))
    after(torch.ones(2, 4))
    assert seen == [after.encoder]
    model(torch.ones(2, 4))
    assert seen[1:] == ["later", model.encoder]


def test_a_hook_that_is_removed_from_one_stays_on_the_other() -> None:
    model, seen = build(), []
    handle = model.encoder.register_forward_hook(lambda m, *_: seen.append(m))
    after = tied.copy(model)
    handle.remove()
    model(torch.ones(2, 4))
    after(torch.ones(2, 4))
    assert seen == [after.encoder]


# --------------------------------------------------------------------------- modules as they are


class Everything(nn.Module):
    """All the ways in which a module holds things."""

    def __init__(self) -> None:
        super().__init__()
        w = torch.ones(3, 3)
        self.weight = nn.Parameter(w)
        self.register_buffer("row", w[0])
        self.plain, self.count, self.text = w.T, 3, "text"
        self.tensors = {"diagonal": w.diagonal(), "parts": [w[:2], w[1:]]}
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Dropout(0.5)])
        self.table = nn.ModuleDict({"again": self.layers[0]})
        self.list = nn.ParameterList([self.weight, nn.Parameter(w[:, 0])])
        self.listed = [self.layers[0]]
        self.function = functools.partial(torch.add, w)
        self.nothing = None


def test_every_way_to_hold_a_tensor_is_followed(operation: Callable[[Any], Any]) -> None:
    model = Everything().eval()
    model.layers[1].train()
    after = operation(model)
    assert tied.ties(after).groups == tied.ties(model).groups
    (one, *_), *_ = tied.ties(after).groups
    assert one == "weight"
    assert after.list[0] is after.weight
    assert after.table["again"] is after.layers[0] is after.listed[0]
    assert (after.count, after.text, after.nothing) == (3, "text", None)
    assert [m.training for m in after.modules()] == [m.training for m in model.modules()]
    assert list(dict(after.named_modules())) == list(dict(model.named_modules()))
    assert vars(after).keys() == vars(model).keys()
    assert type(after._modules) is type(model._modules)


def test_a_module_registered_under_two_names_is_one() -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(OrderedDict(a=layer, b=nn.ReLU(), c=layer))
    after = tied.f64(model)
    assert after.a is after.c
    torch.testing.assert_close(after(torch.ones(2).double()).float(), model(torch.ones(2)))


def test_modules_of_the_copy_are_new_and_the_parts_without_arrays_may_stay() -> None:
    model = build()
    model.act = nn.ReLU()
    assert tied.map(torch.clone, model).act is model.act
    assert tied.copy(model).act is not model.act


def test_a_copy_does_not_keep_the_original_alive() -> None:
    model = build()
    reference = weakref.ref(model)
    after = tied.copy(model)
    del model
    gc.collect()
    assert reference() is None
    assert tied.ties(after).groups == TIED


def test_a_lazy_module_initialises_after_the_cast() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    after = tied.f64(model)
    assert isinstance(after[0].weight, nn.parameter.UninitializedParameter)
    after.float()(torch.ones(1, 5))
    assert after[0].weight.shape == (3, 5)


def test_rnn_weights_stay_in_their_flat_list() -> None:
    model = nn.GRU(3, 2, num_layers=2)
    after = tied.f64(model)
    assert all(a is b for a, b in zip(after._flat_weights, after.parameters(), strict=True))
    x = torch.ones(2, 1, 3)
    torch.testing.assert_close(after(x.double())[0], model(x)[0].double())


def test_torch_func_takes_what_split_gives() -> None:
    model = build()
    _, storages = tied.split(model)
    assert list(storages) == ["encoder.weight", "encoder.bias", "decoder.bias"]
    doubled = {name: x.detach() * 2 for name, x in storages.items()}
    out = torch.func.functional_call(model, doubled, torch.ones(2, 4))
    assert out.shape == (2, 4)
    assert torch.equal(model.encoder.weight, storages["encoder.weight"])
