"""Where an array lives, and whether two of them meet: NumPy, PyTorch, JAX and their odd kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import oracle
import tied


def matrix() -> np.ndarray:
    return np.arange(12, dtype=np.float32).reshape(4, 3)


# Bytes from the start of a (4, 3) array of 4-byte elements in C order.
CUTS: dict[str, tuple[Callable[[Any], Any], int, int]] = {
    "itself": (lambda a: a, 0, 48),
    "transpose": (lambda a: a.T, 0, 48),
    "row": (lambda a: a[1], 12, 24),
    "rows": (lambda a: a[1:3], 12, 36),
    "column": (lambda a: a[:, 1], 4, 44),
    "one_element": (lambda a: a[2, 1:2], 28, 32),
    "zero_dimensional": (lambda a: a[2, 1, ...], 28, 32),
    "every_other_row": (lambda a: a[1::2], 12, 48),
}


def bytes_of(a: Any) -> set[int]:
    return oracle.byte_set(oracle.positions(a))


@pytest.mark.parametrize("cut", CUTS)
def test_numpy_arrays(cut: str) -> None:
    a = matrix()
    read, start, stop = CUTS[cut]
    first = a.ctypes.data
    assert tied.span(read(a)) == tied.Span("cpu", "memory", first + start, first + stop)
    assert (min(bytes_of(read(a))), max(bytes_of(read(a))) + 1) == (first + start, first + stop)


def test_numpy_s_own_odd_arrays() -> None:
    a = matrix()
    first = a.ctypes.data
    whole = tied.Span("cpu", "memory", first, first + 48)
    assert tied.span(a[::-1, ::-1]) == whole
    assert tied.span(np.broadcast_to(a, (5, 4, 3))) == whole
    assert tied.span(a.view(np.uint8)) == whole
    assert tied.span(a.view(np.matrix)) == whole
    assert tied.span(tied.view(a, lambda x: x[1])) == tied.Span("cpu", "memory", first + 12,
                                                                first + 24)  # fmt: skip
    records = np.zeros(3, [("x", "f4"), ("n", "i4")])
    span = tied.span(records["n"])
    assert (span.start - records.ctypes.data, span.stop - span.start) == (4, 20)


@pytest.mark.parametrize("make", [lambda: np.zeros((0, 3)), lambda: matrix()[2:2],
                                  lambda: torch.empty(0), lambda: torch.ones(4)[4:],
                                  lambda: jnp.zeros((0, 3))])  # fmt: skip
def test_empty_arrays_span_nothing(make: Any) -> None:
    span = tied.span(make())
    assert span.start == span.stop
    assert not span.overlaps(span)


@pytest.mark.parametrize("cut", CUTS)
def test_torch_tensors(cut: str) -> None:
    t = torch.arange(12.0).reshape(4, 3)
    read, start, stop = CUTS[cut]
    first = t.data_ptr()
    wanted = tied.Span("cpu", "memory", first + start, first + stop)
    assert tied.span(read(t)) == wanted
    assert tied.span(torch.nn.Parameter(read(t))) == wanted


def test_parts_of_complex_tensors() -> None:
    z = torch.ones(3, dtype=torch.complex64)
    whole, imag = tied.span(z), tied.span(z.imag)
    assert (imag.start - whole.start, imag.stop - whole.stop) == (4, 0)
    assert tied.span(z.conj()) == whole


class Tagged(torch.Tensor):
    """A subclass without tensors inside."""


def test_subclasses_of_tensors() -> None:
    t = torch.ones(3)
    assert tied.span(t.as_subclass(Tagged)) == tied.span(t)
    assert tied.shares(t.as_subclass(Tagged)[1:], t)


@pytest.fixture(params=["meta", "fake"])
def without_elements(request: pytest.FixtureRequest) -> Iterator[Callable[[], torch.Tensor]]:
    """Makes tensors that have a storage and no address."""
    if request.param == "meta":
        yield lambda: torch.empty(4, 3, device="meta")
    else:
        with FakeTensorMode():
            yield lambda: torch.empty(4, 3)


@pytest.mark.parametrize("cut", CUTS)
def test_tensors_without_an_address_live_in_their_storage(
    cut: str, without_elements: Callable[[], torch.Tensor]
) -> None:
    t, other = without_elements(), without_elements()
    read, start, stop = CUTS[cut]
    span = tied.span(read(t))
    assert (span.start, span.stop) == (start, stop)
    assert span.allocation == tied.span(t).allocation != "memory"
    assert tied.span(other).allocation != span.allocation
    assert span.overlaps(tied.span(t))
    assert not span.overlaps(tied.span(other))
    assert tied.shares(read(t), t)
    assert not tied.shares(read(t), other)
    assert tied.ties({"t": t, "v": read(t).detach()[...], "o": other}).groups == (("t", "v"),)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A mesh of two processes, of which only the first is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_dtensors_live_where_their_local_part_does(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for placement in (Shard(0), Replicate()):
        d = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [placement])
        assert tied.span(d) == tied.span(d.to_local())
        assert tied.shares(d, d.t())
        assert not tied.shares(d, distribute_tensor(torch.ones(4, 3), mesh, [placement]))


@pytest.mark.parametrize("cut", CUTS)
def test_jax_arrays_and_their_views(cut: str) -> None:
    j = jnp.arange(12.0).reshape(4, 3)
    read, start, stop = CUTS[cut]
    first = j.unsafe_buffer_pointer()
    assert tied.span(j) == tied.Span("cpu:0", "memory", first, first + 48)
    view = tied.view(j, read)
    assert tied.span(view) == tied.Span("cpu:0", "memory", first + start, first + stop)
    assert tied.shares(view, j)
    assert not tied.shares(j, read(j) + 0)


def test_jax_devices_shardings_and_arrays_that_are_not_there() -> None:
    j = jnp.ones((4, 3))
    assert tied.span(jax.device_put(j, jax.devices()[1])).device == "cpu:1"
    axes = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=axes)
    target = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    sharded = tied.span(jax.device_put(j, target))
    assert (sharded.device, sharded.start, sharded.stop) == ("cpu:0..cpu:3", 0, 48)
    spans = []
    jax.jit(lambda x: spans.append((tied.span(x), tied.shares(x, x), tied.shares(x, x + 0))))(j)
    assert [(s.device, s.stop, same, other) for s, same, other in spans] == [
        ("traced", 48, True, False)
    ]
    assert tied.span(jax.ShapeDtypeStruct((2,), jnp.float32)).device == "abstract"


# ------------------------------------------------------------------------ across, and shares


def test_addresses_are_one_space_for_all_libraries_of_the_cpu() -> None:
    a = matrix()
    one, other = torch.from_numpy(a), torch.from_numpy(a)
    assert tied.span(one) == tied.span(other) == tied.span(a)
    assert tied.shares(one, other)
    assert tied.shares(a, one[1])
    assert tied.ties({"a": a, "t": one.T}).groups == (("a", "t"),)


def test_spans_overlap_where_arrays_only_interleave() -> None:
    a = matrix()
    one, other = tied.span(a[:, 0]), tied.span(a[:, 1])
    assert one.overlaps(other)
    assert not tied.shares(a[:, 0], a[:, 1])
    assert not tied.span(a[:2]).overlaps(tied.span(a[2:]))
    elsewhere = tied.Span("cuda:0", "memory", one.start, one.stop)
    assert not one.overlaps(elsewhere)


@pytest.mark.parametrize("one", CUTS)
@pytest.mark.parametrize("other", CUTS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_shares_is_what_the_bytes_say(one: str, other: str, library: str) -> None:
    a = matrix()
    base = a if library == "numpy" else torch.from_numpy(a)
    x, y = CUTS[one][0](base), CUTS[other][0](base)
    wanted = not bytes_of(x).isdisjoint(bytes_of(y))
    assert tied.shares(x, y) is tied.shares(y, x) is wanted


def test_shares_of_models() -> None:
    w = matrix()
    model = {"layers": [w, np.ones(2)]}
    assert tied.shares(model, {"row": w[1]})
    assert tied.shares(model, w.T)
    assert not tied.shares(model, tied.copy(model))
    assert not tied.shares(model, {"layers": [w.copy()], "name": "x"})
    assert not tied.shares({"a": w[:2]}, {"b": w[2:]})


def test_a_tie_inside_one_of_two_models_is_no_sharing_of_both() -> None:
    w, other = matrix(), matrix()
    assert not tied.shares({"a": w, "b": w.T}, {"c": other, "d": other[0]})
    assert not tied.shares([w[:2], w[1:]], other)


def test_a_span_is_plain_data() -> None:
    span = tied.span(matrix())
    assert hash(span) == hash(tied.Span(span.device, span.allocation, span.start, span.stop))
    assert {type(span.device), type(span.start), type(span.stop)} == {str, int}
