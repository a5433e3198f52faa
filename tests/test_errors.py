"""Bad input to map, merge and check: exact texts, the paths, and that nothing is changed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tied
from refusal import BOTH, MODELS, autoencoder, matrix, refuse

# ------------------------------------------------------------------- what `f` gives to a view


@pytest.mark.parametrize("library", MODELS)
def test_a_function_that_changes_the_shape_of_a_viewed_storage(library: str) -> None:
    refuse(
        tied.TieError, BOTH,
        """
        map cannot change the shape of a storage that is read as a view
          storage  encoder.weight   (3, 2) -> (6,)
          view     decoder.weight = encoder.weight.T
          Return an array of shape (3, 2), or give decoder.weight memory of its own first (a copy)
        """,
        lambda m: tied.map(lambda x: x.reshape(-1) if x.ndim == 2 else x, m),
        MODELS[library](),
    )  # fmt: skip


def test_a_function_may_change_the_shape_of_what_is_read_whole() -> None:
    w = matrix()
    after = tied.map(lambda x: x.reshape(-1), {"a": w, "b": w, "c": w.T.copy()})
    assert after["a"] is after["b"]
    assert [x.shape for x in after.values()] == [(6,), (6,), (6,)]


@pytest.mark.parametrize("library", MODELS)
@pytest.mark.parametrize(("given", "said"), [("text", "str"), (3, "int"), (None, "None")])
def test_a_function_that_gives_no_array_for_a_viewed_storage(
    given: Any, said: str, library: str
) -> None:
    refuse(
        tied.TieError,
        BOTH,
        f"""
        map cannot replace a storage that is read as a view
          storage  encoder.weight   {said}, not an array
          view     decoder.weight = encoder.weight.T
          Return an array, or give decoder.weight memory of its own first (a copy)
        """,
        lambda m: tied.map(lambda x: given if x.ndim == 2 else x, m),
        MODELS[library](),
    )


def test_of_several_views_the_error_names_all_paths() -> None:
    w = matrix()
    model = {"w": w, "t": w.T, "row": w[1]}
    refuse(
        tied.TieError, ("w", "t", "row"),
        """
        map cannot change the shape of a storage that is read as a view
          storage  w   (3, 2) -> (2, 2)
          view     t = w.T
          Return an array of shape (3, 2), or give t memory of its own first (a copy)
        """,
        lambda m: tied.map(lambda x: x[1:], m), model,
    )  # fmt: skip


def test_of_leaves_that_only_overlap_the_error_shows_each() -> None:
    buffer = np.zeros(100)
    refuse(
        tied.TieError,
        ("left", "right"),
        """
        map cannot change the shape of a storage that is read as a view
          storage  left   (100,) -> (99,)
          view     left reads elements 0 to 59
          view     right reads elements 40 to 99
          Return an array of shape (100,), or give left memory of its own first (a copy)
        """,
        lambda m: tied.map(lambda x: x[1:], m),
        {"left": buffer[:60], "right": buffer[40:]},
    )


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_cast_under_a_byte_view(library: str) -> None:
    w = matrix() if library == "numpy" else torch.ones(3, 2)
    model = {"w": w, "bytes": w.view(np.uint8 if library == "numpy" else torch.uint8)}
    refuse(
        tied.TieError, ("w", "bytes"),
        """
        map cannot change the dtype of a storage whose bits are read as another dtype
          storage  w   float32 -> float64
          view     bytes = w.view(uint8)
          Return an array of dtype float32, or give bytes memory of its own first (a copy)
        """,
        tied.f64, model,
    )  # fmt: skip


@pytest.mark.parametrize("part", ["real", "imag"])
def test_a_cast_under_a_part_of_complex_numbers(part: str) -> None:
    z = np.ones(3, np.complex64)
    refuse(
        tied.TieError, ("z", "part"),
        f"""
        map cannot change the dtype of a storage whose bits are read as another dtype
          storage  z   complex64 -> complex128
          view     part = z.{part}
          Return an array of dtype complex64, or give part memory of its own first (a copy)
        """,
        tied.f64, {"z": z, "part": getattr(z, part)},
    )  # fmt: skip


def test_jax_cannot_read_bits_as_another_dtype() -> None:
    z = np.ones(3, np.complex64)
    refuse(
        tied.TieError, ("z", "re"),
        """
        JAX can't read the bits of an array as float32
          storage  z
          leaf     re = z.real
          Give that leaf memory of its own (a copy) before the move
        """,
        lambda m: tied.to(m, "jax"), {"z": z, "re": z.real},
    )  # fmt: skip


# ----------------------------------------------------------------------------- merge


@pytest.mark.parametrize("library", MODELS)
def test_merge_with_storages_missing_and_unknown(library: str) -> None:
    skeleton, storages = tied.split(MODELS[library]())
    given = {name: x for name, x in storages.items() if name != "encoder.weight"}
    refuse(
        tied.MergeError, ("encoder.weight", "head"),
        """
        these storages are not those of the skeleton
          missing  encoder.weight
          unknown  head
          Give merge every dict that split returned, with the same names
        """,
        skeleton.merge, {**given, "head": storages["encoder.weight"]},
    )  # fmt: skip


def test_merge_with_a_storage_of_another_shape() -> None:
    skeleton, storages = tied.split(autoencoder())
    refuse(
        tied.MergeError, ("encoder.weight",),
        """
        a storage has another shape than the skeleton's: encoder.weight
          skeleton  (3, 2)
          given     (2, 3)
          merge needs the shapes that split gave; to change shapes, use tied.map
        """,
        skeleton.merge, {"encoder.weight": storages["encoder.weight"].T},
    )  # fmt: skip


def test_merge_with_a_dict_of_split_left_out_or_given_twice() -> None:
    skeleton, one, rest = tied.split({"a": matrix(), "b": matrix()}, "a")
    refuse(
        tied.MergeError, ("b",),
        """
        these storages are not those of the skeleton
          missing  b
          Give merge every dict that split returned, with the same names
        """,
        skeleton.merge, one,
    )  # fmt: skip
    refuse(
        tied.MergeError,
        ("a",),
        """
        a storage is given twice: a
          Give each dict that split returned once
        """,
        skeleton.merge,
        one,
        rest,
        one,
    )


@pytest.mark.parametrize("given", ["text", [1, 2], 3.0])
@pytest.mark.parametrize("model", [autoencoder, lambda: {"encoder": {"weight": matrix()}}])
def test_merge_with_what_is_no_array(given: Any, model: Callable[[], Any]) -> None:
    """None may stand for a storage that is read whole: a part that was filtered out."""
    skeleton, _ = tied.split(model())
    refuse(
        tied.MergeError,
        ("encoder.weight",),
        f"""
        a storage must be an array: encoder.weight
          given  {type(given).__name__}
          Give the array that split gave, or one of the same shape
        """,
        skeleton.merge,
        {"encoder.weight": given},
    )


def test_merge_with_what_is_no_dict() -> None:
    refuse(
        tied.MergeError,
        (),
        """
        merge takes dicts from name to array, not int
          Give merge every dict that split returned
        """,
        tied.split(autoencoder())[0].merge,
        3,
    )


# ---------------------------------------------------------------------- several models in map


OTHERS: dict[str, tuple[Any, str]] = {
    "no_branch": ({"encoder": {"weight": matrix()}}, "decoder"),
    "another_key": ({"encoder": {"weight": matrix()}, "decoder": {"bias": matrix()}},
                    "decoder.weight"),
    "none": (None, "encoder"),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_models_that_do_not_match(other: str) -> None:
    tree, path = OTHERS[other]
    with pytest.raises(tied.MatchError) as caught:
        tied.map(lambda x, y: x + y, autoencoder(), tree)
    assert caught.value.paths in ((path,), ("decoder",))
    (found,) = caught.value.paths
    assert str(caught.value) == (
        f"model 1 lacks a part of the first: {found}\n"
        "  Every model must have the parts of the first"
    )


def test_a_list_that_is_shorter() -> None:
    refuse(
        tied.MatchError, ("1",),
        """
        model 2 lacks a part of the first: 1
          Every model must have the parts of the first
        """,
        lambda *m: tied.map(lambda x, y, z: x, *m),
        [matrix(), matrix()], [matrix(), matrix()], [matrix()],
    )  # fmt: skip


def test_a_model_whose_values_differ_at_a_tie() -> None:
    other = {"encoder": {"weight": matrix()}, "decoder": {"weight": 2 * matrix().T}}
    refuse(
        tied.MatchError, BOTH,
        """
        model 1 has two values for one storage
          one    encoder.weight
          other  decoder.weight
          Give both leaves the same values; sum separate gradients with tied.accumulate
        """,
        lambda *m: tied.map(lambda x, y: x, *m), autoencoder(), other,
    )  # fmt: skip


# ---------------------------------------------------------------------- ties lost, and the rest


def untied() -> Any:
    return {"encoder": {"weight": matrix()}, "decoder": {"weight": matrix().T}}


@pytest.mark.parametrize("what", ["lost", "made"])
def test_check_names_each_tie_that_was_lost_or_made(what: str) -> None:
    pair = (untied(), autoencoder()) if what == "lost" else (autoencoder(), untied())
    refuse(
        tied.UntiedError, BOTH,
        f"""
        the ties of the model have changed
          {what}  decoder.weight = encoder.weight.T
          Do the step with tied (tied.f64, tied.to, tied.copy, ...), which keeps them
        """,
        tied.check, *pair,
    )  # fmt: skip


def test_a_view_that_is_mapped_over() -> None:
    with pytest.raises(tied.TieError) as caught:
        jax.vmap(lambda x: x.sum())(tied.transpose(jnp.ones((3, 3))))
    assert str(caught.value) == (
        "vmap and scan can't map over a bare View: they would map an axis of its base\n"
        "  base      (3, 3)\n  would be  (3,)\n"
        "  Map over the base and take the view inside, or use tied.Bundle(model)"
    )


def test_what_is_no_array() -> None:
    refuse(
        tied.TiedError,
        (),
        """
        str is no array that tied knows
          Give an array of NumPy, PyTorch or JAX, or a tied.View
        """,
        tied.span,
        "x",
    )
    refuse(
        tied.TiedError,
        (),
        """
        str is no array
          Give an array or a tied.View
        """,
        lambda x: tied.view(x, lambda a: a),
        "x",
    )


def test_the_place_of_what_is_made_of_several_arrays() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(tied.TiedError) as caught:
        tied.span(TwoTensor(torch.ones(2), torch.ones(2)))
    assert str(caught.value) == (
        "a TwoTensor is made of several arrays\n  parts  a, b\n  Ask for the place of one of them"
    )


@pytest.mark.parametrize("error", [
    tied.TieError, tied.MergeError, tied.MatchError, tied.HiddenArrayError, tied.DeviceError,
    tied.DtypeError, tied.LibraryError, tied.ConventionError, tied.UntiedError, tied.PathError,
])  # fmt: skip
def test_errors_are_found_under_python_s_own_and_travel(error: type[tied.TiedError]) -> None:
    made = error("it is so", facts=[("one", "a"), ("another", "b")], hint="Do that", paths=["a"])
    assert str(made) == "it is so\n  one      a\n  another  b\n  Do that"
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is error
    assert (str(again), again.paths) == (str(made), ("a",))
    parents = (ValueError, TypeError, LookupError, ImportError)
    assert isinstance(made, tied.TiedError)
    assert isinstance(made, parents)


def test_warnings_have_one_base() -> None:
    for warning in (tied.HiddenArrayWarning, tied.DeviceWarning, tied.UntiedWarning):
        assert issubclass(warning, tied.TiedWarning)
    assert issubclass(tied.TiedWarning, UserWarning)
