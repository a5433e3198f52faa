"""A `View` where a function of JAX takes an array: every public function, by the table of calls.

The numbers are quarters, so that sums and products are exact in any order: XLA may fuse the reading
into a reduction, and add in another order than over the plain array.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import jax.scipy
import numpy as np
import pytest

import tied
import view_calls

KINDS = ("transposed", "sliced")
HEAVY = ("random", "scipy")  # compiled one by one, they take minutes
READ_IN_LOOPS = ("scipy.special.expn",)  # its program differs in where the view is read
MODULES = [
    f"jax.{name}" for name in ("numpy", "numpy.linalg", "numpy.fft", "nn", "image", "random")
] + [m.name for m in pkgutil.walk_packages(jax.scipy.__path__, "jax.scipy.")]


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def quarters(*shape: int) -> np.ndarray:
        return (rng.integers(1, 4, shape) / 4).astype(np.float32)

    def integers(*shape: int) -> np.ndarray:
        return rng.integers(1, 5, shape).astype(np.int32)

    x, half = quarters(4, 4), quarters(4, 4)
    return {
        "x": x,
        "y": half,
        "s": half @ half.T + 4 * np.eye(4, dtype=np.float32),
        "z": (x + 1j * half).astype(np.complex64),
        "n": integers(4, 4),
        "m": integers(4, 4),
        "u": rng.integers(0, 256, (4, 4)).astype(np.uint8),
        "b": rng.integers(0, 2, (4, 4)).astype(bool),
        "v": quarters(4),
        "w": quarters(4),
        "k": integers(4),
        "t": quarters(4, 4, 4),
        "a": np.full((), 0.5, np.float32),
        "i": np.full((), 3, np.int32),
    }


def transposed(x: np.ndarray) -> tied.View:
    if x.ndim == 1:
        return tied.diagonal(jnp.asarray(np.diag(x)))
    return tied.transpose(jnp.asarray(x.T))


def sliced(x: np.ndarray) -> tied.View:
    if x.ndim == 0:
        return tied.view(jnp.asarray(np.stack([0 * x, x])), lambda base: base[1])
    rows = np.concatenate([x[:1], x]).repeat(2, axis=0)
    return tied.view(jnp.asarray(rows), lambda base: base[2::2])


def views(kind: str) -> dict[str, tied.View]:
    make = transposed if kind == "transposed" else sliced
    found = {name: make(x) for name, x in arrays().items()}
    for name, x in arrays().items():
        np.testing.assert_array_equal(np.asarray(found[name]), x)
    return found


def called(path: str, call: str) -> Callable[[dict[str, Any]], Any]:
    """A function of the arrays by letter, that calls what is at `path` below `jax`."""
    module, _, name = path.rpartition(".")
    function = getattr(importlib.import_module(f"jax.{module}"), name)
    others = {"f": function, "key": jax.random.key(0), "jnp": jnp, "jsp": jax.scipy, "jax": jax}
    code = compile(call.lstrip("!"), f"<{path}>", "eval")
    return lambda letters: eval(code, {**others, **letters})


def plain(letters: dict[str, Any]) -> dict[str, Any]:
    return {name: view.array() for name, view in letters.items()}


def over_arrays(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda letters: function(plain(letters))


CALLS = {
    group: [(f"{group}.{name}", call) for name, call in view_calls.calls(text)]
    for group, text in view_calls.GROUPS.items()
}


# ------------------------------------------------------------------- what is in the table


def functions() -> Iterator[str]:
    """The public functions of these modules, as paths below `jax`."""
    for name in MODULES:
        if "._" in name:
            continue
        module: ModuleType = importlib.import_module(name)
        for attribute in dir(module):
            found = getattr(module, attribute)
            if callable(found) and not inspect.isclass(found) and not attribute.startswith("_"):
                yield f"{name}.{attribute}".removeprefix("jax.")


def test_every_public_function_is_called_or_named_with_a_reason() -> None:
    lists = ("NO_ARRAY", "KEYS", "NAMES_THE_TYPE", "WRITES_A_FILE", "FOR_ACCELERATORS")
    left_out = [name for kind in lists for name in view_calls.names(getattr(view_calls, kind))]
    refused = view_calls.names(view_calls.REFUSED) + view_calls.names(view_calls.OF_PYTREES)
    called = {path for group in CALLS.values() for path, _ in group}
    known = called | {*left_out, *refused}
    found = set(functions())
    assert sorted(found - known) == []
    assert sorted(known - found) == []
    assert not called & {*left_out, *refused}


# ------------------------------------------------------------------------- the same values


def compared(x: Any) -> Any:
    """Something that is equal for two results that are the same bit for bit."""
    assert not isinstance(x, tied.View)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        return repr(x)
    return str(x.dtype), x.shape, getattr(x, "weak_type", False), np.asarray(x).tobytes()


def results(x: Any) -> Any:
    leaves, structure = jax.tree.flatten(x, is_leaf=lambda x: isinstance(x, tied.View))
    return structure, [compared(leaf) for leaf in leaves]


@pytest.mark.parametrize("group", [g for g in view_calls.GROUPS if g not in HEAVY])
def test_bit_for_bit_what_the_array_gives(group: str) -> None:
    ours = views("transposed")
    theirs = plain(ours)
    for path, call in CALLS[group][::7]:  # each is compiled; the programs of all are below
        function = called(path, call)
        assert results(function(ours)) == results(function(theirs)), (path, call)


# ------------------------------------------------------------------------ the same program


def expressions(closed: Any) -> list[int]:
    """What each result of a traced function is computed of: equal for equal expressions."""
    return of_closed(closed, range(len(closed.jaxpr.invars)))


def of_closed(closed: Any, given: Sequence[int]) -> list[int]:
    return of_jaxpr(closed.jaxpr, [*(hash(str(compared(x))) for x in closed.consts), *given])


def of_jaxpr(jaxpr: Any, given: Sequence[int]) -> list[int]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))

    def of(atom: Any) -> int:
        return hash(str(atom)) if isinstance(atom, jax.extend.core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        inner = equation.params.get("call_jaxpr")
        if inner is not None:  # a function with a derivative of its own
            made = of_closed(inner, list(map(of, equation.invars)))
            known.update(zip(equation.outvars, made, strict=True))
            continue
        params = [(name, of_parameter(x)) for name, x in sorted(equation.params.items())]
        inputs = tuple(map(of, equation.invars))
        for n, variable in enumerate(equation.outvars):
            known[variable] = hash((equation.primitive.name, str(params), inputs, n))
    return list(map(of, jaxpr.outvars))


def of_parameter(x: Any) -> Any:
    if isinstance(x, tuple | list):
        return [of_parameter(part) for part in x]
    if isinstance(x, jax.extend.core.ClosedJaxpr):
        return expressions(x)
    if isinstance(x, jax.extend.core.Jaxpr):
        return of_jaxpr(x, range(len(x.constvars) + len(x.invars)))
    return re.sub(r" at 0x[0-9a-f]+", "", str(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", view_calls.GROUPS)
def test_traced_to_the_program_of_the_array(group: str, kind: str) -> None:
    """Without inner `jit`s, so that what remains are the operations themselves."""
    ours = views(kind)
    for path, call in CALLS[group]:
        if call.startswith("!"):
            continue
        function = called(path, call)
        with jax.disable_jit():
            view = jax.make_jaxpr(function)(ours)
            array = jax.make_jaxpr(over_arrays(function))(ours)
        assert view.out_avals == array.out_avals, (path, call)
        if path in READ_IN_LOOPS:
            assert results(function(ours)) == results(function(plain(ours)))
        else:
            assert expressions(view) == expressions(array), (path, call)


@pytest.mark.parametrize("how", ["argument", "closure"])
@pytest.mark.parametrize("group", view_calls.GROUPS)
def test_inside_jit(group: str, how: str) -> None:
    ours = views("transposed")
    for path, call in CALLS[group]:
        if call.startswith("!"):
            continue
        function = called(path, call)
        if how == "argument":
            out = jax.eval_shape(function, ours)
        else:
            out = jax.eval_shape(lambda function=function: function(ours))
        wanted = jax.eval_shape(function, plain(ours))
        assert out == wanted, (path, call)


# ------------------------------------------------------------------ what refuses a view


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_says_what_to_type(kind: str) -> None:
    ours = views(kind)
    for name, call in view_calls.calls(view_calls.REFUSED):
        (path,) = view_calls.names(name)
        with pytest.raises(tied.TieError, match=r"\.array\(\)|tied\.Bundle"):
            called(path, call)(ours)
        called(path, call)(plain(ours))


@pytest.mark.parametrize("kind", KINDS)
def test_what_takes_a_pytree_raises_too(kind: str) -> None:
    ours = views(kind)
    for path, call in view_calls.calls(view_calls.OF_PYTREES):
        with pytest.raises((TypeError, ValueError), match=r"match b|must have the same pytree"):
            called(path, call)(ours)
        called(path, call)(plain(ours))
