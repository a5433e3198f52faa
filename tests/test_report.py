"""The report of what is tied: its text, its data, its counts; and what has changed since."""

from __future__ import annotations

import gc
import json
import re
import textwrap
import weakref
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import tied


def matrix() -> np.ndarray:
    return np.arange(6, dtype=np.float32).reshape(3, 2)


def generator(array: Any) -> Iterator[Any]:
    yield array


def everything() -> Any:
    """A model with a bit of all that a report can tell."""
    w = matrix()
    buffer, other = np.zeros(100, np.float32), np.zeros(20)
    square = np.eye(3)
    hiding = generator(np.ones(3))
    next(hiding)
    return {
        "encoder": {"weight": w, "bias": np.zeros(3)},
        "decoder": {"weight": w.T, "rows": w[1:3], "flat": w.reshape(2, 3), "flipped": w[::-1]},
        "square": square,
        "diagonal": square.diagonal(),
        "left": buffer[:60],
        "right": buffer[40:],
        "parts": [other[:5], other[10:15]],
        "it": hiding,
        "name": "kept",
    }


TEXT = """
encoder.weight    (3, 2)  float32  24 B
  decoder.weight = encoder.weight.T
  decoder.rows = encoder.weight[1:]
  decoder.flat = encoder.weight.reshape(2, 3)
  decoder.flipped = encoder.weight[::-1]
encoder.bias      (3,)    float64  24 B
square            (3, 3)  float64  72 B
  diagonal = square.diagonal()
left              (100,)  float32  400 B
  left reads elements 0 to 59
  right reads elements 40 to 99, overlaps elements 40 to 59
parts.0           (5,)    float64  40 B
parts.1           (5,)    float64  40 B
128 parameters, 600 B (counting every leaf: 173 parameters, 792 B)
hidden: it (generator) hides an array of shape (3,)
not tied: parts.0, parts.1: one buffer, no shared element
"""


# ------------------------------------------------------------------------------------- the text


def said(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_the_whole_report() -> None:
    assert str(tied.ties(everything())) == said(TEXT)
    assert repr(tied.ties(everything())) == "<Ties: 6 storages, 3 of them tied>"


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 3), nn.Linear(3, 4)
        self.decoder.weight = nn.Parameter(self.encoder.weight.detach().T)
        self.again = self.encoder


def test_a_torch_module() -> None:
    assert str(tied.ties(Autoencoder())) == said("""
        encoder.weight    (3, 4)  float32  48 B
          again.weight = encoder.weight
          decoder.weight = encoder.weight.T
        encoder.bias      (3,)    float32  12 B
          again.bias = encoder.bias
        decoder.bias      (4,)    float32  16 B
        19 parameters, 76 B (counting every leaf: 46 parameters, 184 B)
        """)


def test_jax_views_and_the_devices_when_there_are_several() -> None:
    w = jnp.ones((3, 2))
    model = {"w": w, "t": tied.transpose(w), "far": jax.device_put(w, jax.devices()[1])}
    assert str(tied.ties(model)) == said("""
        w      (3, 2)  float32  24 B  cpu:0
          t = w.T
        far    (3, 2)  float32  24 B  cpu:1
        12 parameters, 48 B (counting every leaf: 18 parameters, 72 B)
        """)


Make = Callable[[Any], Any]
HOW: dict[str, tuple[Any, Make]] = {
    "w": (matrix, lambda w: w[:]),
    "w.T": (matrix, lambda w: w.T),
    "w[1]": (matrix, lambda w: w[1]),
    "w[1:]": (matrix, lambda w: w[1:3]),
    "w[:, 1]": (matrix, lambda w: w[:, 1]),
    "w[::2]": (matrix, lambda w: w[::2]),
    "w[::-1]": (matrix, lambda w: w[::-1]),
    "w.reshape(2, 3)": (matrix, lambda w: w.reshape(2, 3)),
    "w.reshape(6)": (matrix, lambda w: w.ravel()),
    "w.diagonal()": (lambda: np.eye(3), np.diagonal),
    "w.diagonal(1)": (lambda: np.eye(3), lambda w: w.diagonal(1)),
    "w.transpose(2, 0, 1)": (lambda: np.zeros((2, 3, 4)), lambda w: w.transpose(2, 0, 1)),
    "w.real": (lambda: np.ones(3, complex), np.real),
    "w.imag.T": (lambda: np.ones((3, 2), complex), lambda w: w.imag.T),
    "w.conj().T": (lambda: np.ones((3, 2), complex), tied.adjoint),
    "w.view(uint8)": (matrix, lambda w: w.view(np.uint8)),
    "w['n']": (lambda: np.zeros(3, [("x", "f4"), ("n", "i4")]), lambda w: w["n"]),
    "w.reshape(3, 1)": (lambda: np.zeros(3), lambda w: w[:, None]),
}


