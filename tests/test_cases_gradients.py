"""What Optimisers.jl asserts of tied parameters, with torch.optim and optax on the storages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import tied

MAKE = {"numpy": np.array, "torch": torch.tensor, "jax": jnp.array}
each_library = pytest.mark.parametrize("library", MAKE)
trained = pytest.mark.parametrize("library", ["torch", "jax"])


def zeros(library: str, *shape: int) -> Any:
    return MAKE[library](np.zeros(shape, "float32"))


def ones(library: str, *shape: int) -> Any:
    return MAKE[library](np.ones(shape, "float32"))


def tied_by_transpose(library: str) -> Any:
    w = ones(library, 2, 2)
    return {"w": w, "t": tied.transpose(w)}


def three_and_seven(model: Any) -> Any:
    """A loss whose gradient is 3 at each element of `w`, and 7 at each of `t`."""
    return 3 * model["w"].sum() + 7 * model["t"].sum()


OPTAX = {
    "sgd": lambda **k: optax.sgd(k["lr"], momentum=k.get("momentum")),
    "adam": lambda **k: optax.adam(k["lr"]),
    "decayed": lambda **k: optax.chain(optax.add_decayed_weights(k["decay"]), optax.sgd(k["lr"])),
    "clipped": lambda **k: optax.chain(optax.clip_by_global_norm(k["norm"]), optax.sgd(k["lr"])),
}


def train_jax(model: Any, loss: Any, name: str, steps: int, **options: Any) -> Any:
    skeleton, storages = tied.split(model)
    optimizer = OPTAX[name](**options)
    state = optimizer.init(storages)
    for _ in range(steps):
        gradients = jax.grad(lambda s: loss(tied.merge(skeleton, s)))(storages)
        updates, state = optimizer.update(gradients, state, storages)
        storages = optax.apply_updates(storages, updates)
    return tied.merge(skeleton, storages), state


def train_torch(model: Any, loss: Any, name: str, steps: int, **options: Any) -> Any:
    skeleton, storages = tied.split(model)
    variables = {key: torch.nn.Parameter(s.detach().clone()) for key, s in storages.items()}
    if name == "adam":
        optimizer: Any = torch.optim.Adam(variables.values(), lr=options["lr"])
    else:
        optimizer = torch.optim.SGD(
            variables.values(),
            lr=options["lr"],
            momentum=options.get("momentum", 0),
            weight_decay=options.get("decay", 0),
        )
    for _ in range(steps):
        optimizer.zero_grad()
        loss(tied.merge(skeleton, variables)).backward()
        if "norm" in options:
            torch.nn.utils.clip_grad_norm_(list(variables.values()), options["norm"])
        optimizer.step()
    return tied.merge(skeleton, {k: v.detach() for k, v in variables.items()}), optimizer.state


def train(library: str, *arguments: Any, **options: Any) -> Any:
    return (train_jax if library == "jax" else train_torch)(*arguments, **options)


@trained
def test_O1_two_tied_gradients_are_one(library: str) -> None:
    model, _ = train(library, tied_by_transpose(library), three_and_seven, "sgd", steps=1, lr=0.125)
    assert model["w"].tolist() == [[1 - 1.25] * 2] * 2
    assert tied.shares(model["w"], model["t"])


@trained
def test_O1_holds_under_momentum(library: str) -> None:
    model, _ = train(
        library,
        tied_by_transpose(library),
        three_and_seven,
        "sgd",
        steps=2,
        lr=0.125,
        momentum=0.5,
    )
    assert model["w"].tolist() == [[1 - 0.125 * (10 + 15)] * 2] * 2


@each_library
def test_O1_accumulate_adds_them(library: str) -> None:
    model = tied_by_transpose(library)
    grads = {"w": ones(library, 2, 2) * 3, "t": ones(library, 2, 2) * 7}
    (total,) = tied.accumulate(model, grads, convention="partial").values()
    assert total.tolist() == [[10, 10], [10, 10]]


@each_library
def test_O1_a_layer_twice_has_a_gradient_at_each_place(library: str) -> None:
    """JAX gives a shared layer's gradient once for each place that holds the layer."""
    layer = {"w": ones(library, 2), "b": ones(library, 1)}
    grads = [
        {"w": ones(library, 2) * 3, "b": ones(library, 1)},
        {"w": ones(library, 2) * 7, "b": ones(library, 1)},
    ]
    total = tied.accumulate([layer, layer], grads, convention="partial")
    assert {name: g.tolist() for name, g in total.items()} == {"0.w": [10, 10], "0.b": [2]}


