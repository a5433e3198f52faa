"""What came untied between two looks at a model: compare, check, watch."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tied
from test_report import Autoencoder, everything, matrix, said


def test_compare_names_each_tie_with_both_paths() -> None:
    model = everything()
    del model["it"]
    after = copy.deepcopy(model)
    found = tied.compare(model, after)
    assert found
    assert all(c.first in str(c) and c.second in str(c) for c in found.lost)
    assert str(found) == said("""
        lost   decoder.weight = encoder.weight.T
        lost   decoder.rows = encoder.weight[1:]
        lost   decoder.flat = encoder.weight.reshape(2, 3)
        lost   decoder.flipped = encoder.weight[::-1]
        lost   diagonal = square.diagonal()
        lost   right reads elements 40 to 99, overlaps elements 40 to 59, as left
        """)
    assert found.lost[0] == tied.TieChange("encoder.weight", "decoder.weight", "encoder.weight.T")
    assert [(c.first, c.second) for c in found.lost[4:]] == [
        ("square", "diagonal"), ("left", "right"),
    ]  # fmt: skip
    assert found.made == ()
    back = tied.compare(after, model)
    assert (back.lost, back.made) == ((), found.lost)


def test_compare_takes_models_reports_and_plain_data() -> None:
    w = matrix()
    before, after = {"a": w, "b": w.T}, {"a": w, "b": w.T.copy()}
    forms: list[Callable[[Any], Any]] = [lambda m: m, tied.ties, lambda m: tied.ties(m).to_dict(),
             lambda m: json.loads(json.dumps(tied.ties(m).to_dict()))]  # fmt: skip
    for one in forms:
        for other in forms:
            assert str(tied.compare(one(before), other(after))) == "lost   b = a.T"
            assert not tied.compare(one(before), other(before))


def test_a_tie_that_reads_in_another_way_is_lost_and_made() -> None:
    w = np.eye(2)
    found = tied.compare({"a": w, "b": w.T}, {"a": w, "b": w})
    assert str(found) == "lost   b = a.T\nmade   b = a"


def test_leaves_that_are_gone_or_new_are_no_change_of_ties() -> None:
    w = matrix()
    found = tied.compare({"a": w, "b": w, "c": w}, {"a": w, "b": w, "d": w})
    assert not found
    assert (found.gone, found.new) == (("c",), ("d",))
    assert str(found) == "gone   c\nnew    d"
    assert str(tied.compare(w, w)) == "the same ties"


def test_when_the_first_leaf_goes_the_others_are_still_tied() -> None:
    w = matrix()
    found = tied.compare({"a": w, "b": w, "c": w.T}, {"b": w, "c": w.T})
    assert not found
    lost = tied.compare({"a": w, "b": w, "c": w.T}, {"b": w, "c": w.T.copy()})
    assert [(c.first, c.second) for c in lost.lost] == [("b", "c")]
    assert str(lost) == "lost   c = a.T, as b\ngone   a"


def test_names_of_storages_do_not_matter_to_compare() -> None:
    w = np.asfortranarray(matrix())
    one, other = {"a": w, "b": w.T}, {"a": np.ascontiguousarray(w)}
    other["b"] = other["a"].T
    assert not tied.compare(one, other)


def test_check_is_silent_when_the_ties_are_as_expected() -> None:
    model = everything()
    tied.check(tied.copy(model, hidden="keep"), model)
    tied.check(model, tied.ties(model))
    tied.check(model, json.loads(json.dumps(tied.ties(model).to_dict())))


def test_watch_names_what_double_loses_in_a_torch_module() -> None:
    """Module.double() keeps a Parameter that is shared and silently unties its transpose."""
    model = Autoencoder()
    with pytest.warns(tied.UntiedWarning) as caught, tied.watch(model) as seen:
        model.double()
    assert str(caught[0].message) == (
        "ties have changed:\nlost   decoder.weight = encoder.weight.T"
    )
    assert seen.comparison is not None
    assert seen.comparison.paths == ("encoder.weight", "decoder.weight")


def test_a_strict_watch_raises() -> None:
    model = Autoencoder()
    with pytest.raises(tied.UntiedError) as caught, tied.watch(model, strict=True):
        model.double()
    assert caught.value.paths == ("encoder.weight", "decoder.weight")
    assert "lost  decoder.weight = encoder.weight.T" in str(caught.value)


def test_watch_is_silent_when_nothing_comes_untied() -> None:
    model = Autoencoder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tied.watch(model) as seen:
            assert seen.comparison is None
            model.eval()
            torch.nn.init.zeros_(model.encoder.weight)
    assert str(seen.comparison) == "the same ties"


def test_watch_sees_ties_that_are_made() -> None:
    model = {"a": matrix(), "b": matrix()}
    with pytest.warns(tied.UntiedWarning, match="made   b = a.T"), tied.watch(model):
        model["b"] = model["a"].T


def test_watch_lets_the_block_s_own_error_through() -> None:
    model = Autoencoder()
    seen = tied.watch(model, strict=True)

    def run() -> None:
        with seen:
            model.double()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()
    assert seen.comparison
