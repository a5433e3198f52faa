"""Hidden arrays, devices, dtypes, gradients: exact texts, the paths, and nothing is changed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tied
from refusal import BOTH, MODELS, autoencoder, jax_autoencoder, matrix, refuse

# ------------------------------------------------------------------------------ hidden arrays


def generator(array: Any) -> Iterator[Any]:
    yield array


def hiding() -> Any:
    """A generator that has run keeps its array where nothing opens it."""
    hidden = generator(np.ones(3))
    next(hidden)
    return {"w": matrix(), "it": hidden}


HIDDEN = """
an array hides in an object that can't be taken apart
  object  it, a generator
  array   shape (3,)
  Say how it comes apart with tied.register, or that it may stay: hidden="keep"
"""
EVERY: dict[str, Callable[..., Any]] = {
    "map": lambda m, **k: tied.map(lambda x: x, m, **k),
    "split": tied.split,
    "copy": tied.copy,
    "f64": tied.f64,
    "cast": lambda m, **k: tied.cast(m, "float16", **k),
    "to": lambda m, **k: tied.to(m, "cpu", **k),
    "to_library": lambda m, **k: tied.to(m, "torch", **k),
    "cpu": tied.cpu,
    "gpu": tied.gpu,
    "empty": tied.empty,
    "ravel": tied.ravel,
}


@pytest.mark.parametrize("operation", EVERY)
def test_a_hidden_array_is_refused_warned_of_or_kept(operation: str) -> None:
    run, model = EVERY[operation], hiding()
    refuse(tied.HiddenArrayError, ("it",), HIDDEN, lambda m: run(m, hidden="raise"), model)
    if operation not in ("gpu",):
        warned = HIDDEN.strip().replace("apart\n", "apart; it stays as it is\n", 1)
        with pytest.warns(tied.HiddenArrayWarning) as caught:
            run(model)
        assert str(caught[0].message) == warned
        run(model, hidden="keep")


def test_an_unknown_way_to_treat_hidden_arrays() -> None:
    refuse(
        tied.TiedError, (), """
        hidden='no' is unknown
          Type "warn", "raise" or "keep"
        """,
        lambda m: tied.copy(m, hidden="no"), autoencoder(),
    )  # fmt: skip


# ---------------------------------------------------------------------- devices and libraries


@pytest.mark.parametrize("library", MODELS)
@pytest.mark.parametrize("device", ["gpuu", "cpu:99x", "", 3, None])
def test_an_unknown_device(device: Any, library: str) -> None:
    refuse(
        tied.DeviceError, ("encoder.weight",),
        f"""
        unknown device {str(device)!r}
          libraries    {library}
          first array  encoder.weight
          Type "cpu", "cuda", "meta", "cpu:1", a device object, or a library: "jax"
        """,
        lambda m: tied.to(m, device), MODELS[library](),
    )  # fmt: skip


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(tied.DeviceError, match=f"cpu:{len(jax.devices())}"):
        tied.to(jax_autoencoder(), f"cpu:{len(jax.devices())}")


def test_a_device_that_pytorch_cannot_use() -> None:
    refuse(
        tied.DeviceError,
        ("w",),
        """
        PyTorch can't use the device 'xpu'
          PyTorch says  Torch not compiled with XPU enabled
          first array   w
          Type "cpu" or "meta", or install a PyTorch with that device
        """,
        lambda m: tied.to(m, "xpu"),
        {"w": torch.ones(2)},
    )


def test_empty_on_an_unknown_device() -> None:
    refuse(
        tied.DeviceError,
        ("w",),
        """
        unknown device 'nowhere'
          libraries    torch
          first array  w
          Type "cpu", "cuda", "meta", "cpu:1", a device object, or a library: "jax"
        """,
        lambda m: tied.empty(m, "nowhere"),
        {"w": torch.ones(2)},
    )


@pytest.mark.parametrize("target", ["cpu", "numpy", "jax"])
def test_elements_that_are_not_there(target: str) -> None:
    model = {"w": torch.ones(2, device="meta")}
    with pytest.raises(tied.DeviceError) as caught:
        tied.to(model, target)
    assert str(caught.value) == (
        "a meta tensor has no elements to move\n  storage  w\n"
        '  Type: tied.empty(model, "cpu"), then fill or load it'
    )
    assert caught.value.paths == ("w",)


@pytest.mark.parametrize(("library", "name"), [("torch", "PyTorch"), ("jax", "JAX")])
def test_a_dtype_that_the_other_library_does_not_have(library: str, name: str) -> None:
    refuse(
        tied.DtypeError,
        ("w",),
        f"""
        {name} has no dtype <U1
          storage  w
          Take it out of the model before the move, and give it to the model afterwards
        """,
        lambda m: tied.to(m, library),
        {"w": np.array(["a"])},
    )


def test_a_random_key_is_no_numpy_array() -> None:
    with pytest.raises(tied.DtypeError) as caught:
        tied.to({"k": jax.random.key(0)}, "numpy")
    assert str(caught.value) == (
        "a JAX random key is no NumPy array\n  storage  k\n  See jax.random.key_data"
    )


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_library_that_is_not_installed(library: str) -> None:
    code = f"""
        import sys
        sys.modules[{library!r}] = None
        import numpy as np, tied
        w = np.ones((3, 2), "float32")
        model = {{"encoder": w, "decoder": w.T}}
        try:
            tied.to(model, {library!r})
        except tied.LibraryError as error:
            print(error)
        print(model["decoder"].base is w)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        f"the array library {library} is not installed\n"
        f'  Type: pip install "tied[{library}]"\nTrue\n'
    )