@each_library
def test_O2_a_branch_without_a_gradient_counts_nothing(library: str) -> None:
    model = tied_by_transpose(library)
    grads = {"w": None, "t": ones(library, 2, 2) * 7}
    total = tied.accumulate(model, grads, convention="partial")
    assert total["w"].tolist() == [[7, 7], [7, 7]]


@each_library
def test_O2_holds_where_every_branch_is_missing(library: str) -> None:
    total = tied.accumulate(
        tied_by_transpose(library), {"w": None, "t": None}, convention="partial"
    )
    assert total["w"].tolist() == [[0, 0], [0, 0]]


@each_library
def test_O12_a_total_gradient_is_not_summed(library: str) -> None:
    """PyTorch's and MLX's way: each use of one array shows its whole gradient."""
    model = tied_by_transpose(library)
    whole = MAKE[library](np.array([[1.0, 2.0], [3.0, 4.0]], "float32"))
    total = tied.accumulate(model, {"w": whole, "t": whole.T}, convention="total")
    assert total["w"].tolist() == [[1, 2], [3, 4]]


@trained
def test_O4_the_state_of_the_transpose_is_the_state_of_the_array(library: str) -> None:
    _, state = train(library, tied_by_transpose(library), three_and_seven, "adam", steps=1, lr=0.1)
    if library == "jax":
        (scale, _) = state
        assert scale.mu["w"].shape == (2, 2)
        assert list(scale.mu) == list(scale.nu) == ["w"]
        moment = scale.mu["w"]
    else:
        (each,) = state.values()
        moment = each["exp_avg"]
    assert np.allclose(np.asarray(moment), 1.0)


def test_O4_an_optimizer_moves_with_its_module() -> None:
    """One Parameter, one state, and both follow in one call."""
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    moved, follower = tied.f64((module, optimizer))
    assert follower.param_groups[0]["params"][0] is moved.weight
    assert set(follower.state) == {moved.weight, moved.bias}
    assert follower.state[moved.weight]["exp_avg"].dtype == torch.float64
    assert module.weight.dtype == torch.float32
    before = moved.weight.detach().clone()
    moved(torch.ones(2, dtype=torch.float64)).sum().backward()
    follower.step()
    assert not torch.equal(before, moved.weight)


@trained
def test_O5_clipping_acts_on_the_sum(library: str) -> None:
    """Gradient 10 at four elements: norm 20, clipped to 10; clipped apart it would not be 5."""
    model, _ = train(
        library, tied_by_transpose(library), three_and_seven, "clipped", steps=1, lr=1.0, norm=10.0
    )
    assert np.allclose(np.asarray(model["w"]), 1 - 5.0, atol=1e-4)


@pytest.mark.parametrize("order", ["tw", "tt", "twt", "ttw", "wtt"])
@each_library
def test_O6_the_transpose_may_come_first(library: str, order: str) -> None:
    w = zeros(library, 2, 3)
    fields = [w if letter == "w" else tied.transpose(w) for letter in order]
    skeleton, storages = tied.split(fields)
    assert len(storages) == 1
    assert sum(int(np.prod(s.shape)) for s in storages.values()) == 6
    merged = tied.merge(skeleton, {name: s + 1 for name, s in storages.items()})
    for field, letter in zip(merged, order, strict=True):
        assert tuple(field.shape) == ((2, 3) if letter == "w" else (3, 2))
        assert float(field.sum()) == 6


@each_library
def test_O8_equal_values_are_two_parameters(library: str) -> None:
    _, storages = tied.split({"a": ones(library, 2), "b": ones(library, 2)})
    assert list(storages) == ["a", "b"]


