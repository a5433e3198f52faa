"""The survival matrix: every kind of tie through every operation is kept, or refused by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch

import kinds
import oracle
import tied
from kinds import KINDS, Kind

# ----------------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Op:
    """An operation on a model, and what it makes of memory; `None`: the elements are not set."""

    run: Callable[[Any], Any]
    memory: Callable[[np.ndarray], np.ndarray] | None = lambda a: a
    libraries: tuple[str, ...] = kinds.ALL
    ends: str = ""  # the library that the members are in afterwards; "": the same


def doubled(x: Any) -> Any:
    return x.copy() if getattr(x.dtype, "names", None) else x * 2


def twice(model: Any) -> Any:
    return tied.map(lambda x, y: x.copy() if getattr(x.dtype, "names", None) else x + y,
                    model, tied.copy(model))  # fmt: skip


def rounded(dtype: Any, complex_dtype: Any = None) -> Callable[[np.ndarray], np.ndarray]:
    def memory(a: np.ndarray) -> np.ndarray:
        if a.dtype.kind == "c":
            return a.astype(complex_dtype or a.dtype)
        return a.astype(dtype) if a.dtype.kind == "f" else a

    return memory


def in_x64(model: Any) -> Any:
    with jax.enable_x64(True):
        return tied.f64(model)


def through(*devices: str) -> Callable[[Any], Any]:
    def run(model: Any) -> Any:
        for device in devices:
            model = tied.to(model, device)
        return model

    return run


def sharded(model: Any) -> Any:
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4],
                         axis_types=(jax.sharding.AxisType.Auto,))  # fmt: skip
    target = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    after = tied.to(model, target)
    for array in tied.split(after)[1].values():
        assert array.sharding.device_set == target.device_set
    return after


def raveled(model: Any) -> Any:
    vector, unravel = tied.ravel(model)
    return unravel(vector)


OPS: dict[str, Op] = {
    "map": Op(lambda m: tied.map(doubled, m), doubled),
    "map_two_models": Op(twice, doubled),
    "f16": Op(tied.f16, rounded(np.float16)),
    "bf16": Op(tied.bf16, rounded(ml_dtypes.bfloat16)),
    "f32": Op(tied.f32, rounded(np.float32)),
    "f64": Op(in_x64, rounded(np.float64, np.complex128)),
    "copy": Op(tied.copy),
    "pickle_of_split": Op(lambda m: tied.merge(*pickle.loads(pickle.dumps(tied.split(m))))),
    "split_and_merge": Op(lambda m: tied.merge(*tied.split(m))),
    "ravel_and_unravel": Op(raveled),
    "to_meta_and_empty": Op(
        lambda m: tied.empty(tied.to(m, "meta"), "cpu"), None, libraries=("torch",)
    ),
    "to_second_device": Op(through("cpu:1"), libraries=("jax",)),
    "to_sharded_devices": Op(sharded, libraries=("jax",)),
    "to_numpy": Op(through("numpy"), libraries=("torch", "jax"), ends="numpy"),
    "to_torch": Op(through("torch"), libraries=("numpy", "jax"), ends="torch"),
    "to_jax": Op(through("jax"), libraries=("numpy", "torch"), ends="jax"),
    "to_torch_to_jax_to_numpy": Op(
        through("torch", "jax", "numpy"), libraries=("numpy",), ends="numpy"
    ),
}

# ------------------------------------------------------------- operations on the storages

Grads = dict[str, Any]
RATE = 0.1


def length(*gradients: np.ndarray) -> Any:
    return np.sqrt(sum((np.abs(g) ** 2).sum() for g in gradients)) or 1.0


def signs(a: np.ndarray) -> np.ndarray:
    return np.sign(a.real) + 1j * np.sign(a.imag) if a.dtype.kind == "c" else np.sign(a)


def stepped(a: np.ndarray, g: np.ndarray, rule: str, pieces: int) -> np.ndarray:
    """What one step makes of memory, if there are so many pieces of it to clip together."""
    share = pieces**-0.5 if rule == "clipped_sgd" else 1.0
    return (a + (STEPS[rule](a, g) - a) * share).astype(a.dtype)


# What one step makes of memory `a` whose gradient is `g`.
STEPS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "sgd": lambda a, g: a - RATE * g,
    "adam": lambda a, g: a - RATE * signs(g),
    "weight_decay": lambda a, g: a - RATE * (g + 0.1 * a),
    "clipped_sgd": lambda a, g: a - RATE * g / length(g),
}


def total(model: Any, kind: Kind) -> Any:
    """The loss: the sum of the real parts of all floating members."""
    sums = [member.sum().real for member in kind.members(model) if "int" not in str(member.dtype)]
    return sums[0] + sums[1] if len(sums) > 1 else sums[0]


def torch_step(model: Any, kind: Kind, rule: str) -> Any:
    skeleton, storages = tied.split(model)
    weights = {name: x.detach().clone().requires_grad_() for name, x in storages.items()}
    merged = skeleton.merge(weights)
    total(merged, kind).backward()
    if rule == "clipped_sgd":
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
    maker = torch.optim.Adam if rule == "adam" else torch.optim.SGD
    decay = {"weight_decay": 0.1} if rule == "weight_decay" else {}
    maker(weights.values(), lr=RATE, **decay).step()
    return skeleton.merge({name: x.detach() for name, x in weights.items()})


def jax_step(model: Any, kind: Kind, rule: str) -> Any:
    skeleton, storages = tied.split(model)
    grads = jax.grad(lambda s: total(skeleton.merge(s), kind))(storages)
    chain = {
        "sgd": optax.sgd(RATE),
        "adam": optax.adam(RATE),
        "weight_decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(RATE)),
        "clipped_sgd": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(RATE)),
    }[rule]
    updates, _ = chain.update(grads, chain.init(storages), storages)
    return skeleton.merge(optax.apply_updates(storages, updates))


def numpy_step(model: Any, kind: Kind, rule: str) -> Any:
    skeleton, storages = tied.split(model)
    ones = dict(zip(kinds.NAMES, kind.gradients(model), strict=True))
    grads = tied.accumulate(model, ones, convention="partial")
    if rule == "clipped_sgd":
        grads = {name: g / length(*grads.values()) for name, g in grads.items()}
    rule = "sgd" if rule == "clipped_sgd" else rule
    return skeleton.merge(
        {name: STEPS[rule](a, grads[name]).astype(a.dtype) for name, a in storages.items()}
    )


STEP_OF = {"numpy": numpy_step, "torch": torch_step, "jax": jax_step}


# ------------------------------------------------------------------------- JAX's transforms


def jitted(model: Any, kind: Kind) -> Any:
    bundle = jax.jit(lambda b: jax.tree.map(lambda x: x * 2, b))(tied.Bundle(model))
    return bundle.skeleton.merge(bundle.storages)


def jitted_over_storages(model: Any, kind: Kind) -> Any:
    skeleton, storages = tied.split(model)

    @jax.jit
    def double(storages: Any) -> Any:
        return tied.split(tied.map(lambda x: x * 2, skeleton.merge(storages)))[1]

    return skeleton.merge(double(storages))


def graded(model: Any, kind: Kind) -> Any:
    """W -> W + d(sum |W|^2 / 2 over memory)/dW is 2 W, as each element counts once."""
    bundle = tied.Bundle(model)
    grads = jax.grad(lambda b: sum(jnp.sum(jnp.abs(x) ** 2) / 2 for x in jax.tree.leaves(b)))(
        bundle
    )
    after = jax.tree.map(lambda x, g: x + g.conj(), bundle, grads)
    return after.skeleton.merge(after.storages)


def vmapped(model: Any, kind: Kind) -> Any:
    """Two models in one batch; each is read through its own ties."""
    skeleton, storages = tied.split(model)
    batch = {name: jnp.stack([x * 0, x * 2]) for name, x in storages.items()}

    def sums(storages: Any) -> Any:
        members = kind.members(skeleton.merge(storages, plain=True))
        return [m.sum() for m in members], jax.tree.map(lambda x: x, storages)

    found, after = jax.vmap(sums)(batch)
    for one, member in zip(found, kind.members(model), strict=True):
        np.testing.assert_allclose(one, [0, 2 * kinds.value(member).sum()], rtol=1e-5)
    return skeleton.merge({name: x[1] for name, x in after.items()})


def scanned(model: Any, kind: Kind) -> Any:
    bundle = tied.Bundle(model)
    after, _ = jax.lax.scan(
        lambda b, _: (jax.tree.map(lambda x: x * 2 ** (1 / 4), b), None), bundle, length=4
    )
    return after.skeleton.merge(after.storages)


def donated(model: Any, kind: Kind) -> Any:
    skeleton, storages = tied.split(tied.copy(model))
    after = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s), donate_argnums=0)(storages)
    assert all(x.is_deleted() for x in storages.values() if x.size)
    return skeleton.merge(after)


TRANSFORMS = {
    "jit": jitted,
    "jit_over_storages": jitted_over_storages,
    "grad": graded,
    "vmap": vmapped,
    "scan": scanned,
    "donation": donated,
}

# --------------------------------------------------------------------------------- refusals

TWO = ("first", "second")
# (library, kind, operation) -> the error, and the paths that it names. Everything else is kept.
REFUSED: dict[tuple[str, str, str], tuple[type[tied.TiedError], tuple[str, ...]]] = {}


def refuse(libraries: str, names: str, ops: str, error: type, paths: tuple[str, ...] = TWO) -> None:
    for library in libraries.split():
        for name in names.split():
            REFUSED.update({(library, name, op): (error, paths) for op in ops.split()})


PARTS = "real_part imaginary_part"
COMPLEX = f"{PARTS} conjugate_transpose"
# A cast may not change the bits that another member reads in its own way.
refuse("numpy", "byte_view", "f16 bf16 f64", tied.TieError)
refuse("torch", "byte_view", "f16 bf16 f64", tied.TieError)
refuse("numpy torch", PARTS, "f64", tied.TieError)
refuse("torch", PARTS, "f16", tied.TieError)
# Complex numbers of half precision: PyTorch has them, of float16 parts.
refuse("numpy", COMPLEX, "f16", tied.DtypeError)
refuse("numpy torch", COMPLEX, "bf16", tied.DtypeError)
refuse("jax", "conjugate_transpose", "f16 bf16", tied.DtypeError)
# JAX can't read the bits of an array as another dtype; structured elements are NumPy's own.
refuse("numpy torch", f"{PARTS} byte_view", "to_jax", tied.TieError)
refuse("numpy", f"{PARTS} byte_view", "to_torch_to_jax_to_numpy", tied.TieError)
refuse("numpy", "field", "to_torch to_jax to_torch_to_jax_to_numpy", tied.DtypeError)
# The gradient of a field has no place in a gradient of the structured storage.
refuse("numpy", "field", "sgd adam weight_decay clipped_sgd", tied.MatchError)
# A column alone is moved as the span that it reads, 31 elements: not to be cut in four.
refuse("jax", "no_tie_interleaved_columns", "to_sharded_devices", tied.DeviceError, ("first",))

# -------------------------------------------------------------------------------- the cells


def cells(ops: dict[str, Any], libraries: tuple[str, ...] = kinds.ALL) -> list[Any]:
    return [
        pytest.param(library, name, op, id=f"{library}-{name}-{op}")
        for library in libraries
        for name, kind in KINDS.items()
        for op in ops
        if library in kind.libraries
        and library in getattr(ops[op], "libraries", kinds.ALL)
        and not (kind.meta and op not in META)
    ]


# What can be done to tensors that have no elements.
META = ("map", "f16", "bf16", "f64", "copy", "pickle_of_split", "split_and_merge",
        "ravel_and_unravel", "to_meta_and_empty")  # fmt: skip


def hold(library: str, name: str, op: str, run: Callable[[Any], Any], memory: Any,
         close: bool = False) -> None:  # fmt: skip
    """Runs one cell: the ties, the values and the classes afterwards, or the refusal."""
    kind = KINDS[name]
    model = kind.model(library)
    members = kind.members(model)
    before = None if kind.meta else oracle.snapshot(model)
    assert bool(tied.ties(model).groups) is kind.tied
    unit = "bytes" if name in kinds.REINTERPRETED else "elements"
    wanted = kinds.pattern(members, unit)
    if (library, name, op) in REFUSED:
        error, paths = REFUSED[library, name, op]
        with pytest.raises(error) as caught:
            run(model)
        assert type(caught.value) is error
        assert set(caught.value.paths) == set(paths)
        assert all(path in str(caught.value) for path in paths)
        assert oracle.snapshot(model) == before
        return
    after = run(model)
    found = kind.members(after)
    assert kinds.pattern(found, unit) == wanted
    assert tied.ties(after).groups == tied.ties(model).groups
    assert type(after) is type(model)
    if not kind.meta:
        assert oracle.snapshot(model) == before
    ends = OPS[op].ends if op in OPS else ""
    if not ends:
        assert [type(x) for x in found] == [type(x) for x in members]
    check_values(kind, found, None if kind.meta else memory, close)


def check_values(kind: Kind, found: list[Any], memory: Any, close: bool) -> None:
    if memory is None:
        shapes = [x.shape for x in kind.read(kind.memory())]
        assert [tuple(x.shape) for x in found] == shapes
        return
    for x, y in zip(found, kind.read(memory(kind.memory())), strict=True):
        got = kinds.value(x)
        assert got.shape == y.shape or str(x.dtype) == "torch.complex32"
        if str(x.dtype) == "torch.complex32":
            y = np.stack([y.real, y.imag], axis=-1).astype(np.float16)
        if got.dtype == np.uint8 and close:  # the bytes of what rounding may have moved
            assert got.tobytes() == kinds.value(found[0]).tobytes()
        elif close:
            np.testing.assert_allclose(got, y, rtol=1e-5, atol=1e-6)
        else:
            assert (str(got.dtype), got.tobytes()) == (str(y.dtype), y.tobytes())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("library", "name", "op"), cells(OPS))
def test_kept(library: str, name: str, op: str) -> None:
    hold(library, name, op, OPS[op].run, OPS[op].memory)


@pytest.mark.parametrize(("library", "name", "op"), cells(STEPS))
def test_one_step(library: str, name: str, op: str) -> None:
    kind = KINDS[name]
    gradient = np.zeros(1) if (library, name, op) in REFUSED else kinds.gradient(kind, name)
    hold(
        library, name, op,
        lambda m: STEP_OF[library](m, kind, op),
        lambda a: stepped(a, gradient, op, pieces=max(kind.bases) + 1),
        close=True,
    )  # fmt: skip


@pytest.mark.parametrize(("library", "name", "op"), cells(TRANSFORMS, ("jax",)))
def test_transforms(library: str, name: str, op: str) -> None:
    hold(library, name, op, lambda m: TRANSFORMS[op](m, KINDS[name]), doubled, close=True)


def test_every_refusal_is_a_cell() -> None:
    every = {tuple(cell.values) for cell in (*cells(OPS), *cells(STEPS), *cells(TRANSFORMS))}
    assert set(REFUSED) <= every
