"""What only a CUDA device can show. `make gpu` runs it, on the libraries that see one."""

import os
from typing import Any

import numpy as np
import pytest

import tied
from tied.layers import Chain, Dense

LIBRARIES = os.environ.get("TIED_GPU_LIBRARIES", "torch,jax").split(",")

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("library", LIBRARIES)]


def model(library: str) -> Chain:
    encoder = Dense(20, 30, library=library)
    zeros = tied.to(np.zeros(20, "float32"), library)
    return tied.cpu(Chain(encoder, Dense(tied.transpose(encoder.W), zeros)))


def outputs(model: Chain) -> Any:
    x = np.ones((1, 20), str(tied.ties(model).storages[0].dtype))
    where = tied.to(tied.to(x, library_of(model)), tied.span(model[0].b).device)
    return np.asarray(tied.to(tied.cpu(model(where)), "numpy"))


def library_of(model: Chain) -> str:
    return "torch" if type(model[0].W).__module__.startswith("torch") else "jax"


def is_tied(model: Chain) -> bool:
    return tied.shares(model[0].W, model[1].W) and len(tied.split(model)[1]) == 3


@pytest.mark.parametrize("cast", [tied.f16, tied.bf16, tied.f32, tied.copy])
def test_casts_on_the_gpu_keep_the_tie(library: str, cast: Any) -> None:
    there = cast(tied.gpu(model(library)))
    assert is_tied(there)
    assert not tied.span(there[0].W).device.startswith("cpu")


def test_there_and_back(library: str) -> None:
    here = model(library)
    there = tied.gpu(here)
    back = tied.cpu(there)
    assert is_tied(there)
    assert is_tied(back)
    assert not tied.compare(here, back)
    np.testing.assert_array_equal(outputs(back), outputs(here))
    np.testing.assert_allclose(outputs(there), outputs(here), rtol=1e-2)


def test_a_move_to_where_it_is_gives_the_same_arrays(library: str) -> None:
    there = tied.gpu(model(library))
    assert tied.gpu(there)[0].W is there[0].W


def test_an_unknown_gpu_is_named(library: str) -> None:
    with pytest.raises(tied.DeviceError, match="cuda:99"):
        tied.to(model(library), "cuda:99")


def test_a_transpose_moves_its_bytes_once(library: str) -> None:
    here = tied.ties(model(library))
    there = tied.ties(tied.gpu(model(library)))
    assert there.nbytes == here.nbytes == 4 * (20 * 30 + 30 + 20)