@dataclass(eq=False)
class Layer:
    w: Any
    name: str


@trained
def test_O9_two_layers_over_one_array_are_two_layers(library: str) -> None:
    w = ones(library, 2)
    model, _ = train(
        library,
        [Layer(w, "first"), Layer(w, "second")],
        lambda m: 3 * m[0].w.sum() + 7 * m[1].w.sum(),
        "sgd",
        steps=1,
        lr=0.125,
    )
    assert model[0] is not model[1]
    assert [layer.name for layer in model] == ["first", "second"]
    assert model[0].w is model[1].w
    assert model[0].w.tolist() == [-0.25, -0.25]


@trained
def test_H3_a_penalty_counts_a_tie_once(library: str) -> None:
    _, storages = tied.split(tied_by_transpose(library))
    assert float(sum((s**2).sum() for s in storages.values())) == 4


@each_library
def test_H8_a_diagonal_ravels_to_its_diagonal(library: str) -> None:
    v = ones(library, 3)
    model = {"d": tied.Diagonal(v), "v": v}
    vector, unravel = tied.ravel(model)
    assert vector.tolist() == [1, 1, 1]
    again = unravel(vector * 2)
    assert np.asarray(again["d"]).tolist() == np.diag([2, 2, 2]).tolist()
    assert again["v"].tolist() == [2, 2, 2]


@each_library
def test_H9_trainable_here_and_frozen_there_raises_with_both_paths(library: str) -> None:
    model = {"train": {"w": ones(library, 2, 3)}, "frozen": {"b": zeros(library, 2)}}
    model["frozen"]["t"] = tied.transpose(model["train"]["w"])
    with pytest.raises(tied.TieError) as caught:
        tied.split(model, "train.*", "frozen.*")
    assert set(caught.value.paths) >= {"train.w", "frozen.t"}
    skeleton, trainable, frozen, rest = tied.split(model, "train.*", "frozen.*", conflict="first")
    assert (list(trainable), list(frozen), dict(rest)) == (["train.w"], ["frozen.b"], {})
    merged = tied.merge(skeleton, trainable, frozen, rest)
    assert tied.shares(merged["train"]["w"], merged["frozen"]["t"])


def test_H9_filters_are_types_globs_or_functions() -> None:
    module = torch.nn.Linear(2, 3)
    module.register_buffer("mean", torch.zeros(2))
    _, parameters, rest = tied.split(module, torch.nn.Parameter)
    assert (sorted(parameters), list(rest)) == (["bias", "weight"], ["mean"])
    _, named, rest = tied.split(module, "w*")
    assert (list(named), sorted(rest)) == (["weight"], ["bias", "mean"])
    _, small, rest = tied.split(module, lambda path, a: a.ndim == 1)
    assert (sorted(small), list(rest)) == (["bias", "mean"], ["weight"])
    _, every, rest = tied.split(module, ...)
    assert (len(every), len(rest)) == (3, 0)


@trained
def test_adam_moves_a_tie_once(library: str) -> None:
    """Adam's first step is the learning rate: 0.1, where two Parameters over one storage go 0.2."""
    model, _ = train(library, tied_by_transpose(library), three_and_seven, "adam", steps=1, lr=0.1)
    assert np.allclose(np.asarray(model["w"]), 0.9, atol=1e-6)
    assert np.allclose(np.asarray(model["t"]), 0.9, atol=1e-6)


@trained
def test_weight_decay_acts_once(library: str) -> None:
    """lr 0.1, decay 0.1, no gradient: 0.99, where a step for each name gives 0.9801."""
    model, _ = train(
        library,
        tied_by_transpose(library),
        lambda m: 0.0 * three_and_seven(m),
        "decayed",
        steps=1,
        lr=0.1,
        decay=0.1,
    )
    assert np.allclose(np.asarray(model["w"]), 0.99, atol=1e-6)


@trained
def test_the_norm_of_a_tie_s_gradient_is_that_of_the_sum(library: str) -> None:
    """A 2x2 tie of ones with gradient 1 for each use: 4, where two separate ones give 2.83."""
    model = tied_by_transpose(library)
    grads = {"w": ones(library, 2, 2), "t": ones(library, 2, 2)}
    total = tied.accumulate(model, grads, convention="partial")
    assert math.sqrt(sum(float((g**2).sum()) for g in total.values())) == 4


