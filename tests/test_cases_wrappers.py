"""Moves, casts and wrappers: what Flux.jl, Adapt.jl and StructArrays.jl assert of themselves."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import oracle
import tied

MAKE = {"numpy": np.array, "torch": torch.tensor, "jax": jnp.array}
each_library = pytest.mark.parametrize("library", MAKE)
CASTS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def make(library: str, values: Any, dtype: str = "float32") -> Any:
    return MAKE[library](np.array(values, dtype))


def dtype_of(a: Any) -> str:
    return str(a.dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------ V: moves


MOVES = {
    "numpy": ["torch", "jax", "cpu"],
    "torch": ["meta", torch.device("meta"), "numpy", "jax", "cpu"],
    "jax": ["cpu:1", jax.devices("cpu")[1], "numpy", "torch"],
}
MOVED = [(library, device) for library, devices in MOVES.items() for device in devices]


@pytest.mark.parametrize(("library", "device"), MOVED, ids=lambda x: str(x))
def test_V2_one_array_twice_is_one_object_after_a_move(library: str, device: Any) -> None:
    x = make(library, [1.0, 2.0])
    first, second = tied.to((x, x), device)
    assert first is second


@pytest.mark.parametrize(("library", "device"), MOVED, ids=lambda x: str(x))
def test_V2_a_move_keeps_views(library: str, device: Any) -> None:
    w = make(library, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    model = {"w": w, "t": tied.transpose(w), "row": tied.view(w, lambda a: a[1]), "other": w * 1}
    moved = tied.to(model, device)
    assert tied.ties(moved).groups == tied.ties(model).groups == (("w", "t", "row"),)
    assert [tuple(a.shape) for a in moved.values()] == [(2, 3), (3, 2), (3,), (2, 3)]
    if "meta" not in str(device):
        assert oracle.numpy(moved["t"]).tolist() == oracle.numpy(w).T.tolist()


def test_V2_the_way_through_three_libraries_and_back() -> None:
    w = np.arange(6.0, dtype="float32").reshape(2, 3)
    model = {"w": w, "t": w.T, "part": w[:, 1:], "diagonal": w.diagonal(), "alone": w.copy()}
    groups = tied.ties(model).groups
    part: Any = model
    for library, kind in [
        ("torch", torch.Tensor),
        ("jax", jax.Array | tied.View),
        ("numpy", np.ndarray),
        ("jax", jax.Array | tied.View),
        ("torch", torch.Tensor),
        ("numpy", np.ndarray),
    ]:
        part = tied.to(part, library)
        assert all(isinstance(a, kind) for a in part.values())
        assert tied.ties(part).groups == groups
    for name in model:
        assert oracle.bits(part[name]) == oracle.bits(model[name])
    part["w"][1, 1] = -1
    assert part["t"][1, 1] == part["part"][1, 0] == part["diagonal"][1] == -1
    assert not np.shares_memory(part["w"], w)


def test_V2_a_sharded_move_keeps_views() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    w = make("jax", [[1.0, 2.0], [3.0, 4.0]])
    moved = tied.to({"w": w, "t": tied.transpose(w), "again": w}, sharding)
    assert moved["w"].sharding == sharding
    assert moved["w"] is moved["again"]
    assert tied.shares(moved["w"], moved["t"])
    assert oracle.numpy(moved["t"]).tolist() == [[1, 3], [2, 4]]


def test_V2_from_meta_and_back_by_empty() -> None:
    """T13, T16: a model built on meta and materialised keeps its ties."""
    with torch.device("meta"):
        encoder, decoder = torch.nn.Linear(4, 3), torch.nn.Linear(3, 4)
    decoder.weight = torch.nn.Parameter(encoder.weight.detach().T)
    model = torch.nn.Sequential(encoder, decoder)
    made = tied.empty(model, "cpu")
    assert made[0].weight.device.type == "cpu"
    assert tuple(made[1].weight.shape) == (4, 3)
    with torch.no_grad():
        made[0].weight.copy_(torch.arange(12.0).reshape(3, 4))
    assert made[1].weight[3, 2] == 11
    assert tied.ties(made).groups == tied.ties(model).groups
    assert isinstance(made[1].weight, torch.nn.Parameter)


@pytest.mark.parametrize(
    ("library", "device"),
    [("numpy", "numpy"), ("numpy", "cpu"), ("torch", "torch"), ("torch", "cpu"), ("jax", "jax")],
)
def test_V6_a_move_to_where_it_is_gives_the_same_arrays(library: str, device: str) -> None:
    w = make(library, [[1.0, 2.0]])
    model = {"w": w, "t": tied.transpose(w)}
    moved = tied.to(model, device)
    assert moved["w"] is w
    assert moved["t"] is model["t"]


def test_V6_a_move_to_its_own_jax_device_gives_the_same_arrays() -> None:
    w = jax.device_put(make("jax", [1.0]), jax.devices("cpu")[2])
    assert tied.to({"w": w}, "cpu:2")["w"] is w
    assert tied.to({"w": w}, w.sharding)["w"] is w


@each_library
def test_gpu_without_an_accelerator_gives_the_model_back(library: str) -> None:
    model = {"w": make(library, [1.0])}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert tied.gpu(model) is model
    assert {warning.category for warning in caught} <= {tied.DeviceWarning}


def test_V3_an_array_of_structured_elements_is_one_leaf() -> None:
    """An RGB image: never opened, one array."""
    image = np.zeros((4, 5), dtype=[("r", "u1"), ("g", "u1"), ("b", "u1")])
    image["g"] = 7
    model = {"image": image, "crop": image[1:3]}
    calls = []
    mapped = tied.map(lambda a: calls.append(a) or a.copy(), model)
    assert [a.dtype for a in calls] == [image.dtype]
    mapped["crop"]["r"][0, 0] = 9
    assert mapped["image"]["r"][1, 0] == 9
    assert tied.f32(model)["image"] is image


def test_V3_the_fields_of_one_image_are_no_ties_of_each_other() -> None:
    image = np.zeros((4, 5), dtype=[("r", "u1"), ("g", "u1"), ("b", "u1")])
    assert len(tied.split({name: image[name] for name in "rgb"})[1]) == 3
    assert len(tied.split({"image": image, **{n: image[n] for n in "rgb"}})[1]) == 1


# ------------------------------------------------------------------------------ X: casts


@pytest.fixture
def x64() -> Any:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("cast", CASTS)
@each_library
def test_X5_casts_touch_floats_only(library: str, cast: str) -> None:
    stay = {
        "i": make(library, [1, 2], "int32"),
        "b": make(library, [True, False], "bool"),
        "u": make(library, [1], "uint8"),
    }
    model = {**stay, "f": make(library, [1.5, 2.0], "float32"), "setting": 2.5}
    found = getattr(tied, cast)(model)
    assert [found[name] is stay[name] for name in stay] == [True] * 3
    assert dtype_of(found["f"]) == ("bfloat16" if cast == "bf16" else f"float{CASTS[cast]}")
    assert found["setting"] == 2.5


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("cast", "dtype"), [("f32", "complex64"), ("f64", "complex128")])
@each_library
def test_X5_complex_floats_keep_being_complex(library: str, cast: str, dtype: str) -> None:
    for start in ("complex64", "complex128"):
        c = make(library, [1 + 2j], start)
        found = getattr(tied, cast)({"c": c})["c"]
        assert dtype_of(found) == dtype
        assert complex(found[0]) == 1 + 2j
        assert (found is c) == (start == dtype)


def test_X5_random_keys_stay() -> None:
    key = jax.random.key(0)
    model = {"key": key, "old": jax.random.PRNGKey(1), "w": jnp.ones(2)}
    found = tied.bf16(model)
    assert found["key"] is key
    assert found["old"] is model["old"]
    assert found["w"].dtype == jnp.bfloat16


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("cast", CASTS)
@each_library
def test_X5_a_cast_that_changes_nothing_gives_the_same_arrays(library: str, cast: str) -> None:
    w = getattr(tied, cast)(make(library, [[1.0, 2.0], [3.0, 4.0]], "float32"))
    model = {"w": w, "t": tied.transpose(w), "row": tied.view(w, lambda a: a[0])}
    found = getattr(tied, cast)(model)
    assert [found[name] is model[name] for name in model] == [True] * 3


@each_library
def test_X5_the_kind_of_wrapper_is_kept(library: str) -> None:
    w = make(library, [[1.0, 2.0], [3.0, 4.0]])
    model = {"w": w, "t": tied.transpose(w), "d": tied.Diagonal(w)}
    found = tied.f16(model)
    assert [type(a) for a in found.values()] == [type(a) for a in model.values()]
    assert tied.shares(found["w"], found["t"])


@each_library
def test_H7_precision_is_decided_once_for_a_storage(library: str) -> None:
    """A rule by name meets a tie at its first name; the other one follows."""
    w = make(library, [[1.0, 2.0], [3.0, 4.0]])
    model = {"encoder": w, "decoder": tied.transpose(w), "bias": w[0] * 1}

    def cast(path: Any, a: Any) -> Any:
        return tied.f16(a) if str(path) == "encoder" else a

    mapped = tied.map(cast, model, with_path=True)
    assert [dtype_of(a) for a in mapped.values()] == ["float16", "float16", "float32"]
    assert tied.shares(mapped["encoder"], mapped["decoder"])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_H13_a_cast_under_a_byte_view_is_refused(library: str) -> None:
    w = make(library, [1.0, 2.0])
    model = {"w": w, "raw": w.view(np.uint8 if library == "numpy" else torch.uint8)}
    with pytest.raises(tied.TiedError) as caught:
        tied.f16(model)
    assert set(caught.value.paths) >= {"w", "raw"}
    assert tied.f32(model)["w"] is w
    copied = tied.copy(model)
    copied["raw"][:] = 0
    assert copied["w"].tolist() == [0, 0]
    assert w.tolist() == [1, 2]


@pytest.mark.parametrize("part", ["real", "imag"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_H13_a_cast_under_a_real_part_is_refused(library: str, part: str) -> None:
    w = make(library, [1 + 2j, 3 + 4j], "complex64")
    model = {"w": w, "part": getattr(w, part)}
    with pytest.raises(tied.TiedError) as caught:
        tied.f64(model)
    assert set(caught.value.paths) >= {"w", "part"}
    doubled = tied.map(lambda a: a * 2, model)
    assert oracle.numpy(doubled["part"]).tolist() == ([2, 6] if part == "real" else [4, 8])
    assert tied.shares(doubled["w"], doubled["part"])


def test_H14_overlapping_views_scatter_add() -> None:
    w = jnp.arange(5.0)
    model = {"low": tied.view(w, lambda a: a[:3]), "high": tied.view(w, lambda a: a[2:])}
    skeleton, storages = tied.split(model)

    def loss(s: Any) -> Any:
        merged = tied.merge(skeleton, s)
        return 1.0 * jnp.sum(merged["low"] * 1.0) + 10.0 * jnp.sum(merged["high"] * 1.0)

    (gradient,) = jax.grad(loss)(storages).values()
    assert gradient.tolist() == [1, 1, 11, 10, 10]


@each_library
def test_H15_a_small_view_of_a_large_buffer_moves_once_and_alone(library: str) -> None:
    huge = make(library, np.arange(40_000).reshape(200, 200))
    row = tied.view(huge, lambda a: a[3])
    model = {"row": row, "again": row, "part": tied.view(huge, lambda a: a[3, 10:20])}
    seen = []
    mapped = tied.map(lambda a: seen.append(a.nbytes) or a * 1, model)
    assert seen == [800]
    assert mapped["row"] is mapped["again"]
    assert tied.shares(mapped["row"], mapped["part"])
    assert oracle.numpy(mapped["part"]).tolist() == list(range(610, 620))


# ------------------------------------------------------------------------- A: wrappers


def complex_or_real(library: str) -> Any:
    return make(library, [[1 + 1j, 2 + 2j], [3 + 3j, 4 + 4j]], "complex64")


LAZY: dict[str, Any] = {
    "transpose": tied.transpose,
    "adjoint": tied.adjoint,
    "permute": lambda w: tied.permute(w, (1, 0)),
    "slices": lambda w: tied.view(w, lambda a: a[:, 1:]),
    "stepped": lambda w: tied.view(w, lambda a: a[::2]),
    "index_array": lambda w: tied.view(w, lambda a: a[np.array([1, 0, 1])]),
    "reshape": lambda w: tied.view(w, lambda a: a.reshape(-1)),
    "flip": lambda w: tied.view(w, lambda a: a.flip(0) if hasattr(a, "flip") else a[::-1]),
    "diagonal": tied.diagonal,
    "off_diagonal": lambda w: tied.diagonal(w, 1),
    "twice": lambda w: tied.transpose(tied.view(w, lambda a: a[1:])),
    "thrice": lambda w: tied.view(tied.adjoint(tied.transpose(w)), lambda a: a[0]),
    "computed": lambda w: tied.view(w, lambda a: a + a),
}
PLAIN: dict[str, Any] = {
    "transpose": lambda w: w.T,
    "adjoint": lambda w: w.conj().T,
    "permute": lambda w: w.T,
    "slices": lambda w: w[:, 1:],
    "stepped": lambda w: w[::2],
    "index_array": lambda w: w[np.array([1, 0, 1])],
    "reshape": lambda w: w.reshape(-1),
    "flip": lambda w: w[::-1],
    "diagonal": lambda w: w.diagonal(),
    "off_diagonal": lambda w: w.diagonal(1),
    "twice": lambda w: w[1:].T,
    "thrice": lambda w: w.conj()[0],
    "computed": lambda w: w + w,
}
each_wrapper = pytest.mark.parametrize("wrapper", LAZY)


@each_wrapper
@each_library
def test_A1_the_wrapper_stays_over_a_mapped_storage(library: str, wrapper: str) -> None:
    """A2 too: wrapped twice and thrice."""
    w = complex_or_real(library)
    model = {"w": w, "r": LAZY[wrapper](w)}
    assert oracle.numpy(model["r"]).tolist() == PLAIN[wrapper](oracle.numpy(w)).tolist()
    assert len(tied.split(model)[1]) == 1
    mapped = tied.map(lambda a: a * 2, model)
    assert type(mapped["r"]) is type(model["r"])
    whole = oracle.numpy(mapped["w"])
    assert whole.tolist() == (2 * oracle.numpy(w)).tolist()
    assert oracle.numpy(mapped["r"]).tolist() == PLAIN[wrapper](whole).tolist()
    assert len(tied.split(mapped)[1]) == 1


@each_wrapper
@each_library
def test_A1_the_wrapper_follows_its_storage(library: str, wrapper: str) -> None:
    """Merged with another storage, it reads that one."""
    w = complex_or_real(library)
    skeleton, storages = tied.split({"r": LAZY[wrapper](w), "w": w})
    other = tied.merge(skeleton, {name: s * 3 for name, s in storages.items()})
    expected = PLAIN[wrapper](3 * oracle.numpy(w))
    assert oracle.numpy(other["r"]).tolist() == expected.tolist()


@each_wrapper
@pytest.mark.parametrize(("start", "device"), [("numpy", "torch"), ("torch", "jax")])
def test_A1_the_wrapper_crosses_to_another_library(start: str, device: str, wrapper: str) -> None:
    w = complex_or_real(start)
    moved = tied.to({"w": w, "r": LAZY[wrapper](w)}, device)
    assert oracle.numpy(moved["r"]).tolist() == PLAIN[wrapper](oracle.numpy(w)).tolist()
    assert len(tied.split(moved)[1]) == 1


@pytest.mark.parametrize("wrapper", [name for name in LAZY if name != "computed"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_A1_where_the_library_has_the_view_it_is_that(library: str, wrapper: str) -> None:
    w = complex_or_real(library)
    reading = LAZY[wrapper](w)
    lazy = {
        "numpy": {"adjoint", "thrice", "index_array"},
        "torch": {"flip", "index_array"},
    }[library]
    assert isinstance(reading, type(w)) == (wrapper not in lazy)
    assert wrapper == "index_array" or tied.shares(w, reading)


def test_S1_a_struct_of_arrays_keeps_its_record_type() -> None:
    """Arrays field by field over one buffer: the storages change, the record stays."""
    from recipes import Triple

    buffer = np.arange(12.0).reshape(3, 4)
    record = Triple(*buffer)
    mapped = tied.map(lambda a: a * 2, {"record": record, "buffer": buffer})
    assert type(mapped["record"]) is Triple
    assert mapped["record"].b.tolist() == [8, 10, 12, 14]
    mapped["buffer"][1] = 0
    assert mapped["record"].b.tolist() == [0] * 4
    lone = tied.f32(record)
    assert type(lone) is Triple
    assert [a.dtype for a in lone] == [np.float32] * 3
