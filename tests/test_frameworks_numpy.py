"""NumPy's arrays: flags, subclasses, mapped files and settings around ties are kept."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tied


def test_read_only_flags_are_kept_and_writable_members_stay_writable() -> None:
    w = np.arange(6.0).reshape(2, 3)
    locked = w[0]
    locked.flags.writeable = False
    for run in (tied.copy, tied.f32, lambda m: tied.map(np.negative, m)):
        after = run({"w": w, "locked": locked})
        assert [x.flags.writeable for x in after.values()] == [True, False]
        assert np.shares_memory(after["w"], after["locked"])
        after["w"][0, 0] = 9
        assert after["locked"][0] == 9


def test_a_model_of_read_only_arrays_stays_read_only() -> None:
    w = np.frombuffer(bytes(48), np.float64)
    after = tied.copy({"w": w, "half": w[:3]})
    assert not any(x.flags.writeable for x in after.values())
    assert tied.ties(after).groups == (("w", "half"),)


class Signal(np.ndarray):
    """A subclass with an attribute."""

    def __array_finalize__(self, obj: Any) -> None:
        self.rate = getattr(obj, "rate", None)


def test_subclasses_and_their_attributes_are_kept() -> None:
    s = np.arange(4.0).view(Signal)
    s.rate = 44_100
    model = {"s": s, "plain": np.asarray(s)[1:], "part": s[2:]}
    for run in (tied.copy, tied.f32, lambda m: tied.merge(*tied.split(m))):
        after = run(model)
        assert [type(x) for x in after.values()] == [Signal, np.ndarray, Signal]
        assert (after["s"].rate, after["part"].rate) == (44_100, 44_100)
        assert tied.ties(after).groups == (("s", "plain", "part"),)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_mapped_files_are_not_read_by_what_changes_nothing(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    np.arange(12, dtype=np.float32).tofile(path)
    mapped = np.memmap(path, np.float32, mode, shape=(3, 4))
    model = {"w": mapped, "t": mapped.T}
    same = tied.merge(*tied.split(model))
    assert type(same["w"]) is np.memmap
    assert same["w"].filename == mapped.filename
    assert np.shares_memory(same["t"], mapped)
    after = tied.copy(model)
    assert type(after["w"]) is np.ndarray
    assert not np.shares_memory(after["w"], mapped)
    assert tied.ties(after).groups == (("w", "t"),)


def test_settings_are_shared_by_map_and_copied_by_copy() -> None:
    model = {"w": np.ones(2), "settings": {"sizes": [1, 2]}, "list": [np.ones(1), {"deep": [3]}]}
    mapped, copied = tied.map(np.copy, model), tied.copy(model)
    assert mapped["settings"] is model["settings"]
    assert mapped["list"][1] is model["list"][1]
    assert copied["settings"] is not model["settings"]
    assert copied["settings"]["sizes"] is not model["settings"]["sizes"]
    assert copied == {**copy.deepcopy(model), "w": copied["w"], "list": copied["list"]}