COMPUTED = ("w.conj().T", "w.view(uint8)")


@pytest.mark.parametrize("text", HOW)
def test_how_a_leaf_reads_its_storage(text: str) -> None:
    make, read = HOW[text]
    w = make()
    (storage,) = tied.ties({"w": w, "v": read(w)}).storages
    assert [(leaf.path, leaf.how) for leaf in storage.leaves] == [("w", ""), ("v", text)]


@pytest.mark.parametrize(
    "text", [text for text in HOW if "conj" not in text and "view" not in text]
)
def test_what_is_said_is_python_that_reads_just_that(text: str) -> None:
    make, read = HOW[text]
    w = make()
    seen = eval(text, {"w": w})
    np.testing.assert_array_equal(seen, read(w))
    assert np.shares_memory(seen, w)


@pytest.mark.parametrize(
    ("length", "text"),
    [(3, "3 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1_536, "1.50 KiB"), (2**20, "1.00 MiB"),
     (8 * 10**6, "7.63 MiB"), (3 * 2**30, "3.00 GiB"), (2**41, "2048.00 GiB")],
)  # fmt: skip
def test_bytes_are_said_in_one_way(length: int, text: str) -> None:
    big = torch.empty(length, dtype=torch.uint8, device="meta")
    lines = str(tied.ties({"w": big})).splitlines()
    assert lines == [f"w    ({length},)  uint8  {text}", f"{length:,} parameters, {text}"]


def test_leaves_that_only_overlap_say_which_elements_they_read() -> None:
    buffer = np.zeros(100, np.float32)
    model = {"one": buffer[:60:2], "other": buffer[40::2], "t": buffer[10:90].reshape(8, 10).T}
    assert str(tied.ties(model)) == said("""
        one    (99,)  float32  360 B
          one reads span[:59:2]
          other reads span[40::2], overlaps elements 40 to 58
          t reads span[10:90].reshape(8, 10).T, overlaps elements 10 to 89
        90 parameters, 360 B (counting every leaf: 140 parameters, 560 B)
        """)


def test_nothing_and_a_bare_array() -> None:
    assert str(tied.ties([])) == "0 parameters, 0 B"
    assert str(tied.ties(matrix())).splitlines()[0] == "(the model)    (3, 2)  float32  24 B"
    assert tied.ties(matrix()).storages[0].name == ""


# ------------------------------------------------------------------------------------- the data


def test_plain_data_for_json() -> None:
    w = matrix()
    report = tied.ties({"a": w, "b": w[1:]})
    assert report.to_dict() == {
        "version": 1,
        "storages": [
            {
                "name": "a", "shape": [3, 2], "dtype": "float32", "nbytes": 24, "device": "cpu",
                "leaves": [
                    {"path": "a", "how": "", "shape": [3, 2], "strides": [2, 1], "offset": 0},
                    {"path": "b", "how": "a[1:]", "shape": [2, 2], "strides": [2, 1], "offset": 2},
                ],
            }
        ],
        "parameters": 6, "nbytes": 24, "naive_parameters": 10, "naive_nbytes": 40,
        "hidden": [], "near": [],
    }  # fmt: skip


def test_the_data_of_everything_survives_json() -> None:
    data = tied.ties(everything()).to_dict()
    assert json.loads(json.dumps(data)) == data


def test_reports_compare_by_what_they_say() -> None:
    assert tied.ties(everything()) == tied.ties(everything())
    w = matrix()
    reports = [
        tied.ties({"a": w, "b": w}), tied.ties({"a": w, "b": w.T}), tied.ties({"a": w}),
        tied.ties({"a": w, "b": w.copy()}), tied.ties({"a": w, "c": w}),
        tied.ties({"a": w.astype("f8"), "b": w}),
    ]  # fmt: skip
    for i, one in enumerate(reports):
        for j, other in enumerate(reports):
            assert (one == other) is (i == j)
    assert reports[0] != "a report"
    with pytest.raises(TypeError):
        hash(reports[0])


def test_a_report_holds_no_array_and_stays_as_it_was() -> None:
    model = Autoencoder()
    weight = weakref.ref(model.encoder.weight)
    report = tied.ties(model)
    before = str(report)
    model.double()
    assert str(report) == before
    del model
    gc.collect()
    assert weight() is None
    assert report.groups[1] == ("encoder.bias", "again.bias")


def test_groups_and_tied_leave_out_what_is_alone() -> None:
    report = tied.ties(everything())
    assert report.groups == (
        ("encoder.weight", "decoder.weight", "decoder.rows", "decoder.flat", "decoder.flipped"),
        ("square", "diagonal"),
        ("left", "right"),
    )
    assert [s.name for s in report.tied] == ["encoder.weight", "square", "left"]
    assert [s.name for s in report.storages] == [
        "encoder.weight", "encoder.bias", "square", "left", "parts.0", "parts.1",
    ]  # fmt: skip


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_notebook_shows_a_table_with_the_same_words() -> None:
    report = tied.ties({**everything(), "<b>bold</b>": matrix()})
    page = report._repr_html_()
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    assert "<b>" not in page
    assert page.startswith("<table>")
    words = " ".join(tags.text)
    for line in str(report).splitlines():
        for cell in re.split(r" {2,}", line.strip()):
            assert cell in words


# ------------------------------------------------------------------------------------- counting


def test_parameters_and_bytes_once_and_naively() -> None:
    w, buffer = matrix(), np.zeros(100)
    cases = [
        ({"a": w, "b": w}, 6, 24, 12, 48),
        ({"a": w, "b": w.T, "c": w[0]}, 6, 24, 14, 56),
        ({"a": buffer[:60], "b": buffer[40:]}, 100, 800, 120, 960),
        ({"a": buffer[:10], "b": buffer[50:60]}, 20, 160, 20, 160),
        ({"a": buffer[::2], "b": buffer[::4]}, 50, 400, 75, 600),
        ({"a": np.broadcast_to(w, (5, 3, 2))}, 6, 24, 30, 120),
        ({"a": w, "bytes": w.view(np.uint8)}, 6, 24, 30, 48),
        ([], 0, 0, 0, 0),
    ]  # fmt: skip
    for model, *numbers in cases:
        report = tied.ties(model)
        assert [report.parameters, report.nbytes, report.naive_parameters,
                report.naive_nbytes] == numbers  # fmt: skip


def test_a_layer_at_many_places_counts_at_each_of_them_naively() -> None:
    layer = {"w": matrix()}
    report = tied.ties([[layer, layer], [layer], layer])
    assert (report.parameters, report.naive_parameters) == (6, 24)
    assert report.groups == (("0.0.w", "0.1.w", "1.0.w", "2.w"),)


# ------------------------------------------------------------------------------------- near, hidden


def test_near_misses_are_named_and_are_no_ties() -> None:
    buffer, columns = torch.zeros(30), np.zeros((4, 4))
    model = {"a": buffer[:10], "b": buffer[20:], "even": columns[:, ::2], "odd": columns[:, 1::2]}
    report = tied.ties(model)
    assert report.groups == ()
    assert report.near == (
        "a, b: one buffer, no shared element",
        "even, odd: one buffer, no shared element",
    )
    assert tied.ties({"a": np.zeros(3), "b": np.zeros(3)}).near == ()
    many = tied.ties([buffer[i : i + 1] for i in range(7)])
    assert many.near == ("0, 1, 2, 3 and 3 more: one buffer, no shared element",)


def test_hidden_arrays_are_named() -> None:
    report = tied.ties(everything())
    assert report.hidden == ("it (generator) hides an array of shape (3,)",)
    w = matrix()
    assert tied.ties({"f": lambda x: x @ w, "w": w}).hidden == ()