@each_library
def test_parameters_are_counted_once(library: str) -> None:
    """T74: 4, where a count by name says 8."""
    report = tied.ties(tied_by_transpose(library))
    assert (report.parameters, report.naive_parameters) == (4, 8)
    assert (report.nbytes, report.naive_nbytes) == (
        4 * tied.split(tied_by_transpose(library))[1]["w"].dtype.itemsize,
        8 * tied.split(tied_by_transpose(library))[1]["w"].dtype.itemsize,
    )


def test_a_view_of_one_parameter_is_no_second_parameter() -> None:
    """T68: two Parameters over one storage step twice in PyTorch; as storages they are one."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, False))
    module[1].weight = torch.nn.Parameter(module[0].weight.detach().T)
    assert sum(p.numel() for p in module.parameters()) == 8
    assert tied.ties(module).parameters == 4
    assert list(tied.split(module)[1]) == ["0.weight"]


# ---------------------------------------------------------------------------- D1 to D6, ravel


@each_library
def test_D1_every_element_is_in_the_vector_once(library: str) -> None:
    t, u = MAKE[library]([1.0, 2.0, 3.0]), MAKE[library]([4.0, 5.0, 6.0])
    vector, _ = tied.ravel({"x": t, "y": t, "z": u})
    assert vector.tolist() == [1, 2, 3, 4, 5, 6]


@each_library
def test_D2_unravel_keeps_the_tie(library: str) -> None:
    t, u = MAKE[library]([1.0, 2.0, 3.0]), MAKE[library]([4.0, 5.0, 6.0])
    vector, unravel = tied.ravel({"x": t, "y": t, "z": u})
    model = unravel(vector * 10)
    assert model["x"] is model["y"]
    assert (model["x"].tolist(), model["z"].tolist()) == ([10, 20, 30], [40, 50, 60])
    assert t.tolist() == [1, 2, 3]


@trained
def test_D3_the_gradient_of_unravel_sums_over_uses(library: str) -> None:
    x, y = MAKE[library]([1.0, 2.0]), MAKE[library]([3.0, 4.0])
    vector, unravel = tied.ravel({"x": x, "y": y, "z": x})

    def loss(flat: Any) -> Any:
        model = unravel(flat)
        return 3 * model["x"].sum() + 13 * model["z"].sum()

    if library == "jax":
        gradient = jax.grad(loss)(vector)
    else:
        variable = vector.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(variable), variable)
    assert gradient.tolist() == [16, 16, 0, 0]


@each_library
def test_D4_dtypes_come_back(library: str) -> None:
    names = ("float16", "float32")
    arrays = [MAKE[library](np.arange(3).astype(name)) for name in names]
    vector, unravel = tied.ravel(arrays)
    assert str(vector.dtype).endswith("float32")
    assert [str(a.dtype).removeprefix("torch.") for a in unravel(vector)] == list(names)


@pytest.mark.parametrize("count", [0, 5, 7])
@each_library
def test_D5_a_vector_of_the_wrong_length_raises(library: str, count: int) -> None:
    _, unravel = tied.ravel({"x": zeros(library, 2, 3)})
    with pytest.raises(tied.TiedError, match="6"):
        unravel(zeros(library, count))


@each_library
def test_D6_views_are_in_the_vector_through_their_storage(library: str) -> None:
    w = MAKE[library]([[1.0, 2.0], [3.0, 4.0]])
    vector, unravel = tied.ravel([tied.transpose(w), w, tied.view(w, lambda a: a[1])])
    assert sorted(vector.tolist()) == [1, 2, 3, 4]
    transposed, whole, row = unravel(vector)
    assert np.asarray(whole).tolist() == [[1, 2], [3, 4]]
    assert np.asarray(transposed).tolist() == [[1, 3], [2, 4]]
    assert np.asarray(row).tolist() == [3, 4]
    assert tied.shares(whole, row)
    assert tied.shares(whole, transposed)
