"""Optimizers and tools count a tied storage once; copies and processes keep ties."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tied
from tying import KINDS, Autoencoder, LanguageModel, Pair, get, put

Make = Callable[[], Any]


def square(view: Any = None) -> Any:
    """Two 2x2 parameters of ones that are one; the sum of both has gradient 1 per use."""
    model = Pair((2, 2), (2, 2))
    with torch.no_grad():
        model.source.fill_(1)
    tied.tie(model, "target", "source", view)
    return model


VIEWS = {"same": None, "transpose": tied.transpose}


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    (model.source.sum() + model.target.sum()).backward()
    optimizer.step()


# --------------------------------------------------------------- each storage once (CASES.md, 3)


@pytest.mark.parametrize("view", VIEWS)
def test_Adam_moves_a_tie_by_the_learning_rate(view: str) -> None:
    model = square(VIEWS[view])
    step(model, torch.optim.Adam(model.parameters(), lr=0.1))
    torch.testing.assert_close(model.source.detach(), torch.full((2, 2), 0.9))
    assert torch.equal(model.target, VIEWS[view](model.source) if VIEWS[view] else model.source)


def test_Adam_on_two_parameters_over_one_storage_moves_twice() -> None:
    """What happens without tie, so that the test above can fail."""
    base = torch.ones(2, 2)
    model = nn.ParameterDict({"source": nn.Parameter(base), "target": nn.Parameter(base.T)})
    step(model, torch.optim.Adam(model.parameters(), lr=0.1))
    torch.testing.assert_close(base, torch.full((2, 2), 0.8))
    base.fill_(1)
    model.zero_grad()
    tied.tie(model)
    step(model, torch.optim.Adam(model.parameters(), lr=0.1))
    torch.testing.assert_close(model["target"].detach(), torch.full((2, 2), 0.9))


@pytest.mark.parametrize("view", VIEWS)
def test_weight_decay_is_applied_once(view: str) -> None:
    model = square(VIEWS[view])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    model.source.grad = torch.zeros(2, 2)
    optimizer.step()
    torch.testing.assert_close(model.source.detach(), torch.full((2, 2), 0.99))


@pytest.mark.parametrize("view", VIEWS)
def test_clipping_acts_on_the_sum(view: str) -> None:
    model = square(VIEWS[view])
    (model.source.sum() + model.target.sum()).backward()
    assert nn.utils.get_total_norm(p.grad for p in model.parameters()) == 4.0
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 4.0
    torch.testing.assert_close(model.source.grad, torch.full((2, 2), 0.5))
    nn.utils.clip_grad_value_(model.parameters(), 0.25)
    assert torch.equal(model.source.grad, torch.full((2, 2), 0.25))


@pytest.mark.parametrize("name", KINDS)
def test_parameters_are_counted_once(name: str) -> None:
    model = KINDS[name].model()
    free = KINDS[name].plain()
    assert sum(p.numel() for p in model.parameters()) == sum(
        get(free, n).numel() for n in KINDS[name].names()
    )
    assert sum(p.numel() for p in square().parameters()) == 4


def test_momentum_of_a_tie_is_one() -> None:
    """O1: gradients 3 and 7 are one gradient of 10, under momentum too."""
    model = square(tied.transpose)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (3 * model.source.sum() + 7 * model.target.sum()).backward()
    optimizer.step()
    optimizer.step()
    torch.testing.assert_close(model.source.detach(), torch.full((2, 2), 1 - 1.0 - 1.9))
    (state,) = optimizer.state.values()
    assert torch.equal(state["momentum_buffer"], torch.full((2, 2), 19.0))


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "LBFGS": torch.optim.LBFGS,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["transpose", "slices", "several"])
def test_an_optimizer_trains_a_tied_model_as_one_written_with_functions(
    name: str, optimizer: str
) -> None:
    """The same model, its targets computed by hand from free leaves in every step."""
    kind = KINDS[name]
    model, twin = kind.model(), kind.plain()
    leaves = {n: get(twin, n).detach().clone().requires_grad_() for n in kind.names()}

    def by_hand() -> torch.Tensor:
        values = dict(leaves)
        for target, source, view in kind.ties:
            sources = [source] if isinstance(source, str) else source
            values[target] = view(*(values[n] for n in sources))
        return torch.func.functional_call(twin, values, kind.inputs).square().mean()

    for parameters, loss in (
        (list(model.parameters()), lambda: model(kind.inputs).square().mean()),
        (list(leaves.values()), by_hand),
    ):
        stepper = OPTIMIZERS[optimizer](parameters)
        for _ in range(3):

            def closure(stepper: Any = stepper, loss: Any = loss) -> torch.Tensor:
                stepper.zero_grad()
                value = loss()
                value.backward()
                return value

            stepper.step(closure)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p, leaves[n])
    assert kind.holds(model)


@pytest.mark.parametrize("name", KINDS)
def test_an_average_of_weights_is_of_each_storage_once_and_stays_tied(name: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    average.update_parameters(model)
    assert kind.holds(average.module)
    assert not tied.shares(average, model)
    assert [n for n, _ in average.module.named_parameters()] == kind.names()
    for n, p in average.module.named_parameters():
        torch.testing.assert_close(p.detach(), first[n] + 0.5)


@pytest.mark.parametrize("name", KINDS)
def test_parameters_as_a_vector(name: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert vector.numel() == sum(p.numel() for p in model.parameters())
    nn.utils.vector_to_parameters(torch.arange(1.0 * vector.numel()), model.parameters())
    assert kind.holds(model)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()),
                       torch.arange(1.0 * vector.numel()))  # fmt: skip


def test_zero_grad_and_accumulation_over_steps() -> None:
    model = square(tied.transpose)
    for _ in range(2):
        (model.source.sum() + model.target.sum()).backward()
    assert torch.equal(model.source.grad, torch.full((2, 2), 4.0))
    model.zero_grad()
    assert model.source.grad is None


def test_checkpointed_activations_give_the_same_gradient() -> None:
    from torch.utils.checkpoint import checkpoint

    model, twin = KINDS["transpose"].model(), KINDS["transpose"].model()
    x = torch.ones(2, 4, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    twin(x).square().sum().backward()
    assert torch.equal(model.encoder.weight.grad, twin.encoder.weight.grad)


# ------------------------------------------------------------------- copies, pickles and processes


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "pickle_2": lambda m: pickle.loads(pickle.dumps(m, protocol=2)),
    "torch_save": saved,
    "tied_copy": tied.copy,
    "twice": lambda m: pickle.loads(pickle.dumps(copy.deepcopy(copy.deepcopy(m)))),
    "nested": lambda m: copy.deepcopy(nn.ModuleList([nn.Linear(2, 2), m]))[1],
    "trained": lambda m: copy.deepcopy(trained(m)),
}


def trained(model: Any) -> Any:
    """The model after a backward pass, its gradients set aside."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", KINDS)