# ---------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", ["int32", np.int32, torch.int32, jnp.int32, bool, "floaty"])
def test_a_cast_to_what_is_no_floating_dtype(dtype: Any) -> None:
    refuse(
        tied.DtypeError, (),
        f"""
        {dtype!r} is not a floating dtype
          Type one of float16, float32, float64, bfloat16; integers and booleans are never cast
        """,
        lambda m: tied.cast(m, dtype), autoencoder(),
    )  # fmt: skip


@pytest.mark.parametrize("way", ["cast", "move"])
def test_jax_without_64_bits(way: str) -> None:
    model = {"w": jnp.ones(2) if way == "cast" else np.ones(2)}
    refuse(
        tied.DtypeError, ("w",),
        """
        JAX makes 32-bit arrays of float64 unless 64 bits are enabled
          storage  w
          Type: jax.config.update("jax_enable_x64", True)
        """,
        tied.f64 if way == "cast" else lambda m: tied.to(m, "jax"), model,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_complex_numbers_of_half_precision(dtype: str) -> None:
    refuse(
        tied.DtypeError,
        ("z",),
        f"""
        NumPy has no complex dtype of {dtype} parts
          storage  z
          Complex arrays can be float32 or float64 throughout: tied.f32, tied.f64
        """,
        lambda m: tied.cast(m, dtype),
        {"z": np.ones(3, np.complex64)},
    )


def test_a_vector_of_another_length() -> None:
    _, unravel = tied.ravel(autoencoder())
    refuse(
        tied.MergeError,
        ("encoder.weight",),
        """
        the vector has another length than the model
          model   (6,)
          vector  (5,)
          Give a vector of shape (6,)
        """,
        unravel,
        np.zeros(5),
    )


def test_a_vector_of_several_libraries() -> None:
    refuse(
        tied.DtypeError, ("a", "b"),
        """
        one vector can't hold arrays of numpy and torch
          Move the model into one library first: tied.to(model, "torch")
        """,
        tied.ravel, {"a": matrix(), "b": torch.ones(2)},
    )  # fmt: skip


# ------------------------------------------------------------------------- gradients, filters


def shared() -> Any:
    w = matrix()
    return {"a": w, "b": w}


def test_gradients_in_an_unknown_convention() -> None:
    refuse(
        tied.ConventionError, (),
        """
        the convention 'sum' is unknown
          Type convention="partial" to sum the gradients of the uses, or "total" if each is the \
whole gradient already
        """,
        lambda m: tied.accumulate(m, m, convention="sum"), shared(),
    )  # fmt: skip


def test_partial_is_claimed_of_a_total() -> None:
    g = matrix()
    refuse(
        tied.ConventionError, ("a", "b"),
        """
        one gradient array stands at two uses, so it is their total
          one    a
          other  b
          Type convention="total"
        """,
        lambda m, grads: tied.accumulate(m, grads, convention="partial"),
        shared(), {"a": g, "b": g},
    )  # fmt: skip


def test_total_is_claimed_of_partial_gradients() -> None:
    refuse(
        tied.ConventionError, ("a", "b"),
        """
        these gradients are not totals: they differ
          one    a
          other  b
          If each is the gradient by its use alone, type convention="partial"
        """,
        lambda m, grads: tied.accumulate(m, grads, convention="total"),
        shared(), {"a": matrix(), "b": 2 * matrix()},
    )  # fmt: skip


def test_a_gradient_of_another_shape() -> None:
    refuse(
        tied.MatchError,
        ("b", "a"),
        """
        a gradient fits neither its leaf nor its storage
          gradient  b   (5,)
          storage   a   (3, 2)
          Give the gradient the shape of either
        """,
        lambda m, grads: tied.accumulate(m, grads, convention="partial"),
        shared(),
        {"a": matrix(), "b": np.ones(5)},
    )


def test_an_unknown_way_to_settle_a_conflict() -> None:
    refuse(
        tied.TiedError,
        (),
        """
        conflict='last' is unknown
          Type "raise" or "first"
        """,
        lambda m: tied.split(m, conflict="last"),
        autoencoder(),
    )


def test_a_tie_across_libraries_that_cannot_be_kept() -> None:
    w = matrix()
    refuse(
        tied.TieError,
        ("t", "n"),
        """
        a tie across torch and numpy can't be kept here
          storage  t
          leaf     n = t
          Move the model into one library first: tied.to(model, "torch")
        """,
        lambda m: tied.to(m, "meta"),
        {"t": torch.from_numpy(w), "n": w},
    )


def test_one_storage_under_two_filters() -> None:
    refuse(
        tied.TieError, BOTH,
        """
        one storage falls under different filters
          filter 0  decoder.weight
          filter 1  encoder.weight
          Sort its leaves alike, or type: tied.split(..., conflict="first")
        """,
        lambda m: tied.split(m, "decoder.*", "encoder.*"), autoencoder(),
    )  # fmt: skip
    refuse(
        tied.TieError, BOTH,
        """
        one storage falls under different filters
          filter 0  encoder.weight
          rest      decoder.weight
          Sort its leaves alike, or type: tied.split(..., conflict="first")
        """,
        lambda m: tied.split(m, "encoder.*"), autoencoder(),
    )  # fmt: skip