def test_T26_T27_a_copy_is_tied_and_apart_from_the_original(name: str, way: str) -> None:
    """mlx#558, mlverse/torch#986: one memo for all that is shared."""
    kind = KINDS[name]
    model = kind.model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    twin = COPIES[way](model)
    assert isinstance(twin, type(kind.plain()))
    assert [n for n, _ in twin.named_parameters()] == kind.names()
    assert list(twin.state_dict()) == kind.names()
    assert torch.equal(twin(kind.inputs), model(kind.inputs))
    assert not tied.shares(model, twin)
    assert not tied.compare(model, twin)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(-2)
    assert kind.holds(twin)
    assert kind.holds(model)
    assert all(torch.equal(get(model, n), t) for n, t in before.items())
    for target in kind.targets if kind.pure else ():
        put(twin, target, torch.full_like(get(twin, target), 3.0))
        assert kind.holds(twin)
    assert kind.holds(twin.double())
    assert twin.train() is twin


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "tied_copy", "torch_save"])
@pytest.mark.parametrize("name", KINDS)
def test_a_model_and_its_optimizer_are_copied_together(name: str, way: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(m: Any, o: Any) -> None:
        o.zero_grad()
        m(kind.inputs).square().sum().backward()
        o.step()

    step(model, optimizer)
    twin, its = COPIES[way]((model, optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    step(twin, its)
    assert kind.holds(twin)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    step(model, optimizer)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not torch.equal(next(model.parameters()), before[0])


def test_a_shallow_copy_reads_the_same_parameters() -> None:
    model = KINDS["transpose"].model()
    twin = copy.copy(model)
    assert twin.encoder.weight is model.encoder.weight
    assert torch.equal(twin.decoder.weight, model.encoder.weight.T)
    layer = copy.copy(model.decoder)
    assert tied.shares(layer.weight, model.encoder.weight)


def test_a_copy_of_a_part_keeps_reading_the_original() -> None:
    model = KINDS["transpose"].model()
    part = copy.deepcopy(model.decoder)
    assert part.bias is not model.decoder.bias
    with torch.no_grad():
        model.encoder.weight.fill_(2)
    assert (part.weight == 2).all()


@pytest.mark.parametrize("order", ["part_first", "whole_first"])
@pytest.mark.parametrize("name", ["same", "transpose"])
def test_a_part_and_the_whole_copied_together_are_part_and_whole(name: str, order: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    owner = kind.targets[0].split(".", maxsplit=1)[0]
    whole_first = order == "whole_first"
    pair = (model, getattr(model, owner))
    copied = copy.deepcopy(pair if whole_first else pair[::-1])
    whole, part = copied if whole_first else copied[::-1]
    assert getattr(whole, owner) is part
    assert kind.holds(whole)
    assert not tied.shares(whole, model)
    put(whole, kind.targets[0], torch.full_like(part.weight, 5.0))
    assert (get(whole, kind.ties[0][1]) == 5).all()
    assert not (get(model, kind.ties[0][1]) == 5).any()


def test_a_pickle_holds_each_storage_once() -> None:
    plain = LanguageModel()
    plain.wte, plain.lm_head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
    tied.tie(plain, "lm_head.weight", "wte.weight")
    assert 256_000 < len(pickle.dumps(plain)) < 262_000
    model = Autoencoder()
    model.encoder, model.decoder = nn.Linear(300, 200), nn.Linear(200, 300)
    tied.tie(model, "decoder.weight", "encoder.weight", tied.transpose)
    assert 240_000 < len(pickle.dumps(model)) < 248_000


def test_a_view_that_can_not_be_written_down_is_refused_by_name() -> None:
    """A lambda is pickled as the operations that it does; this one decides by the values."""
    model = Pair((3, 3), (3, 3))
    tied.tie(model, "target", "source", lambda w: w.tanh() if w.sum() > 0 else w.sin())
    assert torch.equal(copy.deepcopy(model).target, model.target)
    with pytest.raises(tied.TieError) as caught:
        pickle.dumps(model)
    assert str(caught.value).splitlines() == [
        "the view of target can't be pickled",
        "  function  test_a_view_that_can_not_be_written_down_is_refused_by_name.<locals>.<lambda>",
        "  Define it in a module, by name, in place of a lambda or a local function",
    ]
    assert caught.value.paths == ("target",)


def test_views_given_as_lambdas_are_pickled() -> None:
    factor = 3
    model = Pair((3, 3), (3, 2), other=(3, 3))
    tied.tie(model, "target", "source", lambda w: factor * w.tanh()[:, 1:])
    tied.tie(model, "other", "source", lambda w: w * 2, inverse=lambda x: x / 2)
    twin = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(model))))
    twin.other = torch.ones(3, 3)
    assert torch.equal(twin.source, torch.full((3, 3), 0.5))
    assert torch.equal(twin.target, 3 * twin.source.tanh()[:, 1:])


def child(names: list[str], models: list[Any]) -> list[Any]:
    """In another process: what the models compute there, and whether they are tied."""
    found = []
    for name, model in zip(names, models, strict=True):
        out = model(KINDS[name].inputs).detach().numpy()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        found.append((out, KINDS[name].holds(model), list(model.state_dict())))
    return found


def test_spawned_processes_get_tied_models() -> None:
    """In shared memory: what the other process adds to a parameter is seen here, on both sides."""
    names = list(KINDS)
    models = [KINDS[name].model().share_memory() for name in names]
    before = [model(KINDS[n].inputs).detach() for n, model in zip(names, models, strict=True)]
    old = [[p.detach().clone() for p in model.parameters()] for model in models]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        found = pool.submit(child, names, models).result(timeout=300)
    for name, (out, held, keys), there in zip(names, found, before, strict=True):
        assert torch.equal(torch.from_numpy(out), there)
        assert held
        assert keys == KINDS[name].names()
    for name, model, parameters in zip(names, models, old, strict=True):
        assert all(
            torch.equal(p, q + 1) for p, q in zip(model.parameters(), parameters, strict=True)
        )
        assert KINDS[name].holds(model)
